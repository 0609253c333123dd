"""torch's Work, written once, over operations.

A collective returns a handle, torch's Work. Backends do not differ in the handle but in the operation behind
it, which has four methods: `wait` until a deadline, `is_over`, its `error`, its `result`. Futures, streams
and senders have defaults that follow from these; an operation overrides what its backend does better.

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

# Returns the error that the caller gets instead of the backend's; None to keep the backend's.
Explain = Callable[[Exception], Exception | None]


class Operation:
    """The operation behind a handle. A subclass defines the first four methods."""

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until the operation is over.

        Args:
            deadline: a time of the monotonic clock; a passed one is an error.

        Raises:
            RuntimeError: the operation has failed, or is not over at the deadline.
        """
        raise NotImplementedError

    def is_over(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        raise NotImplementedError

    def error(self) -> Any:
        """Return why the operation failed; None if it has not, or is not over."""
        raise NotImplementedError

    def result(self) -> list[Any]:
        """Return the output tensors, which have their values once the operation is over."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Return whether the operation is over and has not failed."""
        return self.is_over() and self.error() is None

    def future(self) -> Future[Any]:
        """Return a future of the result or the error; by default a thread that waits for the operation
        completes it.
        """
        future = empty_future()

        def complete() -> None:
            try:
                self.wait()
            except Exception as error:  # noqa: BLE001 - the future passes it on
                future.set_exception(error)
            else:
                future.set_result(self.result())

        threading.Thread(target=complete, name="torchft-operation", daemon=True).start()
        return future

    def synchronize(self) -> None:
        """Make the caller's current stream wait; by default this blocks the thread."""
        self.wait()

    def block_current_stream(self) -> None:
        """Make the caller's current stream wait, and the thread only if that cannot be avoided."""
        self.synchronize()

    def source_rank(self) -> int:
        """Return the rank whose message a receive from any rank got; -1 for other operations."""
        return -1


class OperationWork(Work):
    """torch's handle of `operation`, which answers every call."""

    def __init__(self, operation: Operation) -> None:
        Work.__init__(self)
        self.operation = operation

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over; as in C++, a timeout of zero means no limit.

        Raises:
            ProcessGroupAbortedError: the group was aborted before.
            RuntimeError: the backend failed, or `timeout` has passed.
        """
        self.operation.wait(time.monotonic() + timeout.total_seconds() if timeout else FOREVER)
        return True

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the list of output tensors, or with the error."""
        return self.operation.future()

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        return self.operation.is_over()

    def is_success(self) -> bool:
        """Return whether the operation is over and has not failed."""
        return self.operation.is_success()

    def exception(self) -> Any:
        """Return the error, once the operation has failed."""
        return self.operation.error()

    def result(self) -> list[Any]:
        """Return the output tensors."""
        return self.operation.result()

    def source_rank(self) -> int:
        """Return the rank whose message a receive from any rank got; -1 for other operations."""
        return self.operation.source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.operation.synchronize()

    def block_current_stream(self) -> None:
        """Make the current stream wait, without the thread."""
        self.operation.block_current_stream()


class ExplainedOperation(Operation):
    """An operation whose waits all end by themselves; of its group it needs only the words for an error."""

    explain: Explain = staticmethod(lambda _: None)


class FinishedOperation(Operation):
    """An operation that is over, with `result` or with `failure`.

    Args:
        source: the value of `source_rank`.
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
        """Return True."""
        return True

    def error(self) -> Exception | None:
        """Return the error that the operation was made with."""
        return self._failure

    def result(self) -> list[Any]:
        """Return the tensors that the operation was made with."""
        return self._result

    def future(self) -> Future[Any]:
        """Return a completed future."""
        future = empty_future()
        if self._failure is not None:
            future.set_exception(self._failure)
        else:
            future.set_result(self._result)
        return future

    def source_rank(self) -> int:
        """Return the sender that the operation was made with."""
        return self._source


def finished_work(result: list[Any], failure: Exception | None = None, source: int = -1) -> OperationWork:
    """Make the handle of an operation that is over."""
    return OperationWork(FinishedOperation(result, failure, source))


NOTHING = FinishedOperation([])
_NOT_STARTED = OperationWork(NOTHING)


class BackendOperation(Operation):
    """An operation of a backend that returns torch's works.

    Attributes:
        work: the backend's work, which may be set later.
    """

    work: Work = _NOT_STARTED

    def wait(self, deadline: float = FOREVER) -> None:
        """Block as the backend's work does."""
        if deadline == FOREVER:
            self.work.wait()
        else:
            self.work.wait(left_until(deadline))

    def is_over(self) -> bool:
        """Return whether the backend's work is completed."""
        return self.work.is_completed()

    def error(self) -> Any:
        """Return the error of the backend's work, once it is over."""
        return self.work.exception() if self.work.is_completed() else None

    def is_success(self) -> bool:
        """Return whether the backend's work has succeeded; older versions of torch cannot pass its error to
        Python.
        """
        return self.work.is_completed() and self.work.is_success()

    def result(self) -> list[Any]:
        """Return the result of the backend's work."""
        return self.work.result()

    def future(self) -> Future[Any]:
        """Return the future of the backend's work."""
        return self.work.get_future()

    def synchronize(self) -> None:
        """Make the current stream wait."""
        self.work.synchronize()

    def block_current_stream(self) -> None:
        """Make the current stream wait, without the thread."""
        self.work.block_current_stream()

    def source_rank(self) -> int:
        """Return the sender's rank that the backend's work reports."""
        return self.work._source_rank()

    def let_go(self, error: Exception) -> None:
        """Drop the backend's work after a failure: an error that the caller keeps would keep the
        connections.
        """
        self.work = finished_work([], type(error)(*error.args))


def operation_of(work: Work) -> Operation:
    """Return the operation behind a handle, which any library may have made."""
    if isinstance(work, OperationWork):
        return work.operation
    operation = BackendOperation()
    operation.work = work
    return operation


def left_until(deadline: float) -> timedelta:
    """Return the time until the deadline as a timeout: never zero, which would mean no limit."""
    return timedelta(seconds=max(deadline - time.monotonic(), 0.001))
