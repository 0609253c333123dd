"""A replica group's ManagerServer in the simulation: the shell around the real `ReplicaGroup`.

It lives in the process of rank 0. Towards the lighthouse it keeps one session open, as `LighthouseLink` does,
unless it waits for a rank; towards each other rank it has a line (`rank_line.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from lighthouse.core.claims import Past
from lighthouse.core.decisions import Member, Quorum
from lighthouse.core.membership import QuorumNumber
from tests.simulation.rank import AGREE, OF_EARLIER_RUN, VERDICT, Rank
from tests.simulation.rank_line import RankLine
from tests.simulation.scenario import LIE
from tests.simulation.world import DEAD, LIGHTHOUSE, PAUSED, Action, Process, Session
from torchft_like.core.peer_links import Probe
from torchft_like.core.replica_group import (
    BrokenLinks,
    Effect,
    GroupAway,
    GroupHolds,
    GroupIdentity,
    GroupJoin,
    GroupLeftNotice,
    GroupLostNotice,
    HoldRanks,
    LossNotice,
    RankJoin,
    RankQuorum,
    RankVerdict,
    ReleaseRanks,
    StepLostNotice,
    SuspectNotice,
    Verdict,
)

if TYPE_CHECKING:
    from tests.simulation.world import World

BACKOFF_MIN_S = 0.01
BACKOFF_MAX_S = 0.08
LIARS_STEP = 1_000_000
FOR_EVER_S = 3600.0
LATE = 6  # in keepalives, the longest for which the others of its group wait for a rank to start


class JoinMessage(NamedTuple):
    """A replica group's message about itself to the other members of a quorum."""

    replica_id: str
    address: str
    store_address: str
    step: int
    commit_failures: int
    commit_quorum_id: int
    fingerprint: bytes = b""
    reconfigure_handles: tuple[str, ...] = ()
    may_catch_up: bool = False
    reached_step: int = 0
    reached_quorum_id: int = 0
    has_fetched: bool = False


