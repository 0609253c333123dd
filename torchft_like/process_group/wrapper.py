"""Groups around other groups, around a backend that every `configure` makes anew, and around nothing.

`ProcessGroupWrapper` hands every call to another group; classes that change one thing about a group derive
from it and define only that thing. `ReconfigurableProcessGroup` runs its collectives on the backend that its
last `configure` has made; a subclass defines how that is made. `FaultInjectingProcessGroup` and
`ProcessGroupDummy` are for tests, and for code that has nothing to communicate.
"""

from __future__ import annotations

import functools
import threading
from abc import ABCMeta
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self, TypeVar, Unpack

from torch._C._distributed_c10d import Store, Work
from torch.futures import Future

from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupNotConfiguredError
from torchft_like.futures import fail
from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.checking import Check, check_wanted, checked
from torchft_like.process_group.collectives import BY_NAME, Collective, refuse_unfit
from torchft_like.process_group.configuration import ANEW, AbortSignal, Configuration
from torchft_like.process_group.generation import Backend, Generation
from torchft_like.process_group.handles import parse_handle
from torchft_like.process_group.store import (
    DEFAULT_TIMEOUT,
    GroupMembers,
    StoreAddress,
    create_store_client,
    parse_store_address,
)
from torchft_like.process_group.work import (
    NOTHING,
    DeferredOperation,
    FinishedOperation,
    FollowingOperation,
    Operation,
    wait_until,
)
from torchft_like.runtime import resources
from torchft_like.runtime.durations import as_timedelta

T = TypeVar("T")
SHUTDOWN_SECONDS = 10.0


class _OpenToOthers(type(ProcessGroup), ABCMeta):  # type: ignore[misc] # pybind11's class of classes
    """A metaclass that lets a class count as one that it does not derive from."""


_REQUIRED = object()


def _of_inner(name: str, otherwise: object = _REQUIRED) -> Any:
    """Return the property of a wrapper that has the inner group's value; `otherwise` before there is one."""

    def read(self: ProcessGroupWrapper) -> object:
        return otherwise if self._pg is None and otherwise is not _REQUIRED else getattr(self.parent, name)

    return property(read)


def _by_inner(name: str) -> Any:
    """Return the method of a wrapper that calls the inner group's."""

    @functools.wraps(getattr(ProcessGroup, name))
    def call(self: ProcessGroupWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.parent, name)(*args, **kwargs)

    return call


