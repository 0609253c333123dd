"""torch's Work, written once, over operations.

What a collective returns is a handle, and what differs between backends is not the handle but the operation
behind it. An operation answers four questions: `wait` until a deadline, `is_over`, its `error`, its `result`.
Futures, streams and senders have defaults that follow from these; an operation overrides what its backend
does better.

INVARIANTS
* A handle has no state of its own: every answer is its operation's.
* A wait whose deadline passes ends that wait and not the operation.
* What an operation does once (to divide, to fill in, to copy back) it does under a lock of its own. No two
  operations share a lock, so groups that have nothing to do with each other never wait for each other.
* An error that a caller keeps does not keep the connections of the group that failed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.futures import empty_future

FOREVER = math.inf

# The error that the caller shall see instead of the backend's; None if that says it best.
Explain = Callable[[Exception], Exception | None]


class Operation:
    """What a handle stands for. A subclass defines the first four methods."""

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until it is over.

        Args:
            deadline: of the monotonic clock; a passed one is an error.

        Raises:
            RuntimeError: the operation has failed, or is not over at the deadline.
        """
        raise NotImplementedError

    def is_over(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        raise NotImplementedError

    def error(self) -> Any:
        """Why it has failed; None if it has not, or is not over."""
        raise NotImplementedError

    def result(self) -> list[Any]:
        """The output tensors, which have their values once it is over."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Whether it is over and has not failed."""
        return self.is_over() and self.error() is None

    def future(self) -> Future[Any]:
        """Completes with the result, or the error: here on a thread that waits for the operation."""
        future = empty_future()

        def complete() -> None:
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001 - it goes where the result would have gone
                future.set_exception(error)
            else:
                future.set_result(self.result())

        threading.Thread(target=complete, name="torchft-operation", daemon=True).start()
        return future

    def synchronize(self) -> None:
        """Make the caller's current stream wait; here by blocking the thread."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the caller's current stream wait, and the thread only where that cannot be helped."""
        self.synchronize()

    def source_rank(self) -> int:
        """Which rank sent what a receive from any rank got; -1 for anything else."""
        return -1


class OperationWork(Work):
    """torch's handle of `operation`, which answers whatever is asked."""

    def __init__(self, operation: Operation) -> None:
        Work.__init__(self)
        self.operation = operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over; as in C++, a timeout of zero is none.

        Raises:
            ProcessGroupAbortedError: the group was aborted before.
            RuntimeError: the backend failed, or `timeout` has passed.
        """
        self.operation.wait(time.monotonic() + timeout.total_seconds() if timeout else FOREVER)
        return True

    def get_future(self) -> Future[Any]:
        """A future that completes with the list of output tensors, or with the error."""
        return self.operation.future()

    def is_completed(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.operation.is_over()

    def is_success(self) -> bool:
        """Whether the operation is over and has not failed."""
        return self.operation.is_success()

    def exception(self) -> Any:
        """The error, once the operation has failed."""
        return self.operation.error()

    def result(self) -> list[Any]:
        """The output tensors."""
        return self.operation.result()

    def source_rank(self) -> int:
        """Which rank sent what a receive from any rank got; -1 for anything else."""
        return self.operation.source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.operation.synchronize()

    def block_current_stream(self) -> None:
        """Make the current stream wait, without the thread."""
        self.operation.block_current_stream()


class ExplainedOperation(Operation):
    """One whose every wait ends by itself; of its group it needs only the words for an error."""

    explain: Explain = staticmethod(lambda _: None)


class FinishedOperation(Operation):
    """One that is over, with `result` or with `failure`.

    Args:
        source: what `source_rank` says.
    """

    def __init__(self, result: list[Any], failure: Exception | None = None, source: int = -1) -> None:
        self._result = result
        self._failure = failure
        self._source = source

    def wait(self, deadline: float = FOREVER) -> None:
        """Return, or raise the error, at once."""
        if self._failure is not None:
            raise self._failure

    def is_over(self) -> bool:
        """Always."""
        return True

    def error(self) -> Exception | None:
        """The error that it was made with."""
        return self._failure

    def result(self) -> list[Any]:
        """The tensors that it was made with."""
        return self._result

    def future(self) -> Future[Any]:
        """A completed one."""
        future = empty_future()
        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            future.set_result(self._result)
        return future

    def source_rank(self) -> int:
        """The sender that it was made with."""
        return self._source


def finished_work(result: list[Any], failure: Exception | None = None, source: int = -1) -> OperationWork:
    """The handle of an operation that is over."""
    return OperationWork(FinishedOperation(result, failure, source))


NOTHING = FinishedOperation([])
_NOT_STARTED = OperationWork(NOTHING)


class BackendOperation(Operation):
    """An operation of a backend that gives torch's works.

    Attributes:
        work: the backend's handle, which may be set later.
    """

    work: Work = _NOT_STARTED

    def wait(self, deadline: float = FOREVER) -> None:
        """Block as the backend's handle does."""
        if deadline == FOREVER:
            self.work.wait()
        else:
            self.work.wait(left_until(deadline))

    def is_over(self) -> bool:
        """What the backend's handle says."""
        return self.work.is_completed()

    def error(self) -> Any:
        """What the backend's handle says, once it is over."""
        return self.work.exception() if self.work.is_completed() else None

    def is_success(self) -> bool:
        """What the backend's handle says; older versions of torch cannot give an error to Python."""
        return self.work.is_completed() and self.work.is_success()

    def result(self) -> list[Any]:
        """What the backend's handle says."""
        return self.work.result()

    def future(self) -> Future[Any]:
        """The backend's."""
        return self.work.get_future()

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.work.synchronize()

    def block_current_stream(self) -> None:
        """Make the current stream wait, without the thread."""
        self.work.block_current_stream()

    def source_rank(self) -> int:
        """What the backend's handle says."""
        return self.work._source_rank()

    def let_go(self, error: Exception) -> None:
        """It has failed: who keeps the error keeps this object, which must not keep the connections."""
        self.work = finished_work([], type(error)(*error.args))


def operation_of(work: Work) -> Operation:
    """The operation behind a handle, whichever library made that."""
    if isinstance(work, OperationWork):
        return work.operation
    operation = BackendOperation()
    operation.work = work
    return operation


def left_until(deadline: float) -> timedelta:
    """The time until then, as a timeout: never zero, which would mean none."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
