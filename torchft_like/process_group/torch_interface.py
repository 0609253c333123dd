"""What torch knows of a group: its name, its backend, and the ranks of its members in the whole job.

Functional collectives, device meshes and FSDP look a group up by name, and `dist.broadcast(src=3)`
means rank 3 of the job. torch keeps both in tables which it fills for the groups that it makes
(`init_process_group`, `new_group`); `register` fills them for any other, so that no function of
`torch.distributed` can tell the two apart.

A group of torch's own has a backend for each kind of device: the `c10d::*` operators hand their work to it,
and hooks, the flight recorder and the health check ask it what it can do. A group of this package runs its
collectives itself, so its backend hands every call back to the group. Before torch 2.14 no class in Python
can be a backend, and torch needs none for such a group.

INVARIANT: what the tables hold about the members is a view of the group, not a copy: they change
with every `configure`, and those of a managed group without a call to it.
"""

from __future__ import annotations

import functools
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn, Self, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Backend,
    ProcessGroupGloo,
    Store,
    _register_process_group,
    _unregister_process_group,
)
from torch.distributed import distributed_c10d as c10d

from lighthouse.forks import lock_of_each_process
from torchft_like.errors import NotSupportedError, ProcessGroupError
from torchft_like.process_group.collectives import BY_NAME
from torchft_like.process_group.uncompiled import uncompiled