class Replica:
    """One start of a replica group; the next start of the same slot is another object."""

    def __init__(self, world: World, slot: int, incarnation: int) -> None:
        self.world = world
        self.slot = slot
        self.incarnation = incarnation
        self.replica_id = f"{name_of(slot)}:{incarnation}"
        self.address = f"http://{self.replica_id}"
        scenario = world.scenario
        job_id = "job" if scenario.is_named else ""
        self.core = world.cores.group(self.replica_id, scenario.ranks, scenario.waits, job_id)
        self.slow = 1.0
        self.session: Session | None = None
        self._connected = False
        self._leaving = False
        self._past = Past(0, frozenset(), 0, False)  # the last quorum, as the lighthouse has stated it
        self._is_away = False  # it does without the lighthouse, while it waits for a rank
        self._suspects: set[int] = set()
        self._lease = 0  # changes when the lease that runs is ended or renewed
        self._backoff = BACKOFF_MIN_S
        self._said_until = 0.0  # when the server hears the last of what its own rank has said
        self.ranks = [Rank(self, number) for number in range(world.scenario.ranks)]
        self.server: Process = self.ranks[0]
        self.core.rank_registered(0, self.ranks[0].process)
        self.lines = {rank.number: RankLine(self, rank) for rank in self.ranks[1:]}
        world.homes[self.address] = self
        world.tell(self.replica_id, "starts")
        self._connect()
        late = int(world.random() * len(self.ranks)) if scenario.starts_late else -1
        for rank in self.ranks:
            wait = LATE * scenario.keepalive_s * world.random() if rank.number == late else 0.0
            world.after(wait + world.latency(), rank, rank.start)

    @property
    def is_spare(self) -> bool:
        """Whether it waits for a place until it has seen a quorum."""
        return self.slot >= self.world.scenario.replicas

    @property
    def patience_s(self) -> float:
        """How long it waits for a state: in the first place for ever, where the others do not, and their
        collectives, of which no timeout is in here, do not wait for that.
        """
        scenario = self.world.scenario
        is_for_ever = scenario.patience_s and scenario.async_quorum and self.slot == 0
        return FOR_EVER_S if is_for_ever else scenario.patience_s

    @property
    def is_alive(self) -> bool:
        """Whether its ManagerServer lives, even if it is stopped."""
        return self.server.state != DEAD

    # -- the session with the lighthouse

    def _connect(self) -> None:
        world = self.world
        if self._leaving or self._is_away or self.session is not None:
            return
        lighthouse = world.lighthouse
        is_cut = world.is_cut(self.slot, LIGHTHOUSE)
        if lighthouse.state == DEAD or is_cut:
            if not is_cut:  # a refusal
                self._renew_lease()
            self._retry()
            return
        session = self.session = Session(self)
        lighthouse.accept(session)
        core = self.core
        number = QuorumNumber(core.last_quorum_id, core.last_quorum_round)
        report = number, core.last_quorum_replica_ids, core.last_quorum_stands, self._past
        world.send_up(session, lighthouse.hear_register, session, *report)
        if lighthouse.state == PAUSED:
            world.probe(session)

    def _retry(self) -> None:
        world = self.world
        world.after(self._backoff * (0.5 + 0.5 * world.random()), self.server, self._connect)
        self._backoff = min(2 * self._backoff, BACKOFF_MAX_S)

    def hear_registered(self, session: Session) -> None:
        """Send what waits for the session: the lighthouse listens."""
        if session is self.session and not session.lost_down:
            self._connected = True
            self._lease += 1
            self._backoff = BACKOFF_MIN_S
            self.perform(self.core.lighthouse_connected())

    def hear_quorum(self, session: Session, quorum: Quorum) -> None:
        """Handle the lighthouse's announcement of a quorum."""
        if session is self.session and not session.lost_down:
            members = [
                cast(Any, m.message)._replace(step=m.step, commit_quorum_id=m.commit_quorum_id)
                for m in quorum.participants
            ]
            facts = quorum.round, quorum.stands, quorum.first_quorum_id
            self.perform(self.core.quorum_formed(quorum.quorum_id, members, *facts))
            if self.core.last_quorum_id == quorum.quorum_id:
                ids = frozenset(member.replica_id for member in members)
                step = max([member.step for member in members])
                self._past = Past(quorum.quorum_id, ids, step, quorum.stands)

    def hear(self, session: Session, act: Callable[..., Sequence[Effect]], *told: Any) -> None:
        """Let the core act on what the lighthouse tells in this session."""
        if session is self.session and not session.lost_down:
            self.perform(act(*told))

    def line_ended(self, session: Session) -> None:
        """Open the next session: this one is over."""
        if session.server_open and session.client_open:
            self.world.send_up(session, self.world.lighthouse.line_ended, session)
        self.abandon(session)

    def abandon(self, session: Session) -> None:
        """Use the session no more, without telling the lighthouse."""
        session.client_open = False
        if session is self.session:
            self.world.tell(self.replica_id, "sees the end of its session")
            self.session = None
            self._connected = False
            self.perform(self.core.lighthouse_disconnected())
            self._renew_lease()
            self._retry()

    def _renew_lease(self) -> None:
        self._lease += 1
        world = self.world
        world.after(world.scenario.lease_s, self.server, self._lease_ended, self._lease)

    def _lease_ended(self, number: int) -> None:
        if number == self._lease and not self._leaving:
            self.perform(self.core.lease_ended())

    def _hang_up(self) -> None:
        """Close the session without a message, or after the last one, and open no other."""
        self._leaving = True
        self._close()

    def _close(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.client_open = False
            world = self.world
            if world.is_cut(self.slot, LIGHTHOUSE):
                world.probe(session)
            else:
                world.send_up(session, world.lighthouse.line_ended, session)

    # -- messages of ranks; those of other processes come over their streams

    def say(self, number: int, action: Action, *args: Any) -> None:
        """Carry a message from a rank to the server."""
        if number == 0:  # a thread of its own process
            self._said_until = max(self.world.now + self.world.lag_s(), self._said_until)
            self.world.go_on(self._said_until - self.world.now, self.server, action, *args)
            return
        self.lines[number].say_up(action, *args)

    def join(self, join: RankJoin) -> None:
        """Handle a rank's request for a quorum."""
        self.perform(self.core.rank_joined(join))

    def holds(self, number: int, quorum_id: int, step: int) -> None:
        """Handle a rank that begins no step from this one on until it is told more."""
        self.perform(self.core.rank_holds(number, quorum_id, step))

    def vote(self, number: int, vote: Verdict) -> None:
        """Handle a rank's vote."""
        self.perform(self.core.rank_voted(number, vote))

    def stalled(self, number: int, quorum_id: int, for_long: bool) -> None:
        """Let the core know that a rank waits for others, and whether it has for long; some runs never
        notice.

        Only rank 0 is watched. It notices what another rank waits for when it has voted, and that rank has
        not.
        """
        if number > 0:
            self.world.after(0.0, self.server, self._vote_stalled, quorum_id, for_long)
        elif self.world.scenario.stall_s < math.inf:
            self.perform(self.core.step_stalled(quorum_id, for_long=for_long))

    def overdue(self, quorum_id: int) -> bool:
        """Let the core know that its rank has waited for others for as long as the lighthouse waits for one;
        return False if that changes nothing.
        """
        effects = self.core.step_overdue(quorum_id, self.world.scenario.join_timeout_s)
        self.perform(effects)
        return bool(effects)

    def _vote_stalled(self, quorum_id: int, for_long: bool) -> None:
        if self.ranks[0].phase in (VERDICT, AGREE):
            self.stalled(0, quorum_id, for_long)

    def leave(self, number: int, step: int, quorum_id: int) -> None:
        """Let a rank leave in good order; the server leaves when its own rank does."""
        self.perform(self.core.rank_left(number, "shutdown"))
        world = self.world
        if self.session is not None and self._connected:
            world.send_up(self.session, world.lighthouse.hear_leave, self.session, step, quorum_id)
        self._leaving = True
        if number == 0:
            world.after(world.scenario.compute_s * 20, self.server, self.die, "left")

    # -- effects

    def perform(self, effects: Sequence[Effect]) -> None:
        """Carry out what the core decided."""
        for effect in effects:
            kind = type(effect)
            if kind is GroupJoin:
                self._ask(effect)  # type: ignore[arg-type]
            elif kind is RankQuorum:
                self._tell(effect.group_rank, Rank.hear_quorum, effect.result)  # type: ignore[union-attr]
            elif kind is RankVerdict:
                if self._suspects and effect.verdict.committed:  # type: ignore[union-attr]
                    self.world.checker.committed_without(self.replica_id, self._suspects)
                self._tell(effect.group_rank, Rank.hear_verdict, effect.verdict)  # type: ignore[union-attr]
            elif isinstance(effect, HoldRanks):
                for number in effect.group_ranks:
                    self._tell(number, Rank.hear_hold, effect.quorum_id)
            elif isinstance(effect, ReleaseRanks):
                for number in effect.group_ranks:
                    self._tell(number, Rank.hear_released, effect.quorum_id, effect.ask_at)
            elif isinstance(effect, GroupHolds):
                self._hold(effect)
            elif isinstance(effect, LossNotice):
                for number in range(len(self.ranks)):
                    self._tell(number, Rank.hear_lost, effect)
            elif isinstance(effect, SuspectNotice):
                for number in range(len(self.ranks)) if effect.reason else ():
                    self._tell(number, Rank.hear_suspected)
            elif isinstance(effect, GroupAway):
                self._go_away(effect.is_back)
            elif isinstance(effect, StepLostNotice):
                for number in effect.group_ranks:
                    self._tell(number, Rank.hear_step_lost, effect.quorum_id)
            elif isinstance(effect, GroupLeftNotice):
                for number in effect.group_ranks:  # once all are told of the verdict after which one leaves
                    self.world.after(0.0, self.server, self._tell, number, Rank.hear_group_left)
            elif isinstance(effect, GroupLostNotice):
                self._hang_up()
                for number in range(len(self.ranks)):
                    self._tell(number, Rank.hear_group_lost)
            elif isinstance(effect, Probe):
                self._probe(effect)
            elif isinstance(effect, BrokenLinks):
                self._report(effect)
            elif isinstance(effect, GroupIdentity):
                self._identify(effect)

    def _probe(self, probe: Probe) -> None:
        """Connect to each peer, as `manager_server/suspicion.py` does."""
        world = self.world
        wait = 2 * world.scenario.probe_s if probe.is_repeated else 0.0
        world.after(wait + 2 * world.latency(), self.server, self._hear_answers, probe)

    def _hear_answers(self, probe: Probe) -> None:
        if silent := self._silent(probe):
            self.world.after(self.world.scenario.probe_s, self.server, self._wait_no_longer, probe)
        else:
            self.perform(self.core.probed(probe, silent))

    def _wait_no_longer(self, probe: Probe) -> None:
        self.perform(self.core.probed(probe, self._silent(probe)))

    def _silent(self, probe: Probe) -> Collection[str]:
        world = self.world
        if not world.blocked and not world.refuses:
            return ()
        homes = [(i, world.homes[address]) for i, address in probe.peers]
        return [i for i, home in homes if self._gives_no_answer(home, must_listen=i in probe.must_listen)]

    def _gives_no_answer(self, home: Replica, *, must_listen: bool) -> bool:
        world = self.world
        if world.are_refused([self.slot, home.slot]) or (world.refuses and not home.is_alive):
            return must_listen
        return world.is_cut(self.slot, home.slot)

    def _report(self, links: BrokenLinks) -> None:
        if (session := self.session) is not None and self._connected:
            self.world.tell(self.replica_id, "cannot reach", *(links.unreachable or ("nobody",)))
            self.world.send_up(session, self.world.lighthouse.hear_links, session, links.unreachable)

    def _identify(self, who: GroupIdentity) -> None:
        if (session := self.session) is not None and self._connected:
            self.world.send_up(session, self.world.lighthouse.hear_identity, session, who.identity)

    def _hold(self, holds: GroupHolds) -> None:
        if (session := self.session) is not None and self._connected:
            number = QuorumNumber(holds.quorum_id, holds.round)
            lighthouse, step = self.world.lighthouse, None if holds.gives_up else holds.step
            self.world.send_up(session, lighthouse.hear_holds, session, number, step)

    def _ask(self, join: GroupJoin) -> None:
        session = self.session
        if session is None or not self._connected:
            return  # the join is repeated when the session is open
        step, failures, quorum_id = join.step, join.commit_failures, join.commit_quorum_id
        if self._lies():
            self.world.feel(LIE)
            step, quorum_id = LIARS_STEP, 0
        message = JoinMessage(
            self.replica_id,
            self.address,
            self.address,
            step,
            failures,
            quorum_id,
            may_catch_up=join.may_catch_up,
            reached_step=join.reached_step,
            reached_quorum_id=join.reached_quorum_id,
            has_fetched=join.has_fetched,
        )
        member = Member(
            self.replica_id,
            step,
            join.shrink_only,
            failures,
            quorum_id,
            join.broken_quorum_id,
            message,
            join.may_stand,
            join.own_failure,
            join.own_failures,
            timeout_ms=int(self.patience_s * 1000),
        )
        self.world.send_up(session, self.world.lighthouse.hear_join, session, member)

    def _lies(self) -> bool:
        """Return whether it says that it is far ahead: it has yet to heal, and members of the last quorum are
        there that have as much as that had.

        Where nobody shows how far the job is, all are believed; a source without a state, alone, is waited
        for then.
        """
        is_liar = self.world.scenario.has_liars and self.incarnation > 0 and self.slot == 0
        last = self.world.lighthouse.quorum
        if not is_liar or last is None or any(rank.protocol.step > 0 for rank in self.ranks):
            return False
        step = max(member.step for member in last.participants)
        homes = [self.world.homes[f"http://{member.replica_id}"] for member in last.participants]
        others = [home for home in homes if home is not self and home.is_alive and home._connected]
        return sum(home.shows(step) for home in others) > 1

    def shows(self, step: int) -> bool:
        """Return whether it has the state of this step, or of a later one, and neither disowns it nor has it
        from a checkpoint of an earlier run, which nothing shows.
        """
        (found, quorum_id), *others = {rank.version for rank in self.ranks}
        return found >= step and quorum_id > OF_EARLIER_RUN[1]["commit_quorum_id"] and not others

    def _tell(self, number: int, action: Action, *args: Any) -> None:
        rank = self.ranks[number]
        if number == 0:
            action(rank, *args)
            return
        self.lines[number].say_down(action, rank, *args)

    # -- silence

    def suspect(self, number: int) -> None:
        """Let the core know that a rank is silent."""
        if self.is_alive and not self._leaving:
            self.world.tell(self.replica_id, "suspects rank", number)
            self._suspects.add(number)
            effects = self.core.rank_suspected(number, "silent")
            if any(isinstance(effect, GroupLostNotice) for effect in effects):
                self.world.checker.ended_for_silence(self.replica_id, 0.0)
            self.perform(effects)

    def trust(self, number: int) -> None:
        """Let the core know that a rank answers again."""
        self._suspects.discard(number)
        self.perform(self.core.rank_resumed(number))

    def give_up(self, number: int, silent_s: float) -> None:
        """Let the core know that a rank was silent for too long."""
        if self.is_alive and not self._leaving:
            self.world.checker.ended_for_silence(self.replica_id, silent_s)
            self._lose_rank(number, self.lines[number])

    def replaced(self, rank: Rank) -> None:
        """Let another process be a rank."""
        self.ranks[rank.number] = rank
        self.lines[rank.number] = RankLine(self, rank)
        self.trust(rank.number)
        rank.start()

    def _go_away(self, is_back: bool) -> None:
        self._is_away = not is_back
        self.world.tell(self.replica_id, "is back" if is_back else "goes away, as a rank is silent")
        if is_back:
            self._connect()
        elif self.session is not None:
            self._close()
            self._connected = False
            self.perform(self.core.lighthouse_disconnected())
            self._renew_lease()

    # -- ends

    def rank_died(self, number: int) -> None:
        """Handle the end of a rank's process; the others see its connection end."""
        world = self.world
        if number > 0:
            line = self.lines[number]
            line.end(self._lose_rank, number, line)
            return
        self._hang_up()
        for rank in self.ranks[1:]:
            world.after(world.latency(), rank, rank.hear_group_lost)
        world.launcher.died(self)

    def _lose_rank(self, number: int, line: RankLine) -> None:
        if self.is_alive and line is self.lines[number]:
            self.perform(self.core.rank_lost(number, "its session ended"))

    def probe_rank(self, number: int) -> None:
        """Let the keepalive of a stream between a rank and the server fail, if one of them is stopped for too
        long.
        """
        limit = self.world.now - self.world.scenario.keepalive_s
        if any(p.state == PAUSED and p.paused_at <= limit for p in (self.ranks[number], self.server)):
            self.lines[number].break_off()

    def die(self, why: str) -> None:
        """Kill the whole group."""
        for rank in reversed(self.ranks):
            rank.die(why)


def name_of(slot: int) -> str:
    """Return the name that every start of the replica group in this place has."""
    return f"{'abcdefghijklmnopqrstuvwxyz'[slot % 26]}{slot // 26 or ''}"
