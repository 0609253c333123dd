"""A group coordinator whose epochs are the quorums of a Manager.

Who is a member, and when that changes, the Manager decides between two steps; a replica that dies is left
out of the next quorum. The coordinator follows: it asks for the quorum when it is called, and has the
members of that one. What it raises loses the step, as in `torchft_like.gang.managed`: also what it refuses,
for the other members have refused it, too. A wait whose time is up raises, and loses nothing.
"""

from __future__ import annotations

from typing import Protocol

import torch

from torchft_like.communicator.communicator import Communicator
from torchft_like.communicator.epoch import Epoch
from torchft_like.communicator.options import CoordinatorOptions
from torchft_like.errors import GroupCoordinatorError, StillUnderWayError
from torchft_like.group_coordinator.coordinator import Place
from torchft_like.group_coordinator.elastic.coordinator import EpochCoordinator
from torchft_like.process_group import ProcessGroup


class CoordinatorManager(Protocol):
    """What a coordinator needs of a Manager."""

    @property
    def process_group(self) -> ProcessGroup:
        """The group that the manager configures."""

    def wait_quorum(self) -> None:
        """Wait until the group is configured for the current step."""

    def replica_rank(self) -> int | None:
        """Return this replica group's rank among all members of the quorum."""

    def replica_world_size(self) -> int:
        """Return how many members the quorum has."""

    def errored(self) -> Exception | None:
        """Return why the current step is lost, if it is."""

    def report_error(self, e: Exception) -> None:
        """Report an error: the current step is lost."""


class ManagedCoordinator(EpochCoordinator):
    """The communication of a Manager's quorum: this rank of every replica group, healing ones included.

    It is usable from the first `start_quorum` on. After a GroupCoordinatorError go on to the next one: the
    same object then has its members. `epoch` counts the configurations of the Manager's group; rank and size
    are up to date after a call, or `refresh`.

    Args:
        manager: the Manager of this rank. `destroy` leaves it, and its group, alone.
        device: the device of the tensors; the manager's group takes it.
    """

    def __init__(
        self,
        manager: CoordinatorManager,
        *,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        options: CoordinatorOptions | None = None,
    ) -> None:
        self._manager = manager
        self.options = options or CoordinatorOptions()
        self._have_no_members(device, group_name)
        self._is_destroyed = False

    def refresh(self) -> int:
        """Have the members of the current quorum, and wait for it; gives the epoch.

        Raises:
            GroupCoordinatorError: there is no quorum, or the step is lost already.
        """
        self._current()
        return self.epoch

    def destroy(self) -> None:
        """End the present epoch; from now on there are no members."""
        self._is_destroyed = True
        self._end_present("the coordinator was destroyed")
        super().destroy()

    def _current(self) -> Communicator:
        if self._is_destroyed:
            raise GroupCoordinatorError(f"the coordinator {self.unique_name} was destroyed")
        try:
            self._manager.wait_quorum()
        except Exception as error:
            raise GroupCoordinatorError(f"{self.unique_name} has no quorum: {error}") from error
        if (lost := self._manager.errored()) is not None:
            raise GroupCoordinatorError(f"the step is lost already: {lost}") from lost
        group = self._manager.process_group
        if self._communicator is None or self.epoch != group.epoch:
            self._follow(group)
        if self._communicator is None:
            raise GroupCoordinatorError(f"{self.unique_name} has no members")
        return self._communicator

    def _follow(self, group: ProcessGroup) -> None:
        """Have the members that the group is configured for."""
        rank = self._manager.replica_rank()
        if rank is None:
            raise GroupCoordinatorError("the manager has no quorum yet: call start_quorum first")
        self._end_present(f"the quorum is another one since configuration {group.epoch}")
        everyone = list(range(self._manager.replica_world_size()))
        epoch = _ManagedEpoch(group, self._manager)
        self._begin_epoch(epoch, Place(self.unique_name, rank, everyone, self.device, group, group))


class _ManagedEpoch(Epoch):
    """One quorum. It is over when the group is configured anew, whether the coordinator has heard or not."""

    def __init__(self, group: ProcessGroup, manager: CoordinatorManager) -> None:
        super().__init__(group.epoch)
        self._configured = group.configuration
        self._group = group
        self._manager = manager

    def check(self, what: str) -> None:
        """Raise if the quorum is over; `what` is an object of its members."""
        self._look()
        super().check(what)

    def explained(self, what: str, error: BaseException) -> BaseException:
        """Return the error to raise for `what`; it loses the step of this quorum, not that of a later one."""
        if isinstance(error, StillUnderWayError) or not isinstance(error, Exception):  # it goes on
            return error
        self._look()
        if self.ended is not None:
            stale = self.stale(what)
            stale.__cause__ = error
            return stale
        self._manager.report_error(error)
        return error

    def _look(self) -> None:
        if self._group.configuration is not self._configured:
            self.end(f"the manager's group was configured anew, {self._group.epoch} times by now")