class TorchInterface:
    """The part of a process group that torch asks, besides collectives: its name, its settings.

    torch's own groups keep both in backends in C++, which a group that is configured anew does not have. In
    torch's base class some of these methods do nothing, and some end the process.
    """

    _name: str | None = None
    _backend_for_torch: GroupBackend | None = None
    _description = "undefined"
    _was_registered_here = False
    _backend_name: str  # in messages and registrations
    _device_type = "cpu"  # of the tensors that the group moves

    def register(self, name: str) -> Self:
        """Make the group known to torch, as functional collectives and device meshes need it.

        torch keeps a registered group alive until `unregister` or `dist.destroy_process_group`.

        Args:
            name: a name that is unique among the groups of this process.

        Raises:
            ProcessGroupError: the group is registered already, or the name is taken.
        """
        full_name = f"{self.getBackendName()}:{name}"
        with _tables:
            if (known := c10d._world.pg_names.get(self)) is not None:  # type: ignore[call-overload]
                raise ProcessGroupError(f"the group is registered already, as {known!r}")
            if full_name in c10d._world.pg_names.values():
                raise ProcessGroupError(f"a group is registered already as {full_name!r}")
            world, tag, backend = c10d._world, f"ptd:{full_name}", self.getBackendName()
            group: Any = self
            kinds = [device.type for device in self._device_types]
            _register_process_group(full_name, group)  # type: ignore[arg-type] # a name is more than a string to the stub
            world.pg_names[group] = full_name  # type: ignore[assignment]
            world.pg_map[group] = _BackendAndStore(group, backend)  # type: ignore[assignment]
            world.pg_backend_config[group] = ",".join(f"{kind}:{backend}" for kind in kinds)
            world.pg_group_ranks[group] = _RanksOf(group)  # type: ignore[assignment]
            world.pg_to_tag[group] = tag
            world.tags_to_pg.setdefault(tag, []).append(group)
            self._set_group_name(full_name)
            self._was_registered_here = True
        return self

    def unregister(self) -> None:
        """Undo `register`. Nothing happens if the group is not registered, or torch has dropped it since.

        Operations under way go on. A group that torch made is given up with `dist.destroy_process_group`.
        """
        with _tables:
            if not self._was_registered_here:
                return
            self._was_registered_here = False
            name, self._name = self._name, None
            world, group = c10d._world, cast("Any", self)
            if world.pg_names.get(group) == name:
                tables: tuple[dict[Any, Any], ...] = (
                    world.pg_map,
                    world.pg_backend_config,
                    world.pg_group_ranks,
                )
                _unregister_process_group(world.pg_names.pop(group))
                for table in tables:
                    table.pop(group, None)
                world.tags_to_pg.pop(world.pg_to_tag.pop(group, ""), None)

    @property
    def group_name(self) -> str:
        """The name under which torch knows the group.

        Raises:
            ProcessGroupError: torch does not know the group.
        """
        if self._name is None:
            raise ProcessGroupError("the group has no name: call register(name) first")
        return self._name

    @property
    def group_desc(self) -> str:
        """The description that torch gave the group when it made it."""
        return self._description

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the group's name in messages and registrations."""
        return self._backend_name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(self._device_type)]

    def _set_group_name(self, name: str) -> None:
        """Set the name; torch calls this for a group that it made, before it looks for its backends."""
        self._name = name
        if not _is_open_to_python() or self._backend_for_torch is not None:
            return
        kind, group = dist.ProcessGroup.BackendType.CUSTOM, cast("Any", self)
        self._backend_for_torch = backend = GroupBackend(group)
        for device in self._device_types:
            group._register_backend(device, kind, backend)
        group._set_default_backend(kind)

    def _set_group_desc(self, description: str) -> None:
        """Set the description; torch calls this for a group that it made."""
        self._description = description

    @property
    def timeout(self) -> timedelta:
        """The limit of each operation and of `configure`."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the limit of each later operation, and of `configure`."""
        raise NotImplementedError

    @property
    def options(self) -> GroupOptions:
        """The settings in the form of torch's backends; the timeout can be set."""
        return GroupOptions(self)

    def get_group_store(self) -> Store:
        """Return a store that the present members share.

        Raises:
            NotSupportedError: this group has none.
        """
        return self._ask_inner("get_group_store")  # type: ignore[no-any-return]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """Set the timeout, under its name in torch before 2.14."""
        self.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Warn that this has no effect: it means the watchdog of torch's own NCCL."""
        warnings.warn("an ephemeral timeout has no effect on this group; use set_timeout", stacklevel=2)

    def _get_sequence_number_for_group(self) -> int:
        """Return how many operations the backend has begun since `configure`."""
        return int(self._ask_inner("_get_sequence_number_for_group"))

    def _set_sequence_number_for_group(self) -> None:
        """Do what torch's backends do under this name: let the sequence numbers begin at 0."""
        self._ask_inner("_set_sequence_number_for_group")

    # torch's own groups need these for their options. Here each configuration makes its device itself.

    create_device = staticmethod(ProcessGroupGloo.create_device)
    create_default_device = staticmethod(ProcessGroupGloo.create_default_device)

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the members of this group change."""
        raise NotSupportedError(
            "a group whose members change is neither split nor merged: make another one with dist.new_group"
        )

    merge_remote_group = split_group

    def _register_on_completion_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: only torch's own NCCL has these hooks."""
        raise NotSupportedError("only torch's own NCCL has completion hooks; use the futures of the works")

    _wait_for_pending_works = _register_on_completion_hook

    def _ask_inner(self, name: str) -> Any:
        """Call a method of the object that runs the collectives now."""
        method: Callable[[], Any] | None = getattr(getattr(self, "parent", None), name, None)
        if method is None:
            raise NotSupportedError(f"{type(self).__name__} has no {name}")
        return method()

    def _member_ranks(self) -> Sequence[int]:
        """Return the members' ranks in the job, in the order of their ranks here; none before `configure`."""
        raise NotImplementedError

    def _refresh_registration(self) -> None:
        """Replace, after `configure`, what torch recorded about the members of a group that it made."""
        ranks: dict[Any, Any] = c10d._world.pg_group_ranks
        filed: dict[Any, Any] = c10d._world.pg_map
        with _tables:
            if self in ranks and not isinstance(ranks[self], _RanksOf):
                ranks[self] = _RanksOf(self)
            if self in filed and not isinstance(filed[self], _BackendAndStore):
                filed[self] = _BackendAndStore(self, filed[self][0])

    # C++ callers use these names.

    def getGroupName(self) -> str:  # noqa: N802
        return self.group_name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self.group_desc

    setGroupName = _set_group_name  # noqa: N815
    setGroupDesc = _set_group_desc  # noqa: N815


_tables = lock_of_each_process(threading.RLock)  # torch has no lock around its tables


@uncompiled
class _RanksOf(Mapping[int, int]):
    """A view that maps ranks in the job to present ranks in the group."""

    def __init__(self, group: TorchInterface) -> None:
        self._group = group

    def __getitem__(self, rank: int) -> int:
        try:
            return self._group._member_ranks().index(rank)
        except ValueError:
            raise KeyError(rank) from None

    def __iter__(self) -> Iterator[int]:
        return iter(self._group._member_ranks())

    def __len__(self) -> int:
        return len(self._group._member_ranks())


