"""The object that torch's C++ finds when it looks for the backend of a group of this package.

A group of torch's own has a backend for each kind of device: the `c10d::*` operators hand their work to it,
and hooks, the flight recorder and the health check ask it what it can do. A group of this package runs its
collectives itself, so its backend hands every call back to the group.

Before torch 2.14 no class in Python can be a backend, and torch needs none for such a group.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from torchft_like.process_group.collectives import BY_NAME


def attach_backend(group: Any) -> None:
    """Give the group one backend for all of its devices; a second call changes nothing."""
    if not _is_open_to_python() or group._backend_for_torch is not None:
        return
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._backend_for_torch = backend = GroupBackend(group)
    for device in group._device_types:
        group._register_backend(device, kind, backend)
    group._set_default_backend(kind)


class GroupBackend(Backend):
    """A backend that runs collectives by calling the group to which it belongs.

    The group keeps the backend alive, not the other way round.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(0, 1)  # C++ asks the group for both
        self._find = weakref.ref(group)

    @property
    def group(self) -> Any:
        """The group to which this backend belongs.

        Raises:
            ReferenceError: the group was deleted.
        """
        if (group := self._find()) is None:
            raise ReferenceError("the process group of this backend is gone")
        return group

    @property
    def options(self) -> Any:
        """The group's settings."""
        return self.group.options

    def rank(self) -> int:
        """Return the caller's rank among the present members."""
        return self.group.rank()  # type: ignore[no-any-return]

    def size(self) -> int:
        """Return the number of the present members."""
        return self.group.size()  # type: ignore[no-any-return]

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the group's name in messages and registrations."""
        return self.group.getBackendName()  # type: ignore[no-any-return]

    def allreduce_sparse(self, *args: Any) -> Any:
        """Run an allreduce: the group looks at the tensors' layout itself."""
        return self.group.allreduce(*args)

    def start_coalescing(self) -> None:
        """Begin a batch: the operations that the calling thread begins until `end_coalescing` are one."""
        self.group._start_coalescing(self.group._device_types[0])

    def end_coalescing(self) -> Any:
        """Return the operations since `start_coalescing`, as one work."""
        return self.group._end_coalescing(self.group._device_types[0])


def _forward(name: str) -> Callable[..., Any]:
    def method(self: GroupBackend, *args: Any) -> Any:
        return getattr(self.group, name)(*args)

    method.__name__ = name
    method.__doc__ = f"The group's `{name}`."
    return method


# C++ looks for methods on the class, under these names.
for _name in (*BY_NAME, "abort", "shutdown", "set_timeout", "_get_sequence_number_for_group"):
    setattr(GroupBackend, _name, _forward(_name))


@functools.cache
def _is_open_to_python() -> bool:
    try:
        Backend(0, 1)
    except TypeError:
        return False
    return True
