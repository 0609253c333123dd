"""The operations of a generation, which are given up when a backend forgets them.

Gloo fails the operations that are registered with a broken connection. If an operation's own write finds the
connection broken, the connection is closed before the operation is registered: it is never told, and its
thread waits until the operation's timeout. This happens to half of the replicas that are stopped inside a
collective and continued later.

So no thread waits for the backend alone. After an abort, once the backend is *still* (no connection is left
and none of its threads has run for a moment), nothing can finish or touch a tensor any more, and the
operations that are left are given up here with the abort's error. The backend's thread ends later, at its
timeout, without effect.

INVARIANT: an operation is given up only while its backend cannot touch the operation's tensors;
otherwise a gradient of the next step could be overwritten by one of the last. Threads of other groups,
which cannot be told from the backend's, may be busy for ever: ten seconds without a connection are enough.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Work
from torch.futures import Future

from torchft_like.devices import after
from torchft_like.errors import ProcessGroupAbortedError
from torchft_like.futures import empty_future
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.work import FOREVER, BackendOperation, Explain
from torchft_like.runtime.spin_wait import AdaptiveSpin

SLICE_S = 0.1
SLICE = timedelta(seconds=SLICE_S)
LOOK_PAUSE_S = 0.02
LOOKS_S_MAX = 10.0
ISSUED_MIN = 128


class Operations:
    """The operations of one generation of a group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._issued: list[weakref.ref[GroupOperation]] = []
        self._issued_max = ISSUED_MIN
        self._given_up: Exception | None = None
        self._spin = AdaptiveSpin()  # waiting threads share it: a lost update does no harm

    def begin(self, explain: Explain) -> GroupOperation:
        """Make an operation for a call that the backend is about to get; its holder may wait for it."""
        operation = GroupOperation()
        operation.operations, operation.explain = self, explain
        if len(self._issued) >= self._issued_max:
            self._forget_those_done()  # before the new one is added: without a work it would pass for done
        self._issued.append(weakref.ref(operation))  # no lock: append is atomic
        return operation

    def message(self, work: Work, explain: Explain) -> MessageOperation:
        """Make the operation of a send or a receive that the backend has begun."""
        operation = MessageOperation()
        operation.operations, operation.explain, operation.work = self, explain, work
        return operation

    def follow(self, work: Work, explain: Explain = lambda _: None) -> Future[Any]:
        """Return a future that completes as the work's does, or when the operation is given up.

        A stream that waits for it waits for the tensors, too, as after `work.wait`. The thread that completes
        the operation passes an error to `explain`, and the future gets the error that this returns.
        """
        own = empty_future()
        with self._lock:
            self._futures.add(own)
            error = self._given_up
        work.get_future().add_done_callback(lambda done: self._complete(own, work, done, explain))
        if error is not None and self._take(own):
            own.set_exception(error)
        return own

    def wait_briefly(self, work: Work) -> bool:
        """Wait for the work for one slice.

        Watching for the end costs a short operation nothing. A wait with a limit does: setting and removing a
        timer is slow on virtual machines.
        """
        started = time.monotonic()
        is_over = self._spin.watch(work.is_completed, math.inf)
        try:
            return work.wait() if is_over else work.wait(SLICE)
        finally:
            self._spin.learn(time.monotonic() - started)

    def wait(self, work: Work, deadline: float) -> bool:
        """Wait for the work, until it is over or the operation is given up.

        The wait is cut into slices, because C++ cannot be interrupted. It is not for sends and receives,
        which Gloo ends when a slice is over.
        """
        try:
            while not _is_over(work, deadline):
                if self._given_up is not None:
                    raise self._given_up
            return work.wait()
        finally:
            del work  # an error that the caller keeps would keep this frame, and the connections open

    def give_up(
        self, is_still: Callable[[], bool], error: Exception, seconds_max: float | None = None
    ) -> bool:
        """Wait, after an abort, until no operation is awaited any more, or give up the rest once that is
        safe.

        This blocks for a moment. If the backend does not come to rest it blocks for `seconds_max`
        (`LOOKS_S_MAX` by default), and returns False.
        """
        deadline = time.monotonic() + (LOOKS_S_MAX if seconds_max is None else seconds_max)
        is_safe = False
        while not is_safe and time.monotonic() < deadline:
            is_safe = not self._is_awaited() or is_still()
            if not is_safe:
                time.sleep(LOOK_PAUSE_S)
        self._fail_all(error)
        return is_safe

    @property
    def given_up(self) -> Exception | None:
        """The error of the operations that were given up; None if there are none."""
        return self._given_up

    def _forget_those_done(self) -> None:
        with self._lock:
            issued = len(self._issued)
            # Entries that were added since are kept.
            self._issued[:issued] = filter(_is_open, self._issued[:issued])
            self._issued_max = max(ISSUED_MIN, 2 * len(self._issued))

    def _is_awaited(self) -> bool:
        with self._lock:
            return bool(self._futures) or any(map(_is_open, list(self._issued)))

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._given_up = error
            futures, self._futures = self._futures, set()
        for future in futures:
            future.set_exception(error)

    def _take(self, own: Future[Any]) -> bool:
        """Claim the future; return whether the caller is the one to complete it."""
        with self._lock:
            if own not in self._futures:
                return False
            self._futures.remove(own)
            return True

    def _complete(self, own: Future[Any], work: Work, done: Future[Any], explain: Explain) -> None:
        if not self._take(own):
            return
        try:
            value = done.value()
        except Exception as error:  # noqa: BLE001 - the future passes it on
            own.set_exception(explain(error) or error)
        else:
            with after([work], value):
                own.set_result(done.wait())  # the tensors may have been completed on another stream


