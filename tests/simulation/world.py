"""Virtual time, chance and the network: the world of the simulated processes.

One heap of events is the whole machine. An event belongs to a process: a dead one never sees it, a stopped
one sees it when it goes on. Nothing here reads a clock, and every random draw comes from one of two
generators that the seed determines, so that a seed is a history.

A session is what gRPC gives: two streams, each in order and without duplicates, until it ends. A break loses
what is on its way in either direction, and each side learns of it in its own time. So a message is lost,
duplicated or overtaken only across sessions, or between different connections.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol

from tests.simulation.checker import Checker, RunOverError
from tests.simulation.scenario import HELD_UP, KINDS, STEP_KINDS, Scenario

if TYPE_CHECKING:
    from tests.simulation.cores import Cores
    from tests.simulation.lighthouse import SimLighthouse
    from tests.simulation.mesh import Mesh
    from tests.simulation.replica import Replica
    from tests.simulation.restarting import Launch, Store, Trainer

RUNNING, PAUSED, DEAD = 0, 1, 2
LIGHTHOUSE = -1  # the lighthouse's place in the network; replica groups have 0, 1, ...
OVERTAKE_STEPS = 6.0

Action = Callable[..., object]


class Process:
    """A process that runs, is stopped or is dead. Events that reach it while it is stopped wait."""

    def __init__(self) -> None:
        self.state = RUNNING
        self.paused_at = self.away_s = 0.0
        self.resumed_at = -math.inf
        self.inbox: list[tuple[Action, tuple[Any, ...]]] = []

    @property
    def parts(self) -> tuple[Process, ...]:
        """What stops and goes on with it."""
        return (self,)


class Session:
    """A stream in each direction between a replica group and the lighthouse."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.number = 0  # given by the lighthouse when the session is registered
        self.client_open = True
        self.server_open = True
        self.lost_up = self.lost_down = False  # messages that are still on their way will not arrive
        # The time at which the last message arrives: streams keep their order.
        self.up_at = self.down_at = 0.0
        self.held_up: list[tuple[Action, tuple[Any, ...]]] = []
        self.held_down: list[tuple[Action, tuple[Any, ...]]] = []


class Launcher(Protocol):
    """Starts replica groups again."""

    def died(self, replica: Replica) -> None:
        """Start this replica group again: its ManagerServer is gone."""

    def begin_try(self, launch: Launch, trainers: Sequence[Trainer]) -> None:
        """Begin a try of a replica group, for which these processes have met."""

    def launch_over(self, launch: Launch) -> None:
        """Start this replica group again: all of its processes have ended."""

    def spare_over(self) -> None:
        """Start another spare: one has ended, or taken a place."""


