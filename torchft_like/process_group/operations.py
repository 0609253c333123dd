"""Operations that are waited for, and what becomes of them when a backend forgets one.

Gloo fails an operation by telling everybody who is registered with the broken connection. When the
write that finds the connection broken is the operation's own, the connection is closed first and
the operation registered after: nobody is told, and its thread waits until the operation's timeout.
Half of the replicas that are stopped inside a collective and continued later meet this.

So whoever waits does not wait for the backend alone. After an abort, once the backend is *still*
(no connection is left and none of its threads has run for a moment), nothing can finish or touch
a tensor any more, and what is left is given up here with the abort's error. The backend's thread
ends later, at its timeout, and finds that nobody listens.

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
from torchft_like.patience import Patience
from torchft_like.process_group.work import FOREVER, BackendOperation, Explain

SLICE_S = 0.1
SLICE = timedelta(seconds=SLICE_S)
LOOK_PAUSE_S = 0.02
LOOKS_S_MAX = 10.0
ISSUED_MIN = 128


class Operations:
    """Those of one generation of a group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._waiting = 0
        self._issued: list[weakref.ref[GroupOperation]] = []
        self._issued_max = ISSUED_MIN
        self._given_up: Exception | None = None
        self._patience = Patience()  # whichever thread waits: a number that two have written is still one

    def begin(self, explain: Explain) -> GroupOperation:
        """An operation that the backend is about to be given; its holder may come and wait for it."""
        operation = GroupOperation()
        operation.operations, operation.explain = self, explain
        if len(self._issued) >= self._issued_max:
            self._forget_those_done()  # before: one that the backend does not have yet would pass for done
        self._issued.append(weakref.ref(operation))  # no lock: all come here, and this is one step
        return operation

    def message(self, work: Work, explain: Explain) -> MessageOperation:
        """A send or a receive that the backend has been given."""
        operation = MessageOperation()
        operation.operations, operation.explain, operation.work = self, explain, work
        return operation

    def follow(self, work: Work, explain: Explain = lambda _: None) -> Future[Any]:
        """A future that completes as the work's does, or when the operation is given up.

        Whoever waits for it on a stream waits for the tensors, too, as after `work.wait`. An error is told to
        `explain`, and told in its words, on the thread that completes the operation.
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
        """For a slice, as `work.wait`.

        Watching for the end of a short operation costs it nothing. A wait with a limit does: to set a timer,
        and to take it back, is slow on virtual machines.
        """
        started = time.monotonic()
        is_over = self._patience.watch(work.is_completed, math.inf)
        try:
            return work.wait() if is_over else work.wait(SLICE)
        finally:
            self._patience.learn(time.monotonic() - started)

    def wait(self, work: Work, deadline: float) -> bool:
        """As `work.wait`, but also over when the operation is given up.

        The wait is cut into slices: C++ cannot be interrupted. Not for sends and receives, which
        Gloo breaks off when a slice is over.
        """
        self._count_waiting(1)
        try:
            while not _is_over(work, deadline):
                if self._given_up is not None:
                    raise self._given_up
            return work.wait()
        finally:
            del work  # whoever keeps an error keeps this frame: let that not keep the connections open
            self._count_waiting(-1)

    def give_up(
        self, is_still: Callable[[], bool], error: Exception, seconds_max: float | None = None
    ) -> bool:
        """After an abort: wait until none can be awaited any more, or give up what is left once it is safe.

        Blocks for a moment, and for `seconds_max` (`LOOKS_S_MAX` if left out) where the backend does not come
        to rest; False then.
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
        """The error of those that are not over and never will be, once there are any."""
        return self._given_up

    def _forget_those_done(self) -> None:
        with self._lock:
            issued = len(self._issued)
            self._issued[:issued] = filter(_is_open, self._issued[:issued])  # what was added meanwhile stays
            self._issued_max = max(ISSUED_MIN, 2 * len(self._issued))

    def _is_awaited(self) -> bool:
        with self._lock:
            return bool(self._futures or self._waiting) or any(map(_is_open, list(self._issued)))

    def _count_waiting(self, change: int) -> None:
        with self._lock:
            self._waiting += change

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            self._given_up = error
            futures, self._futures = self._futures, set()
        for future in futures:
            future.set_exception(error)

    def _take(self, own: Future[Any]) -> bool:
        """Whether the caller is the one to complete it."""
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
        except Exception as error:  # noqa: BLE001 - it goes where the result would have gone
            own.set_exception(explain(error) or error)
        else:
            with after([work], value):
                own.set_result(done.wait())  # which may have been completed on another stream


