"""When a replica group says how far it is, and what it says. Pure; the caller passes the time.

A quorum that stands sends no message per step, so operators would see the step at which it was formed. The
ManagerServer looks every LOOK_EVERY_S at what its rank waits for (`stall_watch.py`); from these looks comes a
report now and then: no part of a step waits for it, and no rule of the lighthouse depends on it.

How much of the looks found the rank waiting tells a straggler: its peers wait for it, and it for nobody.
"""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.core.history import Report

# However short the interval, all members of a quorum together send one report in so many seconds at most.
PER_MEMBER_S = 0.004


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
            members: the number of members of the quorum.
            interval_s: the least time between two reports.
        """
        self._looks += 1
        self._waiting += seen.waits_for != ""
        if seen.quorum_id != self._began_at[0]:
            self._began_at = seen.quorum_id, seen.step
        has_begun = self._told_of != seen.quorum_id and seen.step > self._began_at[1]
        is_urgent = has_begun or self._last is None or seen.heals_from != self._last.heals_from
        gap_s = PER_MEMBER_S * members
        due_at = self._sent_at + (gap_s if is_urgent else max(interval_s, gap_s))
        report = seen._replace(waiting_permille=1000 * self._waiting // self._looks)
        if now < due_at or report == self._last:
            return None
        self._told_of = seen.quorum_id if has_begun else self._told_of
        self._last, self._sent_at, self._looks, self._waiting = report, now, 0, 0
        return report
