"""What torch asks of a group, or sets on it, besides collectives.

In torch a backend in C++ answers, which a group that is configured anew does not have. Left to torch's base
class, some of these do nothing, and some end the process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from torch._C._distributed_c10d import Backend, Store
from torch.distributed import distributed_c10d as c10d

from torchft_like.errors import NotSupportedError


class Controls:
    """The part of a process group that has to do with torch's settings."""

    @property
    def timeout(self) -> timedelta:
        """The limit of each operation and of `configure`."""
        raise NotImplementedError

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit of each operation, and of `configure`, from now on."""
        raise NotImplementedError

    @property
    def options(self) -> GroupOptions:
        """As of torch's backends: its name, its members, and its timeout, which can be set."""
        return GroupOptions(self)

    def get_group_store(self) -> Store:
        """A store that the present members share.

        Raises:
            NotSupportedError: this group has none.
        """
        return self._ask_inner("get_group_store")  # type: ignore[no-any-return]

    def _set_default_timeout(self, timeout: timedelta) -> None:
        """For torch before 2.14."""
        self.set_timeout(timeout)

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """For torch, which means the watchdog of its own NCCL; there is none here."""
        warnings.warn("an ephemeral timeout has no effect on this group; use set_timeout", stacklevel=2)

    def _get_sequence_number_for_group(self) -> int:
        """How many operations the backend has begun since `configure`."""
        return int(self._ask_inner("_get_sequence_number_for_group"))

    def _set_sequence_number_for_group(self) -> None:
        """They begin at 0."""
        self._ask_inner("_set_sequence_number_for_group")

    def create_device(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not with a group that makes a device of its own for each configuration."""
        raise NotSupportedError(
            "a device is made for each configuration, on the interface that leads to the store; name another "
            "one by the environment variable GLOO_SOCKET_IFNAME"
        )

    create_default_device = create_device

    def split_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not with members that change."""
        raise NotSupportedError(
            "a group whose members change is neither split nor merged: make another one with dist.new_group"
        )

    merge_remote_group = split_group

    def _register_on_completion_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Only torch's own NCCL has it."""
        raise NotSupportedError("only torch's own NCCL has completion hooks; use the futures of the works")

    _wait_for_pending_works = _register_on_completion_hook

    def _ask_inner(self, name: str) -> Any:
        """Call a method of whatever carries out the collectives now."""
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


def adopt_timeout_setter() -> None:
    """Have torch's `_set_pg_timeout` set that of our groups: before 2.14 it looks for torch's own classes."""
    torchs = c10d._set_pg_timeout
    if hasattr(c10d, "set_timeout") or getattr(torchs, "__module__", None) == __name__:
        return

    def _set_pg_timeout(timeout: timedelta, group: Any = None) -> None:
        target = c10d._get_default_group() if group is None else group
        if isinstance(target, Controls):
            target.set_timeout(timeout)
        else:
            torchs(timeout, target)

    c10d._set_pg_timeout = _set_pg_timeout
