"""The conversation of a rank with its ManagerServer, over the sessions that carry it, one after the other.

It does what `server.py`, `rank_link.py` and `suspicion.py` of `torchft_like/manager_server` do. A session is
in order and without losses until it breaks, which loses what is on its way; the conversation repeats that. A
process that is dead refuses connections, one that is stopped does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulation.scenario import TINY_S
from tests.simulation.world import DEAD, Action, Process
from torchft_like.core.conversation import Conversation

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from tests.simulation.replica import Replica

Message = tuple[Action, tuple[Any, ...]]
RESUME = 0.2  # of the keepalive: a process that lives opens another session sooner


class RankLine:
    """The line between the server of a replica group and one of its other ranks.

    Attributes:
        life: changes with every break and every new session: what belongs to an earlier one is ignored.
    """

    def __init__(self, replica: Replica, rank: Rank) -> None:
        self._replica = replica
        self._rank = rank
        self._process = rank.process  # the one that the server knows
        self.life = 0
        self._above: Conversation[Message] = replica.world.cores.conversation()  # the server's memory
        self._below: Conversation[Message] = replica.world.cores.conversation()  # the rank's
        self._is_open_above = self._is_open_below = True
        self._up_at = self._down_at = 0.0
        replica.core.rank_registered(rank.number, rank.process)

    # -- messages

    def say_up(self, action: Action, *args: Any) -> None:
        """Carry a message from the rank to the server."""
        self._below.say((action, args))
        if self._is_open_below:
            self._send_up((action, args))

    def say_down(self, action: Action, *args: Any) -> None:
        """Carry a message from the server to the rank."""
        self._above.say((action, args))
        if self._is_open_above:
            self._send_down((action, args))

    def _send_up(self, message: Message | None) -> None:
        world = self._replica.world
        time = self._up_at = max(world.now + world.latency(), self._up_at)
        count = self._below.tell_count()
        world.at(time, self._replica.server, self._come_up, self.life, count, message)

    def _send_down(self, message: Message | None) -> None:
        world = self._replica.world
        time = self._down_at = max(world.now + world.latency(), self._down_at)
        count = self._above.tell_count()
        world.at(time, self._rank, self._come_down, self.life, count, message)

    def _come_up(self, life: int, count: int, message: Message | None) -> None:
        if life == self.life and self._above.arrived(count) and message is not None:
            self._above.hear()
            action, args = message
            action(*args)
            if life == self.life and self._above.owes_count and self._is_open_above:
                self._send_down(None)

    def _come_down(self, life: int, count: int, message: Message | None) -> None:
        if life == self.life and self._below.arrived(count) and message is not None:
            self._below.hear()
            action, args = message
            action(*args)
            if life == self.life and self._below.owes_count and self._is_open_below:
                self._send_up(None)

    def end(self, action: Action, *args: Any) -> None:
        """Let the server find out that the rank's process is gone, after the last messages of it."""
        world = self._replica.world
        time = max(world.now + world.latency(), self._up_at)
        world.at(time, self._replica.server, action, *args)

    # -- sessions

    def break_off(self) -> bool:
        """End the session, with what is on its way; return False if there is none."""
        world = self._replica.world
        if self._rank.state == DEAD or not self._replica.is_alive:
            return False
        if not self._is_open_above and not self._is_open_below:
            return False
        self.life += 1
        self._is_open_above = self._is_open_below = False
        world.tell(self._rank.name, "and its server lose their session")
        world.after(world.latency(), self._replica.server, self._see_end_above, self.life)
        world.after(world.latency(), self._rank, self._see_end_below, self.life)
        return True

    def _see_end_above(self, life: int) -> None:
        if life == self.life:
            self._replica.world.after(
                self._grace_s(self._replica.server), self._replica.server, self._suspect_above, life
            )

    def _see_end_below(self, life: int) -> None:
        if life != self.life:
            return
        rank, world = self._rank, self._replica.world
        world.after(self._grace_s(rank), rank, self._suspect_below, life)
        again = (life, self._below.tell_count(), rank)
        world.after(world.latency(), self._replica.server, self.hear_register, *again)

    def hear_register(self, life: int, count: int, rank: Rank) -> None:
        """Open a session of the process that speaks for the rank, and of no other one."""
        replica, world = self._replica, self._replica.world
        if life != self.life or rank.state == DEAD:
            return
        if not replica.core.rank_registered(rank.number, rank.process):
            world.tell(replica.replica_id, "refuses a process as rank", rank.number)
            world.after(world.latency(), rank, rank.hear_group_lost)
            return
        if rank.process != self._process:
            self.life += 1
            world.tell(replica.replica_id, "takes another process for rank", rank.number)
            replica.replaced(rank)
            return
        self.life += 1
        self._above.arrived(count)
        self._is_open_above = True
        world.tell(rank.name, "has another session")
        told = self._above.tell_count()
        time = self._down_at = max(world.now + world.latency(), self._down_at)
        world.at(time, rank, self._hear_registered, self.life, told)
        repeat = self._above.to_repeat
        replica.trust(rank.number)
        for message in repeat:
            self._send_down(message)

    def _hear_registered(self, life: int, count: int) -> None:
        if life == self.life:
            self._below.arrived(count)
            self._is_open_below = True
            for message in self._below.to_repeat:
                self._send_up(message)

    # -- suspicion

    def _grace_s(self, process: Process) -> float:
        """Return how long another session is awaited, for longer by a process that was stopped just now."""
        world = self._replica.world
        keepalive_s = world.scenario.keepalive_s
        return keepalive_s if world.now < process.resumed_at + keepalive_s else RESUME * keepalive_s

    def _suspect_above(self, life: int) -> None:
        if life == self.life:
            self._replica.suspect(self._rank.number)
            self._wait_above(life, self._replica.world.heard(self._replica.server))

    def _wait_above(self, life: int, since: float) -> None:
        """Wait for the dead time, in which this process could hear."""
        world, server = self._replica.world, self._replica.server
        if life != self.life:
            return
        left_s = since + world.scenario.dead_s - world.cores.heard(world, server)
        if left_s > TINY_S:
            world.after(left_s, server, self._wait_above, life, since)
        else:
            self._replica.give_up(self._rank.number, world.heard(server) - since)

    def _suspect_below(self, life: int) -> None:
        if life == self.life:
            self._rank.hear_suspected()
            self._wait_below(life, self._replica.world.heard(self._rank))

    def _wait_below(self, life: int, since: float) -> None:
        world, rank = self._replica.world, self._rank
        if life != self.life:
            return
        left_s = since + world.scenario.dead_s - world.cores.heard(world, rank)
        if left_s > TINY_S:
            world.after(left_s, rank, self._wait_below, life, since)
        else:
            world.checker.ended_for_silence(rank.name, world.heard(rank) - since)
            rank.hear_group_lost()
