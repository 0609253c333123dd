"""The invariants of every run of a job, checked on its logs alone.

The history of a run consists of the processes' records: one `Commit` per committed step of every rank, one
`Refusal` per step that it was told not to commit, one `Heal` per state that it fetched, one `Sighting` per
quorum that a process was told of. Nothing here knows how quorums are formed, which transport moved the bytes
or which faults were injected; a checker that shares nothing with the code under test cannot share its
mistakes.

Each invariant is a function from a history to its violations, one sentence each, under the name that the
design gives it. `violations` applies all that need only the history; `progress` also needs the processes that
have to commit steps, and since when.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise
from operator import attrgetter
from types import MappingProxyType
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")
Process = tuple[str, int]  # replica id and group rank
Place = tuple[int, int, int]  # step, quorum id and group rank
QUORUMS_TOLD_APART = 1009  # a ledger is of float64, and holds the remainders of quorum ids


@dataclass(frozen=True, slots=True)
class Commit:
    """One committed step of one rank.

    `ledger` shows which replicas really took part: beside the gradients every replica adds `2**index` to a
    sum, `2**index * (step - 1)` to another, and to a third one the quorum's number, through the same
    collectives. The set bits name the contributors; the other sums show whether all of them were at the same
    step, in the same quorum. `average` is the average of `2**index`, computed as that of the gradients.
    """

    time: float  # seconds since the Unix epoch
    replica_id: str
    group_rank: int
    step: int  # the step number after the commit
    quorum_id: int
    members: frozenset[str]  # replica ids of the quorum's members
    participants: int  # as counted by the Manager
    participating: bool  # as this replica's Manager tells it
    index: int
    ledger: int
    ledger_steps: int
    digest: str  # the digest of all parameters after the step
    began: float = 0.0  # when the attempt at this step began
    ledger_quorums: int | None = None  # these three are None if the worker does not record them
    average: float | None = None
    # The digest of the parameters before the step: after a heal, of those taken over.
    before: str | None = None

    @property
    def process(self) -> Process:
        return self.replica_id, self.group_rank

    @property
    def place(self) -> Place:
        return self.step, self.quorum_id, self.group_rank

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.group_rank} step {self.step} quorum {self.quorum_id}"


@dataclass(frozen=True)
class Heal:
    """A rank took over a peer's state."""

    time: float  # seconds since the Unix epoch
    replica_id: str
    group_rank: int

    @property
    def process(self) -> Process:
        return self.replica_id, self.group_rank


@dataclass(frozen=True)
class Sighting:
    """A process was told of a quorum with a new id, whether or not a step was ever committed in it."""

    replica_id: str  # empty for the lighthouse
    group_rank: int
    quorum_id: int
    members: frozenset[str]

    @property
    def process(self) -> Process:
        return self.replica_id, self.group_rank

    def __str__(self) -> str:
        return f"{self.replica_id or 'the lighthouse'}/{self.group_rank} saw quorum {self.quorum_id}"


@dataclass(frozen=True)
class Refusal:
    """A rank was told that its replica group does not commit a step."""

    replica_id: str
    group_rank: int
    quorum_id: int
    step: int  # the step number that it would have had after the commit


