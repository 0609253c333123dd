"""A group for code that takes a plain process group: DDP, FSDP, a device mesh.

Its members are those of the Manager's current quorum, and errors go to the Manager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import AllreduceOptions

from torchft_like.errors import (
    CollectiveRefusedError,
    GroupLostError,
    ProcessGroupError,
    ProcessGroupNotConfiguredError,
    QuorumTimeoutError,
)
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.collectives import ALLREDUCE, BY_NAME, Call, Collective
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.swallowing import SwallowingGroup, skipped

T = TypeVar("T")
ALLREDUCE_COALESCED = BY_NAME["allreduce_coalesced"]


# The manager has no quorum, or lost its group. Only `should_commit` raises these.
UNAVAILABLE = (QuorumTimeoutError, GroupLostError)


class StepManager(Protocol):
    """The part of a Manager that everything over its process group needs."""

    @property
    def process_group(self) -> ProcessGroup:
        """The group that the manager configures."""

    def wait_quorum(self) -> None:
        """Wait until the group is configured for the current step."""

    def errored(self) -> Exception | None:
        """Return why the current step is lost, if it is."""

    def report_error(self, e: Exception) -> None:
        """Declare the current step lost."""


class QuorumManager(StepManager, Protocol):
    """The part of a Manager that the members of its quorum need."""

    def replica_rank(self) -> int | None:
        """Return this replica group's rank among all members of the quorum."""

    def replica_world_size(self) -> int:
        """Return how many members the quorum has."""


class GroupManager(StepManager, Protocol):
    """The part of a Manager that a managed group needs."""

    def group_allreduce(
        self, tensors: list[torch.Tensor], options: AllreduceOptions, *, collective: Collective
    ) -> Work:
        """Reduce in place over the participants, in one operation that never fails."""

    def num_participants(self) -> int:
        """Return how many replicas contribute to the current step."""

    def healing_ranks(self) -> Collection[int]:
        """Return the members, by their rank in the group, whose state is not the others' in this step."""

    def is_exchanging_state(self) -> bool:
        """Return whether the caller reads or loads its state, in which no other member takes part."""

    def participating_rank(self) -> int | None:
        """Return the caller's place among the participants; None while it does not contribute."""


class ManagedProcessGroup(SwallowingGroup):
    """A group whose collectives never fail and whose size is the number of participants.

    An allreduce is `manager.allreduce`, so averages count the participants and a replica that heals adds
    zero, or another value that changes no result. Every other collective goes to the manager's group; where
    some members of it do not participate, one that shares tensors out by rank cannot have a right result: it
    is skipped and the step is lost. Once the step is lost, collectives are skipped, as in an
    ErrorSwallowingProcessGroupWrapper.

    While the Manager reads the state for a peer, or loads a peer's, this replica is alone: a broadcast or a
    reduction, such as those of `set_state_dict` on a mesh with an elastic dimension, keeps the tensors as
    they are.

    If there is no quorum within `quorum_timeout`, or the replica group is lost, the step is lost, too,
    and `should_commit` raises that.

    Args:
        manager: the Manager of this rank.
        pg: the group that the manager configures; by default `manager.process_group`.
    """

    def __init__(self, manager: GroupManager, pg: ProcessGroup | None = None) -> None:
        super().__init__(pg=pg or manager.process_group)
        self._manager = manager

    supports_reconfigure = False
    counts_participants = True

    def configure(self, *args: Any, **about: Any) -> NoReturn:
        """Refuse: the Manager configures this group.

        Raises:
            ProcessGroupError: always.
        """
        raise ProcessGroupError("a managed process group is configured by its Manager")

    reconfigure = get_reconfigure_handle = configure

    def errored(self) -> Exception | None:
        return self._manager.errored()

    hidden_error = errored

    def size(self) -> int:
        """Return the number of participants in the current step.

        If there is no quorum, it is the number of all members of the last one. It is never 0, as DDP divides
        by it.
        """
        return self._ask(self._manager.num_participants, otherwise=lambda: max(len(self._member_ranks()), 1))

    def rank(self) -> int:
        """Return the place among the participants; among all members while the caller does not participate.

        It is 0 before the first quorum, because FSDP asks when it gets the group.
        """
        rank = self._ask(self._manager.participating_rank, otherwise=lambda: None)
        if rank is not None:
            return rank
        try:
            return int(self.parent.rank())
        except ProcessGroupNotConfiguredError:
            return 0

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if collective is ALLREDUCE or collective is ALLREDUCE_COALESCED:
            return self._allreduce(collective, args, kwargs)
        if self._manager.is_exchanging_state():
            if collective.everyone:
                raise CollectiveRefusedError(
                    f"{collective.name} needs other replicas, which do not read or load a state with this one"
                )
            return skipped(collective.bind(args, kwargs), self)
        if self._is_lost(collective, args, kwargs):
            return skipped(collective.bind(args, kwargs), self)
        return self._swallow(collective, args, kwargs)

    def _report_of(self, configuration: Configuration, error: Exception) -> None:
        if self.configuration is configuration:
            self._manager.report_error(error)

    def _allreduce(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Work | None:
        if len(args) == 2 and type(args[0]) is list and type(args[1]) is AllreduceOptions:
            tensors, options = args[0][:], args[1]  # the form in which DDP and torch.distributed call it
        else:
            tensors, options = collective.bind(args, kwargs).reduction()
        try:
            return self._manager.group_allreduce(tensors, options, collective=collective)
        except UNAVAILABLE as error:
            self._manager.report_error(error)
            return skipped(collective.bind(args, kwargs), self)

    def _is_lost(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether the step is lost, or is now, because this collective can have no right result."""
        self._ask(self._manager.wait_quorum, otherwise=lambda: None)
        if self._manager.errored() is None:
            if collective.everyone:
                self._check_everyone(collective)
            elif collective.name == "broadcast":
                self._check_root(collective.bind(args, kwargs))
        return self._manager.errored() is not None

    def _check_everyone(self, collective: Collective) -> None:
        members, participants = self.parent.size(), self._manager.num_participants()
        if members != participants:
            error = f"{collective.name} needs all {members} members of the group; {participants} participate"
            self._manager.report_error(ProcessGroupError(error))
        elif healing := self._manager.healing_ranks():  # in the first step all members are participants
            error = (
                f"{collective.name} needs the state of all members, and ranks {sorted(healing)} get theirs "
                "in this step: pass the Manager use_async_quorum=False, or init_sync=False"
            )
            self._manager.report_error(ProcessGroupError(error))

    def _check_root(self, call: Call) -> None:
        if (root := call.root) in self._manager.healing_ranks():
            error = f"rank {root} heals in this step: what it would broadcast is not yet the others' state"
            self._manager.report_error(ProcessGroupError(error))

    def _ask(self, question: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Return the manager's answer, or that of `otherwise` if the manager has no quorum."""
        try:
            return question()
        except UNAVAILABLE as error:
            self._manager.report_error(error)
            return otherwise()
