"""The Work of a managed collective: it succeeds, or the Manager gets the error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import AllreduceOptions, ReduceOp
from torch.futures import Future

from torchft_like.errors import ProcessGroupError, lost_by
from torchft_like.futures import future_wait
from torchft_like.process_group.work import FOREVER, Operation
from torchft_like.writing import divide

Report = Callable[[Exception], object]

# When each reduction was issued, in this order.
Pending = dict["Reduction", float]


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
