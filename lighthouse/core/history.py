"""What happened to the job lately, as operators want to see it. It is pure, and its size is bounded.

Events and what replica groups say of their steps go in; a timeline, step rates, heals and recovery times come
out. No rule of the lighthouse looks at any of it. `now` is in seconds on a clock that never runs backwards,
`time` in seconds since the Unix epoch.

A recovery begins with the loss of a member of the quorum. It has two ends: the quorum without that member,
which this lighthouse forms, and the first step that is committed in it, which is known once a member says so.

A replica heals while it is behind the newest member of its quorum, or says that it takes over the state of
another one.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MOMENTS_MAX = 1000
TEXT_MAX = 400  # characters of a moment
RECORDS_MAX = 100  # recoveries, heals
DURATION_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
NAMES_MAX = 8  # lost replicas that a recovery names
_SAMPLES_MAX = 16
_SAMPLE_EVERY_S = 0.4
_WAITING_EASING = 0.7
_REPORTS_MIN = 5  # the share in a few looks is chance
_SLOWER_PERMILLE = 200  # a straggler waits by so much less than half of the others


class Report(NamedTuple):
    """What a replica group says of its progress; the fields of the message `Progress`."""

    quorum_id: int
    step: int
    waits_for: str = ""
    waiting_permille: int = 0
    heals_from: str = ""


class Moment(NamedTuple):
    """A point of the timeline."""

    time: float
    kind: str
    quorum_id: int
    replica_id: str
    text: str = ""


@dataclass(slots=True)
class Durations:
    """How many of some durations were within each of the bounds, and beyond them, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one of them."""
        self.counts[bisect.bisect_left(DURATION_BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


@dataclass(slots=True)
class Recovery:
    """The time from the loss of members until the others go on; None while they do not."""

    time: float
    began: float
    lost: list[str]
    quorum_id: int = 0  # the one that was formed without them
    quorum_s: float | None = None
    step_s: float | None = None


@dataclass(slots=True)
class Heal:
    """A replica that takes over a state. `outcome` is "" until it is "healed", "lost" or "left"."""

    time: float
    began: float
    replica_id: str
    from_step: int
    to_step: int
    quorum_id: int
    source: str = ""  # unknown until the replica names it
    seconds: float | None = None
    outcome: str = ""


@dataclass(slots=True)
class Pace:
    """What is known of a replica's steps."""

    step: int = 0
    heard_time: float = 0.0
    waits_for: str = ""
    waiting_permille: float | None = None  # None if it never said
    reports: int = 0
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_SAMPLES_MAX))

    def saw(self, step: int, time: float, now: float) -> None:
        """Record a step; a replica that went back, as it lost its state, begins anew."""
        if step < self.step:
            self.samples.clear()
        self.step, self.heard_time = step, time
        if not self.samples or (step > self.samples[-1][1] and now >= self.samples[-1][0] + _SAMPLE_EVERY_S):
            self.samples.append((now, step))

    def steps_per_s(self, now: float) -> float | None:
        """Return the rate over the last samples, which falls once a step takes longer than all of them."""
        if len(self.samples) < 2:
            return None
        times = [at for at, _ in self.samples]
        longest_s = max(later - earlier for earlier, later in itertools.pairwise(times))
        seconds = max(times[-1] - times[0], now - times[0] - longest_s)
        return (self.samples[-1][1] - self.samples[0][1]) / seconds


