"""Whether this process was kept from running, by a stop or by others on its processor.

A process that measures the silence of others has to know how long it could not hear them: their answers lie
unread, and limits that have passed say nothing.
"""

from __future__ import annotations

import asyncio
import math

RECOVERY_S = 1.0


class StarvationWatch:
    """Watches how late the event loop is on which it is made, until it is stopped.

    Args:
        late_s: a loop that is later than so many seconds is starved.
        look_every_s: the seconds between two looks.
    """

    def __init__(self, late_s: float = 0.5, look_every_s: float = 0.1) -> None:
        self._loop = asyncio.get_running_loop()
        self._look_every_s = look_every_s
        self._pause_s_max = look_every_s + late_s
        self._last = self._loop.time()
        self._last_starved = -math.inf
        self._look()

    @property
    def last_starved(self) -> float:
        """The time on the loop's clock at which it was last found late, which may be now; -inf if never."""
        now = self._loop.time()
        return now if now - self._last > self._pause_s_max else self._last_starved

    def is_starved(self) -> bool:
        """Return whether the loop is late now, or was within the last RECOVERY_S."""
        return self._loop.time() < self.last_starved + RECOVERY_S

    def stop(self) -> None:
        """Stop watching."""
        self._timer.cancel()

    def _look(self) -> None:
        self._last_starved = self.last_starved
        self._last = self._loop.time()
        self._timer = self._loop.call_later(self._look_every_s, self._look)
