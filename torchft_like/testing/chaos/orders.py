"""What a worker of a chaos run is told: one object on the engine's side and on the worker's.

A worker may be started before it is known which rank it will be: it loads torch and waits for one
line on its standard input, which is this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

NAMING = "r{index}"  # of the replica groups


@dataclass(frozen=True)
class Training:
    """How every rank of a job trains.

    Attributes:
        pause_s: work outside of the collectives in each step.
        state_kb: size of the state beside the model, so that a heal takes a while.
        timeout_s: of collectives and transfers; far above what a recovery takes, so that nothing
            recovers by it unseen.
        quorum_timeout_s: how long a replica waits for a quorum.
        checkpoint_every: steps between two checkpoints on disk.
        backend: "gloo", "baby-gloo", or "mixed" for baby-gloo in the last replica group only.
    """

    pause_s: float = 0.05
    state_kb: int = 1024
    timeout_s: float = 30.0
    quorum_timeout_s: float = 60.0
    checkpoint_every: int = 5
    backend: str = "gloo"


@dataclass(frozen=True)
class Order:
    """Who a worker is.

    Attributes:
        name: of the replica group.
        index: position of the group's bit in the ledger (see `invariants.Commit`).
        journal: path of the file for commits, checkpoints and faults.
        checkpoints: the folder for checkpoints on disk.
        triggers: the folder in which the engine asks for a fault inside of a worker.
        namespace: path of the network namespace to enter; empty for none.
        training: how to train.
        variables: of the environment.
    """

    name: str
    index: int
    journal: str
    checkpoints: str
    triggers: str
    namespace: str = ""
    training: Training = Training()
    variables: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """What `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "training": Training(**fields["training"])})
