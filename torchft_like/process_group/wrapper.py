"""Groups around other groups, and groups around a backend that every `configure` makes anew.

`ProcessGroupWrapper` hands every call to another group; classes that change one thing about a group derive
from it and define only that thing. `ReconfigurableProcessGroup` runs its collectives on the backend that its
last `configure` has made; a subclass defines how that is made.
"""

from __future__ import annotations

import functools
import threading
from abc import ABCMeta
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Self, TypeVar, Unpack

from torch._C._distributed_c10d import Store, Work

from torchft_like.errors import ProcessGroupNotConfiguredError
from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.checking import Check, check_wanted, checked
from torchft_like.process_group.collectives import Collective
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
        pg: the inner group.
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

    def configure(
        self,
        store_addr: str,
        rank: int,
        world_size: int,
        **about: Unpack[About],
    ) -> None:
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
