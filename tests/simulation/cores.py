"""The cores under test, as the simulation makes them; a mutant is another set of these."""

from __future__ import annotations

from typing import NamedTuple

from lighthouse.core.quorum import QuorumCore
from torchft_like.core.replica_group import ReplicaGroup
from torchft_like.core.step import StepProtocol


class Cores(NamedTuple):
    """The class that plays each part."""

    lighthouse: type[QuorumCore] = QuorumCore
    group: type[ReplicaGroup] = ReplicaGroup
    protocol: type[StepProtocol] = StepProtocol
