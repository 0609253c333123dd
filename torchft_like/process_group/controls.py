"""Methods by which torch asks a group, or sets something on it, besides collectives.

In torch a backend in C++ answers them, which a group that is configured anew does not have. In torch's base
class some of them do nothing, and some end the process.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import Backend, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d

from torchft_like.errors import NotSupportedError


class Controls:
    """The part of a process group that has to do with torch's settings."""

    @property
    def timeout(self) -> timedelta:
        """The limit of each operation and of `configure`."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
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


class GroupOptions(Backend.Options):
    """A group's settings, as they are now."""

    def __init__(self, group: Any) -> None:
        super().__init__(group.getBackendName(), group.timeout)
        self._group = group
        self.group_name = group._name or c10d.GroupName("")
        self.global_ranks_in_group = list(group._member_ranks())

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
    for name, take_over in _TAKEN_OVER.items():
        torchs = getattr(c10d, name, None)
        is_newer = name == "_set_pg_timeout" and hasattr(c10d, "set_timeout")
        if torchs is None or is_newer or torchs.__module__ == __name__:
            continue
        ours = take_over(torchs)
        for module in (c10d, dist):
            if hasattr(module, name):
                setattr(module, name, ours)


def _take_barrier(torchs: Callable[..., None]) -> Callable[..., None]:
    def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        if (own := _own(group)) is None:
            torchs(group, timeout, wait_all_ranks)
        else:
            own.monitored_barrier(own.timeout if timeout is None else timeout, wait_all_ranks)

    return monitored_barrier


def _take_timeout(torchs: Callable[..., None]) -> Callable[..., None]:
    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        if (own := _own(group)) is None:
            torchs(timeout, group)
        else:
            own.set_timeout(timeout)

    return _set_pg_timeout


_TAKEN_OVER = {"monitored_barrier": _take_barrier, "_set_pg_timeout": _take_timeout}


def _own(group: Any) -> Any:
    """Return the group, or the default one, if this package made it; else None."""
    target = c10d.GroupMember.WORLD if group is None else group
    return target if isinstance(target, Controls) else None


def is_nan_check_wanted() -> bool:
    """Return whether TORCH_DIST_NAN_CHECK asks to check inputs, as torch does from 2.14 on."""
    return os.environ.get("TORCH_DIST_NAN_CHECK", "0") == "1"
