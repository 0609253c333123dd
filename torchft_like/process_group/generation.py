"""What runs one configuration of a reconfigurable group, from the start of `configure` to the last socket.

Each configuration of a group has a generation, which is made, used, ended and cleaned up on its own, so an
abort, an error or a late callback of one cannot reach another.

The backend is made on a thread of its own: neither an abort nor Ctrl-C ever waits for C++. A generation that
is aborted while it is being made is left to that thread, which closes the backend that it gets. This module
knows nothing of any particular backend.

Gloo fails the operations that are registered with a broken connection. If an operation's own write finds the
connection broken, the connection is closed before the operation is registered: it is never told, and its
thread waits until the operation's timeout. This happens to half of the replicas that are stopped inside a
collective and continued later. So no thread waits for the backend alone. After an abort, once the backend is
*still* (no connection is left and none of its threads has run for a moment), nothing can finish or touch a
tensor any more, and the operations that are left are given up with the abort's error. The backend's thread
ends later, at its timeout, without effect.

INVARIANT: an operation is given up only while its backend cannot touch the operation's tensors;
otherwise a gradient of the next step could be overwritten by one of the last. Threads of other groups,
which cannot be told from the backend's, may be busy for ever: ten seconds without a connection are enough.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from torch._C._distributed_c10d import Work
from torch.futures import Future

from lighthouse.forks import Turn, keep_for_ever, left_to_parent
from torchft_like.devices import after
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    PeerLostError,
    ProcessGroupAbortedError,
    ProcessGroupNotConfiguredError,
    is_lack_of_memory,
    is_refusal,
    is_timeout,
)
from torchft_like.futures import complete, empty_future, fail, without_frames
from torchft_like.process_group.collectives import POINT_TO_POINT, Collective, tensors_of
from torchft_like.process_group.configuration import AbortSignal, Configuration
from torchft_like.process_group.store import AbortableStore, GroupMembers
from torchft_like.process_group.work import (
    FOREVER,
    Explain,
    ExplainedOperation,
    FollowingOperation,
    Operation,
    wait_until,
)
from torchft_like.runtime.background import run_in_background
from torchft_like.runtime.spin_wait import AdaptiveSpin

# Seconds after its own limits at which a `configure` is given up.
CONFIGURE_GRACE_S = 5.0
EXPLAIN_S = 3.0  # of it, for `out_of_reach` where some do not answer, and are not too many
SLICE_S = 0.1
SLICE = timedelta(seconds=SLICE_S)
LOOK_PAUSE_S = 0.02
LOOKS_S_MAX = 10.0
ISSUED_MIN = 128
LARGE_BYTES = 1024 * 1024  # of a message

_logger = logging.getLogger(__name__)


class Operations:
    """The operations of one generation of a group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: set[Future[Any]] = set()
        self._issued: list[weakref.ref[GroupOperation]] = []
        self._issued_max = ISSUED_MIN
        self.given_up: Exception | None = None  # the error of the operations that were given up
        self._spin = AdaptiveSpin()  # waiting threads share it: a lost update does no harm

    def begin(self, explain: Explain) -> GroupOperation:
        """Make an operation for a call that the backend is about to get; its holder may wait for it."""
        operation = GroupOperation()
        operation.operations, operation.explain = self, explain
        if len(self._issued) >= self._issued_max:
            self._forget_those_done()  # before the new one is added: without a work it would pass for done
        self._issued.append(weakref.ref(operation))  # no lock: append is atomic
        return operation

    def message(self, work: Work, explain: Explain, *, has_thread: bool) -> MessageOperation:
        """Make the operation of a send or a receive that the backend has begun."""
        operation = MessageOperation()
        operation.operations, operation.explain, operation.inner = self, explain, work
        if has_thread:
            operation.has_thread = True
            self._issued.append(weakref.ref(operation))
        return operation

    def follow(self, work: Work, explain: Explain = lambda _: None) -> Future[Any]:
        """Return a future that completes as the work's does, or when the operation is given up.

        A stream that waits for it waits for the tensors, too, as after `work.wait`. The thread that completes
        the operation passes an error to `explain`, and the future gets the error that this returns.
        """
        own = empty_future()
        with self._lock:
            self._futures.add(own)
            error = self.given_up
        work.get_future().add_done_callback(lambda done: self._complete(own, work, done, explain))
        if error is not None and self._take(own):
            fail(own, error)
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
                if self.given_up is not None:
                    raise self.given_up
            return work.wait()
        finally:
            del work  # an error that the caller keeps would keep this frame, and the connections open

    def give_up(
        self,
        is_still: Callable[[], bool],
        error: Exception,
        seconds_max: float | None = None,
        *,
        in_any_case: bool = True,
    ) -> bool:
        """Wait, after the connections were broken, until no operation is awaited any more, or give up the
        rest once that is safe.

        This blocks for a moment. If the backend does not come to rest it blocks for `seconds_max`
        (`LOOKS_S_MAX` by default), gives the rest up only `in_any_case`, and returns False.
        """
        deadline = time.monotonic() + (LOOKS_S_MAX if seconds_max is None else seconds_max)
        is_safe = False
        while not is_safe and time.monotonic() < deadline:
            with self._lock:
                is_awaited = bool(self._futures) or any(map(_is_open, list(self._issued)))
            is_safe = not is_awaited or is_still()
            if not is_safe:
                time.sleep(LOOK_PAUSE_S)
        if not (is_safe or in_any_case):
            return False
        with self._lock:
            self.given_up = error
            futures, self._futures = self._futures, set()
        for future in futures:
            fail(future, error)
        return is_safe

    def _forget_those_done(self) -> None:
        with self._lock:
            issued = len(self._issued)
            # Entries that were added since are kept.
            self._issued[:issued] = filter(_is_open, self._issued[:issued])
            self._issued_max = max(ISSUED_MIN, 2 * len(self._issued))

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
            fail(own, explain(error) or error)
        else:
            with after([work], value):
                own.set_result(done.wait())  # the tensors may have been completed on another stream


