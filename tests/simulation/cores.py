"""The cores under test, as the simulation makes them. A mutant is another set of these."""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.quorum import QuorumCore
from torchft_like.manager.group import ReplicaGroup
from torchft_like.manager.step import StepProtocol


@dataclass(frozen=True)
class Cores:
    """Which class plays which part."""

    lighthouse: type[QuorumCore] = QuorumCore
    group: type[ReplicaGroup] = ReplicaGroup
    protocol: type[StepProtocol] = StepProtocol