class World:
    """One run. `story` collects its events for a person to read, or is None."""

    def __init__(self, scenario: Scenario, cores: Cores, *, story: bool = False) -> None:
        self.scenario = scenario
        self.cores = cores
        self.now = 0.0
        self.random = random.Random(scenario.seed * 2 + 1).random
        self.checker = Checker(self)
        self.story: list[tuple[Any, ...]] | None = [] if story else None
        self.felt = dict.fromkeys((*KINDS, *STEP_KINDS), 0)
        self.faults = 0
        self.events = 0
        self.wall_clock_s = 1_000.0  # the lead of the wall clock over virtual time
        self.slots: list[Replica | None] = [None] * (scenario.replicas + scenario.spares)
        self.homes: dict[str, Replica] = {}  # every incarnation, by its address
        self.saved: dict[tuple[int, int], tuple[int, dict[str, int]]] = {}
        self.stores: dict[str, Store] = {}  # in which processes meet between two tries
        # Pairs of processes that cannot talk between two tries, and what they have sent each other.
        self.apart: list[tuple[Trainer, Trainer]] = []
        self._held: list[tuple[Trainer, Trainer, Action, tuple[Any, ...]]] = []
        self.meshes: dict[tuple[str, int, int], Mesh] = {}
        # From, to: the time since which no message gets through.
        self.blocked: dict[tuple[int, int], float] = {}
        # Whether links that do not work, and the hosts of dead processes, refuse connections at once. In the
        # other runs nothing comes back over a link, and a process has died after it was probed.
        self.refuses = scenario.seed % 5 == 3
        self.refused: set[tuple[int, int]] = set()  # those of the blocked links that do
        self.stalled: list[Callable[[], object]] = []  # to be tried again when a partition ends
        self.lighthouse: SimLighthouse
        self.launcher: Launcher
        self.is_ending = False  # all are asked to stop, and no process is started any more
        self.nobody = Process()  # the process of the network's own events
        self.heap: list[tuple[float, int, Process, Action, tuple[Any, ...]]] = []
        self._sequence = 0
        self._processes = 0
        self._runs = 0
        self._base = scenario.latency_s
        self._delay_rate = scenario.delay_rate if "delay" in scenario.kinds else 0.0
        self._overtake_rate = scenario.overtake_rate if "overtake" in scenario.kinds else 0.0
        self.heal_break_rate = scenario.heal_break_rate if "heal_break" in scenario.kinds else 0.0

    # -- time

    def after(self, delay: float, process: Process, action: Action, *args: Any) -> None:
        """Call `action` in `delay` seconds, if `process` lives then."""
        self.at(self.now + delay, process, action, *args)

    def at(self, time: float, process: Process, action: Action, *args: Any) -> None:
        """Call `action` at a time, after what is to happen then already, if `process` lives then."""
        self._sequence += 1
        heappush(self.heap, (time, self._sequence, process, action, args))

    def go_on(self, lag_s: float, process: Process, action: Action, *args: Any) -> None:
        """Call `action` in the thread of a process that goes on after so long."""
        if lag_s > 0:
            self.after(lag_s, process, action, *args)
        else:
            action(*args)

    def lag_s(self) -> float:
        """How long a thread takes to go on with what another one of its process has handed to it."""
        return self.scenario.thread_s * self.random() if self.scenario.thread_s else 0.0

    def run(self, until: float, events_max: int) -> None:
        """Let time pass until `until`, until the checker has seen enough, or until `events_max` events have
        happened.
        """
        heap, pop = self.heap, heappop
        self._runs += 1
        self.after(until - self.now, self.nobody, self._stop, self._runs)
        events = self.events
        last = events + events_max
        try:
            while events < last:
                events += 1
                self.now, _, process, action, args = pop(heap)
                if not process.state:
                    action(*args)
                elif process.state == PAUSED:
                    process.inbox.append((action, args))
        except RunOverError:
            return
        finally:
            self.events = events

    def stop(self) -> None:
        """Let no more time pass, once the present event is over."""
        self.after(0.0, self.nobody, self._stop, self._runs)

    def _stop(self, run: int) -> None:
        if run == self._runs:
            raise RunOverError

    def pause(self, process: Process) -> None:
        """Stop a process, as SIGSTOP does."""
        for each in process.parts:
            if each.state == RUNNING:
                each.state = PAUSED
                each.paused_at = self.now

    def resume(self, process: Process) -> None:
        """Let a process go on, as SIGCONT does: the events that waited happen now, in their order."""
        for each in process.parts:
            if each.state != PAUSED:
                continue
            each.state = RUNNING
            each.resumed_at = self.now
            each.away_s += self.now - each.paused_at
            inbox, each.inbox = each.inbox, []
            for action, args in inbox:
                self.after(0.0, each, action, *args)

    def heard(self, process: Process) -> float:
        """Return for how long a process that runs was not stopped, since the beginning."""
        return self.now - process.away_s

    # -- chance

    def next_process(self) -> int:
        """Return a number for a process."""
        self._processes += 1
        return self._processes

    def feel(self, kind: str) -> None:
        """Count a fault that the network or a process has felt."""
        self.faults += 1
        self.felt[kind] += 1

    def tell(self, *event: Any) -> None:
        """Write an event into the story, for a person to read."""
        if self.story is not None:
            self.story.append((self.now, *event))

    def latency(self) -> float:
        """Return how long a message takes."""
        chance = self.random
        time = self._base * (0.5 + chance())
        if self._delay_rate and chance() < self._delay_rate:
            self.faults += 1
            self.felt["delay"] += 1
            time += chance() * self.scenario.delay_s
        if self._overtake_rate and chance() < self._overtake_rate:
            self.feel("overtake")
            time += chance() * self.scenario.compute_s * OVERTAKE_STEPS
        return time

    def calm(self) -> None:
        """Hold up no message any more."""
        self._delay_rate = self._overtake_rate = self.heal_break_rate = 0.0

    # -- links

    def is_cut(self, one: int, other: int) -> bool:
        """Return whether two places cannot talk: a stream needs both directions to go on."""
        blocked = self.blocked
        return bool(blocked) and ((one, other) in blocked or (other, one) in blocked)

    def are_cut(self, places: list[int]) -> bool:
        """Return whether any two of these places cannot talk."""
        return bool(self.blocked) and any(one in places and other in places for one, other in self.blocked)

    def are_refused(self, places: list[int]) -> bool:
        """Return whether of any two of these places one refuses the other's connections."""
        return bool(self.refused) and any(one in places and other in places for one, other in self.refused)

    def unblock(self, links: list[tuple[int, int]]) -> None:
        """End a partition: messages that were held up arrive, if their session has lived so long."""
        for link in links:
            self.blocked.pop(link, None)
            self.refused.discard(link)
        for replica in self.slots:
            session = replica.session if replica is not None else None
            if replica is not None and session is not None:
                self._release(session, replica)
        for session in list(self.lighthouse.sessions.values()):
            self._release(session, session.replica)
        stalled, self.stalled = self.stalled, []
        for retry in stalled:
            retry()

    def _release(self, session: Session, replica: Replica) -> None:
        if session.held_up and (replica.slot, LIGHTHOUSE) not in self.blocked:
            held, session.held_up = session.held_up, []
            for action, args in held:
                self._up(session, action, args)
        if session.held_down and (LIGHTHOUSE, replica.slot) not in self.blocked:
            held, session.held_down = session.held_down, []
            for action, args in held:
                self._down(session, action, args)

    def are_apart(self, one: Trainer, other: Trainer) -> bool:
        """Return whether two processes of a replica group cannot talk."""
        apart = self.apart
        return bool(apart) and ((one, other) in apart or (other, one) in apart)

    def send(self, sender: Trainer, receiver: Trainer, action: Action, *args: Any) -> None:
        """Send a message from one process to another, of those that meet between two tries."""
        if self.apart and self.are_apart(sender, receiver):
            self.feel(HELD_UP)
            self._held.append((sender, receiver, action, args))
        else:
            self.after(self.latency(), receiver, action, *args)

    def reunite(self, pairs: list[tuple[Trainer, Trainer]]) -> None:
        """Let processes talk again: what they have sent arrives."""
        for pair in pairs:
            self.apart.remove(pair)
        held, self._held = self._held, []
        for sender, receiver, action, args in held:
            self.send(sender, receiver, action, *args)

    def send_up(self, session: Session, action: Action, *args: Any) -> None:
        """Send a message to the lighthouse."""
        if self.blocked and (session.replica.slot, LIGHTHOUSE) in self.blocked:
            self.feel(HELD_UP)
            session.held_up.append((action, args))
        else:
            self._up(session, action, args)

    def send_down(self, session: Session, action: Action, *args: Any) -> None:
        """Send a message to the replica group."""
        if self.blocked and (LIGHTHOUSE, session.replica.slot) in self.blocked:
            self.feel(HELD_UP)
            session.held_down.append((action, args))
        else:
            self._down(session, action, args)

    def _up(self, session: Session, action: Action, args: tuple[Any, ...]) -> None:
        session.up_at = max(self.now + self.latency(), session.up_at)
        self.at(session.up_at, self.lighthouse, action, *args)

    def _down(self, session: Session, action: Action, args: tuple[Any, ...]) -> None:
        session.down_at = max(self.now + self.latency(), session.down_at)
        self.at(session.down_at, session.replica.server, action, *args)

    def probe(self, session: Session) -> None:
        """Let the keepalive of both sides notice in a while if a session is dead."""
        wait = self.scenario.keepalive_s
        self.after(wait * (1 + 0.3 * self.random()), self.nobody, self._probe_client, session)
        self.after(wait * (1 + 0.3 * self.random()), self.nobody, self._probe_server, session)

    def _probe_client(self, session: Session) -> None:
        lighthouse = self.lighthouse
        if session.client_open and self._is_dead(session, lighthouse):
            self.after(0.0, session.replica.server, session.replica.line_ended, session)
            self.probe(session)

    def _probe_server(self, session: Session) -> None:
        is_dead = not session.client_open or self._is_dead(session, session.replica.server)
        if session.server_open and is_dead:
            self.after(0.0, self.lighthouse, self.lighthouse.line_ended, session)

    def _is_dead(self, session: Session, far_end: Process) -> bool:
        """Return whether no PING was answered for the time of the keepalive."""
        limit = self.now - self.scenario.keepalive_s
        slot = session.replica.slot
        for link in ((slot, LIGHTHOUSE), (LIGHTHOUSE, slot)):
            if self.blocked.get(link, self.now) <= limit:
                return True
        return far_end.state == DEAD or (far_end.state == PAUSED and far_end.paused_at <= limit)
