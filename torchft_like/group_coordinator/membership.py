"""Who the members of a coordinator are, where its groups come from and when they are given back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch._C._distributed_c10d import Store

from torchft_like.errors import GroupCoordinatorError
from torchft_like.group_coordinator.barrier import Barriers
from torchft_like.group_coordinator.creation import (
    ANONYMOUS,
    Wish,
    destroy_group,
    make_groups,
    ranks_of,
    unique_name,
)
from torchft_like.group_coordinator.options import CoordinatorOptions
from torchft_like.group_coordinator.transport import Group, Transport
from torchft_like.message_queue import MessageQueue

_by_name: weakref.WeakValueDictionary[str, Members] = weakref.WeakValueDictionary()


def coordinator_named(unique_name: str) -> Any:
    """The coordinator of this process with that `unique_name`.

    Raises:
        GroupCoordinatorError: there is none, or it was given up.
    """
    if (found := _by_name.get(unique_name)) is None:
        raise GroupCoordinatorError(f"there is no coordinator named {unique_name!r} any more")
    return found


class Place(NamedTuple):
    """The caller among the members, and the groups that join them.

    Attributes:
        ranks: of the members in the whole job, in the order of their ranks in the group.
    """

    name: str
    rank_in_group: int
    ranks: list[int]
    device: torch.device
    cpu_group: Group
    device_group: Group | None


class Members:
    """See `GroupCoordinator`, which adds what the members do together.

    Attributes:
        group_name: as it was given; the same on all members.
        unique_name: of the coordinator in this process.
        ranks: of the members in the whole job, in the order of their ranks in the group.
        rank: the caller's in the whole job.
        rank_in_group: its place among `ranks`.
        world_size: how many members there are.
        local_rank: the number of its device on its host.
        device: where tensors that are received are put.
        cpu_group, device_group: the process groups; one and the same if the device is a CPU. None as
            the device group means that tensors go through memory of the CPU.
        mq_broadcaster: through which rank 0 broadcasts objects, if there is one.
        options: as they were given.
    """

    group_name: str
    unique_name: str
    ranks: list[int]
    rank: int
    rank_in_group: int
    world_size: int
    local_rank: int
    device: torch.device
    cpu_group: Group
    device_group: Group | None
    options: CoordinatorOptions

    mq_broadcaster: MessageQueue | None = None
    _queues: list[MessageQueue]
    _transport: Transport | None = None
    _barriers: Barriers | None = None
    _store: Store | None = None
    _owns_groups = False

    @classmethod
    def from_groups(
        cls,
        cpu_group: Group,
        device_group: Group | None = None,
        *,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        ranks: Sequence[int] | None = None,
        store: Store | None = None,
        options: CoordinatorOptions | None = None,
    ) -> Self:
        """A coordinator over process groups that exist: torch's own or any of ours, registered or not.

        They stay their owner's: `destroy` leaves them alone. Configured anew, they have other members, and
        the coordinator refuses to go on.

        Args:
            cpu_group: takes CPU tensors.
            device_group: takes tensors on `device`; the CPU group does, if that is a CPU.
            ranks: of the members in the whole job; where left out those that the group, or torch, knows, or
                else 0, 1, 2...
            store: that all members reach, for barriers to name who is missing; several coordinators in one
                store need names that differ. Groups of ours that were configured, and groups that torch
                made, bring one.

        Raises:
            ValueError: the groups do not fit each other, or `ranks`.
        """
        if device_group is not None and (cpu_group.rank(), cpu_group.size()) != (
            device_group.rank(),
            device_group.size(),
        ):
            raise ValueError(f"the caller's place differs in the two groups: {cpu_group} and {device_group}")
        known = ranks_of(cpu_group) if ranks is None else list(ranks)
        if len(known) != cpu_group.size():
            raise ValueError(f"{len(known)} ranks for a group of {cpu_group.size()}")
        made = cls.__new__(cls)
        made._store = store
        made.group_name = group_name or ANONYMOUS
        place = torch.device(device)
        made.local_rank = place.index or 0
        name = unique_name(made.group_name)
        made._adopt(Place(name, cpu_group.rank(), known, place, cpu_group, device_group), options)
        return made

    @property
    def first_rank(self) -> int:
        """The rank in the whole job of the first member."""
        return self._member(0)

    @property
    def last_rank(self) -> int:
        """The rank in the whole job of the last member."""
        return self._member(-1)

    @property
    def is_first_rank(self) -> bool:
        """Whether the caller is the first member."""
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        """Whether the caller is the last member."""
        return 0 <= self.rank_in_group == self.world_size - 1

    @property
    def next_rank(self) -> int:
        """The rank in the whole job of the member after the caller; of the first, after the last."""
        return self._member(self.rank_in_group + 1)

    @property
    def prev_rank(self) -> int:
        """The rank in the whole job of the member before the caller; of the last, before the first."""
        return self._member(self.rank_in_group - 1)

    def _member(self, place: int) -> int:
        """The rank in the whole job of the member at a place, counted round."""
        if not self.ranks:
            raise GroupCoordinatorError(f"{self!r} has no members now")
        return self.ranks[place % len(self.ranks)]

    def _keep(self, *queues: MessageQueue) -> None:
        """Those that the coordinator made end with it."""
        self._queues = [*(known for known in self._queues if not known.is_closed), *queues]

    def destroy(self) -> None:
        """Give back the groups and queues that the coordinator made. Once more does nothing."""
        transport, self._transport, self._barriers = self._transport, None, None
        with contextlib.ExitStack() as undo:  # the last first, and all of it, whatever interrupts a farewell
            if transport is not None and self._owns_groups:
                for group in {id(group): group for group in (self.cpu_group, self.device_group)}.values():
                    if group is not None:
                        undo.callback(destroy_group, group)
            for queue in self._queues:
                undo.callback(queue.shutdown)
        self._queues.clear()

    def _make(self, wish: Wish) -> None:
        """Have torch make the groups, together with all ranks of the default group."""
        made = make_groups(wish)
        self._owns_groups = True
        self.group_name = wish.group_name
        self.local_rank = wish.local_rank
        rank = made.cpu_group.rank()
        place = Place(made.name, rank, made.ranks, made.device, made.cpu_group, made.device_group)
        self._adopt(place, wish.options)

    def _adopt(self, place: Place, options: CoordinatorOptions | None) -> None:
        """From now on these are the members."""
        self.options = options or CoordinatorOptions()
        self.unique_name, self.rank_in_group, self.ranks, self.device, cpu_group, device_group = place
        self.cpu_group, self.device_group = cpu_group, device_group
        self._queues = []
        self.world_size, self.rank = len(self.ranks), self.ranks[self.rank_in_group]
        seat = self.rank_in_group, self.world_size
        self._transport = Transport(
            self.unique_name, seat, self.device, cpu_group, device_group, self.options
        )
        _by_name[self.unique_name] = self

    def _current(self) -> Transport:
        """What carries the next call.

        Raises:
            GroupCoordinatorError: the coordinator was destroyed.
        """
        if self._transport is None:
            raise GroupCoordinatorError(f"the coordinator {self.unique_name} was destroyed")
        return self._transport

    def _all_barriers(self) -> Barriers:
        transport = self._current()
        if self._barriers is None:
            self._barriers = Barriers(transport, self._store, self.group_name)
        return self._barriers

    def __repr__(self) -> str:
        state = "destroyed" if self._transport is None else f"on {self.device}"
        return (
            f"<{type(self).__name__} {self.unique_name}: rank {self.rank_in_group} of {self.ranks}, {state}>"
        )