class History:
    """The recent past of one lighthouse.

    Attributes:
        moments: the timeline, the oldest first.
        counts: how often each kind of event happened since the start.
        recoveries, heals: the last ones, the oldest first.
        to_quorum, to_step: how long recoveries took.
        paces: by replica that is there.
        ends: how replicas were lost or left since the last quorum.
        quorum_began: when the last quorum was formed first, in seconds since the Unix epoch; 0 if
            that was before this lighthouse started.
    """

    def __init__(self) -> None:
        self.moments: deque[Moment] = deque(maxlen=MOMENTS_MAX)
        self.counts: Counter[str] = Counter()
        self.recoveries: deque[Recovery] = deque(maxlen=RECORDS_MAX)
        self.heals: deque[Heal] = deque(maxlen=RECORDS_MAX)
        self.to_quorum, self.to_step = Durations(), Durations()
        self.paces: dict[str, Pace] = {}
        self.ends: dict[str, str] = {}
        self.quorum_began = 0.0
        self._quorum_id = 0
        self._recovering: Recovery | None = None
        self._healing: dict[str, Heal] = {}
        self._newest_step = 0
        self._members: frozenset[str] = frozenset()  # of the last quorum

    # -- what comes in

    def happened(self, moment: Moment, now: float) -> None:
        """Record an event of the lighthouse."""
        self.counts[moment.kind] += 1
        self.moments.append(moment._replace(text=moment.text[:TEXT_MAX]))
        if moment.kind == "loss" and moment.quorum_id > 0:
            if (running := self._recovering) is None or running.quorum_s is not None:
                self._recovering = Recovery(moment.time, now, [moment.replica_id])
                self.recoveries.append(self._recovering)
            elif len(running.lost) < NAMES_MAX:  # another loss before there is a quorum
                running.lost.append(moment.replica_id)
        if moment.kind in ("loss", "leave", "refused"):
            self.paces.pop(moment.replica_id, None)
            outcome = "left" if moment.kind == "leave" else "lost"
            self._end_heal(moment.replica_id, outcome, moment.time, now)
            if len(self.ends) < MOMENTS_MAX:
                self.ends[moment.replica_id] = moment.text[:TEXT_MAX]

    def formed(self, quorum_id: int, steps: Mapping[str, int], time: float, now: float) -> None:
        """Record a quorum, perhaps the same again, with the steps at which its members are believed to be."""
        if quorum_id != self._quorum_id:
            self.quorum_began, self._quorum_id = time, quorum_id
        self.ends = {}
        self._newest_step = max(steps.values(), default=0)
        if (recovery := self._recovering) is not None and recovery.quorum_s is None:
            recovery.quorum_id, recovery.quorum_s = quorum_id, now - recovery.began
            self.to_quorum.add(recovery.quorum_s)
        self._members = frozenset(steps)
        for replica_id, step in steps.items():
            if (pace := self.paces.get(replica_id)) is not None and step < pace.step:
                pace.saw(step, time, now)  # it claimed more
            if step < self._newest_step:
                self._heal(replica_id, Report(quorum_id, step), time, now)
            elif replica_id in self._healing:
                self._end_heal(replica_id, "healed", time, now)

    def stepped(self, replica_id: str, step: int, time: float, now: float) -> None:
        """Record that a replica has committed so many steps."""
        self.paces.setdefault(replica_id, Pace()).saw(step, time, now)
        recovery = self._recovering
        is_new = replica_id in self._members and step > self._newest_step
        if recovery is not None and recovery.quorum_s is not None and is_new:
            recovery.step_s, self._recovering = now - recovery.began, None
            self.to_step.add(recovery.step_s)

    def reported(self, replica_id: str, report: Report, time: float, now: float) -> None:
        """Record what a replica says of itself."""
        self.stepped(replica_id, report.step, time, now)
        pace = self.paces[replica_id]
        permille = min(report.waiting_permille, 1000)
        before = permille if pace.waiting_permille is None else pace.waiting_permille
        pace.waiting_permille = _WAITING_EASING * before + (1 - _WAITING_EASING) * permille
        pace.waits_for, pace.reports = report.waits_for, pace.reports + 1
        if report.heals_from:
            self._heal(replica_id, report, time, now)
        elif (heal := self._healing.get(replica_id)) is not None and report.step >= heal.to_step:
            self._end_heal(replica_id, "healed", time, now)

    # -- what operators see

    def healing(self) -> Mapping[str, Heal]:
        """Return the heals that are under way, by replica."""
        return self._healing

    def straggler(self, members: Iterable[str]) -> str | None:
        """Return the member for which the others wait, if there is one: it waits much less than they do."""
        waiting = {
            i: pace.waiting_permille
            for i in members
            if (pace := self.paces.get(i)) is not None and pace.waiting_permille is not None
            if pace.reports >= _REPORTS_MIN
        }
        if len(waiting) < 2:
            return None
        slowest = min(waiting, key=waiting.__getitem__)
        others = statistics.median(value for i, value in waiting.items() if i != slowest)
        return slowest if others - waiting[slowest] >= _SLOWER_PERMILLE else None

    # -- heals

    def _heal(self, replica_id: str, report: Report, time: float, now: float) -> None:
        """Record a heal, or what is news of it."""
        heal = self._healing.get(replica_id)
        if heal is None:
            heal = Heal(time, now, replica_id, report.step, self._newest_step, report.quorum_id)
            self._healing[replica_id] = heal
            self.heals.append(heal)
        heal.source, heal.quorum_id = report.heals_from, report.quorum_id
        heal.to_step = max(heal.to_step, self._newest_step)

    def _end_heal(self, replica_id: str, outcome: str, time: float, now: float) -> None:
        if (heal := self._healing.pop(replica_id, None)) is None:
            return
        heal.outcome, heal.seconds = outcome, now - heal.began
        if outcome == "healed":
            if (pace := self.paces.get(replica_id)) is not None:
                pace.samples.clear()  # it has not done the steps that it took over
            text = f"healed: step {heal.from_step} to {heal.to_step} in {heal.seconds:.2f} s"
            self.happened(Moment(time, "heal", heal.quorum_id, replica_id, text), now)
