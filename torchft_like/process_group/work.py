"""torch's Work, written once, over operations.

A collective returns torch's Work. Backends do not differ in its interface but in four methods: `wait_until`
a deadline, `is_completed`, its `exception`, its `result`. Waits, futures, streams and senders have defaults
that follow from these; an operation overrides what its backend does better. A work of torch's own has the
same interface, so an operation that follows another one follows that, too.

INVARIANTS
* A wait whose deadline passes ends that wait and not the operation.
* What an operation does once (to divide, to fill in, to copy back) it does under a lock of its own. No two
  operations share a lock, so groups that have nothing to do with each other never wait for each other.
* An error that a caller keeps does not keep the connections of the group that failed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.devices import after, beside_captures
from torchft_like.errors import ProcessGroupError
from torchft_like.futures import copy_outcome, empty_future, fail
from torchft_like.process_group.uncompiled import uncompiled
from torchft_like.runtime.background import run_in_background
from torchft_like.runtime.durations import seconds_of

FOREVER = math.inf

# Returns the error that the caller gets instead of the backend's; None to keep the backend's.
Explain = Callable[[Exception], Exception | None]
# Returns the result of an operation, once the works behind it have succeeded.
Finish = Callable[[], list[Any]]


@uncompiled
class Operation(Work):
    """An operation of a group. A subclass defines `wait_until`, `is_completed`, `exception` and `result`."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        uncompiled(cls)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the operation is over; as in C++, a timeout of zero means no limit.

        Raises:
            ConfigError: the timeout is negative, or no duration.
            ProcessGroupAbortedError: the group was aborted before.
            RuntimeError: the backend failed, or `timeout` has passed.
        """
        self.wait_until(time.monotonic() + seconds_of(timeout) if timeout else FOREVER)
        return True

    def wait_until(self, deadline: float) -> None:
        """Block until the operation is over.

        Args:
            deadline: a time of the monotonic clock, or FOREVER; a passed one is an error.

        Raises:
            RuntimeError: the operation has failed, or is not over at the deadline.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        raise NotImplementedError

    def exception(self) -> Any:
        """Return why the operation failed; None if it has not, or is not over."""
        raise NotImplementedError

    def result(self) -> list[Any]:
        """Return the output tensors, which have their values once the operation is over."""
        raise NotImplementedError

    def is_success(self) -> bool:
        """Return whether the operation is over and has not failed."""
        return self.is_completed() and self.exception() is None

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the list of output tensors, or with the error.

        By default a thread that waits completes it.
        """
        future = empty_future()
        run_in_background("torchft-operation", self._complete_by_waiting, future)
        return future

    def _complete_by_waiting(self, future: Future[Any]) -> None:
        try:
            self.wait_until(FOREVER)
        except Exception as error:  # noqa: BLE001 - the future passes it on
            fail(future, error)
        else:
            future.set_result(self.result())

    def synchronize(self) -> None:
        """Make the caller's current stream wait; by default this blocks the thread."""
        self.wait_until(FOREVER)

    def block_current_stream(self) -> None:
        """Make the caller's current stream wait, and the thread only if that cannot be avoided."""
        self.synchronize()

    def _source_rank(self) -> int:
        return -1

    def source_rank(self) -> int:
        """Return the rank whose message a receive from any rank got; -1 for other operations."""
        return self._source_rank()


def wait_until(work: Work, deadline: float) -> None:
    """Block until a work is over, which any library may have made; a passed deadline is an error."""
    if deadline == FOREVER:
        work.wait()
    elif isinstance(work, Operation):
        work.wait_until(deadline)
    else:
        left_s = max(deadline - time.monotonic(), 0.001)  # zero would mean no limit
        work.wait(timedelta(seconds=left_s))


class FinishedOperation(Operation):
    """An operation that is over, with `result` or with `failure`."""

    def __init__(self, result: list[Any], failure: Exception | None = None, source: int = -1) -> None:
        super().__init__()
        self._result = result
        self._failure = failure
        self._source = source

    def wait_until(self, deadline: float) -> None:
        if self._failure is not None:
            raise self._failure

    def is_completed(self) -> bool:
        return True

    def exception(self) -> Exception | None:
        return self._failure

    def result(self) -> list[Any]:
        return self._result

    def get_future(self) -> Future[Any]:
        future = empty_future()
        if self._failure is not None:
            fail(future, self._failure)
        else:
            future.set_result(self._result)
        return future

    def _source_rank(self) -> int:
        return self._source


NOTHING = FinishedOperation([])


class FollowingOperation(Operation):
    """An operation that behaves as `inner`, which may be set later, except for what a subclass changes."""

    inner: Work = NOTHING

    def wait_until(self, deadline: float) -> None:
        wait_until(self.inner, deadline)

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def exception(self) -> Any:
        return self.inner.exception()

    def is_success(self) -> bool:
        """Return whether the inner work has succeeded; older torches cannot pass its error to Python."""
        return self.inner.is_completed() and self.inner.is_success()

    def result(self) -> list[Any]:
        return self.inner.result()

    def get_future(self) -> Future[Any]:
        return self.inner.get_future()

    def synchronize(self) -> None:
        self.inner.synchronize()

    def block_current_stream(self) -> None:
        self.inner.block_current_stream()

    def _source_rank(self) -> int:
        return self.inner._source_rank()

    def let_go(self, error: Exception) -> None:
        """Drop the backend's work: an error that the caller keeps would keep the connections."""
        self.inner = FinishedOperation([], type(error)(*error.args))