class ProcessGroupWrapper(ProcessGroup, metaclass=_OpenToOthers):
    """A group that hands every call to `parent`.

    Args:
        timeout: the limit for subclasses that make the inner group (seconds or timedelta); a given group
          keeps its own.
        pg: the inner group; None where a subclass makes it.
    """

    configuration = _of_inner("configuration")
    timeout = _of_inner("timeout")
    _device_types = _of_inner("_device_types")
    store_address = _of_inner("store_address", None)
    divides = _of_inner("divides", False)
    hides_errors = _of_inner("hides_errors", False)
    counts_participants = _of_inner("counts_participants", False)

    abort = _by_inner("abort")
    shutdown = _by_inner("shutdown")
    errored = _by_inner("errored")
    size = _by_inner("size")
    rank = _by_inner("rank")
    getBackendName = _by_inner("getBackendName")  # noqa: N815

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT, pg: ProcessGroup | None = None) -> None:
        super().__init__()
        self._timeout = as_timedelta(timeout)
        self._pg = pg

    @property
    def parent(self) -> Any:
        """The inner group.

        Raises:
            ProcessGroupNotConfiguredError: there is no inner group.
        """
        if self._pg is None:
            raise ProcessGroupNotConfiguredError(
                f"{type(self).__name__} has no inner group: pass it as pg=; no _create_pg is called here"
            )
        return self._pg

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Configure the inner group."""
        self.parent.configure(store_addr, rank, world_size, **about)
        self._refresh_registration()

    def prepare(self, timeout: timedelta) -> None:
        if self._pg is not None:
            self._pg.prepare(timeout)

    def hidden_error(self) -> Exception | None:
        return None if self._pg is None else self._pg.hidden_error()

    def innermost(self) -> ProcessGroup:
        return self if self._pg is None else self._pg.innermost()

    def make_alike(self) -> ProcessGroup | None:
        """Make another group like the inner one, without the wrapper."""
        return None if self._pg is None else self._pg.make_alike()

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._timeout = as_timedelta(timeout)
        self.parent.set_timeout(self._timeout)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pg!r})"

    def _member_ranks(self) -> Sequence[int]:
        return () if self._pg is None else self._pg._member_ranks()

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        return self.parent._run(collective, args, kwargs)  # type: ignore[no-any-return]


class ReconfigurableProcessGroup(ProcessGroup):
    """A group that makes its backend anew in every `configure`; a subclass defines `_create`.

    Args:
        timeout: the limit of each operation and of `configure`, seconds or timedelta.
        check_collectives: which of the ranks' calls to compare before any data moves, to refuse those that do
          not fit together (docs/checking-collectives.md): all (True), none (False), or those that are not as
          the calls before make all ranks predict ("new", the default); the same on every rank. The
          environment variable TORCHFT_CHECK_COLLECTIVES (1, 0 or new) overrides it.
    """

    def __init__(
        self, timeout: timedelta | float = DEFAULT_TIMEOUT, *, check_collectives: Check | None = None
    ) -> None:
        super().__init__()
        self._timeout = as_timedelta(timeout)
        self._check = check_wanted(check_collectives)
        self._replacing = threading.Lock()
        self._generation: Generation | None = None
        self._members: GroupMembers | None = None  # the members of the last generation that was made
        self._store: Store | None = None  # the store that those share, once a caller has asked for it
        self._set_up()
        resources.track(self)

    def _set_up(self) -> None:
        """Do what groups of a class need besides; runs at the end of the constructor."""

    def _create(self, members: GroupMembers, abort: AbortSignal) -> Backend:
        """Make the backend. This may block, and ends early when `abort` is set.

        It runs on a thread of its own. What it has made is closed before it raises an error.
        """
        raise NotImplementedError

    @property
    def parent(self) -> Any:
        """The object that runs the collectives now.

        Raises:
            ProcessGroupError: there is none: the group was aborted, never configured, or could not be.
        """
        return _known(self._generation).target()

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        store = parse_store_address(store_addr)
        limit = as_timedelta(about.get("timeout") or self._timeout)
        members = GroupMembers(store, rank, world_size, limit)
        global_ranks = about.get("global_ranks")
        if global_ranks is not None and len(global_ranks) != world_size:
            raise ValueError(f"{len(global_ranks)} global ranks for a world of {world_size}")
        with self._replacing:
            self._configuration = Configuration(self._configuration.number + 1)
            generation = Generation(members, self._configuration)
            previous, self._generation = self._generation, generation
        if previous is not None:
            previous.end(ANEW)
        if (signal := about.get("ends_with")) is not None:
            self._configuration.end_with(signal, generation.end)
        generation.make(checked(self._create, generation, self._check))
        if limit != self._timeout:
            generation.set_timeout(self._timeout)
        self._members = members
        self._store = None
        self._global_ranks = global_ranks
        self._refresh_registration()

    def abort(self, reason: str = "abort() was called", *, errored: bool = True) -> None:
        """End every operation, present and future; before the first `configure` there is nothing to end."""
        if (generation := self._generation) is not None:
            generation.end(reason)

    def shutdown(self) -> None:
        """Abort, and wait until the resources are released. The group can be configured again."""
        if (generation := self._generation) is not None:
            generation.end("the group was shut down")
            generation.wait_gone(SHUTDOWN_SECONDS)

    def errored(self) -> Exception | None:
        return self._generation.error() if self._generation is not None else None

    def set_timeout(self, timeout: timedelta | float) -> None:
        self._timeout = as_timedelta(timeout)
        if self._generation is not None:
            self._generation.set_timeout(self._timeout)

    def size(self) -> int:
        return _known(self._members).world_size

    def rank(self) -> int:
        return _known(self._members).rank

    def get_group_store(self) -> Store:
        """Return a part of the store in which the members met."""
        if self._store is None:
            store = str(_known(self._members).store.shared)
            self._store = create_store_client(store, self._timeout)
        return self._store

    def adopt_store(self, store: Store) -> None:
        """Share this store with the members until the next `configure`."""
        self._store = store

    def adopt_seat(self, rank: int, world_size: int) -> None:
        """Set the caller's rank, and the number of members, until the first `configure`."""
        own = parse_handle(self.get_reconfigure_handle()).store
        self._members = GroupMembers(parse_store_address(own), rank, world_size, self._timeout)

    @property
    def store_address(self) -> StoreAddress | None:
        return None if self._members is None else self._members.store

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def make_alike(self) -> Self:
        """Make another group of this class, with its timeout and options, that is not configured."""
        made = type(self)(self._timeout)
        made._check = self._check
        return made

    def __repr__(self) -> str:
        state = "not configured" if self._generation is None else str(self._generation)
        return f"<{type(self).__name__}: {state}>"

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        return (self._generation or _known(self._generation)).run(collective, args, kwargs)


