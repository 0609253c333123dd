"""The Work that a managed collective returns: it succeeds, or the Manager has heard why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Self

import torch
from torch.distributed import AllreduceOptions, ReduceOp, Work
from torch.futures import Future

from lighthouse.forks import lock_of_each_process
from torchft_like.futures import future_wait
from torchft_like.process_group.work import DoneWork, GroupWork, Issuer
from torchft_like.writing import divide

Report = Callable[[Exception], object]

_SETTLED = DoneWork([])

# When each was issued, in this order.
Pending = dict["ManagedWork", float]


class ManagedWork(GroupWork):
    """A reduction of a step: never fails; after an error the tensors are undefined and the step lost.

    `work` is followed up (an average divided, an error reported) once, by whoever comes first: the
    thread that waits, or, if somebody asked for the future, the one that completes the collective.
    Python that runs on a backend's thread costs more than a small allreduce takes, so nothing runs
    there unless it was asked for.

    Until it was told to `take` the backend's work, it is done.

    Args:
        tensors: its result.
        divide_by: for an average, which the backend only added up.
        report: told of an error.
        pending: holds the work until it was followed up, whatever becomes of the caller's handle.
    """

    # Those of most works: what is not set takes no time.
    _settled_future: Future[Any] | None = None
    _is_issued = True
    _pending: Pending | None = None
    _divide_by: int | None = None
    _work: Work = _SETTLED

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        divide_by: int | None,
        report: Report,
        pending: Pending | None = None,
    ) -> None:
        Work.__init__(self)
        self._tensors = tensors
        self._report = report
        if divide_by is not None:
            self._divide_by = divide_by
        if pending is not None:
            self._pending = pending
            pending[self] = time.monotonic()

    def take(self, work: Work, issuer: Issuer | None) -> None:
        """See Taker."""
        if issuer is not None:
            self._issuer = issuer
        else:
            self._is_issued = False
        self._work = work
        if self._tensors and not self._tensors[0].is_cpu:
            self.get_future()  # whoever waits on another stream waits for the division, too

    @classmethod
    def finished(cls, tensors: Sequence[torch.Tensor]) -> Self:
        """One that is done already."""
        return cls(tensors, None, lambda _: None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until done.

        Raises:
            TimeoutError: not done within `timeout`.
        """
        if timeout:  # C++ passes zero for none
            self._wait_for(timeout)
        elif self._settled_future is not None:
            self._settled_future.wait()
        elif self._work is not _SETTLED:
            try:
                GroupWork.wait(self) if self._is_issued else self._work.wait()
            except Exception as error:  # noqa: BLE001 - see `_settle`
                self._fail(error)
            else:
                self._succeed()
        return True

    def get_future(self) -> Future[Any]:
        """Completes with the tensor."""
        if self._settled_future is None:
            if self._work is _SETTLED:
                self._settled_future = self._completed()
            else:
                future = GroupWork.get_future(self) if self._is_issued else self._work.get_future()
                self._settled_future = future.then(self._finish)
        return self._settled_future

    def is_completed(self) -> bool:
        """Whether the result is there."""
        if self._settled_future is not None:
            return self._settled_future.done()
        if self._work is not _SETTLED and self._is_over():
            self._settle(self._wait_for_work)
        return self._work is _SETTLED

    def is_success(self) -> bool:
        """Errors have gone to the Manager."""
        return self.is_completed()

    def _outcome(self) -> Any:
        """What the future carries."""
        return self._tensors[0]

    def _is_over(self) -> bool:
        return GroupWork.is_completed(self) if self._is_issued else self._work.is_completed()

    def _wait_for_work(self) -> None:
        GroupWork.wait(self) if self._is_issued else self._work.wait()

    def _wait_for(self, timeout: timedelta) -> None:
        future_wait(self.get_future(), timeout)

    def _finish(self, done: Future[Any]) -> Any:
        self._settle(done.value)
        return self._outcome()

    def _completed(self) -> Future[Any]:
        devices = {tensor.device for tensor in self._tensors if not tensor.is_cpu}
        future: Future[Any] = Future(devices=list(devices) or None)
        future.set_result(self._outcome())
        return future

    def _settle(self, outcome: Callable[[], object]) -> None:
        try:
            outcome()
        except Exception as error:  # noqa: BLE001 - whatever it is, the step is lost and the Manager knows
            self._fail(error)
        else:
            self._succeed()

    def _succeed(self) -> None:
        if self._divide_by is not None:
            try:
                self._divide(self._divide_by)
            except Exception as error:  # noqa: BLE001 - a tensor that nothing can be written to
                self._fail(error)
                return
        self._end()

    def _divide(self, divide_by: int) -> None:
        with _dividing:
            if self._work is not _SETTLED:
                divide(self._tensors, divide_by)
                self._work = _SETTLED

    def _fail(self, error: Exception) -> None:
        self._report(error)
        self._end()

    def _end(self) -> None:
        self._work = _SETTLED
        if self._pending is not None:
            self._pending.pop(self, None)


class ManagedGroupWork(ManagedWork):
    """As a process group's: its future carries a list, and a wait that ends too early loses the step."""

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._outcome()

    def exception(self) -> None:
        """None: the Manager has it."""

    def source_rank(self) -> int:
        """Nobody."""
        return -1

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.wait()

    block_current_stream = synchronize

    def _outcome(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def _wait_for(self, timeout: timedelta) -> None:
        try:
            super()._wait_for(timeout)
        except TimeoutError as error:
            self._report(error)


_dividing = lock_of_each_process()


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
