"""The log of a run: all records of its processes, joined, and queries on them.

It is pure: a test may make a log by hand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torchft_like.testing.invariants import Commit, Heal, History, Process, Refusal, Sighting
from torchft_like.testing.journal import Record

# Records of several processes come in the order in which they are read: their times may differ by this much.
DISORDER_S = 2.0


@dataclass
class Log:
    """The log of a run.

    Attributes:
        commits: every committed step of every rank.
        events: event records of Managers and the lighthouse, without the committed votes.
        notes: the workers' other records (failed, checkpoint_failed, fault), and the ends of their processes
            (ended), each with its `replica`.
    """

    commits: list[Commit] = field(default_factory=list)
    events: list[Record] = field(default_factory=list)
    notes: list[Record] = field(default_factory=list)

    def history(self) -> History:
        """Return the history on which the invariants are checked."""
        heals = [
            Heal(e["time"], e["replica_id"], e["group_rank"]) for e in self.events if e["kind"] == "heal"
        ]
        seen, refused = tuple(sightings(self.events)), tuple(refusals(self.events))
        return History(tuple(self.commits), tuple(heals), seen, refused)

    def commits_between(self, since: float, until: float) -> Iterator[Commit]:
        """Yield the commits of this time, in any order."""
        start = bisect_left(self.commits, since - DISORDER_S, key=lambda commit: commit.time)
        for commit in self.commits[start:]:
            if commit.time > until + DISORDER_S:
                return
            if since < commit.time <= until:
                yield commit

    def events_between(self, since: float, until: float, *kinds: str) -> list[Record]:
        """Return the events of some kinds, oldest first."""
        return _between(self.events, since, until, kinds)

    def notes_between(self, since: float, until: float, *kinds: str) -> list[Record]:
        """Return the notes of some kinds, oldest first."""
        return _between(self.notes, since, until, kinds)

    def sort(self) -> None:
        """Sort all records by time, once the log is complete."""
        self.commits.sort(key=lambda commit: commit.time)
        self.events.sort(key=lambda record: float(record["time"]))
        self.notes.sort(key=lambda record: float(record["time"]))


def sightings(events: Iterable[Record]) -> Iterator[Sighting]:
    """Yield the quorums that processes were told of, in the order of the events."""
    for event in events:
        if event["kind"] == "quorum":
            members = frozenset(event["members"])
            yield Sighting(event["replica_id"], event["group_rank"], event["quorum_id"], members)


def refusals(events: Iterable[Record]) -> Iterator[Refusal]:
    """Yield the steps that ranks were told not to commit."""
    for event in events:
        if event["kind"] == "commit" and not event["committed"]:
            yield Refusal(event["replica_id"], event["group_rank"], event["quorum_id"], event["step"] + 1)


def commit_of(record: Record, members: frozenset[str] | None = None) -> Commit:
    """Make a commit of a `Witness`'s record; `members`, if given, replace the record's."""
    fields = {key: value for key, value in record.items() if key not in ("kind", "members")}
    return Commit(members=frozenset(record["members"]) if members is None else members, **fields)


def name_of(replica_id: str) -> str:
    """Return the replica group's name, without the part that is new with every start."""
    return replica_id.partition(":")[0]


def rank_of(commit: Commit) -> Process:
    """Return the rank, whichever start of it: the name of the replica group, and the group rank."""
    return name_of(commit.replica_id), commit.group_rank


def _between(records: list[Record], since: float, until: float, kinds: Iterable[str]) -> list[Record]:
    start = bisect_left(records, since - DISORDER_S, key=lambda record: float(record["time"]))
    found = [r for r in records[start:] if since < r["time"] <= until and r["kind"] in kinds]
    return sorted(found, key=lambda record: float(record["time"]))
