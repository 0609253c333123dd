"""One process group, torch's own or one of this package, registered with torch or not, that moves bytes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch._C._distributed_c10d import Work

from torchft_like.errors import (
    FaultToleranceError,
    GroupCoordinatorError,
    ProcessGroupNotConfiguredError,
)
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.collectives import Collective
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.store import StoreAddress

# Any object that has torch's collectives as methods.
Group = Any


class Channel:
    """One process group, in its present configuration.

    Attributes:
        configuration: the present configuration, which is set when it is over; None for a group that has
          none.
        hides_errors: whether the group hides its errors from its works.
        issue: begins a collective, and returns an object with `wait`.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._own = group if isinstance(group, ProcessGroup) else None
        self.configuration = None if self._own is None else _configuration_of(self._own)
        self.hides_errors = self._own is not None and self._own.hides_errors
        # A caller that waits at once needs no Work; but only methods with one check for NaN
        # (TORCH_DIST_NAN_CHECK).
        is_plain = self._own is not None and not self._own._checks_nan
        self.issue: Callable[..., Any] = group.issue if is_plain else self._call

    @property
    def is_lasting(self) -> bool:
        """Whether the group still has the members that it had, and would report it if it had others."""
        return not self.hides_errors and self.configuration is not None and self.configuration.reason is None

    def check(self) -> None:
        """Raise an error if the group cannot be used, even if the group hides that."""
        if (error := self.hidden_error()) is not None:
            raise GroupCoordinatorError(f"its process group has failed: {error}") from error
        if self._own is not None and _configuration_of(self._own) is not self.configuration:
            raise GroupCoordinatorError("its process group was configured anew: make a new coordinator")

    def hidden_error(self) -> Exception | None:
        """Return the error that the group has hidden."""
        return None if self._own is None else self._own.hidden_error()

    def break_off(self, reason: str) -> None:
        """End the group, so that no peer waits for this rank; torch's own groups cannot be ended."""
        if self._own is not None and _configuration_of(self._own) is self.configuration:
            self._own.abort(reason)

    def store_address(self) -> StoreAddress | None:
        """Return the store in which the members met, if the group is of this package."""
        return None if self._own is None else self._own.store_address

    def _call(self, collective: Collective, *args: Any) -> Any:
        return getattr(self.group, collective.name)(*args)

    def start(self, method: str, *args: Any) -> Started:
        """Begin one collective."""
        return Started(getattr(self.group, method)(*args), self)


class Started(NamedTuple):
    """A collective that is under way."""

    work: Work
    channel: Channel

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for the end of the collective.

        Args:
            timeout: the limit of the wait; None takes that of the group.

        Raises:
            GroupCoordinatorError: the collective failed, and the group hid that.
            RuntimeError: the collective failed.
        """
        self.work.wait() if timeout is None else self.work.wait(timeout)
        self.channel.check()


def _configuration_of(group: ProcessGroup) -> Configuration | None:
    try:
        return group.configuration
    except ProcessGroupNotConfiguredError:  # a wrapper may have no group yet
        return None


def ranks_in_job(group: Group) -> list[int]:
    """Return the members' ranks in the whole job, if they are known, in the order of the group."""
    known: list[int] = []
    try:
        if isinstance(group, ProcessGroup):
            known = list(group._member_ranks())
        elif group in dist.distributed_c10d._world.pg_group_ranks:
            known = dist.get_process_group_ranks(group)
    except FaultToleranceError:
        known = []
    return known if len(known) == group.size() else list(range(group.size()))
