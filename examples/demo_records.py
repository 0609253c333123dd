"""What the replicas wrote, read while the files grow: metrics of the script, events of its Manager.

Nothing here asks a replica anything: the demo knows what these files say and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchft_like.testing.journal import JournalReader

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Metric:
    """One step as the training script saw it; `time` is seconds since the Unix epoch."""

    time: float
    replica: int
    step: int
    loss: float
    participants: int
    participating: bool  # False where the replica healed in this step


@dataclass(frozen=True)
class Commit:
    """A step that a replica committed; `time` is seconds since the Unix epoch."""

    time: float
    step: int
    quorum_id: int


class ReplicaRecords:
    """Everything that one replica has written so far."""

    def __init__(self, events: Path, metrics: Path) -> None:
        self._event_lines = JournalReader(events)
        self._metric_lines = JournalReader(metrics)
        self.metrics: list[Metric] = []
        self.commits: list[Commit] = []
        self.healing = False  # the last quorum says that it fetches state, and it has not committed since

    def update(self) -> Sequence[Record]:
        """Read on, and return the new event records."""
        self.metrics += [Metric(**record) for record in self._metric_lines.new_records()]
        events = self._event_lines.new_records()
        for event in events:
            if event["kind"] == "quorum":
                self.healing = event["replica_id"] in event["healing"]
            elif event["kind"] == "commit" and event["committed"]:
                self.healing = False
                self.commits.append(Commit(event["time"], event["step"], event["quorum_id"]))
        return events

    @property
    def step(self) -> int:
        """Steps committed, as of its last progress; 0 before the first."""
        return self.metrics[-1].step if self.metrics else 0


def first_metric_of_each_step(metrics: Iterable[Metric]) -> list[Metric]:
    """Return one metric per committed step, by step; a step that was tried again counts once."""
    first: dict[int, Metric] = {}
    for metric in sorted(metrics, key=lambda metric: metric.time):
        if metric.participating:
            first.setdefault(metric.step, metric)
    return [first[step] for step in sorted(first)]


class Story:
    """Turns event records into lines for people, each fact once however many replicas report it.

    Quorums are numbered from 1: their real ids never repeat, not even over a restart of the
    lighthouse, and are too long to be read.
    """

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._quorums: dict[int, int] = {}
        self._members: frozenset[str] = frozenset()

    def tell(self, events: Iterable[Record]) -> list[tuple[float, str]]:
        """Return (time, line) of each event that is news, oldest first."""
        lines = []
        for event in sorted(events, key=lambda event: float(event["time"])):
            text = self._describe(event)
            if text is not None and text not in self._told:
                self._told.add(text)
                lines.append((float(event["time"]), text))
        return lines

    def _describe(self, event: Record) -> str | None:
        who = short_name(event["replica_id"])
        match event["kind"]:
            case "quorum":
                return self._describe_quorum(event)
            case "loss":
                quorum = self._quorums.get(event["quorum_id"], "?")
                return f"quorum {quorum} lost {short_name(event['member'])}: {event['reason']}"
            case "heal":
                size, source = event["bytes"] / 1e6, short_name(event["source"])
                return f"{who} healed from {source}: {size:.1f} MB in {event['seconds']:.2f} s"
            case "disconnected":
                return f"{who} lost the lighthouse: {event['reason']}"
        return None

    def _describe_quorum(self, event: Record) -> str | None:
        """Return a line about a quorum and the replicas that came and went, at the first report of it."""
        if event["quorum_id"] in self._quorums:
            return None
        number = self._quorums[event["quorum_id"]] = len(self._quorums) + 1
        before, self._members = self._members, frozenset(event["members"])
        changes = (
            [f"{name} joined" for name in _names(self._members - before) if before]
            + [f"{name} left" for name in _names(before - self._members)]
            + [f"{name} heals" for name in _names(event["healing"])]
        )
        line = f"quorum {number}: {', '.join(_names(self._members))}"
        return f"{line} ({'; '.join(changes)})" if changes else line


def short_name(replica_id: str) -> str:
    """Return a replica id without the part that is new in every incarnation."""
    return replica_id.partition(":")[0]


def _names(replica_ids: Iterable[str]) -> list[str]:
    return sorted(map(short_name, replica_ids))


def problems(results: Mapping[int, Record | None], steps: int) -> list[str]:
    """Return why the replicas do not hold the same trained state; empty if they do, bit for bit."""
    found = [f"replica {replica} printed no digest" for replica, result in results.items() if result is None]
    there = {replica: result for replica, result in results.items() if result is not None}
    ends = {replica: result["step"] for replica, result in there.items()}
    if len(set(ends.values())) > 1 or min(ends.values(), default=steps) < steps:
        found.append(f"the replicas ended at steps {ends}, not all at the same one from {steps} on")
    digests = {result["digest"] for result in there.values()}
    if len(digests) > 1:
        found.append(f"the replicas hold {len(digests)} different states")
    return found
