"""One life of a reconfigurable group, from the start of `configure` to the last socket.

Each configuration of a group has a generation: what carries it out. It is made, used, ended and cleaned
up on its own, so an abort, an error or a late callback of one cannot reach another.

The backend is made on a thread of its own: neither an abort nor Ctrl-C ever waits for C++. A
generation that is aborted while it is being made is left to that thread, which throws away what it
gets. It knows nothing of any particular backend.
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
from torchft_like.process_group.collectives import COLLECTIVES, POINT_TO_POINT, Collective
from torchft_like.process_group.configuration import AbortSignal, Configuration
from torchft_like.process_group.operations import Operations
from torchft_like.process_group.store import StoreAddress
from torchft_like.process_group.work import NOTHING, ExplainedOperation, Operation, OperationWork

CLEANUP_SECONDS_AT_EXIT = 2.0
# How much later than its own limits a `configure` is given up, whatever it does.
CONFIGURE_GRACE_S = 5.0
_NO_NAMES: Mapping[str, Any] = {}

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Membership:
    """What a generation is made for."""

    store: StoreAddress
    rank: int
    world_size: int
    timeout: timedelta

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not within a world of {self.world_size}")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} at {self.store}"


class Backend(Protocol):
    """What a generation runs its collectives on."""

    @property
    def rest_s_max(self) -> float | None:
        """After an abort: how long it may take to come to rest before it is given up; None is as most."""

    @property
    def inner(self) -> object:
        """The group of the library that moves the bytes."""

    def targets(self) -> tuple[object, ...]:
        """Objects that have torch's collectives as methods; the first that has one is asked."""

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit of each operation from now on."""

    def break_off(self) -> None:
        """Break the connections to the peers; must not block."""

    def is_still(self) -> bool:
        """After an abort: whether nothing can touch a tensor any more, as far as two calls can tell."""

    def close(self) -> None:
        """Give everything back; may block for a moment."""


Create = Callable[[Membership, AbortSignal], Backend]


@dataclass(eq=False)
class Generation:
    """See the module. `end` may be called from any thread, everything else by the group."""

    membership: Membership
    configuration: Configuration = field(default_factory=Configuration)
    operations: Operations = field(default_factory=Operations)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _settled: threading.Event = field(default_factory=threading.Event)
    _gone: threading.Event = field(default_factory=threading.Event)
    _backend: Backend | None = None
    _methods: Mapping[str, Callable[..., Work]] | None = None
    _failure: Exception | None = None

    def __post_init__(self) -> None:
        _living.add(self)

    def make(self, create: Create) -> None:
        """Have the backend made; blocks until it is, or until an abort.

        Raises:
            ProcessGroupAbortedError: aborted meanwhile.
            ProcessGroupError: it could not be made; the cause says why.
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
        handle = OperationWork(NOTHING)  # made before, see GroupOperation
        handle.operation = self.issue(collective, args, kwargs)
        return handle

    def issue(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NO_NAMES
    ) -> Operation:
        """As `run`, of a collective that does not block, for a caller who makes the handle."""
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
            # The bound method is in no variable: an error that somebody keeps must not keep the backend.
            return methods[name](*args, **kwargs)
        except RuntimeError as error:
            if self.configuration.reason is not None:
                raise self._aborted() from error
            raise

    def take(self, collective: Collective, work: Work) -> Operation:
        """The operation behind a handle of the backend, which gets the group's words for errors."""
        if type(work) is OperationWork and isinstance(work.operation, ExplainedOperation):
            work.operation.explain = self.explain
            return work.operation
        if collective.name in POINT_TO_POINT:
            return self.operations.message(work, self.explain)
        operation = self.operations.begin(self.explain)
        operation.work = work
        return operation

    def explain(self, error: Exception) -> Exception | None:
        """An operation failed: what the caller shall see instead of the error, if anything.

        After one failure the backend is of no use, and a peer may wait for what will never come:
        the connections are given up, so that it fails, too. An operation that was refused has not
        reached the backend.
        """
        if self.configuration.reason is not None:
            return self._aborted()
        if isinstance(error, CollectiveRefusedError | NotImplementedError):
            return None
        if self._failure is None:
            self._failure = type(error)(*error.args)  # a copy: frames would keep the backend
        with self._lock:
            if self._backend is not None:
                self._backend.break_off()
        return None

    def error(self) -> Exception | None:
        """What ended the generation, None while it is fine."""
        if self.configuration.reason is not None:
            return self._aborted()
        return self._failure

    def end(self, reason: str) -> None:
        """End what is under way, refuse what comes, clean up aside. From any thread; returns at once."""
        self.configuration.set(reason)
        if (backend := self._take_backend()) is not None:
            _run_aside(self._dispose, backend)
        self._settled.set()

    def end_with(self, signal: AbortSignal) -> None:
        """From now on it ends when `signal` is set, at once if it is; also if its user has dropped it."""
        self.configuration.end_with(signal, self.end)

    def wait_gone(self, seconds: float) -> bool:
        """Until an ended generation has given everything back; whether it has."""
        return self._gone.wait(seconds)

    def target(self) -> object:
        """What carries the collectives out.

        Raises:
            ProcessGroupError: nothing does now.
        """
        if (backend := self._backend) is None:
            raise self._unusable()
        return backend.inner

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit of each operation from now on."""
        if (backend := self._backend) is not None:
            backend.set_timeout(timeout)

    def __str__(self) -> str:
        error = self.error()
        state = "ready" if self._methods is not None else "being configured"
        return f"{self.membership}, {state if error is None else error}"

    def _make(self, create: Create) -> None:
        try:
            backend = create(self.membership, self.configuration)
        except BaseException as error:  # noqa: BLE001 - it is raised where the group is configured
            self._failure = self._failed(error)
            self._gone.set()
        else:
            if not self._accept(backend):
                self._dispose(backend)
        self._settled.set()

    def _accept(self, backend: Backend) -> bool:
        found = ((c.name, c.find_on(*backend.targets())) for c in COLLECTIVES)
        methods = {name: method for name, method in found if method is not None}
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
                    _logger.warning("%s was aborted, and did not come to rest: %s", self.membership, backend)
            finally:
                backend.close()  # or the backend would be destroyed by whoever drops the last reference to it
        except Exception:
            _logger.exception("cleaning up after %s", self.membership)
        finally:
            self._gone.set()

    def _unusable(self) -> Exception:
        return self.error() or ProcessGroupNotConfiguredError(f"{self.membership} is being configured")

    def _aborted(self) -> ProcessGroupAbortedError:
        return ProcessGroupAbortedError(f"{self.membership} was aborted: {self.configuration.reason}")

    def _failed(self, error: BaseException) -> Exception:
        failure = ProcessGroupNotConfiguredError(f"configuring {self.membership} failed: {error}")
        failure.__cause__ = error.with_traceback(None)
        return failure


_living: weakref.WeakSet[Generation] = weakref.WeakSet()
_aside: set[threading.Thread] = set()
_starting = lock_of_each_process(
    threading.RLock
)  # so that whoever finds a thread in `_aside` can wait for it


def _run_aside(work: Callable[..., None], *args: Any) -> None:
    """On a thread of its own, which ends with the work and is waited for a little at exit."""

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
    """In a fork, of a data loader for example: what was inherited is the parent's, sockets included."""
    for generation in _living:
        keep_for_ever(generation)  # as the destructors of backends wait for their threads
    _living.clear()
    _aside.clear()


in_each_fork(Turn.LOCKS, _leave_to_the_parent)


@atexit.register
def _clean_up() -> None:
    """A backend's thread that lets go of a tensor in a finished interpreter ends the process with a crash."""
    for generation in list(_living):
        generation.end("the process is ending")
    deadline = time.monotonic() + CLEANUP_SECONDS_AT_EXIT
    while (thread := _any_aside()) is not None and (left_s := deadline - time.monotonic()) > 0:
        thread.join(left_s)


def _any_aside() -> threading.Thread | None:
    with _starting:
        return next((thread for thread in tuple(_aside) if thread.is_alive()), None)