class GroupOperation(FollowingOperation):
    """An operation of a generation's backend, whose errors are in the group's words.

    The waiting thread reports an error to the group, or the future does, if there is one.

    The operation is made before the backend is called, and gets the backend's work afterwards: Python that
    runs after the call competes with the backend's threads, and takes many times as long where cores are few.
    """

    operations: Operations
    explain: Explain
    _future: Future[Any] | None = None

    def wait_until(self, deadline: float) -> None:
        if deadline == FOREVER:
            try:
                if self.operations.wait_briefly(self.inner):
                    return
            except RuntimeError:
                pass  # it failed, or takes longer than a slice; most operations do neither
        self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        try:
            self._wait_for_backend(deadline)
        except RuntimeError as error:
            if self.is_completed():
                self.let_go(error)
            if (better := self.explain(error)) is not None:
                raise better from error
            raise

    def is_completed(self) -> bool:
        return self.inner.is_completed() or self.operations.given_up is not None

    def exception(self) -> Any:
        return self.inner.exception() if self.inner.is_completed() else self.operations.given_up

    def get_future(self) -> Future[Any]:
        if self._future is None:
            self._future = self.operations.follow(self.inner, self.explain)
        return self._future

    def _wait_for_backend(self, deadline: float) -> None:
        self.operations.wait(self.inner, deadline)


class MessageOperation(GroupOperation):
    """A send or a receive. Its wait is a single one, without slices.

    Gloo forgets a message that is on its way when the connection ends, as in an abort or by a death, and
    notices no end of a connection in a receive from any rank: that wait lasts until its timeout. So a receive
    from any rank, and one for a large message, which may be on its way for long, has a thread of its own, and
    is given up with the group's other operations. Other messages are not worth a thread.
    """

    has_thread = False
    _was_waited = False

    def wait_until(self, deadline: float) -> None:
        self._wait(deadline)

    def _wait_for_backend(self, deadline: float) -> None:
        if not self._was_waited:  # a second wait would be for another message
            if self.has_thread:
                self._wait_in_thread(deadline)
            else:
                wait_until(self.inner, deadline)
            self._was_waited = True

    def _wait_in_thread(self, deadline: float) -> None:
        ended = concurrent.futures.Future[bool]()
        # It is not `in_background`: the end of the process would wait for it, too, and in vain.
        about = ended, partial(wait_until, self.inner, deadline)
        threading.Thread(target=complete, args=about, name="torchft-message", daemon=True).start()
        del about
        while not concurrent.futures.wait([ended], LOOK_PAUSE_S).done:
            if self.operations.given_up is not None:
                raise self.operations.given_up
        if (error := ended.exception()) is not None:
            raise error.with_traceback(None)


def _is_open(entry: weakref.ref[GroupOperation]) -> bool:
    """Return whether a caller holds the operation, and the backend is not done with it."""
    operation = entry()
    return operation is not None and not operation.inner.is_completed()


def _is_over(work: Work, deadline: float) -> bool:
    """Wait for a slice; return whether the work is over, with or without an error."""
    left_s = deadline - time.monotonic()
    try:
        return work.wait(timedelta(seconds=min(SLICE_S, max(left_s, 1e-3))))
    except RuntimeError:
        if not work.is_completed() and left_s <= SLICE_S:
            raise
        return work.is_completed()
    finally:
        del work


