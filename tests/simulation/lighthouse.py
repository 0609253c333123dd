"""The lighthouse's shell in the simulation: messages in, the real quorum core, messages out.

It does over the simulated network what `lighthouse/server.py` does over gRPC, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lighthouse.core.claims import Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import (
    NO_QUORUM,
    Decision,
    FindMembers,
    HoldQuorum,
    LeftOut,
    Member,
    MemberLost,
    Quorum,
    QuorumBroken,
    QuorumFormed,
    QuorumOver,
    QuorumReleased,
    Refused,
)
from lighthouse.core.identity import Identity
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from tests.simulation.replica import LIARS_STEP
from tests.simulation.restarting import Desk
from tests.simulation.scenario import STRANGER, TINY_S
from tests.simulation.world import DEAD, LIGHTHOUSE, RUNNING, Process, Session

if TYPE_CHECKING:
    from tests.simulation.world import World
    from torchft_like.core.replica_group import Effect

STRANGERS_STEP = 1_000_000


class SimLighthouse(Process):
    """A lighthouse that comes and goes; its sessions and its memory go with it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        scenario = world.scenario
        self._world = world
        self._config = LighthouseConfig(
            min_replicas=scenario.min_replicas,
            replicas=scenario.replicas,
            join_timeout_ms=int(scenario.join_timeout_s * 1000),
            reconnect_grace_ms=int(scenario.compute_s * 8000),
            start_grace_ms=int(scenario.compute_s * 500),
            standing_lease_ms=max(1, int(scenario.lease_s * 1000)),
            sick_pause_ms=int(scenario.compute_s * 4000),
            sick_pause_max_ms=int(scenario.compute_s * 30_000),
            keepalive_time_ms=max(10, int(scenario.keepalive_s * 500)),
            keepalive_timeout_ms=max(10, int(scenario.keepalive_s * 500)),
        )
        self._numbers = self._strangers = 0
        self._life = 0
        self.sessions: dict[int, Session] = {}
        self.quorum: Quorum | None = None  # the last one
        self._last: tuple[Member, ...] = ()  # its members, if it was formed since the start
        self._opening: dict[Session, None] = {}  # connected, not registered yet
        self._core: QuorumCore
        self.desk: Desk  # for spare ranks
        self.start()

    @property
    def healthy(self) -> int:
        """The number of replicas that the core holds to be healthy."""
        return len(self._core)

    @property
    def _now(self) -> float:
        """The time by which the core measures silence."""
        return self._world.cores.heard(self._world, self)

    # -- life

    def start(self) -> None:
        """Start with nothing but the wall clock."""
        world = self._world
        self.state = RUNNING
        self._last = ()
        self._life += 1
        self._armed = float("inf")
        first_id = int((world.now + world.wall_clock_s) * 1000)
        self._core = world.cores.lighthouse(self._config, first_id)
        self.desk = Desk(world)
        for number in range(world.scenario.idle):
            self._core.register(-1 - number, f"idle:{number}", QuorumNumber(NO_QUORUM, 0), (), self._now)
        world.checker.lighthouse_started()
        world.tell("lighthouse", "starts", f"first quorum id {first_id}")

    def crash(self) -> None:
        """Die: the system closes the connections, where it can reach the other side."""
        world = self._world
        self.state = DEAD
        self.inbox.clear()
        self.desk.end()
        sessions = [*self.sessions.values(), *self._opening]
        self.sessions, self._opening = {}, {}
        for session in sessions:
            session.server_open = False
            world.send_down(session, session.replica.line_ended, session)
        world.checker.lighthouse_died()
        world.tell("lighthouse", "dies")

    # -- messages

    def accept(self, session: Session) -> None:
        """Accept a connection: the system does so even for a process that is stopped."""
        self._opening[session] = None

    def hear_register(
        self, session: Session, last: QuorumNumber, last_ids: tuple[str, ...], stands: bool, past: Past
    ) -> None:
        """Handle the first message of a session."""
        if session.lost_up or not session.server_open:
            return
        world = self._world
        del self._opening[session]
        self._numbers = session.number = self._numbers + 1
        self.sessions[session.number] = session
        replica, core = session.replica, self._core
        if due := core.advance(self._now):  # decisions that were due before it came
            self._apply(due)
        has_no_place = last.quorum_id <= 0 and not core.sign_of(replica.replica_id)
        is_spare = replica.is_spare and has_no_place
        world.checker.connected(replica.replica_id, last.quorum_id, is_spare=is_spare)
        world.tell("lighthouse", "registers", replica.replica_id, "session", session.number, "last", *last)
        world.send_down(session, replica.hear_registered, session)
        core.reported(replica.replica_id, past)
        seen = last, last_ids, self._now, stands
        self._apply(core.register(session.number, replica.replica_id, *seen, replica.is_spare))

    def hear_identity(self, session: Session, identity: Identity) -> None:
        """Handle what a replica group says of itself."""
        if not (session.lost_up or not session.server_open):
            self._apply(self._core.identify(session.number, identity, self._now))

    def hear_stranger(self) -> str | None:
        """Handle a trainer of another job, which says who it is and asks at a step that is far ahead; return
        its id. While it is neither refused nor let in, no other comes: two could be a job.
        """
        if f"{STRANGER}:{self._strangers}" in self._core:
            return None
        self._strangers += 1
        session, replica_id = -1000 - self._strangers, f"{STRANGER}:{self._strangers}"
        core, identity = self._core, Identity("another job", first_quorum_id=1)
        self._apply(core.register(session, replica_id, QuorumNumber(NO_QUORUM, 0), (), self._now))
        self._apply(core.identify(session, identity, self._now))
        self._apply(core.join(session, Member(replica_id, STRANGERS_STEP), self._now))
        return replica_id

    def hear_join(self, session: Session, member: Member) -> None:
        """Handle a replica group's request for a quorum."""
        if session.lost_up or not session.server_open:
            return
        world = self._world
        if world.story is not None:
            version = f"step {member.step} of quorum {member.commit_quorum_id}"
            failures = f", {member.commit_failures} failures" if member.commit_failures else ""
            world.tell("lighthouse", "hears a join", f"of {member.replica_id}: {version}{failures}")
        world.checker.asked(session.replica.replica_id, member.commit_quorum_id)
        self._apply(self._core.join(session.number, member, self._now))

    def hear_holds(self, session: Session, number: QuorumNumber, step: int | None) -> None:
        """Handle a replica group that holds before a step of the quorum that stands, or gives that up."""
        if session.lost_up or not session.server_open:
            return
        world = self._world
        if step is None:
            world.tell("lighthouse", "hears that", session.replica.replica_id, "gives up", *number)
            world.checker.gave_up(session.replica.replica_id, number)
            self._apply(self._core.give_up(session.number, number, self._now))
            return
        world.tell("lighthouse", "hears that", session.replica.replica_id, "holds before attempt", step)
        self._apply(self._core.hold(session.number, number, step, self._now))

    def hear_links(self, session: Session, unreachable: tuple[str, ...]) -> None:
        """Handle a replica group's report of peers that it cannot reach."""
        if session.lost_up or not session.server_open:
            return
        world = self._world
        world.tell("lighthouse", "hears that", session.replica.replica_id, "cannot reach", *unreachable)
        self._apply(self._core.report_links(session.number, unreachable, self._now))

    def hear_leave(self, session: Session, step: int, quorum_id: int) -> None:
        """Handle a replica group's goodbye."""
        if session.lost_up or not session.server_open:
            return
        world = self._world
        world.tell("lighthouse", "hears the leave of", session.replica.replica_id)
        if self._core.replica_of(session.number) is not None:
            world.checker.disconnected(session.replica.replica_id)
        self._apply(self._core.leave(session.number, self._now, step, quorum_id))
        self._end(session)

    def line_ended(self, session: Session) -> None:
        """Handle the end of a session without a leave."""
        if not session.server_open:
            return
        session.server_open = False
        if session.client_open:
            self._world.send_down(session, session.replica.line_ended, session)
        if self.sessions.pop(session.number, None) is None:
            self._opening.pop(session, None)
            return
        world = self._world
        replica_id = session.replica.replica_id
        world.tell("lighthouse", "sees the end of session", session.number, "of", replica_id)
        if self._core.replica_of(session.number) is not None:
            world.checker.disconnected(replica_id)
        recovery_s = world.scenario.keepalive_s
        if world.now < self.resumed_at + recovery_s:  # it was stopped: who lives comes back first
            world.after(recovery_s, self, self._closed, session.number, self._life)
        else:
            self._apply(self._core.lost(session.number, "its connection ended", self._now))

    # -- decisions

    def _apply(self, decisions: list[Decision]) -> None:
        world, sessions = self._world, self.sessions
        for decision in decisions:
            if isinstance(decision, QuorumFormed):
                self._announce(decision)
            elif isinstance(decision, MemberLost):
                if world.story is not None:
                    where = f"of quorum {decision.quorum_id}, tells {len(decision.sessions)} sessions"
                    world.tell("lighthouse", "has lost", f"{decision.replica_id} {where}")
                self._alarm(decision, decision.sessions)
            elif isinstance(decision, QuorumBroken):
                world.tell("lighthouse", "says that it broke for", decision.replica_id)
                self._alarm(decision, decision.sessions)
            elif isinstance(decision, LeftOut):
                self._leave_out(decision)
            elif isinstance(decision, Refused):
                self._refuse(decision)
            elif isinstance(decision, HoldQuorum | QuorumReleased):
                self._hold_or_release(decision)
            elif isinstance(decision, FindMembers):
                world.tell("lighthouse", "looks for", *decision.replica_ids)
                world.after(2 * world.latency(), self, self._find, decision.replica_ids, self._life)
            elif isinstance(decision, QuorumOver):
                if decision.session in sessions:
                    world.tell("lighthouse", "says that it is over to", decision.replica_id)
                    if decision.must_answer:
                        world.checker.told_to_give_up(decision.quorum_id)
                    self._alarm(decision, (decision.session,))
            elif (older := sessions.get(decision.session)) is not None:
                world.tell("lighthouse", "ends the older session", older.number, "of", decision.replica_id)
                self._end(older)
        self._arm()

    def _find(self, replica_ids: Sequence[str], life: int) -> None:
        """Tell the core whose processes are gone, among those that can be reached."""
        world = self._world
        for replica_id in replica_ids if life == self._life else ():
            replica = world.homes[f"http://{replica_id}"]
            if not replica.is_alive and not world.is_cut(replica.slot, LIGHTHOUSE):
                world.tell("lighthouse", "finds that", replica_id, "is gone")
                self._apply(self._core.gone(replica_id, self._now))

    def _alarm(self, decision: MemberLost | QuorumBroken | QuorumOver, numbers: Iterable[int]) -> None:
        for number in numbers:
            if (session := self.sessions.get(number)) is not None:
                is_alive = type(decision) is QuorumBroken
                must_answer = isinstance(decision, QuorumOver) and decision.must_answer
                lost = decision.quorum_id, decision.replica_id, "lost", is_alive, b"", must_answer
                self._send(session, session.replica.core.member_lost, *lost)

    def _leave_out(self, left: LeftOut) -> None:
        self._world.tell("lighthouse", "leaves out", *left.replica_ids, "for", *left.links)
        for number, _ in left.sessions:
            if (session := self.sessions.get(number)) is not None:
                self._send(session, session.replica.core.left_out, left.quorum_id, ())

    def _refuse(self, refused: Refused) -> None:
        self._world.tell("lighthouse", "refuses", refused.replica_id, refused.reason)
        if (session := self.sessions.get(refused.session)) is not None:
            self._world.checker.disconnected(refused.replica_id)
            self._send(session, session.replica.core.refused, "its state began elsewhere")

    def _hold_or_release(self, decision: HoldQuorum | QuorumReleased) -> None:
        world, number = self._world, QuorumNumber(decision.quorum_id, decision.round)
        for each in decision.sessions:
            if (session := self.sessions.get(each)) is None:
                continue
            replica = session.replica
            if isinstance(decision, HoldQuorum):
                world.tell("lighthouse", "asks", replica.replica_id, "to hold")
                self._send(session, replica.core.hold, *number)
            else:
                world.tell("lighthouse", "tells", replica.replica_id, "to ask at attempt", decision.ask_at)
                self._send(session, replica.core.released, *number, decision.ask_at)

    def _announce(self, formed: QuorumFormed) -> None:
        world, quorum = self._world, formed.quorum
        self._look_for_liars(quorum)
        self._look_for_lost_steps(quorum)
        self.quorum, self._last = quorum, quorum.participants
        ids = tuple([member.replica_id for member in quorum.participants])
        if world.story is not None:
            verb = "forms, to stand," if quorum.stands else "forms"
            world.tell("lighthouse", verb, f"quorum {quorum.quorum_id}/{quorum.round} of {' '.join(ids)}")
        if formed.unproven:
            world.tell("lighthouse", "does not believe", *formed.unproven)
        shrinks = any(member.shrink_only for member in quorum.participants)
        last = QuorumNumber(quorum.quorum_id, quorum.round)
        world.checker.announced(last, ids, quorum.stands, shrinks)
        for number in formed.sessions:
            session = self.sessions.get(number)
            if session is not None:
                world.send_down(session, session.replica.hear_quorum, session, quorum)

    def _send(self, session: Session, act: Callable[..., Sequence[Effect]], *told: Any) -> None:
        """Send what the replica group's core is to act on."""
        self._world.send_down(session, session.replica.hear, session, act, *told)

    def _look_for_liars(self, quorum: Quorum) -> None:
        """Check that no liar is believed while members of the last quorum show how far the job is. Where none
        does, all are believed; as a liar gives nobody the state, its operators end it.
        """
        world, last = self._world, self.quorum.participants if self.quorum is not None else ()
        liars = [
            i for i, step, *_ in quorum.participants if step == LIARS_STEP and not i.startswith(STRANGER)
        ]
        for liar in liars:
            step = max((member.step for member in last), default=0)
            ids = {m.replica_id for m in last} & {m.replica_id for m in quorum.participants}
            if any(world.homes[f"http://{i}"].shows(step) for i in ids):
                world.checker.violate("no_regress", f"{liar} is believed, and others show more than it")
            world.after(TINY_S, world.nobody, world.homes[f"http://{liar}"].die, "it has no state")

    def _look_for_lost_steps(self, quorum: Quorum) -> None:
        """Check that no steps are lost that a member of the last quorum has which is there, and stays. A
        lighthouse that was restarted may have heard of an earlier quorum only.
        """
        world, last = self._world, self._last
        step = max((member.step for member in last), default=0)
        ids = {member.replica_id for member in quorum.participants}
        if any(member.step >= step for member in quorum.participants):
            return
        for absent in sorted({member.replica_id for member in last} - ids):
            if self._core.session_of(absent) is not None and world.homes[f"http://{absent}"].shows(step):
                world.checker.violate("no_regress", f"{absent} has step {step}, a quorum begins before it")

    def _end(self, session: Session) -> None:
        """End a session from this side."""
        self.sessions.pop(session.number, None)
        session.server_open = False
        self._world.send_down(session, session.replica.line_ended, session)
        self._world.after(0.0, self, self._closed, session.number, self._life)

    def _closed(self, number: int, life: int) -> None:
        if life == self._life:
            self._apply(self._core.lost(number, "ended", self._now))

    # -- time

    def _arm(self) -> None:
        deadline = self._core.next_deadline()
        if deadline is not None and deadline < self._armed:
            self._armed = deadline
            self._world.after(max(TINY_S, deadline - self._now), self, self._wake, self._life)

    def _wake(self, life: int) -> None:
        if life == self._life:
            self._armed = float("inf")
            self._apply(self._core.advance(self._now))
