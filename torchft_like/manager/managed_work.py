"""The allreduces of a step: over the participants, never failing, followed up by the works that they return.
A work succeeds, or the Manager gets the error.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import AllreduceOptions, ReduceOp
from torch.futures import Future

from torchft_like.checkpointing.shards import is_dtensor, local_part
from torchft_like.collectives import ErrorFeedback, reduce_quantized, stream_beside
from torchft_like.core.step import StepProtocol
from torchft_like.divergence.state_fingerprint import PendingFingerprint
from torchft_like.errors import ConfigError, DivergenceError, FaultToleranceError, ProcessGroupError, lost_by
from torchft_like.futures import future_wait
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.manager.quorum_driver import QuorumDriver
from torchft_like.process_group.collectives import ALLREDUCE, Collective
from torchft_like.process_group.work import FOREVER, Operation
from torchft_like.quantization import Format
from torchft_like.writing import divide, writing_to

Report = Callable[[Exception], object]

# When each reduction was issued, in this order.
Pending = dict["Reduction", float]

DIGEST_BYTES = 7  # a number that has a negative one
DIVERGED = "the members' states differ: the step is tried again, and it is found out whose"


class Reducer:
    """Issues the allreduces of a Manager. Every microsecond here is added to each small gradient."""

    def __init__(self, protocol: StepProtocol, group: ManagedGroup, driver: QuorumDriver) -> None:
        self._protocol = protocol
        self._group = group
        self._driver = driver

    def start(
        self,
        tensors: list[torch.Tensor],
        options: AllreduceOptions,
        kind: type[Reduction],
        collective: Collective = ALLREDUCE,
        of_all_members: bool = False,
        quantize_to: Format | None = None,
        error_feedback: ErrorFeedback | None = None,
    ) -> Reduction:
        """Begin an allreduce, in place; an error spoils the step, and is reported nowhere else.

        Args:
            tensors: the tensors, which one operation of the group reduces; of a DTensor this rank's part.
            kind: the class of the returned work.
            collective: the operation: `allreduce` or `allreduce_coalesced`.
            of_all_members: whether the tensors of a replica that heals, or is a spare, count like the
              others'.
            quantize_to: the format in which numbers are sent; None for their own.
            error_feedback: what quantizing has left of these tensors in earlier steps that were committed.

        Raises:
            ValueError: an average of a tensor that is neither floating point nor complex; what is no tensor.
        """
        tensors = [tensor if type(tensor) is torch.Tensor else _memory_of(tensor) for tensor in tensors]
        averages = options is AVERAGE or is_average(options.reduceOp)
        if averages:
            _check_divisible(tensors)
        protocol, group, driver = self._protocol, self._group, self._driver
        if (attempt := driver.attempt) is None or driver.fatal is not None:
            attempt = driver.current()
        is_open = attempt.is_configured and attempt.error is None and not attempt.is_exchanging
        if not (is_open and protocol.can_communicate) and not self._can_communicate(attempt):
            return kind(tensors, None, lambda _: None)
        is_first = attempt.report is None
        report = attempt.report = attempt.report or partial(group.fail, protocol.quorum_id)
        # Gloo completes one of nothing without the others.
        protocol.is_bound = protocol.is_bound or any(map(torch.Tensor.numel, tensors))
        if attempt.result is None or attempt.result.replica_world_size <= 1:
            quantize_to = None
        count, divide_by = protocol.num_participants, None
        backend_divides = quantize_to is None and group.pg.divides
        if averages and not (backend_divides and _divides_alike(count, attempt, tensors)):
            divide_by = count
            options = SUM if options is AVERAGE else summing(options)
        # Quantized numbers are divided by their owner, before it quantizes them again.
        divisor = divide_by if quantize_to is None else None
        reduction = kind(tensors, divisor, report, attempt.pending_collectives)
        try:
            if not (of_all_members or protocol.is_participating):
                leave_out(tensors, options.reduceOp)
                error_feedback = None
            if quantize_to is None:
                driver.wait_for_turn()
                work = getattr(group.pg, collective.name)(tensors, options)
            else:
                work = self._quantize(tensors, options, divide_by, quantize_to, error_feedback)
            reduction.follow(work)
            if is_first and attempt.fingerprint is not None:
                self._begin_to_compare(attempt, attempt.fingerprint, report, tensors[0].device)
        except BaseException as error:  # a backend or `fill_` may raise anything: only the step is lost
            attempt.pending_collectives.pop(reduction, None)
            report(lost_by(error, "an allreduce"))
            if not isinstance(error, Exception):
                raise
        return reduction

    def _quantize(
        self,
        tensors: list[torch.Tensor],
        options: AllreduceOptions,
        divide_by: int | None,
        quantize_to: Format,
        feedback: ErrorFeedback | None,
    ) -> Work:
        """Begin an allreduce of several collectives; the quorum worker waits for all but the last ones."""
        if feedback is not None and (attempt := self._driver.attempt) is not None:
            attempt.error_feedbacks.append(feedback)
        pg, stream = self._group.pg, stream_beside(tensors)
        return self._driver.defer(
            lambda: reduce_quantized(tensors, options, pg, stream, divide_by, quantize_to, feedback),
            {tensor.device for tensor in tensors if not tensor.is_cpu},
        )

    def _begin_to_compare(
        self, attempt: Attempt, fingerprint: PendingFingerprint, report: Report, device: torch.device
    ) -> None:
        """Compare this rank's state with those of the other members, in a step for which no member asked."""
        if attempt.is_unasked and attempt.result is not None and attempt.result.watched:
            digest = hashlib.blake2b(fingerprint.result(), digest_size=DIGEST_BYTES).digest()
            number = int.from_bytes(digest)
            attempt.comparison = least = torch.tensor([number, -number], device=device)
            reduction = Reduction([least], None, report, attempt.pending_collectives)
            self._driver.wait_for_turn()
            reduction.follow(self._group.pg.allreduce([least], options_for(ReduceOp.MIN)))

    def compare(self, attempt: Attempt) -> None:
        """Fail the step if the members' states differ, once its collectives are over."""
        if attempt.comparison is not None and attempt.result is not None and self._protocol.failure is None:
            least, negated_largest = attempt.comparison.tolist()
            if least != -negated_largest:
                self._group.fail(attempt.result.quorum_id, DivergenceError(DIVERGED))

    def _can_communicate(self, attempt: Attempt) -> bool:
        """Wait for the quorum; keep an error in getting it for `should_commit`, which raises it."""
        try:
            self._driver.wait_configured(attempt)
        except FaultToleranceError as error:
            attempt.fail(error)
            return False
        except BaseException as error:  # Ctrl-C, after which a script may vote nevertheless
            self._group.fail_current(lost_by(error, "an allreduce"))
            raise
        # While a state is read or loaded the other replicas take no part: the sum is this replica's own
        # tensor.
        return not attempt.is_exchanging and not self._group.refuse()


