"""The allreduces of a step: over the participants, never failing, followed up by the works that they
return.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import AllreduceOptions, ReduceOp

from torchft_like.checkpointing.shards import is_dtensor, local_part
from torchft_like.collectives import ErrorFeedback, reduce_quantized, stream_beside
from torchft_like.core.step import StepProtocol
from torchft_like.divergence.state_fingerprint import PendingFingerprint
from torchft_like.errors import ConfigError, DivergenceError, FaultToleranceError, lost_by
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.manager.managed_work import (
    AVERAGE,
    SUM,
    Reduction,
    Report,
    is_average,
    options_for,
    summing,
)
from torchft_like.manager.quorum_driver import QuorumDriver
from torchft_like.process_group.collectives import ALLREDUCE, Collective
from torchft_like.quantization import Format
from torchft_like.writing import writing_to

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