@uncompiled
class _BackendAndStore(Sequence[Any]):
    """The pair of the backend's name and the store that the members share at the time of the call."""

    def __init__(self, group: Any, backend: str) -> None:
        self._group = group
        self._backend = backend

    def __getitem__(self, index: Any) -> Any:
        return self._group.get_group_store() if index in (1, -1) else (self._backend, None)[index]

    def __len__(self) -> int:
        return 2


class GroupBackend(Backend):
    """A backend that runs every call by calling the group to which it belongs.

    The group keeps the backend alive, not the other way round.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(0, 1)  # C++ asks the group for both
        self._find = weakref.ref(group)

    @property
    def group(self) -> Any:
        """The group to which this backend belongs; a ReferenceError once that was deleted."""
        if (group := self._find()) is None:
            raise ReferenceError("the process group of this backend is gone")
        return group

    @property
    def options(self) -> Any:
        return self.group.options

    def start_coalescing(self) -> None:
        """Begin a batch: the operations that the calling thread begins until `end_coalescing` are one."""
        self.group._start_coalescing(self.group._device_types[0])

    def end_coalescing(self) -> Any:
        """Return the operations since `start_coalescing`, as one work."""
        return self.group._end_coalescing(self.group._device_types[0])


def _forward(name: str, group_name: str) -> Callable[..., Any]:
    def method(self: GroupBackend, *args: Any) -> Any:
        return getattr(self.group, group_name)(*args)

    method.__name__ = name
    method.__doc__ = f"The group's `{group_name}`."
    return method


# C++ looks for methods on the class, under these names.
_ASKED = (
    "rank",
    "size",
    "getBackendName",
    "abort",
    "shutdown",
    "set_timeout",
    "_get_sequence_number_for_group",
)
for _name in (*BY_NAME, *_ASKED):
    setattr(GroupBackend, _name, _forward(_name, _name))
# A group looks at the tensors' layout itself.
GroupBackend.allreduce_sparse = _forward("allreduce_sparse", "allreduce")  # type: ignore[attr-defined]
uncompiled(GroupBackend)


@functools.cache
def _is_open_to_python() -> bool:
    try:
        Backend(0, 1)
    except TypeError:
        return False
    return True


class GroupOptions(Backend.Options):
    """A group's settings, as they are now."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.getBackendName(), group.timeout)
        self._group = group
        self.group_name: c10d.GroupName = group._name or c10d.GroupName("")
        self.global_ranks_in_group: list[int] = list(group._member_ranks())

    @property
    def _timeout(self) -> timedelta:
        timeout: timedelta = self._group.timeout
        return timeout

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        self._group.set_timeout(timeout)


def adopt_functions() -> None:
    """Make functions of torch that look for its own classes take this package's groups, too. May be repeated.

    `monitored_barrier` asks for the backend's name, and before torch 2.14 `_set_pg_timeout` for its class.
    """
    ours = [monitored_barrier] if hasattr(c10d, "set_timeout") else [monitored_barrier, _set_pg_timeout]
    for function in ours:
        for module in (c10d, dist):
            if hasattr(module, function.__name__):
                setattr(module, function.__name__, function)


_torchs_barrier = c10d.monitored_barrier
_torchs_set_timeout = getattr(c10d, "_set_pg_timeout", None)


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    if (own := _own(group)) is None:
        _torchs_barrier(group, timeout, wait_all_ranks)
    else:
        own.monitored_barrier(own.timeout if timeout is None else timeout, wait_all_ranks)


def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
    if (own := _own(group)) is None:
        _torchs_set_timeout(timeout, group)  # type: ignore[misc] # this is called where torch has it
    else:
        own.set_timeout(timeout)


def set_default_group_timeout(timeout: timedelta) -> None:
    """Set the timeout of the default group's operations, where its backend takes another one."""
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # which says that it takes none
        (getattr(c10d, "set_timeout", None) or c10d._set_pg_timeout)(timeout)


def abort_groups_of_torch(reason: str) -> None:
    """Abort the groups that torch knows and that are of this package; torch's own cannot be ended."""
    for group in list(c10d._world.pg_map):
        if (own := _own(group)) is not None:
            own.abort(reason)


def _own(group: Any) -> Any:
    """Return the group, or the default one, if this package made it; else None."""
    target = c10d.GroupMember.WORLD if group is None else group
    return target if isinstance(target, TorchInterface) else None