class GroupOperation(BackendOperation):
    """An operation of a generation's backend, whose errors are told in the group's words.

    The group hears of an error from the thread that waits, or through the future if there is one.

    It is made before the backend is called, and takes the backend's handle then: what Python does after
    that competes with the backend's threads, and takes many times as long where cores are few.
    """

    operations: Operations
    explain: Explain
    _future: Future[Any] | None = None

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until it is over, or given up.

        Raises:
            ProcessGroupAbortedError: the group was aborted before.
            RuntimeError: the backend failed, or `deadline` has passed.
        """
        if deadline == FOREVER:
            try:
                if self.operations.wait_briefly(self.work):
                    return
            except RuntimeError:
                pass  # it failed, or takes longer; most do not, and their wait ends here
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
        """Whether the backend is done with it, or it was given up."""
        return self.work.is_completed() or self.operations.given_up is not None

    def error(self) -> Any:
        """The backend's error, or that of those that were given up."""
        return self.work.exception() if self.work.is_completed() else self.operations.given_up

    def future(self) -> Future[Any]:
        """Completes on the backend's thread, with the list of output tensors or with the error."""
        if self._future is None:
            self._future = self.operations.follow(self.work, self.explain)
        return self._future

    def _wait_for_backend(self, deadline: float) -> None:
        self.operations.wait(self.work, deadline)


class MessageOperation(GroupOperation):
    """A send or a receive, which moves its message in `wait`: one wait, in one piece, is never given up."""

    _was_waited = False

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until the message was moved; see GroupOperation.wait for the errors."""
        self._wait(deadline)

    def _wait_for_backend(self, deadline: float) -> None:
        if not self._was_waited:  # a second wait would be for another message
            BackendOperation.wait(self, deadline)
            self._was_waited = True


class AbandonableOperation(BackendOperation):
    """One whose wait nothing can end: the wait is left to a thread of its own.

    Args:
        work: of the backend.
        until_abort: gives the context in which an abort calls a function; raises after one.
    """

    def __init__(self, work: Work, until_abort: Callable[[Callable[[], object]], Any]) -> None:
        self.work = work
        self._until_abort = until_abort

    def wait(self, deadline: float = FOREVER) -> None:
        """Block until it is over, or the group was aborted: then the thread stays until it times out."""
        ended = threading.Event()
        errors: list[Exception] = []

        def wait_aside() -> None:
            try:
                BackendOperation.wait(self, deadline)
            except Exception as error:  # noqa: BLE001 - it is raised where the caller waits
                errors.append(error)
            ended.set()

        try:
            with self._until_abort(ended.set):
                threading.Thread(target=wait_aside, name="torchft-abandonable", daemon=True).start()
                ended.wait()
        except ProcessGroupAbortedError as error:
            self.let_go(error)
            raise
        if errors:
            if self.work.is_completed():
                self.let_go(errors[0])
            raise errors[0].with_traceback(None)


def _is_open(entry: weakref.ref[GroupOperation]) -> bool:
    """Whether somebody holds the operation, and the backend is not done with it."""
    operation = entry()
    return operation is not None and not operation.work.is_completed()


def _is_over(work: Work, deadline: float) -> bool:
    """Wait for a slice; whether the work is done, for better or worse.

    Raises:
        RuntimeError: it is not, and the deadline has passed.
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
