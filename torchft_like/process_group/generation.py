"""What runs one configuration of a reconfigurable group, from the start of `configure` to the last socket.

Each configuration of a group has a generation, which is made, used, ended and cleaned up on its own, so an
abort, an error or a late callback of one cannot reach another.

The backend is made on a thread of its own: neither an abort nor Ctrl-C ever waits for C++. A generation that
is aborted while it is being made is left to that thread, which closes the backend that it gets. This module
knows nothing of any particular backend.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Work

from lighthouse.forks import Turn, in_each_fork, keep_for_ever, lock_of_each_process
from torchft_like.errors import (
    CollectiveRefusedError,
    ProcessGroupAbortedError,
    ProcessGroupNotConfiguredError,
)
from torchft_like.process_group.collectives import POINT_TO_POINT, Collective
from torchft_like.process_group.configuration import AbortSignal, Configuration
from torchft_like.process_group.operations import Operations
from torchft_like.process_group.store import GroupMembers
from torchft_like.process_group.work import NOTHING, ExplainedOperation, Operation, OperationWork

CLEANUP_SECONDS_AT_EXIT = 2.0
# Seconds after its own limits at which a `configure` is given up.
CONFIGURE_GRACE_S = 5.0
_NO_NAMES: Mapping[str, Any] = {}

_logger = logging.getLogger(__name__)


class Backend(Protocol):
    """The object on which a generation runs its collectives."""

    @property
    def rest_s_max(self) -> float | None:
        """How many seconds it may take to come to rest after an abort; None for the usual time."""

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
    _settled: threading.Event = field(default_factory=threading.Event)
    _gone: threading.Event = field(default_factory=threading.Event)
    _backend: Backend | None = None
    _methods: Mapping[str, Callable[..., Work | None]] | None = None
    _failure: Exception | None = None

    def __post_init__(self) -> None:
        _living.add(self)

    def make(self, create: Create) -> None:
        """Make the backend; block until it is made, or until an abort.

        Raises:
            ProcessGroupAbortedError: the group was aborted during the wait.
            ProcessGroupError: the backend could not be made; the cause says why.
        """
        if self.configuration.reason is None:
            _run_aside(self._make, create)
        else:
            self._gone.set()
        try:
            self._settled.wait()
        except BaseException:
            self.end("the thread that configured the group was interrupted")
            raise
        if (error := self.error()) is not None:
            raise error

    def run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        """Start one collective.

        Raises:
            ProcessGroupAbortedError, ProcessGroupNotConfiguredError: the generation is over, or never began.
        """
        if collective.blocking or collective.name in POINT_TO_POINT:
            work = self._start(collective, args, kwargs)
            return None if work is None else OperationWork(self.take(collective, work))
        handle = OperationWork(NOTHING)  # made first, for the reason given at GroupOperation
        handle.operation = self.issue(collective, args, kwargs)
        return handle

    def issue(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NO_NAMES
    ) -> Operation:
        """Start a collective that does not block, for a caller that makes the work itself."""
        operation = self.operations.begin(self.explain)
        work = self._start(collective, args, kwargs)
        if type(work) is OperationWork and isinstance(work.operation, ExplainedOperation):
            work.operation.explain = self.explain
            return work.operation
        operation.work = work
        return operation

    def _start(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if (methods := self._methods) is None:
            raise self._unusable()
        if (name := collective.name) not in methods:
            raise NotImplementedError(f"the backend has no {name}")
        try:
            # No variable holds the bound method: an error that the caller keeps must not keep the backend.
            return methods[name](*args, **kwargs)
        except RuntimeError as error:
            if self.configuration.reason is not None:
                raise self._aborted() from error
            raise

    def take(self, collective: Collective, work: Work) -> Operation:
        """Return the operation behind a work of the backend, which raises errors in the group's words."""
        if type(work) is OperationWork and isinstance(work.operation, ExplainedOperation):
            work.operation.explain = self.explain
            return work.operation
        if collective.name in POINT_TO_POINT:
            return self.operations.message(work, self.explain)
        operation = self.operations.begin(self.explain)
        operation.work = work
        return operation

    def explain(self, error: Exception) -> Exception | None:
        """Return the error that the caller of a failed operation gets instead of `error`; None to keep it.

        After one failure the backend is of no use, and a peer may wait for data that will never come: the
        connections are broken, so that the peer fails, too. An operation that was refused has not reached the
        backend.
        """
        if self.configuration.reason is not None:
            return self._aborted()
        if isinstance(error, CollectiveRefusedError | NotImplementedError):
            return None
        if self._failure is None:
            # A copy, because the frames of the original would keep the backend.
            self._failure = type(error)(*error.args)
        with self._lock:
            if self._backend is not None:
                self._backend.break_off()
        return None

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
        if (backend := self._take_backend()) is not None:
            _run_aside(self._dispose, backend)
        self._settled.set()

    def wait_gone(self, seconds: float) -> bool:
        """Wait until an ended generation has released everything; return whether it has."""
        return self._gone.wait(seconds)

    def target(self) -> object:
        """Return the object that runs the collectives.

        Raises:
            ProcessGroupError: no object does now.
        """
        if (backend := self._backend) is None:
            raise self._unusable()
        return backend.inner

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each later operation."""
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
            self._failure = self._failed(error)
            self._gone.set()
        else:
            if not self._accept(backend):
                self._dispose(backend)
        self._settled.set()

    def _accept(self, backend: Backend) -> bool:
        methods = backend.methods()
        with self._lock:
            if self.configuration.reason is not None:
                return False
            self._backend, self._methods = backend, methods
            return True

    def _take_backend(self) -> Backend | None:
        with self._lock:
            backend, self._backend, self._methods = self._backend, None, None
            return backend

    def _dispose(self, backend: Backend) -> None:
        try:
            try:
                was_aborted = self.configuration.reason is not None
                if was_aborted and not self.operations.give_up(
                    backend.is_still, self._aborted(), backend.rest_s_max
                ):
                    _logger.warning("%s was aborted, and did not come to rest: %s", self.members, backend)
            finally:
                backend.close()  # else the thread that drops the last reference would destroy the backend
        except Exception:
            _logger.exception("cleaning up after %s", self.members)
        finally:
            self._gone.set()

    def _unusable(self) -> Exception:
        return self.error() or ProcessGroupNotConfiguredError(f"{self.members} is being configured")

    def _aborted(self) -> ProcessGroupAbortedError:
        return ProcessGroupAbortedError(f"{self.members} was aborted: {self.configuration.reason}")

    def _failed(self, error: BaseException) -> Exception:
        failure = ProcessGroupNotConfiguredError(f"configuring {self.members} failed: {error}")
        failure.__cause__ = error.with_traceback(None)
        return failure


_living: weakref.WeakSet[Generation] = weakref.WeakSet()
_aside: set[threading.Thread] = set()
_starting = lock_of_each_process(
    threading.RLock
)  # held while a thread is started, because only a thread that runs can be joined


def _run_aside(work: Callable[..., None], *args: Any) -> None:
    """Run `work` on a new thread, which ends with it and is joined, within limits, at exit."""

    def run() -> None:
        try:
            work(*args)
        finally:
            _aside.discard(threading.current_thread())

    thread = threading.Thread(target=run, name="torchft-process-group", daemon=True)
    with _starting:
        _aside.add(thread)
        thread.start()


def _leave_to_the_parent() -> None:
    """Leave the backends to the parent, sockets included; runs in a fork, such as a data-loader worker."""
    for generation in _living:
        keep_for_ever(generation)  # the destructors of backends would wait for their threads
    _living.clear()
    _aside.clear()


in_each_fork(Turn.LOCKS, _leave_to_the_parent)


@atexit.register
def _clean_up() -> None:
    """End all generations at exit.

    A backend's thread that drops a tensor in a finished interpreter ends the process with a crash.
    """
    for generation in list(_living):
        generation.end("the process is ending")
    deadline = time.monotonic() + CLEANUP_SECONDS_AT_EXIT
    while (thread := _any_aside()) is not None and (left_s := deadline - time.monotonic()) > 0:
        thread.join(left_s)


def _any_aside() -> threading.Thread | None:
    with _starting:
        return next((thread for thread in tuple(_aside) if thread.is_alive()), None)
