"""When has a step waited for so long that something may be wrong? Pure; the clock is the caller's.

What is normal differs by orders of magnitude between jobs, so it is learned: a wait is remarkable when it
takes twice as long as those before it in the same quorum. Being wrong costs a few connections and nothing
else, and each time that a wait was remarkable it has to become twice as long to be so again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

FIRST_S = 0.5
# Everybody asks everybody: what that costs stays a small part of the time that is waited.
PER_MEMBER_S = 0.005
LOOK_EVERY_S = 0.1
EASING = 0.9  # of what was learned, with every wait: one slow checkpoint is forgotten in the end


@dataclass
class StallWatch:
    """Told every LOOK_EVERY_S what a rank waits for.

    Attributes:
        limit_s: a wait that takes longer is remarkable.
    """

    limit_s: float = FIRST_S
    _quorum_id: int | None = None
    _wait: Hashable = None
    _since: float = 0.0

    def look(self, quorum_id: int, members: int, wait: Hashable, now: float) -> bool:
        """Whether what a rank waits for is remarkable now, and was not when last looked at.

        Args:
            members: of the quorum.
            wait: what it waits for; another one, another wait. None while it waits for nothing.
            now: in seconds.
        """
        least_s = FIRST_S + PER_MEMBER_S * members
        if quorum_id != self._quorum_id:
            self.limit_s, self._quorum_id, self._wait = least_s, quorum_id, None
        if wait != self._wait:
            if self._wait is not None:
                self.limit_s = max(least_s, 2 * (now - self._since), EASING * self.limit_s)
            self._wait, self._since = wait, now
        is_remarkable = wait is not None and now - self._since > self.limit_s
        if is_remarkable:
            self.limit_s *= 2
        return is_remarkable
