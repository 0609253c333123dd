"""What a ManagerServer makes of its looks at its rank: a stall or a report. Pure; the caller passes the time.

A step may have waited for so long that something may be wrong. Normal waits differ by orders of magnitude
between jobs, so they are learned: a wait is remarkable when it takes twice as long as earlier waits of its
kind in the same quorum. It is remarkable again each time that its length has doubled, and at least every
LAST_S seconds, so that events in a long wait are found, too.

A step that waits for longer than the lighthouse's join_timeout is given up, as a member may never have begun
it. Where one is slower than the others by more, in every step, that would never help: so there a wait is
overdue only after twice the longest of late, of this quorum or an earlier one.

A quorum that stands sends no message per step, so operators would see the step at which it was formed. From
the looks comes a report now and then: no part of a step waits for it, and no rule of the lighthouse depends
on it. How much of the looks found the rank waiting tells a straggler: its peers wait for it, and it does not
wait.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from lighthouse.core.history import Report

FIRST_S = 0.5
LAST_S = 10.0
LONG_S = 30.0  # seconds: most network cuts are over by then, and the usual timeout of operations is not
# All members probe all others, and the cost of that has to stay a small part of the wait.
PER_MEMBER_S = 0.005
LOOK_EVERY_S = 0.1
EASING = 0.9  # factor of the learned time at every wait, so that one slow checkpoint is forgotten in the end
LATE_EASING = 0.99  # of that after which it is overdue: a step has many waits, one of which is long


class Wait(NamedTuple):
    """A wait of a rank.

    Attributes:
        kind: the kind of wait; waits of a kind take about the same time.
        which: a value that tells this wait from others of its kind.
        is_unasked: whether it is part of a step for which no member has asked, so one may not have begun it.
    """

    kind: str
    which: Hashable
    is_unasked: bool = False


@dataclass
class StallWatch:
    """The watch, which is told every LOOK_EVERY_S what a rank waits for."""

    _quorum_id: int | None = None
    _wait: Wait | None = None
    _since: float = 0.0
    _remarkable_at: float = 0.0
    _usual_s: dict[str, float] = field(default_factory=dict)  # by kind: twice the longest wait, eased
    _late_s: dict[str, float] = field(default_factory=dict)  # the same in all quorums

    def look(self, quorum_id: int, members: int, wait: Wait | None, now: float) -> float:
        """Return how many seconds a rank has waited, if that has become remarkable since the last look; else
        0.

        Args:
            now: the present time in seconds.
        """
        least_s, most_s = FIRST_S + PER_MEMBER_S * members, LAST_S + PER_MEMBER_S * members
        is_new = quorum_id != self._quorum_id
        if is_new or wait != self._wait:
            if self._wait is not None:  # it is over: learn from it
                for learned, easing in ((self._usual_s, EASING), (self._late_s, LATE_EASING)):
                    eased_s = easing * learned.get(self._wait.kind, 0.0)
                    learned[self._wait.kind] = max(2 * (now - self._since), eased_s)
            if is_new:
                self._quorum_id, self._usual_s = quorum_id, {}
            self._wait, self._since = wait, now
            usual_s = self._usual_s.get(wait.kind, 0.0) if wait else 0.0
            self._remarkable_at = now + min(max(usual_s, least_s), most_s)
        if wait is None or now <= self._remarkable_at:
            return 0.0
        waited_s = now - self._since
        self._remarkable_at = now + min(waited_s, most_s)
        return waited_s

    def is_overdue(self, join_timeout_s: float, now: float) -> bool:
        """Return whether the step of the last look has waited for too long for a member that may not have
        begun it.
        """
        if self._wait is None or not self._wait.is_unasked:
            return False
        return now - self._since > max(join_timeout_s, self._late_s.get(self._wait.kind, 0.0))


# However short the interval, all members of a quorum together send one report in so many seconds at most.
REPORT_PER_MEMBER_S = 0.004


@dataclass
class ProgressLog:
    """The looks since the last report."""

    _last: Report | None = None
    _sent_at: float = 0.0
    _looks: int = 0
    _waiting: int = 0
    _began_at: tuple[int, int] = (0, 0)  # the quorum of the last look, and the step at its first look
    _told_of: int = 0  # the quorum in which a report has told of a step that was committed in it

    def look(self, seen: Report, members: int, interval_s: float, now: float) -> Report | None:
        """Return what to report after this look, if anything.

        The end of a heal, its beginning, and the first step in a quorum are told at once: recovery times are
        read from them. An unchanged state is not told again.

        Args:
            seen: the present state, without a share of waiting.
            interval_s: the least time between two reports.
        """
        self._looks += 1
        self._waiting += seen.waits_for != ""
        if seen.quorum_id != self._began_at[0]:
            self._began_at = seen.quorum_id, seen.step
        has_begun = self._told_of != seen.quorum_id and seen.step > self._began_at[1]
        is_urgent = has_begun or self._last is None or seen.heals_from != self._last.heals_from
        gap_s = REPORT_PER_MEMBER_S * members
        due_at = self._sent_at + (gap_s if is_urgent else max(interval_s, gap_s))
        report = seen._replace(waiting_permille=1000 * self._waiting // self._looks)
        if now < due_at or report == self._last:
            return None
        self._told_of = seen.quorum_id if has_begun else self._told_of
        self._last, self._sent_at, self._looks, self._waiting = report, now, 0, 0
        return report