class Reduction(Operation):
    """A reduction of a step, which never fails; after an error the tensors are undefined and the step is
    lost.

    The group's operation is followed up (an average divided, an error reported) once, by the first thread
    that comes: the one that waits, or, if the future was asked for, the one that completes the collective.
    Running Python on a backend's thread takes longer than a small allreduce, so nothing runs there unless the
    future was asked for.

    Until `follow` gets the group's operation, the reduction is over.

    Args:
        tensors: the tensors, which are its result.
        divide_by: the divisor of an average, for which the backend only added up.
        report: called with an error.
        pending: keeps the reduction until it was followed up, even if the caller drops its work.
    """

    _inner: Work | None = None  # the group's operation, until it was followed up
    _future: Future[Any] | None = None

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        divide_by: int | None,
        report: Report,
        pending: Pending | None = None,
    ) -> None:
        Operation.__init__(self)
        self._tensors = tensors
        self._divide_by = divide_by
        self._report = report
        self._pending = pending
        self._following_up = threading.Lock()
        if pending is not None:
            pending[self] = time.monotonic()

    def follow(self, work: Work | None) -> None:
        """Follow up this work, which the group has begun.

        Raises:
            ProcessGroupError: there is none, with which the reduction would pass for one that is over.
        """
        if work is None:
            raise ProcessGroupError("an allreduce of the Manager's process group has returned no Work")
        self._inner = work
        if self._tensors and not self._tensors[0].is_cpu:
            self.get_future()  # a thread that waits on another stream waits for the division, too

    def wait_until(self, deadline: float) -> None:
        """Block until the operation was followed up.

        Raises:
            TimeoutError: the operation is not over at the deadline.
        """
        if deadline != FOREVER:
            future_wait(self.get_future(), timedelta(seconds=max(deadline - time.monotonic(), 0.0)))
        elif self._future is not None:
            self._future.wait()
        elif (inner := self._inner) is not None:
            try:
                inner.wait()
            except Exception as error:  # noqa: BLE001 - any error loses the step, and goes to the Manager
                self._fail(error)
            else:
                self._succeed()

    def is_completed(self) -> bool:
        """Return whether the result is there."""
        if self._future is not None:
            return self._future.done()
        if (inner := self._inner) is not None and inner.is_completed():
            self.wait_until(FOREVER)
        return self._inner is None

    def exception(self) -> None:
        """Return None: the Manager has the error."""

    def result(self) -> list[torch.Tensor]:
        """Return the tensors."""
        return list(self._tensors)

    def get_future(self) -> Future[Any]:
        """Return a future that completes with `outcome()`, once the operation was followed up."""
        if self._future is None:
            inner = self._inner
            self._future = self._completed() if inner is None else inner.get_future().then(self._finish)
        return self._future

    def outcome(self) -> Any:
        """Return the value of the future: the tensor."""
        return self._tensors[0]

    def _finish(self, done: Future[Any]) -> Any:
        try:
            done.value()
        except Exception as error:  # noqa: BLE001 - as in `wait`
            self._fail(error)
        else:
            self._succeed()
        return self.outcome()

    def _completed(self) -> Future[Any]:
        devices = {tensor.device for tensor in self._tensors if not tensor.is_cpu}
        future: Future[Any] = Future(devices=list(devices) or None)
        future.set_result(self.outcome())
        return future

    def _succeed(self) -> None:
        try:
            with self._following_up:
                if self._inner is not None and self._divide_by is not None:
                    divide(self._tensors, self._divide_by)
                self._end()
        except BaseException as error:  # it cannot be written to; or Ctrl-C, and it may be divided by now
            self._fail(lost_by(error, "an allreduce"))
            if not isinstance(error, Exception):
                raise

    def _fail(self, error: Exception) -> None:
        self._report(error)
        self._end()

    def _end(self) -> None:
        self._inner = None
        if self._pending is not None:
            self._pending.pop(self, None)


