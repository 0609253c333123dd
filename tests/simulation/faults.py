"""The faults that happen at a time: their victims, how long they last, and whether they were felt.

A fault is counted when it met something: a process that was alive, a session that was open, a message
that was held up. Each fault takes the same number of random draws in every case, so that leaving one
out, which is how a failure is made small, leaves the others as they were.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.checker import RunOverError
from tests.simulation.rank import VERDICT, Rank
from tests.simulation.replica import Replica
from tests.simulation.restarting import OF_SCRIPT
from tests.simulation.scenario import EVENT_KINDS, FAULTS_MIN, ORDER_KINDS
from tests.simulation.world import DEAD, LIGHTHOUSE, PAUSED, RUNNING, Process

if TYPE_CHECKING:
    from tests.simulation.restarting import Launch, Trainer
    from tests.simulation.simulation import Simulation

Draws = tuple[float, float, float]


class Faults:
    """Injects one fault after the other until it is told to stop.

    Args:
        only: the numbers of the faults that are to happen; all of them where it is None.
        injections: stop after so many, instead of after `FAULTS_MIN` that were felt.
    """

    def __init__(self, simulation: Simulation, only: Collection[int] | None, injections: int | None) -> None:
        self._simulation = simulation
        self._world = world = simulation.world
        scenario = world.scenario
        self._draw = random.Random(scenario.seed * 2).random
        self._gap = scenario.gap_s
        self._only = only
        self._injected_max = math.inf if injections is None else injections
        self._felt_max = FAULTS_MIN if injections is None else math.inf
        self._kinds: list[tuple[str, Callable[[Draws], str | None]]] = [
            (kind, partial(self._order, kind) if kind in ORDER_KINDS else getattr(self, f"_{kind}"))
            for kind in (*EVENT_KINDS, *ORDER_KINDS)
            if kind in scenario.kinds
        ]
        self._cut: list[list[tuple[int, int]]] = []
        self._torn: list[list[tuple[Trainer, Trainer]]] = []
        self._cut_off_s = 0.0  # for so long, a quorum that stands is to be cut off from the lighthouse
        self._is_over = False
        self.count = 0

    def next(self) -> None:
        """Let one fault happen now and the next one a little later; end the run when there were enough."""
        draw, world = self._draw, self._world
        if self._is_over:
            return
        if world.faults >= self._felt_max or self.count >= self._injected_max:
            raise RunOverError
        gap, which, draws = draw(), draw(), (draw(), draw(), draw())
        # Faults come in bursts: most are close together, some come after a pause in which steps are
        # committed.
        world.after(self._gap * (0.2 + 12 * gap**6), world.nobody, self.next)
        number, self.count = self.count, self.count + 1
        self._cut_a_quorum_off()
        kinds = self._kinds
        if kinds and (self._only is None or number in self._only):
            kind, inject = kinds[int(which * len(kinds))]
            text = inject(draws)
            if text is not None:
                world.feel(kind)
                world.tell("FAULT", f"#{number} {kind}", text)

    def stop(self) -> None:
        """End all partitions, let stopped processes go on, and slow ones be as fast as before."""
        world = self._world
        self._is_over = True
        links = [link for cut in self._cut for link in cut]
        self._cut.clear()
        world.unblock(links)
        for pairs in list(self._torn):
            self._reunite(pairs)
        for process in self._simulation.processes():
            if process.state == PAUSED:
                world.resume(process)
        for replica in self._replicas():
            replica.slow = 1.0
            for rank in replica.ranks:
                rank.sick_until = 0.0

    # -- the victims

    def _replicas(self) -> list[Replica]:
        return [replica for replica in self._world.slots if replica is not None]

    def _replica(self, draw: float) -> Replica | None:
        replicas = self._replicas()
        return replicas[int(draw * len(replicas))] if replicas else None

    def _rank(self, draws: Draws) -> Rank | None:
        """Return a rank of a replica group; None if there is no group."""
        replica = self._replica(draws[0])
        return None if replica is None else replica.ranks[int(draws[1] * len(replica.ranks))]

    def _long(self, draw: float) -> float:
        """Return a time that is sometimes shorter than the keepalive, and sometimes much longer."""
        return self._world.scenario.keepalive_s * (0.1 + 3 * draw * draw)

    # -- sessions and connections

    def _session_break(self, draws: Draws) -> str | None:
        """Break the connection to the lighthouse, with the messages that are on their way."""
        replica, world = self._replica(draws[0]), self._world
        session = replica.session if replica is not None else None
        if replica is None or session is None or world.is_cut(replica.slot, LIGHTHOUSE):
            return None
        session.lost_up = draws[1] < 0.6
        session.lost_down = draws[1] > 0.4
        world.send_up(session, world.lighthouse.line_ended, session)
        world.send_down(session, replica.line_ended, session)
        lost = [" up"] * session.lost_up + [" down"] * session.lost_down
        return f"session of {replica.replica_id}; lost is what goes{''.join(lost)}"

    def _session_twice(self, draws: Draws) -> str | None:
        """Let the replica give its session up and open another; the lighthouse hears from both."""
        replica, world = self._replica(draws[0]), self._world
        session = replica.session if replica is not None else None
        if replica is None or session is None or not replica.is_alive:
            return None
        session.lost_down = True
        world.after(0.0, replica.server, replica.abandon, session)
        world.after(self._long(draws[1]), world.lighthouse, world.lighthouse.line_ended, session)
        return f"{replica.replica_id}; its older session lives on for {self._long(draws[1]):.3f} s"

    def _peer_reset(self, draws: Draws) -> str | None:
        """Break a connection of the process group."""
        rank = self._rank(draws)
        if rank is None or rank.group_mesh is None or rank.state == DEAD:
            return None
        rank.group_mesh.reset()
        return f"of {rank.name} in quorum {rank.group_mesh.quorum_id}"

    def _partition(self, draws: Draws) -> str | None:
        """Cut off halves, one place alone, the two sides of a bridge, or the next quorum that stands without
        a replica group, that one from the lighthouse; in both directions or in one.
        """
        world = self._world
        slots, time = world.scenario.replicas, self._long(draws[2])
        places = [LIGHTHOUSE, *range(slots)]
        one = places[int(draws[0] * len(places))]
        if draws[1] < 0.4:
            sides = [one], [place for place in places if place != one]
        elif draws[1] < 0.7:
            half = 1 + int(draws[0] * (slots - 1))
            sides = list(range(half)), list(range(half, slots))
            sides[int(draws[0] * 100) % 2].append(LIGHTHOUSE)
        elif draws[1] > 0.9:
            self._cut_off_s = 6 * time
            return None
        else:  # `one` can talk to both sides, which cannot talk to each other
            others = [place for place in places if place != one]
            half = 1 + int(draws[0] * 100) % (len(others) - 1)
            sides = others[:half], others[half:]
        links = [(a, b) for a in sides[0] for b in sides[1]]
        direction = int(draws[2] * 1000) % 4
        if direction == 0:
            links = [(b, a) for a, b in links]
        elif direction > 1:
            links += [(b, a) for a, b in links]
        links = [link for link in links if link not in world.blocked]
        if not links:
            return None
        self._cut_links(links, time)
        how = "cannot reach" if direction < 2 else "and back cannot reach"
        return f"{sides[0]} {how} {sides[1]} for {time:.3f} s ({LIGHTHOUSE}: lighthouse)"

    def _cut_a_quorum_off(self) -> None:
        world = self._world
        if self._cut_off_s and (members := world.checker.standing) and len(members) < world.scenario.replicas:
            links = [(a, b) for i in members for a, b in ((i, LIGHTHOUSE), (LIGHTHOUSE, i))]
            self._cut_links([link for link in links if link not in world.blocked], self._cut_off_s)
            world.feel("partition")
            world.tell(
                "FAULT", f"{members} cannot reach the lighthouse for {self._cut_off_s:.3f} s, nor back"
            )
            self._cut_off_s = 0.0

    def _link(self, draws: Draws) -> str | None:
        """Cut the link of two replica groups, or have it refuse, for longer than a collective may wait."""
        scenario = self._world.scenario
        one = int(draws[0] * scenario.replicas)
        other = (one + 1 + int(draws[1] * (scenario.replicas - 1))) % scenario.replicas
        links = [link for link in ((one, other), (other, one)) if link not in self._world.blocked]
        if not links:
            return None
        time = self._long(draws[2]) + scenario.timeout_s * (0.5 + 3 * draws[2])
        self._cut_links(links, time)
        how = "cannot reach"
        if self._world.refuses:
            self._world.refused.update(links)
            how = "refuse"
        return f"{one} and {other} {how} each other for {time:.3f} s"

    def _cut_links(self, links: list[tuple[int, int]], time: float) -> None:
        world = self._world
        self._cut.append(links)
        for link in links:
            world.blocked[link] = world.now
            slot = max(link)
            replica = world.slots[slot]
            if LIGHTHOUSE in link and replica is not None and replica.session is not None:
                world.probe(replica.session)
        world.after(time, world.nobody, self._mend, links)

    def _mend(self, links: list[tuple[int, int]]) -> None:
        if links in self._cut:
            self._cut.remove(links)
            self._world.unblock(links)

    # -- processes

    def _crash(self, draws: Draws) -> str | None:
        """Kill a replica group."""
        replica = self._replica(draws[0])
        if replica is None:
            return None
        replica.die("SIGKILL")
        return replica.replica_id

    def _rank_crash(self, draws: Draws) -> str | None:
        """Kill one rank of a replica group."""
        rank = self._rank(draws)
        if rank is None or rank.state == DEAD:
            return None
        rank.die("SIGKILL")
        return rank.name

    def _lighthouse_crash(self, draws: Draws) -> str | None:
        """Kill the lighthouse, perhaps before what it said last has reached all replica groups, and start it
        again with nothing in its memory.
        """
        lighthouse = self._world.lighthouse
        if lighthouse.state == DEAD:
            return None
        for number, session in lighthouse.sessions.items() if draws[1] < 0.5 else ():
            session.lost_down = number % 2 == int(draws[2] * 2)
        lighthouse.crash()
        self._simulation.restart_lighthouse(self._long(draws[0]) * 0.5)
        return f"for {self._long(draws[0]) * 0.5:.3f} s"

    def _pause(self, draws: Draws) -> str | None:
        """Stop a replica group, and let it go on later."""
        replica = self._replica(draws[0])
        if replica is None or any(rank.state != RUNNING for rank in replica.ranks):
            return None
        for rank in replica.ranks:
            self._stop(rank, self._long(draws[1]))
        if replica.session is not None:
            self._world.probe(replica.session)
        return f"{replica.replica_id} for {self._long(draws[1]):.3f} s"

    def _rank_pause(self, draws: Draws) -> str | None:
        """Stop one rank, and let it go on later."""
        replica = self._replica(draws[0])
        if replica is None:
            return None
        number = int(draws[2] * len(replica.ranks))
        rank, world = replica.ranks[number], self._world
        if rank.state != RUNNING:
            return None
        self.pause(rank)
        world.after(self._long(draws[1]), world.nobody, self._go_on, rank.parts[-1], world.now)
        silent_s = world.scenario.keepalive_s * 2.5 + world.scenario.dead_s + 4 * world.scenario.delay_s
        if number > 0:
            world.after(silent_s, world.nobody, self._expect_end, rank, replica, world.now, silent_s)
        return f"{rank.name} for {self._long(draws[1]):.3f} s"

    def pause(self, rank: Rank) -> None:
        """Stop a rank, and let the keepalive of its sessions find that out."""
        world, replica, number = self._world, rank.replica, rank.number
        world.pause(rank)
        if number == 0 and replica.session is not None:
            world.probe(replica.session)
        for other in range(1, len(replica.ranks)) if number == 0 else [number]:
            world.after(world.scenario.keepalive_s * 1.1, world.nobody, replica.probe_rank, other)

    def _expect_end(self, rank: Rank, replica: Replica, since: float, silent_s: float) -> None:
        """Check that a group whose rank was silent for so long is over, if the server could hear."""
        is_silent = rank.state == PAUSED and rank.paused_at == since
        server = replica.server
        could_hear = server.state == RUNNING and server.resumed_at < since
        if is_silent and could_hear and replica.core.lost_reason is None:
            self._world.checker.outlasted(rank.name)

    def _rank_session_break(self, draws: Draws) -> str | None:
        """Break the session of a rank, with the messages that are on their way; of one that waits for the
        votes of others, if there is any, which is stopped as well.
        """
        ranks = [rank for replica in self._replicas() for rank in replica.ranks[1:]]
        waiting = [rank for rank in ranks if rank.phase == VERDICT and rank.state == RUNNING]
        if not ranks:
            return None
        rank = (waiting or ranks)[int(draws[1] * len(waiting or ranks))]
        if not rank.replica.lines[rank.number].break_off():
            return None
        if waiting:
            self._stop(rank, self._long(draws[2]))
        return rank.name

    def _rank_replaced(self, draws: Draws) -> str | None:
        """Kill a rank, and let another process say that it is that rank before its end is noticed."""
        replica = self._replica(draws[0])
        if replica is None or len(replica.ranks) == 1 or replica.core.lost_reason is not None:
            return None
        number, world = 1 + int(draws[1] * (len(replica.ranks) - 1)), self._world
        rank, line = replica.ranks[number], replica.lines[number]
        if rank.state == DEAD or not replica.is_alive:
            return None
        line.break_off()
        other = Rank(replica, number)
        world.after(0.0, replica.server, line.hear_register, line.life, 0, other)
        rank.die("SIGKILL")
        return rank.name

    def _lighthouse_pause(self, draws: Draws) -> str | None:
        """Stop the lighthouse, and let it go on later."""
        world = self._world
        if world.lighthouse.state != RUNNING:
            return None
        self._stop(world.lighthouse, self._long(draws[0]))
        for session in list(world.lighthouse.sessions.values()):
            world.probe(session)
        return f"for {self._long(draws[0]):.3f} s"

    def _stop(self, process: Process, time: float) -> None:
        self._world.pause(process)
        self._world.after(time, self._world.nobody, self._go_on, process.parts[-1], self._world.now)

    def _go_on(self, process: Process, since: float) -> None:
        if process.state == PAUSED and process.paused_at == since:
            self._world.resume(process)

    def _slow(self, draws: Draws) -> str | None:
        """Let a replica group compute more slowly for a while."""
        replica = self._replica(draws[0])
        if replica is None or replica.slow > 1:
            return None
        replica.slow = 2 + 6 * draws[1]
        self._world.after(self._long(draws[2]) * 2, self._world.nobody, self._speed_up, replica)
        return f"{replica.replica_id} by {replica.slow:.1f}"

    def _speed_up(self, replica: Replica) -> None:
        replica.slow = 1.0

    def _sick(self, draws: Draws) -> str | None:
        """Break the process group of a rank, and let it fail whenever it is configured, for a while."""
        rank = self._rank(draws)
        if rank is None or rank.group_mesh is None or rank.state == DEAD:
            return None
        rank.sick_until = self._world.now + 4 * self._long(draws[2])
        rank.group_mesh.reset()
        return f"{rank.name} for {4 * self._long(draws[2]):.3f} s"

    def _clock_jump(self, draws: Draws) -> str | None:
        """Let the lighthouse's wall clock jump, and start it again by that clock."""
        world = self._world
        if world.lighthouse.state == DEAD:
            return None
        world.wall_clock_s += (draws[1] - 0.85) * 100
        world.lighthouse.crash()
        self._simulation.restart_lighthouse(self._long(draws[0]) * 0.3)
        return f"by {(draws[1] - 0.85) * 100:.1f} s"

    # -- processes that run their functions again

    def _try_error(self, draws: Draws) -> str | None:
        """Let the function of a rank raise an error that no step survives."""
        rank = self._rank(draws)
        if rank is None or rank.state != RUNNING:
            return None
        error = OF_SCRIPT[int(draws[2] * len(OF_SCRIPT))]
        rank.die(error)
        return f"{error} of {rank.name}"

    def _trainer_crash(self, draws: Draws) -> str | None:
        """Kill a process, of those that meet others or are on their way to them if there are any; or two."""
        trainers = [trainer for trainer in self._simulation.trainers() if trainer.launch is not None]
        busy = [trainer for trainer in trainers if trainer.rank is None]
        victims = (busy or trainers) if draws[1] < 0.8 else trainers
        if not victims:
            return None
        first = victims[int(draws[0] * len(victims))]
        others = (
            [t for t in trainers if t.launch is first.launch and t is not first] if draws[2] < 0.3 else []
        )
        for each in (first, *others[:1]):
            each.kill()
        return " and ".join(each.name for each in (first, *others[:1]))

    def _spare_crash(self, draws: Draws) -> str | None:
        """Kill a spare, of those on their way if there are any."""
        spares = [trainer for trainer in self._simulation.trainers() if trainer.is_spare]
        on_their_way = [spare for spare in spares if spare.launch is not None]
        if not spares:
            return None
        victims = on_their_way or spares
        victims[int(draws[0] * len(victims))].kill()
        return victims[int(draws[0] * len(victims))].name

    def _trainer_pause(self, draws: Draws) -> str | None:
        """Stop a process, of those that meet others or are on their way to them if there are any."""
        trainers = [t for t in self._simulation.trainers() if t.launch is not None and t.state == RUNNING]
        victims = [trainer for trainer in trainers if trainer.rank is None] or trainers
        if not victims:
            return None
        victim, time = victims[int(draws[0] * len(victims))], self._in_silence(draws)
        self._stop(victim, time)
        return f"{victim.name} for {time:.3f} s"

    def _trainer_cut(self, draws: Draws) -> str | None:
        """Cut the processes of a replica group into two sides, which do not hear each other for a while."""
        world = self._world
        launches = list(dict.fromkeys(t.launch for t in self._simulation.trainers() if t.launch is not None))
        launch = launches[int(draws[0] * len(launches))] if launches else None
        trainers = [] if launch is None else [each for each in launch.trainers if each.state != DEAD]
        if launch is None or len(trainers) < 2 or any(one in trainers for one, _ in world.apart):
            return None
        number = 1 + int(draws[0] * 1000) % (2 ** len(trainers) - 2)
        sides: tuple[list[Trainer], list[Trainer]] = [], []
        for bit, trainer in enumerate(trainers):
            sides[number >> bit & 1].append(trainer)
        pairs, time = [(one, other) for one in sides[0] for other in sides[1]], self._in_silence(draws)
        world.apart += pairs
        self._torn.append(pairs)
        world.after(time, world.nobody, self._reunite, pairs)
        world.after(1.1 * world.scenario.dead_s, world.nobody, self._lose_try, launch, pairs)
        names = [" and ".join(trainer.name for trainer in side) for side in sides]
        return f"{names[0]} cannot hear {names[1]} for {time:.3f} s"

    def _in_silence(self, draws: Draws) -> float:
        """Return a time that is often longer than a process may be silent."""
        scenario = self._world.scenario
        return self._long(draws[1]) + 3 * draws[2] * min(scenario.dead_s, 3 * scenario.keepalive_s)

    def _lose_try(self, launch: Launch, pairs: list[tuple[Trainer, Trainer]]) -> None:
        """End the try of a replica group whose ranks do not hear each other."""
        torn = [trainer for trainer in launch.trainers if trainer.is_torn] if pairs in self._torn else []
        for trainer in torn:
            if trainer.rank is not None and trainer.rank.state == RUNNING:
                trainer.rank.die("its replica group is lost")

    def _reunite(self, pairs: list[tuple[Trainer, Trainer]]) -> None:
        if pairs in self._torn:
            self._torn.remove(pairs)
            self._world.reunite(pairs)

    # -- training scripts

    def _report_error(self, draws: Draws) -> str | None:
        """Let the script report an error in its step."""
        rank = self._rank(draws)
        return rank.name if rank is not None and rank.state == RUNNING and rank.report_error() else None

    def _give_up(self, draws: Draws) -> str | None:
        """Let the script begin the next step without a verdict on this one."""
        rank = self._rank(draws)
        return rank.name if rank is not None and rank.state == RUNNING and rank.give_up() else None

    def _time_out(self, draws: Draws) -> str | None:
        """Let what a rank waits for take longer than its timeout."""
        rank = self._rank(draws)
        if rank is None or rank.state != RUNNING or not rank.time_out(is_noticed=draws[2] < 0.5):
            return None
        return rank.name

    def _order(self, kind: str, draws: Draws) -> None:
        """Have the script of a rank do something once, at the next place where it can; that is felt then."""
        if (rank := self._rank(draws)) is not None:
            rank.orders.setdefault(kind, draws[2])

    def _foreign(self, draws: Draws) -> str | None:
        """Let a trainer of another job come to this lighthouse."""
        lighthouse = self._world.lighthouse
        return lighthouse.hear_stranger() if lighthouse.state == RUNNING else None

    def _late_error(self, draws: Draws) -> str | None:
        """Let a callback of a past quorum report its error only now."""
        rank = self._rank(draws)
        if rank is None or rank.state != RUNNING or not rank.hear_late_error():
            return None
        return f"{rank.name}, of quorum {rank.failed_quorum}"

    def _leave(self, draws: Draws) -> str | None:
        """Ask one rank to stop; its group leaves, and another start of it joins later."""
        rank = self._rank(draws)
        if rank is None or rank.stop_wanted or rank.state == DEAD:
            return None
        rank.stop_wanted = True
        return rank.name
