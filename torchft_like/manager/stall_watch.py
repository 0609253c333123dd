"""When has a step waited for so long that something may be wrong? Pure; the clock is the caller's.

What is normal differs by orders of magnitude between jobs, so it is learned: a wait is remarkable when it
takes twice as long as those before it of its kind, in the same quorum. It is so again each time that it has
taken twice as long as before, but often enough that what happens in a long wait is found, too.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST_S = 0.5
LAST_S = 10.0
LONG_S = 30.0  # most cuts are over by then, and the usual timeout of operations is not
# Everybody asks everybody: what that costs stays a small part of the time that is waited.
PER_MEMBER_S = 0.005
LOOK_EVERY_S = 0.1
EASING = 0.9  # of what was learned, with every wait: one slow checkpoint is forgotten in the end


class Wait(NamedTuple):
    """What a rank waits for.

    Attributes:
        kind: what takes about as long every time.
        which: another wait of that kind is another value.
    """

    kind: str
    which: Hashable


@dataclass
class StallWatch:
    """Told every LOOK_EVERY_S what a rank waits for."""

    _quorum_id: int | None = None
    _wait: Wait | None = None
    _since: float = 0.0
    _remarkable_at: float = 0.0
    _usual_s: dict[str, float] = field(default_factory=dict)  # by kind: twice the longest, eased

    def look(self, quorum_id: int, members: int, wait: Wait | None, now: float) -> float:
        """How many seconds a rank has waited, if that is remarkable now, and was not at the last look; or 0.

        Args:
            members: of the quorum.
            now: in seconds.
        """
        least_s, most_s = FIRST_S + PER_MEMBER_S * members, LAST_S + PER_MEMBER_S * members
        if quorum_id != self._quorum_id:
            self._quorum_id, self._wait, self._usual_s = quorum_id, None, {}
        if wait != self._wait:
            self._learn(now)
            self._wait, self._since = wait, now
            usual_s = self._usual_s.get(wait.kind, 0.0) if wait else 0.0
            self._remarkable_at = now + min(max(usual_s, least_s), most_s)
        if wait is None or now <= self._remarkable_at:
            return 0.0
        waited_s = now - self._since
        self._remarkable_at = now + min(waited_s, most_s)
        return waited_s

    def _learn(self, now: float) -> None:
        """From the wait that is over."""
        if self._wait is not None:
            eased_s = EASING * self._usual_s.get(self._wait.kind, 0.0)
            self._usual_s[self._wait.kind] = max(2 * (now - self._since), eased_s)