class GroupReduction(Reduction):
    """A process group's reduction: its future carries a list; a wait that ends too early loses the step."""

    def wait_until(self, deadline: float) -> None:
        """Block until the operation was followed up, or until the deadline, which is an error."""
        try:
            super().wait_until(deadline)
        except TimeoutError as error:
            self._report(error)

    def outcome(self) -> list[torch.Tensor]:
        """Return the value of the future: all tensors."""
        return list(self._tensors)


def is_average(operation: ReduceOp.RedOpType | ReduceOp) -> bool:
    """Return whether the group's sum has to be divided by the number of participants."""
    return hash(operation) == _AVERAGE


def options_for(operation: ReduceOp.RedOpType | ReduceOp) -> AllreduceOptions:
    """Return torch's options for an operation. Many callers share them, so they must not be changed."""
    known = _OPTIONS.get(hash(operation))
    return known or _options(operation)  # a premultiplied sum carries its factor


def summing(options: AllreduceOptions) -> AllreduceOptions:
    """Return the same options with a sum as their operation."""
    made = type(options)()
    made.reduceOp = SUM.reduceOp
    made.timeout = options.timeout
    made.asyncOp = options.asyncOp
    return made


def _options(operation: ReduceOp.RedOpType | ReduceOp) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = operation  # type: ignore[assignment] # torch takes either type
    return options


# The keys are hashes, because an operation's hash is its number: an allreduce of four bytes takes less time
# than any other look at torch's enums.
_AVERAGE = hash(ReduceOp.AVG)
_OPTIONS = {
    hash(operation): _options(operation)
    for operation in ReduceOp.RedOpType.__members__.values()
    if operation != ReduceOp.PREMUL_SUM
}
AVERAGE, SUM = options_for(ReduceOp.AVG), options_for(ReduceOp.SUM)


def _divides_alike(participants: int, attempt: Attempt, tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the backend's own average is precise enough, which is the same on all members.

    The backend multiplies by the inverse of the number of members in the tensors' dtype: in bfloat16 a third
    is wrong by 2 per mille, for all gradients alike, while the quotient of a sum is rounded to either side.
    """
    if attempt.result is None or participants != attempt.result.replica_world_size:
        return False
    return participants & (participants - 1) == 0 or all(tensor.dtype in _WIDE for tensor in tensors)


_WIDE = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def _check_divisible(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"an average needs floating point tensors, not {tensor.dtype}; use ReduceOp.SUM")


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"an allreduce takes a torch.Tensor, not {tensor!r:.100}")
    return local_part(tensor) if is_dtensor(tensor) else tensor


def leave_out(tensors: Sequence[torch.Tensor], operation: ReduceOp.RedOpType | ReduceOp) -> None:
    """Fill the tensors with the neutral value of the operation, which does not change the others' result."""
    neutral = _NEUTRAL.get(hash(operation))
    with writing_to(*tensors):
        for tensor in tensors:
            if neutral is None:
                tensor.zero_()  # sparse tensors have `zero_`, too
            else:
                tensor.fill_(neutral(tensor.dtype))


def _largest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def _smallest(dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


# The keys are hashes, as in `is_average`. All other operations are sums, or like sums.
_NEUTRAL: Mapping[int, Callable[[torch.dtype], float]] = {
    hash(ReduceOp.MIN): _largest,
    hash(ReduceOp.MAX): _smallest,
    hash(ReduceOp.PRODUCT): lambda _: 1,
    hash(ReduceOp.BAND): lambda dtype: -1 if dtype.is_signed else int(_largest(dtype)),  # all bits
}
