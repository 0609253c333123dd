"""The settings of a chaos run, and the order of a worker in it: the same on the engine's side and on the
worker's. This is pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from torchft_like.testing.invariants import Process

NAMING = "r{index}"  # the names of replica groups


@dataclass(frozen=True)
class Training:
    """The settings of the training, the same for every rank of a job.

    Attributes:
        pause_s: seconds of work outside of the collectives in each step.
        timeout_s: the limit of collectives and transfers; far above the time of a recovery, so that no
          recovery depends on it unseen.
        quorum_timeout_s: how long a replica waits for a quorum.
        width: the width of the model; a trainer of a wider one is foreign to the job.
        algorithm: "ddp", or "diloco": a step is then a sync, and the pause is that of an inner step.
        restarts: whether ranks train again in their processes when another one has died, beside a spare.
      backend: "gloo", "baby-gloo", or "mixed" for baby-gloo in the last replica group only.
    """

    pause_s: float = 0.05
    timeout_s: float = 30.0
    quorum_timeout_s: float = 60.0
    width: int = 16
    algorithm: str = "ddp"
    backend: str = "gloo"
    restarts: bool = False

    @property
    def is_local(self) -> bool:
        """Whether replica groups train by themselves between two syncs."""
        return self.algorithm == "diloco"


@dataclass(frozen=True)
class Order:
    """The order of one worker: its replica group and its files.

    Attributes:
        name: the name of the replica group; for a spare, which learns the index, with `{index}` in it.
        index: the position of the group's bit in the ledger of `invariants.Commit`.
        checkpoints: the folder for checkpoints on disk.
        triggers: the folder in which the engine asks for a fault inside of a worker.
    """

    name: str
    index: int
    checkpoints: str
    triggers: str
    training: Training = Training()

    def at(self, index: int) -> Order:
        """Return the order of a worker of the replica group with this index."""
        return replace(self, name=with_index(self.name, index), index=index)

    def to_json(self) -> str:
        """Encode the order as one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Order:
        """Decode what `to_json` has encoded."""
        fields = json.loads(text)
        return cls(**{**fields, "training": Training(**fields["training"])})


@dataclass(frozen=True)
class JobSettings:
    """The settings of a job.

    Attributes:
        replicas: the number of replica groups.
        ranks: the ranks of each replica group.
        spares: how many processes wait for the place of a rank that has died; its group goes on then.
        training: the settings of the built-in worker.
        cold: whether each worker is a new interpreter, which takes seconds to load torch; else it is a fork
            of a process that has torch loaded.
        command: the user's own training command instead of the built-in worker; `{index}` in it stands for
            the index of the replica group.
        naming: how the replica groups are named, by the command, too; `{index}` stands for the index.
        min_replicas: the lighthouse's setting.
    """

    replicas: int = 4
    ranks: int = 1
    spares: int = 0
    training: Training = Training()
    cold: bool = False
    command: tuple[str, ...] = ()
    naming: str = NAMING
    min_replicas: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replica groups."""
        return tuple(with_index(self.naming, index) for index in range(self.replicas))

    def processes(self, without: Iterable[str] = ()) -> frozenset[Process]:
        """Return all ranks of all replica groups but some."""
        names = set(self.names) - set(without)
        return frozenset((name, rank) for name in names for rank in range(self.ranks))


def with_index(text: str, index: int) -> str:
    """Return the text with the index of a replica group in its place."""
    return text.replace("{index}", str(index))
