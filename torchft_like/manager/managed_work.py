"""The reduction behind the Work of a managed collective: it succeeds, or the Manager has heard why not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import AllreduceOptions, ReduceOp
from torch.futures import Future

from torchft_like.futures import future_wait
from torchft_like.process_group.work import FOREVER, Operation
from torchft_like.writing import divide

Report = Callable[[Exception], object]

# When each was issued, in this order.
Pending = dict["Reduction", float]


class Reduction(Operation):
    """A reduction of a step: never fails; after an error the tensors are undefined and the step lost.

    The group's operation is followed up (an average divided, an error reported) once, by whoever comes first:
    the thread that waits, or, if somebody asked for the future, the one that completes the collective.
    Python that runs on a backend's thread costs more than a small allreduce takes, so nothing runs
    there unless it was asked for.

    Until it was told to `follow` the group's operation, it is over.

    Args:
        tensors: its result.
        divide_by: for an average, which the backend only added up.
        report: told of an error.
        pending: holds the reduction until it was followed up, whatever becomes of the caller's handle.
    """

    _inner: Operation | None = None  # of the group, until it was followed up
    _future: Future[Any] | None = None

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        divide_by: int | None,
        report: Report,
        pending: Pending | None = None,
    ) -> None:
        self._tensors = tensors
        self._divide_by = divide_by
        self._report = report
        self._pending = pending
        self._following_up = threading.Lock()
        if pending is not None:
            pending[self] = time.monotonic()

    def follow(self, operation: Operation) -> None:
        """The group has begun it."""
        self._inner = operation
        if self._tensors and not self._tensors[0].is_cpu:
            self.future()  # whoever waits on another stream waits for the division, too

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until it was followed up.

        Raises:
            TimeoutError: it is not over at the deadline.
        """
        if deadline != FOREVER:
            future_wait(self.future(), timedelta(seconds=max(deadline - time.monotonic(), 0.0)))
        elif self._future is not None:
            self._future.wait()
        elif (inner := self._inner) is not None:
            try:
                inner.wait()
            except Exception as error:  # noqa: BLE001 - whatever it is, the step is lost and the Manager knows
                self._fail(error)
            else:
                self._succeed()

    def is_over(self) -> bool:
        """Whether the result is there."""
        if self._future is not None:
            return self._future.done()
        if (inner := self._inner) is not None and inner.is_over():
            self.wait()
        return self._inner is None

    def error(self) -> None:
        """None: the Manager has it."""

    def result(self) -> list[torch.Tensor]:
        """The tensors."""
        return list(self._tensors)

    def future(self) -> Future[Any]:
        """Completes with what `outcome` gives, once it was followed up."""
        if self._future is None:
            inner = self._inner
            self._future = self._completed() if inner is None else inner.future().then(self._finish)
        return self._future

    def outcome(self) -> Any:
        """What the future carries: the tensor."""
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
        except Exception as error:  # noqa: BLE001 - a tensor that nothing can be written to
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._report(error)
        self._end()

    def _end(self) -> None:
        self._inner = None
        if self._pending is not None:
            self._pending.pop(self, None)


class GroupReduction(Reduction):
    """As a process group's: its future carries a list, and a wait that ends too early loses the step."""

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until it was followed up, or until the deadline, which is an error."""
        try:
            super().wait(deadline)
        except TimeoutError as error:
            self._report(error)

    def outcome(self) -> list[torch.Tensor]:
        """What the future carries: all tensors."""
        return list(self._tensors)


def is_average(operation: ReduceOp.RedOpType | ReduceOp) -> bool:
    """Whether the group's sum has to be divided by the number of participants."""
    return hash(operation) == _AVERAGE


def options_for(operation: ReduceOp.RedOpType | ReduceOp) -> AllreduceOptions:
    """torch's options for it. Whoever gets them changes nothing: many share them."""
    known = _OPTIONS.get(hash(operation))
    return known or _options(operation)  # a sum that multiplies carries its factor


def summing(options: AllreduceOptions) -> AllreduceOptions:
    """Such options, but for the sum."""
    made = type(options)()
    made.reduceOp = SUM.reduceOp
    made.timeout = options.timeout
    made.asyncOp = options.asyncOp
    return made


def _options(operation: ReduceOp.RedOpType | ReduceOp) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = operation  # type: ignore[assignment] # torch takes either
    return options


# Made once, and by hash, which is the number of the operation: an allreduce of four bytes takes less time
# than looking at torch's enums in any other way.
_AVERAGE = hash(ReduceOp.AVG)
_OPTIONS = {
    hash(operation): _options(operation)
    for operation in ReduceOp.RedOpType.__members__.values()
    if operation != ReduceOp.PREMUL_SUM
}
AVERAGE, SUM = options_for(ReduceOp.AVG), options_for(ReduceOp.SUM)