class DeferredOperation(FollowingOperation):
    """An operation that another thread begins later; from then on it behaves as the one that was begun."""

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        super().__init__()
        self._devices = list(devices)
        self._lock = threading.Lock()
        self._begun = threading.Event()
        self._futures: list[Future[Any]] = []

    @property
    def has_begun(self) -> bool:
        """Whether the operation was begun, or cannot be."""
        return self._begun.is_set()

    def follow(self, work: Work | None) -> None:
        """Behave as `work` from now on, because it has begun; None if it is over."""
        with self._lock:
            self.inner = work or self.inner
            futures, self._futures = self._futures, []
            self._begun.set()
        beginner = threading.get_ident()
        for future in futures:
            self._follow_with(future, beginner)

    def wait_begun(self, deadline: float = FOREVER) -> None:
        """Block until the operation was begun, or cannot be.

        Raises:
            TimeoutError: it has not begun at the deadline.
        """
        if not self._begun.wait(deadline - time.monotonic() if deadline < FOREVER else None):
            raise TimeoutError("timed out: the operation has not begun")

    def wait_until(self, deadline: float) -> None:
        self.wait_begun(deadline)
        super().wait_until(deadline)

    def is_completed(self) -> bool:
        return self.has_begun and super().is_completed()

    def is_success(self) -> bool:
        return self.has_begun and super().is_success()

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future(devices=[*self._devices])
        with self._lock:
            if not self.has_begun:
                self._futures.append(future)
                return future
        self._follow_with(future)
        return future

    def synchronize(self) -> None:
        self.wait_begun()
        super().synchronize()

    def block_current_stream(self) -> None:
        """Block the thread until the operation has begun, and then only the stream."""
        self.wait_begun()
        super().block_current_stream()

    def _follow_with(self, future: Future[Any], beginner: int | None = None) -> None:
        """Complete `future` as the inner one, but not on thread `beginner`: a callback may wait for it."""

        def copy(done: Future[Any]) -> None:
            with beside_captures(next(iter(self._devices), None)):
                copy_outcome(done, future)

        def complete(done: Future[Any]) -> None:
            if threading.get_ident() == beginner:
                run_in_background("torchft-operation", copy, done)
            else:
                copy(done)

        self.inner.get_future().add_done_callback(complete)


class ExplainedOperation(Operation):
    """An operation whose waits all end by themselves; of its group it needs only the words for an error."""

    explain: Explain = staticmethod(lambda _: None)


def _refuse_to_finish() -> list[Any]:
    raise ProcessGroupError("the wait that completed the result was interrupted: the tensors are undefined")


class JointOperation(Operation):
    """Several works as one, which is over when all of them are, and fails when one of them does.

    What is left to do once all of them are over, such as copying a result, is done once, by the backend's
    thread or by a waiting one, whichever comes first.

    Args:
        works: works of one backend, in the order in which they were begun.
        finish: returns the result, once all have succeeded.
        waits: whether `finish` runs only once a thread waits, or asks for the future. Sends and receives have
          no future.
        on_cpu: whether there is one work, of CPU tensors, whose thread finishes it: no stream has to wait.
    """

    def __init__(
        self, works: Sequence[Work], finish: Finish, *, waits: bool = False, on_cpu: bool = False
    ) -> None:
        super().__init__()
        self._works = works
        self._make_result = finish
        self._finishing = threading.Lock()
        self._finished: list[Any] | None = None
        # A waiting thread that finished it, too, would compete with the backend's for the interpreter.
        self._is_finished_by_backend = on_cpu
        self._future: Future[Any] | None = None
        if on_cpu:
            self._future = works[0].get_future().then(self._finish_after)
            self.is_completed = self._future.done  # type: ignore[method-assign] # polled, and C code
        elif not waits:
            self._future = self._follow()

    def wait_until(self, deadline: float) -> None:
        for work in self._works:
            wait_until(work, deadline)
        self.result()

    def is_completed(self) -> bool:
        """Return whether all works are over, and the result is there or cannot come."""
        return (self._future is None or self._future.done()) and all(w.is_completed() for w in self._works)

    def exception(self) -> Any:
        errors = (work.exception() for work in self._works if work.is_completed())
        return next((error for error in errors if error is not None), None)

    def is_success(self) -> bool:
        """Return whether all works have succeeded, and the result is there unless no future was asked for."""
        is_finished = self._future is None or self._finished is not None
        return is_finished and all(work.is_success() for work in self._works)

    def result(self) -> list[Any]:
        """Return the result; this blocks until the backend's thread has it, if no other may finish it."""
        if self._is_finished_by_backend and self._future is not None:
            return self._future.wait()  # type: ignore[no-any-return]
        return self._finish()

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = self._follow()
        return self._future

    def synchronize(self) -> None:
        for work in self._works:
            work.synchronize()

    def _source_rank(self) -> int:
        return self._works[0]._source_rank() if len(self._works) == 1 else -1

    def _finish(self) -> list[Any]:
        with self._finishing:
            if self._finished is None:
                try:
                    self._finished = self._make_result()
                except Exception:
                    raise
                except BaseException:  # Ctrl-C: a sum may be divided by now
                    self._make_result = _refuse_to_finish
                    raise
            return self._finished

    def _finish_after(self, done: Future[Any]) -> list[Any]:
        done.value()  # raises the error of an operation that has failed
        return self._finish()

    def _follow(self) -> Future[list[Any]]:
        own = empty_future()
        joined = torch.futures.collect_all([work.get_future() for work in self._works])
        joined.add_done_callback(lambda done: self._complete(own, done))
        return own

    def _complete(self, own: Future[list[Any]], done: Future[list[Future[Any]]]) -> None:
        try:
            values = [future.value() for future in done.value()]
            with after(self._works, values):
                own.set_result(self._finish())
        except Exception as error:  # noqa: BLE001 - the future passes it on
            fail(own, error)