def _needs_thread(collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a message is one that `MessageOperation` waits for in a thread."""
    call = collective.bind(args, kwargs)
    tensors = tensors_of((call.outputs, call.inputs))
    is_large = any(tensor.device.type == "cpu" and tensor.nbytes >= LARGE_BYTES for tensor in tensors)
    return is_large or collective.name == "recv_anysource"


class Backend(Protocol):
    """The object on which a generation runs its collectives.

    Attributes:
        rest_s_max: how many seconds it may take to come to rest after an abort; None for the usual time.
    """

    rest_s_max: float | None = None

    @property
    def inner(self) -> object:
        """The group of the library that moves the bytes."""

    def methods(self) -> Mapping[str, Callable[..., Work | None]]:
        """Return the collectives that the backend has, by the names of their rows."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each later operation."""

    def break_off(self) -> None:
        """Break the connections to the peers, without blocking."""

    def is_still(self) -> bool:
        """Return whether nothing can touch a tensor any more after an abort, as far as two calls can tell."""

    def out_of_reach(self, store: AbortableStore | None = None) -> str:
        """Return who does not reach whom, "" if nothing is known of that; this may take seconds.

        Args:
            store: where the members have met, if all are about to give up: there they say what they know.
        """
        return ""

    def close(self) -> None:
        """Release everything; this may block for a moment."""


Create = Callable[[GroupMembers, AbortSignal], Backend]


@dataclass(eq=False)
class Generation:
    """The backend of one configuration. Any thread may call `end`; only the group calls the other methods."""

    members: GroupMembers
    configuration: Configuration = field(default_factory=Configuration)
    operations: Operations = field(default_factory=Operations)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # One thread waits for the backend's rest.
    _resting: threading.Lock = field(default_factory=threading.Lock)
    _settled: threading.Event = field(default_factory=threading.Event)
    _gone: threading.Event = field(default_factory=threading.Event)
    _backend: Backend | None = None
    _methods: Mapping[str, Callable[..., Work | None]] | None = None
    _failure: Exception | None = None
    # Waits for a moment, as an operation has failed, for a caller of `fail` that knows a better reason; it is
    # told whether a collective has timed out.
    ask_why: Callable[[bool], None] = lambda _: None

    def __post_init__(self) -> None:
        _living.add(self)

    def make(self, create: Create) -> None:
        """Make the backend; block until it is made, or until an abort.

        Raises:
            ProcessGroupAbortedError: the group was aborted during the wait.
            ProcessGroupError: the backend could not be made; the cause says why.
        """
        if self.configuration.reason is None:
            run_in_background(_THREAD_NAME, self._make, create)
        else:
            self._gone.set()
        try:
            self._settled.wait()
        except BaseException:
            self.end("the thread that configured the group was interrupted")
            raise
        if (error := self.error()) is not None:
            # The caller's frames hold the generation before, and so the error of each since a usable one.
            raise without_frames(error)

    def run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        """Start one collective; the error says why the generation is over, or that it never began."""
        if (methods := self._methods) is None:
            raise self._unusable()
        if (name := collective.name) not in methods:
            raise NotImplementedError(f"the backend has no {name}")
        operation = self.operations.begin(self.explain)  # made first, for the reason given at GroupOperation
        try:
            # No variable holds the bound method: an error that the caller keeps must not keep the backend.
            work = methods[name](*args, **kwargs)
        except (RuntimeError, MemoryError) as error:
            if self.configuration.reason is not None:
                raise self._aborted() from error
            self.not_begun(error)
            raise
        if work is None:
            return None
        # The first question is the usual case: the metaclass of torch's classes makes `isinstance` slow.
        if (type(work) is not Work and isinstance(work, ExplainedOperation)) or name in POINT_TO_POINT:
            return self.take(collective, work, args, kwargs)
        operation.inner = work
        return operation

    def take(
        self, collective: Collective, work: Work, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Operation:
        """Return an operation for the backend's work; the arguments tell large messages from small ones."""
        is_message = collective.name in POINT_TO_POINT
        explain = partial(self.explain, is_message=True) if is_message else self.explain
        if isinstance(work, ExplainedOperation):
            work.explain = explain
            return work
        if is_message:
            return self.operations.message(work, explain, has_thread=_needs_thread(collective, args, kwargs))
        operation = self.operations.begin(self.explain)
        operation.inner = work
        return operation

    def explain(self, error: Exception, *, is_message: bool = False) -> Exception | None:
        """Return the error that the caller of a failed operation gets instead of `error`; None to keep it.

        After one failure the backend is of no use, and a peer may wait for data that will never come: the
        connections are broken, so that the peer fails, too. An operation that was refused has not reached the
        backend. Where another rank meant something else by an operation that is under way, that is the error.
        Where it is known which rank has not come to a collective that has timed out, the error names it.
        """
        if self.configuration.reason is not None:
            return self._aborted()
        if is_refusal(error):
            return None
        own = type(error)(*error.args)  # a copy, because the frames of the original would keep the backend
        if self._failure is None:
            self.ask_why(is_timeout(error) and not is_message)
            own = self._with_culprits(own)
        self.fail(own)
        found = self._failure
        if isinstance(found, CollectiveMismatchError) or (
            isinstance(found, CollectiveTimeoutError | PeerLostError) and own.args == error.args
        ):
            return type(found)(*found.args)
        return None if own.args == error.args else own

    def _with_culprits(self, error: Exception) -> Exception:
        """Return the error of an operation whose time is up, with what the backend finds out about links."""
        backend = self._backend
        if backend is None or type(error) is not RuntimeError or not is_timeout(error):
            return error
        who = backend.out_of_reach()
        return type(error)(f"{error}; {who}") if who else error

    def not_begun(self, error: Exception) -> None:
        """Make the backend unusable if a call did not begin for want of memory.

        The peers may have begun it, and would meet this rank's next call in it. What is wrong with a call's
        arguments is mostly wrong on all ranks, and the group goes on.
        """
        if is_lack_of_memory(error):
            self.fail(type(error)(*error.args))  # a copy, as in `explain`

    def fail(self, error: Exception) -> None:
        """Make the backend unusable; the first error counts.

        Gloo may forget an operation when its connections break: that one ends once nothing moves any more.
        """
        with self._lock:
            is_first, self._failure = self._failure is None, self._failure or error
            backend = self._backend
            if backend is not None:
                backend.break_off()
        if is_first and backend is not None:
            run_in_background(_THREAD_NAME, self._rest, backend, type(error)(*error.args), in_any_case=False)

    def error(self) -> Exception | None:
        """Return the error that ended the generation; None while it is usable."""
        if self.configuration.reason is not None:
            return self._aborted()
        return self._failure

    def end(self, reason: str) -> None:
        """End the operations under way, refuse later ones, and clean up on another thread.

        Any thread may call this; it returns at once.
        """
        self.configuration.set(reason)
        with self._lock:
            backend, self._backend, self._methods = self._backend, None, None
        if backend is not None:
            run_in_background(_THREAD_NAME, self._dispose, backend)
        self._settled.set()

    def wait_gone(self, seconds: float) -> bool:
        """Wait until an ended generation has released everything; return whether it has."""
        return self._gone.wait(seconds)

    def target(self) -> object:
        """Return the object that runs the collectives; a ProcessGroupError says why there is none."""
        if (backend := self._backend) is None:
            raise self._unusable()
        return backend.inner

    def set_timeout(self, timeout: timedelta) -> None:
        if (backend := self._backend) is not None:
            backend.set_timeout(timeout)

    def __str__(self) -> str:
        error = self.error()
        state = "ready" if self._methods is not None else "being configured"
        return f"{self.members}, {state if error is None else error}"

    def _make(self, create: Create) -> None:
        try:
            backend = create(self.members, self.configuration)
        except BaseException as error:  # noqa: BLE001 - the error is raised where the group is configured
            failure = ProcessGroupNotConfiguredError(f"configuring {self.members} failed: {error}")
            failure.__cause__ = without_frames(error)  # they hold what the backend was being made of
            self._failure = failure
            self._gone.set()
        else:
            methods = backend.methods()
            with self._lock:
                if is_wanted := self.configuration.reason is None:
                    self._backend, self._methods = backend, methods
            if not is_wanted:
                self._dispose(backend)
        self._settled.set()

    def _dispose(self, backend: Backend) -> None:
        try:
            try:
                was_aborted = self.configuration.reason is not None
                if was_aborted and not self._rest(backend, self._aborted()):
                    _logger.warning("%s was aborted, and did not come to rest: %s", self.members, backend)
            finally:
                self.ask_why = lambda _: None  # the backend's
                backend.close()  # else the thread that drops the last reference would destroy the backend
        except Exception:
            _logger.exception("cleaning up after %s", self.members)
        finally:
            self._gone.set()

    def _rest(self, backend: Backend, error: Exception, in_any_case: bool = True) -> bool:
        with self._resting:
            return self.operations.give_up(
                backend.is_still, error, backend.rest_s_max, in_any_case=in_any_case
            )

    def _unusable(self) -> Exception:
        return self.error() or ProcessGroupNotConfiguredError(f"{self.members} is being configured")

    def _aborted(self) -> ProcessGroupAbortedError:
        return ProcessGroupAbortedError(f"{self.members} was aborted: {self.configuration.reason}")


# The destructors of backends, sockets included, would wait for the parent's threads.
_living: weakref.WeakSet[Generation] = left_to_parent(Turn.LOCKS, keep_for_ever)
_THREAD_NAME = "torchft-process-group"


@atexit.register
def _end_all() -> None:
    """End all generations at exit, and with them what other threads wait for; `background` waits for those.

    A backend's thread that drops a tensor in a finished interpreter ends the process with a crash.
    """
    for generation in list(_living):
        generation.end("the process is ending")
