"""The observer's records, and what follows from them. Nothing here starts or reads a process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Record:
    """The state of one rank after one committed step.

    Attributes:
        time: seconds since the epoch.
        replica: the replica id, `name:uuid`; the uuid is new with every start.
        rank: within the replica group.
        digest: of the rank's parameters.
        before: of its parameters before the step.
    """

    time: float
    pid: int
    rank: int
    replica: str
    step: int
    digest: str
    before: str = ""

    @property
    def name(self) -> str:
        """The name of the replica group, whichever start of it this is."""
        return self.replica.rpartition(":")[0]


def names(records: Iterable[Record]) -> list[str]:
    """Return the names of the replica groups, sorted."""
    return sorted({record.name for record in records})


def incarnation(records: Iterable[Record], name: str) -> str | None:
    """Return the replica id under which a group wrote last; None if it has written nothing."""
    return max(((r.time, r.replica) for r in records if r.name == name), default=(0.0, None))[1]


def common_steps(records: Iterable[Record], replicas: Sequence[str], ranks: int) -> list[int]:
    """Return the steps, ascending, of which every rank of all these incarnations has a record."""
    seen: defaultdict[int, set[tuple[str, int]]] = defaultdict(set)
    for record in records:
        seen[record.step].add((record.replica, record.rank))
    wanted = {(replica, rank) for replica in replicas for rank in range(ranks)}
    return sorted(step for step, members in seen.items() if wanted <= members)


def differences(records: Iterable[Record]) -> list[str]:
    """Return each step after which ranks of the same number, in different replica groups, differ.

    Several records of a rank in one step are of several optimizers: the last has seen all of them.
    """
    last: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
    for record in records:
        last[record.step, record.rank][record.replica] = record.digest
    return [
        f"rank {rank} after step {step}: {digests}"
        for (step, rank), digests in sorted(last.items())
        if len(set(digests.values())) > 1
    ]
