"""How long others were silent, measured by a process that may have been kept from hearing them.

A process that was stopped, or starved by others on its processor, has the answers that it waits for lying
unread: limits that have passed meanwhile say nothing about others. So code that measures silence uses this
clock, which does not count such times, and asks it whether there was one just now (the local health of
memberlist's Lifeguard).

gRPC's keepalive is measured inside gRPC, which does not know of this. So its verdict, the end of a session,
only makes a suspect, which has time to come back.
"""

from __future__ import annotations

import asyncio
import math

RECOVERY_S = 1.0


class SilenceClock:
    """The time in which this process could hear, and when it last could not; it runs until it is stopped.

    Args:
        loop: the event loop on which others are heard.
        late_s: a loop that is later than so many seconds does not hear the others.
        look_every_s: the seconds between two looks.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, late_s: float = 0.5, look_every_s: float = 0.1
    ) -> None:
        self._loop = loop
        self._look_every_s = look_every_s
        self._pause_s_max = look_every_s + late_s
        self._looked_at = loop.time()
        self._last_starved = -math.inf
        self._heard_s = self._now_s = 0.0  # at the last look; the latest that was returned
        self._timer = loop.call_later(look_every_s, self._look)

    def now(self) -> float:
        """Return the seconds in which this process could hear; they never run backwards."""
        pause_s = self._loop.time() - self._looked_at
        if pause_s > self._pause_s_max:
            pause_s = self._look_every_s
        self._now_s = max(self._now_s, self._heard_s + pause_s)
        return self._now_s

    async def sleep(self, seconds: float) -> None:
        """Wait for so many seconds in which this process could hear."""
        end = self.now() + seconds
        while (left_s := end - self.now()) > 0:
            await asyncio.sleep(left_s)

    @property
    def last_starved(self) -> float:
        """The loop's time at which it was last found late, which may be now; -inf if never."""
        now = self._loop.time()
        return now if now - self._looked_at > self._pause_s_max else self._last_starved

    def is_starved(self) -> bool:
        """Return whether the loop is late now, or was within the last RECOVERY_S."""
        return self._loop.time() < self.last_starved + RECOVERY_S

    def stop(self) -> None:
        """Stop looking."""
        self._timer.cancel()

    def _look(self) -> None:
        self._heard_s, self._last_starved = self.now(), self.last_starved
        self._looked_at = self._loop.time()
        self._timer = self._loop.call_later(self._look_every_s, self._look)
