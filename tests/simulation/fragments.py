"""What DiLoCo keeps, as numbers: global, outer and local parameters of each fragment.

It imitates the fragments of `torchft_like/local_sgd.py` around the real `SyncSchedule`. Equal numbers are
equal tensors. Local parameters are the global ones that they come from, and a hash of the inner steps since
then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.scenario import Scenario
    from torchft_like.core.sync_schedule import SyncSchedule

MASK = 2**61 - 1
Local = tuple[int, int]  # the global parameters, and the inner steps since them; 0 if there were none
Held = tuple[tuple[int, ...], tuple[int, ...], tuple[Local, ...]]


def mix(one: int, other: int) -> int:
    """Return a hash of two numbers."""
    return ((one ^ other * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & MASK


class Fragments:
    """The fragments of one rank, and the schedule of their syncs."""

    def __init__(self, scenario: Scenario, schedule: type[SyncSchedule], seed: int) -> None:
        count = scenario.fragments
        self.schedule = schedule(count, count * scenario.inner_steps, scenario.delay_steps)
        self.global_ = [mix(seed, number) for number in range(count)]
        self.outer = [0] * count
        self.local: list[Local] = [(number, 0) for number in self.global_]
        self._keeps_local = scenario.keeps_local

    def digest(self) -> int:
        """Return a hash of what is the same on all replicas."""
        digest = 0
        for shared, outer in zip(self.global_, self.outer, strict=True):
            digest = mix(mix(digest, shared), outer)
        return digest

    def train(self, gradient: int) -> None:
        """Take an inner step."""
        self.local = [(origin, mix(steps, gradient)) for origin, steps in self.local]
        self.schedule.step()

    def send(self, syncs: int) -> int:
        """Begin a sync; return the pseudogradient."""
        fragment = self.schedule.next_fragment(syncs)
        self.schedule.sent(fragment)
        return mix(*self.local[fragment])

    def receive(self, fragment: int, total: int, committed: bool) -> None:
        """Step the outer optimizer if the sync is committed, and begin anew with the global parameters."""
        if committed:
            self._step_outer(fragment, total)
        kept = self.local[fragment][1] if committed and self._keeps_local else 0
        self.local[fragment] = self.global_[fragment], kept

    def _step_outer(self, fragment: int, total: int) -> None:
        self.outer[fragment] = mix(self.outer[fragment], total)
        self.global_[fragment] = mix(self.global_[fragment], self.outer[fragment])

    def spoil(self, number: int) -> None:
        """Change a part of the state, as an outer optimizer that raises does."""
        self.outer[0] = mix(self.outer[0], number)

    def save(self) -> Held:
        """Return the state, for a peer."""
        return tuple(self.global_), tuple(self.outer), tuple(self.local)

    def load(self, state: Held) -> None:
        """Take over a peer's state."""
        shared, outer, local = state
        self.global_, self.outer, self.local = list(shared), list(outer), list(local)
