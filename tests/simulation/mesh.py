"""A process group in the simulation: the ranks of one number of every replica group in a quorum.

Its name is the store prefix of the real thing, so the ranks that configure the same prefix meet here. A sum
is complete once every member has added to it; each member hears of that in its own time, and a break in
between makes some of them fail while others have succeeded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.simulation.world import DEAD

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.rank import Rank
    from tests.simulation.world import World

# (replica id, quorum, step, fingerprint of the parameters, gradient); None adds zeros
Part = tuple[str, int, int, int, int] | None

LOOKS_UNTIL_LONG = 5


class Mesh:
    """A rendezvous, the collectives of its members, and their end."""

    def __init__(self, world: World, quorum_id: int, size: int) -> None:
        self._world = world
        self.quorum_id = quorum_id
        self.size = size
        self._members: dict[int, Rank] = {}
        self._parts: dict[int, dict[int, Part]] = {}
        self._configured = False
        self._broken = False

    def enter(self, replica_rank: int, rank: Rank) -> None:
        """Let a rank configure."""
        self._members[replica_rank] = rank
        if self._broken:
            world = self._world
            world.after(world.latency(), rank, rank.hear_broken, self)
        elif len(self._members) == self.size:
            self._meet()

    def _meet(self) -> None:
        world = self._world
        if self._broken or self._configured:
            return
        if world.are_refused(self._places()):
            self.reset()
            return
        if world.blocked and world.are_cut(self._places()):
            world.stalled.append(self._meet)
            self._time_out(lambda: self._configured)
            return
        self._configured = True
        for rank in self._members.values():
            world.after(world.latency(), rank, rank.hear_configured, self)

    def add(self, replica_rank: int, key: int, part: Part) -> None:
        """Let a rank take part in a collective."""
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = {}
        parts[replica_rank] = part
        if len(parts) == self.size:
            self._sum(key)

    def _sum(self, key: int) -> None:
        world = self._world
        if not self._broken and world.are_refused(self._places()):
            self.reset()
            return
        if world.blocked and world.are_cut(self._places()):
            if not self._broken:
                world.stalled.append(lambda: self._sum(key))
                self._time_out(lambda: key not in self._parts)
            return
        if self._broken:
            return
        parts = self._parts.pop(key)
        given = [part for _, part in sorted(parts.items()) if part is not None]
        world.checker.summed(self.quorum_id, given)
        total = 0
        for part in given:
            total += part[4]
        base = given[0][3] if given else None
        for rank in self._members.values():
            world.after(world.latency(), rank, rank.hear_sum, self, key, (total, base, len(given)))

    def leave(self, gone: Rank) -> None:
        """Let a member abort or die: the others' connections to it end, and what they wait for fails."""
        if self._broken:
            return
        self._broken = True
        world = self._world
        for rank in self._members.values():
            if rank is not gone and rank.state != DEAD:
                self._pass_on(gone.replica.slot, rank)
        world.tell(gone.name, "leaves the process group of quorum", self.quorum_id)

    def _pass_on(self, slot: int, rank: Rank) -> None:
        world = self._world
        if world.is_cut(slot, rank.replica.slot) and not world.are_refused([slot, rank.replica.slot]):
            world.stalled.append(lambda: self._pass_on(slot, rank))
            if world.scenario.timeout_s < math.inf:
                world.after(world.scenario.timeout_s, rank, rank.hear_broken, self)
        else:
            world.after(world.latency() + world.latency(), rank, rank.hear_broken, self)

    def _time_out(self, is_done: Callable[[], bool]) -> None:
        """Let the members look for a link that is cut while data does not come, and give up in the end."""
        world = self._world
        if world.scenario.stall_s < math.inf:
            world.after(world.scenario.stall_s, world.nobody, self._look_for_links, is_done, 1)
        if world.scenario.timeout_s < math.inf:
            world.after(world.scenario.timeout_s, world.nobody, self._expire, is_done)

    def _look_for_links(self, is_done: Callable[[], bool], times: int) -> None:
        world = self._world
        if self._broken or is_done():
            return
        for_long = times >= LOOKS_UNTIL_LONG
        for rank in self._members.values():
            world.after(world.latency(), rank, rank.replica.stalled, rank.number, self.quorum_id, for_long)
        world.after(world.scenario.stall_s, world.nobody, self._look_for_links, is_done, times + 1)

    def _expire(self, is_done: Callable[[], bool]) -> None:
        if not self._broken and not is_done():
            self._world.tell("a process group", "times out in quorum", self.quorum_id)
            self.reset()

    def reset(self) -> None:
        """Break a connection of the group."""
        self._broken = True
        world = self._world
        for rank in self._members.values():
            world.after(world.latency(), rank, rank.hear_broken, self)

    def _places(self) -> list[int]:
        return [rank.replica.slot for rank in self._members.values()]


def mesh_of(world: World, name: tuple[str, int, int], quorum_id: int, size: int) -> Mesh:
    """Return the process group of a store prefix."""
    mesh = world.meshes.get(name)
    if mesh is None:
        mesh = world.meshes[name] = Mesh(world, quorum_id, size)
    return mesh