def _known(part: T | None) -> T:
    """Return what the first `configure` of a group has made."""
    if part is None:
        raise ProcessGroupNotConfiguredError("the group was never configured: call configure() first")
    return part


# In torchft the class derives from it. (`register` here is ABCMeta's, not the method of a group.)
ABCMeta.register(ProcessGroupWrapper, ReconfigurableProcessGroup)


ANY = "any"


class FaultInjectingProcessGroup(ProcessGroupWrapper):
    """A wrapper that hands every call to `pg`, except those for which a fault was planted.

    A planted fault is felt wherever a real one would be: in `wait()`, in `get_future()`, or by the thread
    that calls. `injected` counts those that were felt, so that a test can prove that it tested something.

    Faults outlive `configure`. `call` counts the calls of the collective from the planting on,
    beginning with 1; the collective "any" counts all of them.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self.injected: int = 0

    def report_future_error(self, e: Exception) -> None:
        """Let the next collective run, and then fail with `e`, in `wait()` and in its future."""
        self.fail(ANY, e)

    def fail(self, collective: str, error: Exception, call: int = 1) -> None:
        """Let a call run, and then fail with `error`, in `wait()` and in its future."""

        def inject(run: Run) -> Work:
            return _FailedOperation(run() or NOTHING, error)

        self._plant(collective, call, inject)

    def refuse(self, collective: str, error: Exception, call: int = 1) -> None:
        """Let a call raise `error` without running."""

        def inject(run: Run) -> Work:
            raise error

        self._plant(collective, call, inject)

    def delay(self, collective: str, seconds: float, call: int = 1) -> None:
        """Block the caller of a call for `seconds`, or until an abort, before it begins."""

        def inject(run: Run) -> Work | None:
            over = threading.Event()
            self.configuration.add(over.set)
            over.wait(seconds)
            return run()

        self._plant(collective, call, inject)

    def hang(self, collective: str, call: int = 1) -> None:
        """Keep a call from running and from ending, until an abort fails it."""

        def inject(run: Run) -> Work:
            hung = DeferredOperation()
            error = ProcessGroupAbortedError("the group was aborted while a collective hung")
            self.configuration.add(lambda: hung.follow(FinishedOperation([], error)))
            return hung

        self._plant(collective, call, inject)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        def run() -> Work | None:
            return super(FaultInjectingProcessGroup, self)._run(collective, args, kwargs)

        fault = self._due(collective)
        return run() if fault is None else fault.inject(run)

    def _plant(self, collective: str, call: int, inject: Inject) -> None:
        if collective != ANY and collective not in BY_NAME:
            raise ValueError(f"{collective!r} is no collective; there are {', '.join(BY_NAME)} and any")
        if call < 1:
            raise ValueError(f"calls count from 1, not {call}")
        name = ANY if collective == ANY else BY_NAME[collective].name
        with self._lock:
            self._faults.append(_Fault(name, call, inject))

    def _due(self, collective: Collective) -> _Fault | None:
        with self._lock:
            concerned = [f for f in self._faults if f.collective in (ANY, collective.name)]
            for fault in concerned:
                fault.calls_left -= 1
            due = next((f for f in concerned if f.calls_left == 0), None)
            if due is not None:
                self.injected += 1
            self._faults = [f for f in self._faults if f.calls_left > 0]
            return due


FakeProcessGroupWrapper = FaultInjectingProcessGroup

Run = Callable[[], Work | None]
Inject = Callable[[Run], Work | None]


@dataclass
class _Fault:
    collective: str
    calls_left: int
    inject: Inject


class _FailedOperation(FollowingOperation):
    """An operation that runs to its end, and then fails."""

    def __init__(self, inner: Work, failure: Exception) -> None:
        super().__init__()
        self.inner = inner
        self._failure = failure

    is_success = Operation.is_success

    def wait_until(self, deadline: float) -> None:
        wait_until(self.inner, deadline)
        raise self._failure

    def synchronize(self) -> None:
        self.wait()

    def exception(self) -> Exception:
        return self._failure

    def result(self) -> list[Any]:
        return []

    def get_future(self) -> Future[Any]:
        failed: Future[Any] = Future()
        self.inner.get_future().add_done_callback(lambda _: fail(failed, self._failure))
        return failed


class ProcessGroupDummy(ProcessGroup):
    """A group whose collectives are over at once, with the result that a group of one has, and are counted.

    It is for code that needs a group where there is nothing to communicate, and for tests.

    Attributes:
        calls: how often each collective was called, by name.
        configure_count, wait_count, get_future_count: how often each of these was called.

    Raises:
        ValueError: the rank is not 0, or the world not 1.
    """

    _backend_name = "torchft-dummy"

    def __init__(self, rank: int, world: int) -> None:
        if (rank, world) != (0, 1):
            raise ValueError(f"a dummy group is rank 0 of a world of 1, not rank {rank} of {world}")
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._timeout = DEFAULT_TIMEOUT
        self.configure_count: int = 0
        self.wait_count = 0
        self.get_future_count = 0

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Count the call: this group always has one member."""
        self.configure_count += 1
        self._begin_configuration(about.get("ends_with"))

    def abort(self, reason: str = "abort() was called", *, errored: bool = True) -> None:
        """End what belongs to this configuration; no operation is ever under way."""
        self._configuration.set(reason)

    def shutdown(self) -> None:
        self._configuration.set("the group was shut down")

    def errored(self) -> Exception | None:
        return None

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the timeout, without effect: nothing takes time."""
        self._timeout = as_timedelta(timeout)

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0

    def make_alike(self) -> ProcessGroupDummy:
        return ProcessGroupDummy(0, 1)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        self.calls[collective.name] += 1
        call = collective.bind(args, kwargs)
        refuse_unfit(call)
        call.apply_locally(rank=0, world_size=1)
        return None if collective.blocking else _CountedOperation(self, call.result)


class _CountedOperation(FinishedOperation):
    def __init__(self, group: ProcessGroupDummy, result: list[Any]) -> None:
        super().__init__(result)
        self._group = group

    def wait_until(self, deadline: float) -> None:
        self._group.wait_count += 1

    def get_future(self) -> Future[Any]:
        self._group.get_future_count += 1
        return super().get_future()
