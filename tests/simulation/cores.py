"""The cores under test, as the simulation makes them; a mutant is another set of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lighthouse.core.quorum import QuorumCore
from lighthouse.core.vacancies import Vacancies
from tests.simulation.fragments import Fragments
from torchft_like.core.conversation import Conversation
from torchft_like.core.replica_group import ReplicaGroup
from torchft_like.core.restarts import MeetingProtocol
from torchft_like.core.step import StepProtocol
from torchft_like.core.sync_schedule import SyncSchedule

if TYPE_CHECKING:
    from tests.simulation.world import Process, World


def heard(world: World, process: Process) -> float:
    """Return the seconds in which a process could hear others, as `lighthouse/starvation.py` does."""
    return world.heard(process)


class Cores(NamedTuple):
    """The class that plays each part, and how a process measures silence."""

    lighthouse: type[QuorumCore] = QuorumCore
    group: type[ReplicaGroup] = ReplicaGroup
    protocol: type[StepProtocol] = StepProtocol
    conversation: type[Conversation[Any]] = Conversation
    schedule: type[SyncSchedule] = SyncSchedule
    fragments: type[Fragments] = Fragments
    vacancies: type[Vacancies] = Vacancies
    meeting: type[MeetingProtocol] = MeetingProtocol
    heard: Callable[[World, Process], float] = heard
