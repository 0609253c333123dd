"""When the fragments of a model are synced, in DiLoCo. It is pure: it counts, and knows no tensors.

Every `sync_every / fragments` inner steps one fragment is synced. It is sent `delay` inner steps before, and
one sync is over before the next one begins. Which fragment it is follows from the number of committed syncs,
which is the same on all replicas: after a sync that failed it is the same fragment again, and a replica that
healed goes on where its source is.
"""

from __future__ import annotations


class SyncSchedule:
    """The inner steps since the last sync, and the sync that is under way.

    Args:
        fragments: how many there are.
        sync_every: the inner steps in which each fragment is synced once.
        delay: the inner steps between the begin of a sync and its end.

    Attributes:
        under_way: the number of the fragment that was sent and not yet received.
    """

    def __init__(self, fragments: int, sync_every: int, delay: int) -> None:
        self.under_way: int | None = None
        self._fragments = fragments
        self._interval, self._delay = sync_every // fragments, delay
        self._steps = 0

    def step(self) -> None:
        """Count an inner step."""
        self._steps += 1

    @property
    def is_due(self) -> bool:
        """Whether it is time to send a fragment."""
        return self.under_way is None and self._steps >= self._interval - self._delay

    def next_fragment(self, syncs: int) -> int:
        """Return the number of the fragment to send, after so many committed syncs."""
        return syncs % self._fragments

    def sent(self, fragment: int) -> None:
        """Record that a fragment was sent."""
        self.under_way = fragment

    def received(self) -> int | None:
        """Return the number of the fragment whose sync is to end now, which is over with this; None if it is
        not time.
        """
        if self.under_way is None or self._steps < self._interval:
            return None
        fragment, self.under_way, self._steps = self.under_way, None, 0
        return fragment
