"""How long to watch shared memory for what is awaited before going to sleep.

Watching notices within a microsecond and burns a core; sleeping costs nothing and takes some tens of
microseconds to end. What came soon the last times is worth watching for, anything else is not: who
waits for a busy peer watches, who is idle sleeps.
"""

from __future__ import annotations

SPIN_S_MAX = 1e-3
SPIN_S_MIN = 20e-6
RECHECK_S = 0.1  # should a wake-up ever be lost, this is what it costs
_WEIGHT = 0.25


class Patience:
    """Learns from the waits of one waiter; for one thread at a time."""

    def __init__(self) -> None:
        self._usual_s = 0.0

    def spin_s(self) -> float:
        """How long to watch this time."""
        return SPIN_S_MAX if self._usual_s < SPIN_S_MAX else SPIN_S_MIN

    def learn(self, waited_s: float) -> None:
        """Take note of a wait; one endless wait counts like any that was too long to watch."""
        self._usual_s += _WEIGHT * (min(waited_s, 4 * SPIN_S_MAX) - self._usual_s)