class GroupOperation(BackendOperation):
    """An operation of a generation's backend, whose errors are in the group's words.

    The waiting thread reports an error to the group, or the future does, if there is one.

    The operation is made before the backend is called, and gets the backend's work afterwards: Python that
    runs after the call competes with the backend's threads, and takes many times as long where cores are few.
    """

    operations: Operations
    explain: Explain
    _future: Future[Any] | None = None

    def wait(self, deadline: float = FOREVER) -> None:
        if deadline == FOREVER:
            try:
                if self.operations.wait_briefly(self.work):
                    return
            except RuntimeError:
                pass  # it failed, or takes longer than a slice; most operations do neither
        self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        try:
            self._wait_for_backend(deadline)
        except RuntimeError as error:
            if self.work.is_completed() or isinstance(error, ProcessGroupAbortedError):
                self.let_go(error)
            if (better := self.explain(error)) is not None:
                raise better from error
            raise

    def is_over(self) -> bool:
        return self.work.is_completed() or self.operations.given_up is not None

    def error(self) -> Any:
        return self.work.exception() if self.work.is_completed() else self.operations.given_up

    def future(self) -> Future[Any]:
        if self._future is None:
            self._future = self.operations.follow(self.work, self.explain)
        return self._future

    def _wait_for_backend(self, deadline: float) -> None:
        self.operations.wait(self.work, deadline)


class MessageOperation(GroupOperation):
    """A send or a receive, which moves its message in `wait`: that single wait, without slices, is never
    given up."""

    _was_waited = False

    def wait(self, deadline: float = FOREVER) -> None:
        self._wait(deadline)

    def _wait_for_backend(self, deadline: float) -> None:
        if not self._was_waited:  # a second wait would be for another message
            BackendOperation.wait(self, deadline)
            self._was_waited = True


class AbandonableOperation(BackendOperation):
    """An operation whose wait nothing can end, so that a thread of its own waits.

    Args:
        work: the work of the backend.
        abort: the signal that ends the wait.
    """

    def __init__(self, work: Work, abort: AbortSignal) -> None:
        self.work = work
        self._abort = abort

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until the operation is over, or the group was aborted; the other thread then waits on."""
        ended = threading.Event()
        errors: list[Exception] = []

        def wait_aside() -> None:
            try:
                BackendOperation.wait(self, deadline)
            except Exception as error:  # noqa: BLE001 - the error is raised where the caller waits
                errors.append(error)
            ended.set()

        try:
            with self._abort.ends(ended.set):
                threading.Thread(target=wait_aside, name="torchft-abandonable", daemon=True).start()
                ended.wait()
            self._abort.check()
        except ProcessGroupAbortedError as error:
            self.let_go(error)
            raise
        if errors:
            if self.work.is_completed():
                self.let_go(errors[0])
            raise errors[0].with_traceback(None)


def _is_open(entry: weakref.ref[GroupOperation]) -> bool:
    """Return whether a caller holds the operation, and the backend is not done with it."""
    operation = entry()
    return operation is not None and not operation.work.is_completed()


def _is_over(work: Work, deadline: float) -> bool:
    """Wait for a slice; return whether the work is over, with or without an error.

    Raises:
        RuntimeError: the work is not over, and the deadline has passed.
    """
    left_s = deadline - time.monotonic()
    try:
        return work.wait(timedelta(seconds=min(SLICE_S, max(left_s, 1e-3))))
    except RuntimeError:
        if not work.is_completed() and left_s <= SLICE_S:
            raise
        return work.is_completed()
    finally:
        del work
