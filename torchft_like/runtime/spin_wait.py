"""Adaptive spinning: how long to watch for an event of another process before going to sleep.

Watching notices an event within a microsecond and burns a core; sleeping costs nothing and takes some tens of
microseconds to end. An event that came soon the last times is worth watching for, any other is not: a thread
that waits for a busy peer watches, an idle one sleeps.

A watcher yields to other processes with every look. If they keep the core for long, they have work for it:
then a sleeper, which the system prefers when it wakes, is served sooner than a watcher.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

SPIN_S_MAX = 1e-3
CROWDED_S = 100e-6
PAUSE_S_MIN = 50e-6
PAUSE_S_MAX = 5e-3
_WEIGHT = 0.25
_LONG_S = 4 * SPIN_S_MAX
_CROWDED_USUAL_S = 40 * SPIN_S_MAX  # about ten waits without watching


class AdaptiveSpin:
    """The wait times of one waiter, from which it learns; for one thread at a time."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    def spin_s(self) -> float:
        """Return how many seconds to watch this time."""
        return SPIN_S_MAX if self._usual_s < SPIN_S_MAX else 0.0

    def watch(self, reached: Callable[[], bool], deadline: float) -> bool:
        """Look repeatedly until `reached()`; return False when it is time to sleep, or at `deadline`."""
        if not (budget_s := self.spin_s()):
            return reached()
        last = time.monotonic()
        until = min(last + budget_s, deadline)
        while not reached():
            if last >= until:
                return False
            os.sched_yield()
            now = time.monotonic()
            if now - last > CROWDED_S:
                self._usual_s = _CROWDED_USUAL_S
                return reached()
            last = now
        return True

    def learn(self, waited_s: float) -> None:
        """Learn from a wait; an endless one counts like any that was too long to watch."""
        counted_s = waited_s if waited_s < _LONG_S else _LONG_S
        self._usual_s += _WEIGHT * (counted_s - self._usual_s)


def ask_until(reached: Callable[[], bool], deadline: float = math.inf) -> bool:
    """Ask again and again until `reached()`; return False once the deadline has passed.

    The pauses in between grow: few queries are in vain, and a short operation is noticed soon.
    """
    pause_s = PAUSE_S_MIN
    while not reached():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, PAUSE_S_MAX)
    return True