@dataclass(frozen=True)
class History:
    """All records of a run; those of one process are in the order in which it wrote them."""

    commits: tuple[Commit, ...]
    heals: tuple[Heal, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    def by_process(self) -> Mapping[Process, list[Commit]]:
        return _grouped(self.commits, lambda commit: commit.process)

    def by_place(self) -> Mapping[Place, list[Commit]]:
        return _grouped(self.commits, lambda commit: commit.place)


Violations = Iterator[str]


def violations(history: History) -> list[str]:
    """Return every violation in the history, each after the name of its invariant."""
    return [f"{name}: {text}" for name, check in INVARIANTS.items() for text in check(history)]


def agreement(history: History) -> Violations:
    """Replicas that commit a step in the same quorum hold bit-identical parameters after it.

    The ranks of one replica group get the same verdict: none commits a step that another one does not.
    """
    refused = {(refusal.replica_id, refusal.quorum_id, refusal.step) for refusal in history.refusals}
    for commit in history.commits:
        if (commit.replica_id, commit.quorum_id, commit.step) in refused:
            yield f"{commit} was committed, but a rank of its replica group was told that it is not"
    for commits in history.by_place().values():
        for other in commits[1:]:
            if other.digest != commits[0].digest:
                yield f"{commits[0]} has digest {commits[0].digest}, but {other} has {other.digest}"


def one_quorum_per_step(history: History) -> Violations:
    """No step is committed by two quorums with no member in common."""
    members: dict[int, dict[int, frozenset[str]]] = defaultdict(dict)
    for commit in history.commits:
        members[commit.step][commit.quorum_id] = commit.members
    for step, quorums in members.items():
        for (one, these), (other, those) in combinations(quorums.items(), 2):
            if not these & those:
                yield f"step {step} was committed by quorums {one} and {other} without a common member"


def monotonic(history: History) -> Violations:
    """Quorum ids only grow, for every process and for the job, and none is used twice."""
    pairs: list[tuple[Commit, Commit] | tuple[Sighting, Sighting]] = []
    for commits in history.by_process().values():
        pairs += pairwise(commits)
    for sightings in _grouped(history.sightings, lambda sighting: sighting.process).values():
        pairs += pairwise(sightings)
    for before, after in pairs:
        if after.quorum_id < before.quorum_id:
            yield f"{before} was followed by quorum {after.quorum_id}"
    first: dict[int, Commit | Sighting] = {}
    everything: list[Commit | Sighting] = [*history.commits, *history.sightings]
    for seen in everything:
        if first.setdefault(seen.quorum_id, seen).members != seen.members:
            yield f"{first[seen.quorum_id]} and {seen} have the same quorum id and other members"
    latest: Commit | None = None
    for commit in sorted(history.commits, key=lambda commit: (commit.step, commit.quorum_id)):
        if latest and commit.step > latest.step and commit.quorum_id < latest.quorum_id:
            yield f"{latest} came before {commit} of an older quorum"
        latest = max(latest or commit, commit, key=lambda commit: commit.quorum_id)


def no_regress(history: History) -> Violations:
    """No process, and no quorum, goes back behind a step that it has committed."""
    for commits in history.by_process().values():
        for before, after in pairwise(commits):
            if after.step <= before.step:
                yield f"{before} was followed by step {after.step}"
    latest: dict[str, Commit] = {}  # the latest commit of each replica, in the quorums so far
    for quorum_id, commits in sorted(_grouped(history.commits, lambda commit: commit.quorum_id).items()):
        first = min(commits, key=lambda commit: commit.step)
        for past in (latest[member] for member in sorted(first.members) if member in latest):
            if past.step >= first.step:
                yield f"{past} was forgotten by quorum {quorum_id}, which committed step {first.step} again"
        for commit in commits:
            latest[commit.replica_id] = max(
                latest.get(commit.replica_id, commit), commit, key=attrgetter("step")
            )


def heal_is_clean(history: History) -> Violations:
    """A replica that skips steps has healed, equals the others from then on and added nothing before."""
    by_place = history.by_place()
    for before, commit, has_healed in _passages(history):
        for other in by_place[commit.place] if has_healed else ():
            if other.digest != commit.digest:
                yield f"{commit} has healed to {commit.digest}, but {other} has {other.digest}"
            if other.ledger != commit.ledger:
                yield f"{commit} has healed and counts {commit.ledger:b}, but {other} counts {other.ledger:b}"
        if not has_healed and commit.step != (before.step if before else 0) + 1:
            yield f"{commit} skipped steps and has not healed"


def no_trace(history: History) -> Violations:
    """A step begins with the state that was committed last: one that failed leaves no trace in it.

    That is this process's own state; after a heal it is one that a replica committed as the step before.
    """
    committed: dict[tuple[int, int], set[str]] = defaultdict(set)
    for commit in history.commits:
        committed[commit.step, commit.group_rank].add(commit.digest)
    for before, commit, has_healed in _passages(history):
        if commit.before is None or commit.step == 1:
            continue
        own = {before.digest} if before and not has_healed else committed[commit.step - 1, commit.group_rank]
        if commit.before not in own:
            expected = " or ".join(sorted(own)) or "nothing"
            yield f"{commit} began with {commit.before}, but what was committed before it is {expected}"
    for commits in history.by_place().values():
        states = {commit.before for commit in commits if commit.before is not None}
        if len(states) > 1:
            yield f"{commits[0]} was begun with {' and '.join(sorted(states))}"


def no_zombie(history: History) -> Violations:
    """Every sum holds one contribution of each participant, for this step, and nothing else.

    In the very first step all but one take over a peer's initial state: they count, and add nothing.
    """
    for commit in history.commits:
        contributors = commit.ledger.bit_count()
        if contributors > commit.participants or (contributors < commit.participants and commit.step > 1):
            yield f"{commit} has {commit.participants} participants, but its sums hold {commit.ledger:b}"
        if commit.ledger_steps != commit.ledger * (commit.step - 1):
            yield f"{commit} holds a contribution that was made for another step"
        if commit.ledger_quorums not in (None, commit.ledger * (commit.quorum_id % QUORUMS_TOLD_APART)):
            yield f"{commit} holds a contribution that was made for another quorum"
        if commit.average not in (None, commit.ledger / max(1, commit.participants)):
            yield f"{commit}: {commit.ledger} averages to {commit.average}, not over {commit.participants}"
        if bool(commit.ledger >> commit.index & 1) != commit.participating:
            yield f"{commit} takes part: {commit.participating}, but its sums hold {commit.ledger:b}"


def progress(history: History, since: float, processes: Iterable[Process], steps: int) -> Violations:
    """Each of the processes commits at least `steps` steps after the time `since`."""
    done = Counter(commit.process for commit in history.commits if commit.time > since)
    for process in processes:
        if done[process] < steps:
            yield f"{process[0]}/{process[1]} committed {done[process]} of {steps} steps"


INVARIANTS: Mapping[str, Callable[[History], Violations]] = MappingProxyType(
    {
        check.__name__: check
        for check in (
            agreement,
            one_quorum_per_step,
            monotonic,
            no_regress,
            heal_is_clean,
            no_trace,
            no_zombie,
        )
    }
)


def _passages(history: History) -> Iterator[tuple[Commit | None, Commit, bool]]:
    """Yield each commit, its process's commit before it, and whether that process healed in between."""
    healed = _grouped(history.heals, lambda heal: heal.process)
    for process, commits in history.by_process().items():
        for before, commit in zip([None, *commits], commits, strict=False):
            start = before.time if before else float("-inf")
            yield before, commit, any(start <= heal.time <= commit.time for heal in healed.get(process, ()))


def _grouped(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    groups: dict[K, list[V]] = defaultdict(list)
    for item in items:
        groups[key(item)].append(item)
    return groups
