"""The lighthouse on the network: gRPC in, the quorum core in the middle, gRPC out.

Everything happens on one asyncio loop and nothing waits in between: an RPC becomes an event of the
core, the core's decisions become messages, in the same instant. This module decides nothing about
quorums. It knows about streams that end, callers that hang up and readers that do not read.

A quorum is serialized once for all sessions and once for all unary callers. Answering a thousand replicas
then costs a copy of the same bytes into a thousand connections.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from lighthouse import admission, codec, wire
from lighthouse.address import Address, parse_address
from lighthouse.core.claims import Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import (
    NO_QUORUM,
    Decision,
    FindMembers,
    HoldQuorum,
    LeftOut,
    MemberLost,
    Quorum,
    QuorumBroken,
    QuorumFormed,
    QuorumOver,
    QuorumReleased,
    Refused,
)
from lighthouse.core.explanation import Facts, describe
from lighthouse.core.history import History, Moment
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import QuorumCore
from lighthouse.core.vacancies import Filled, NoSpare, Told, Vacancies, Vacancy
from lighthouse.errors import AddressError
from lighthouse.events import Event, EventLog, printable
from lighthouse.listening import why_unreachable
from lighthouse.net import (
    Keepalive,
    ServerLimits,
    caller_of,
    make_aio_channel,
    make_aio_server,
    unary,
)
from lighthouse.session import (
    Context,
    Refusal,
    RefusedError,
    Session,
    check,
    invalid,
    read_register,
    service,
    settle,
)
from lighthouse.starvation import RECOVERY_S, SilenceClock
from lighthouse.trust import signing_key
from lighthouse.wire import torchft_pb2 as pb

_STOP_GRACE_S = 0.5
_FIND_S = 0.8  # seconds in which a member's host has to answer
_FIND_AT_ONCE = 64
_LINKS_TOLD_MAX = 32  # links, and replicas with a reason, that an event names at most
WATCHED_S = 90.0  # Prometheus looks every 15 to 60 seconds
_KILL_S = 5.0  # seconds in which a replica that is killed has to answer
_REASON_MAX = 1000  # characters of a status
_SECRET_BYTES = 32
_CALLS_PER_REPLICA_MAX = 8  # open unary Quorum calls of one replica: one, and some that it has given up

_SHUTDOWN = Refusal(grpc.StatusCode.UNAVAILABLE, "the lighthouse shuts down")
_SUPERSEDED = Refusal(grpc.StatusCode.ABORTED, "a newer session of this replica took this one's place")
_REPLICA_GONE = Refusal(grpc.StatusCode.ABORTED, "the session of this replica ended")
_TOO_MANY_CALLS = Refusal(grpc.StatusCode.ABORTED, "newer calls of this replica took this one's place")


class Lighthouse:
    """A running lighthouse, to be used on the loop that started it.

        lighthouse = await Lighthouse.start(LighthouseConfig(min_replicas=2), parse_address("127.0.0.1:0"))
        print(lighthouse.address.url)
        await lighthouse.stop()

    `events` has one record for each quorum with a new id, register, leave, loss, refused replica, change of
    the replicas that are left out, and shutdown.
    """

    def __init__(self, config: LighthouseConfig) -> None:
        self.config = config
        self.events = EventLog("lighthouse", logging.getLogger("lighthouse"))
        self.history = History()
        self.events.subscribe(self._remember)
        self.quorum = pb.Quorum()  # the last one, without its secret
        self._secret_id, self._secret = NO_QUORUM, b""  # of the quorum with this id
        self._statement = pb.Statement()  # of the last quorum
        self._key = signing_key()  # for statements; none without a token
        self._stated: tuple[Past, bytes] | None = None  # in an earlier start, as it was shown
        self.spare_ranks = SpareRanks(config, self.events)
        self._core = QuorumCore(config, first_quorum_id=time.time_ns() // 1_000_000)
        self.started = time.time()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._clock = SilenceClock(self._loop)
        self._numbers = itertools.count(1)
        self._sessions: dict[int, ReplicaSession] = {}
        self._addresses: dict[str, str] = {}  # by replica with a session, of the last quorum, or missed
        self._search: asyncio.Task[None] | None = None  # for members of a quorum that may be training
        # By replica, the oldest call first.
        self._calls: dict[str, dict[asyncio.Future[bytes], None]] = {}
        self._looked_at = 0.0  # by a client of the page, at how far the members are
        self._watch: asyncio.TimerHandle | None = None  # runs while a client looks
        self._server: grpc.aio.Server | None = None
        self._address: Address | None = None

    @classmethod
    async def start(cls, config: LighthouseConfig, bind: Address) -> Lighthouse:
        """Serve at `bind`; port 0 takes a free one.

        Raises:
            BindError: the address is in use or not of this host.
        """
        lighthouse = cls(config)
        keepalive = Keepalive(config.keepalive_time_ms, config.keepalive_timeout_ms)
        limits = ServerLimits(
            connections=config.connections_max,
            calls=config.connections_max,
            request_bytes=config.request_bytes_max,
        )
        server, address = make_aio_server(bind, [_handlers(lighthouse)], limits, keepalive)
        lighthouse._server, lighthouse._address = server, address
        await server.start()
        return lighthouse

    @property
    def address(self) -> Address:
        """The address at which the lighthouse listens, with the port that it got."""
        if self._address is None:
            raise RuntimeError("the lighthouse is not running: make it with `await Lighthouse.start(...)`")
        return self._address

    def facts(self) -> Facts:
        """Return the state of the quorum."""
        return replace(self._core.facts(self._clock.now()), spare_ranks=self.spare_ranks.names())

    def sign_of(self, replica_id: str) -> str:
        """Return the sign by which a replica is healthy; "" if it is not."""
        return self._core.sign_of(replica_id)

    def is_suspect(self, replica_id: str) -> bool:
        """Return whether a replica has time to come back after its session, as this process was starved."""
        number = self._core.session_of(replica_id)
        return number is not None and number not in self._sessions

    def address_of(self, replica_id: str) -> str:
        """Return where a replica says that its ManagerServer is; "" if it is not known."""
        return self._addresses.get(replica_id, "")

    @property
    def is_starved(self) -> bool:
        """Whether this process could not hear just now, so that it takes no replica for lost at once."""
        return self._clock.is_starved()

    async def kill(self, replica_id: str, by: str) -> None:
        """Have a replica group end itself, as torchft's Kill does; `by` names the caller.

        Raises:
            AddressError: it has told no address at which it could be asked.
            grpc.aio.AioRpcError: it does not answer there.
        """
        address = parse_address(self.address_of(replica_id), f"address of {replica_id!r:.100}")
        session = self._sessions.get(self._core.session_of(replica_id) or 0)
        # A token of the job's own would be a present to any process that claims to serve at an address.
        token = session.kill_token if session is not None else ""
        self.events.emit("kill", member=replica_id, by=by)
        async with make_aio_channel(address) as channel:
            call = unary(channel, wire.KILL, pb.KillRequest, pb.KillResponse, token)
            await call(pb.KillRequest(msg=f"{by} asked for it"), timeout=_KILL_S)

    def describe(self) -> str:
        """Describe the quorum's members, the awaited replicas, and why there is no quorum yet."""
        return describe(self.facts())

    def look(self) -> None:
        """Have the members say how far they are, from now on and for WATCHED_S after the last look."""
        self._looked_at = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(WATCHED_S, self._check_watch)
            self._tell_config(is_watched=True)

    def _check_watch(self) -> None:
        ends_at = self._looked_at + WATCHED_S
        if self._loop.time() < ends_at:
            self._watch = self._loop.call_at(ends_at, self._check_watch)
            return
        self._watch = None
        self._tell_config(is_watched=False)

    def _tell_config(self, *, is_watched: bool) -> None:
        config = codec.job_config(self.config, is_watched)
        self._send_all(list(self._sessions), codec.told(config_changed=config))

    async def stop(self, reason: str = "stopped") -> None:
        """End every session and call with a status that says so, and close the port. May be called again."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self.events.emit("shutdown", reason=reason)
        for session in list(self._sessions.values()):
            session.end(_SHUTDOWN)
        for replica_id in list(self._calls):
            self._answer(replica_id, _SHUTDOWN)
        self.spare_ranks.end(_SHUTDOWN)
        await server.stop(_STOP_GRACE_S)
        self._clock.stop()
        if self._search is not None:
            self._search.cancel()
        for timer in (self._timer, self._watch):
            if timer is not None:
                timer.cancel()

    # -- RPCs

    async def serve_session(self, _requests: object, context: Context) -> None:
        """Serve a replica group's session, from its register until it ends in one way or another."""
        register: pb.Register = (await read_register(context, pb.SessionRequest)).register
        self._admit_session(register, caller_of(context))
        session = ReplicaSession(next(self._numbers), register, context, self.config.session_queue_max)
        reason = "its connection ended: the process died, or no PING was answered"
        try:
            async with session:
                self._open_session(session, register)
                reason = await self._serve_session(session)
        finally:
            self._sessions.pop(session.number, None)
            if session.ended is not None:
                self._lose(session.number, session.ended.text)
            elif self._clock.is_starved():
                # Its PINGs lie unread here, perhaps. A replica that lives comes back with another session
                # first.
                self._loop.call_later(RECOVERY_S, self._lose, session.number, reason)
            else:
                self._lose(session.number, reason)

    async def serve_quorum(self, request: pb.LighthouseQuorumRequest, context: Context) -> bytes:
        """Serve torchft's Quorum: the caller joins, and is answered with the quorum."""
        message = request.requester
        complaint = admission.about_member(message, self.config, self._believable(), caller_of(context))
        self._admit(message.replica_id, complaint)
        if self._core.session_of(message.replica_id) is not None:
            raise _exists(f"replica {message.replica_id!r:.100} joins through its session")
        member = codec.member_from_wire(message)
        self._stepped(message)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        calls = self._calls.setdefault(member.replica_id, {})
        calls[answer] = None
        self._apply(self._core.call(member, self._clock.now()))
        # A call that was settled may not have woken up yet.
        waiting = [call for call in calls if not call.done()]
        if len(waiting) > _CALLS_PER_REPLICA_MAX:
            settle(waiting[0], _TOO_MANY_CALLS)
        try:
            return await answer
        finally:
            calls.pop(answer, None)
            if not calls and self._calls.get(member.replica_id) is calls:
                del self._calls[member.replica_id]
                self._apply(self._core.withdraw(member.replica_id, self._clock.now()))

    async def serve_heartbeat(self, request: pb.LighthouseHeartbeatRequest, _: Context) -> bytes:
        """Serve torchft's Heartbeat."""
        self._admit(request.replica_id, admission.about_replica(request.replica_id))
        self._apply(self._core.heartbeat(request.replica_id, self._clock.now()))
        return b""

    # -- sessions

    def _admit_session(self, register: pb.Register, caller: str) -> None:
        self._admit(
            register.replica_id, admission.about_register(register, self.config, self._believable(), caller)
        )
        if (known := self._core.session_of(register.replica_id)) is not None:
            live = self._sessions.get(known)
            # The same replica comes back with its own address.
            if live is not None and live.ended is None and live.address != register.address:
                name, place = f"{register.replica_id!r:.100}", f"{live.address!r:.100}"
                raise _exists(f"replica {name} has a session, and is at {place}")

    def _open_session(self, session: ReplicaSession, register: pb.Register) -> None:
        self._sessions[session.number] = session
        self._addresses[session.replica_id] = session.address
        session.send(codec.told(registered=codec.job_config(self.config, self._watch is not None)))
        self.events.emit("register", member=session.replica_id)
        self._hear_report(register)
        decisions = self._core.register(
            session.number,
            register.replica_id,
            QuorumNumber(register.last_quorum_id, register.last_quorum_round),
            register.last_quorum_replica_ids,
            self._clock.now(),
            register.last_quorum_stands,
            register.spare,
        )
        self._apply(decisions)

    async def _serve_session(self, session: ReplicaSession) -> str:
        """Serve requests until the replica ends its side; return why, which is reported unless it left."""
        while (request := await session.read()) is not None:
            if request.WhichOneof("request") == "leave":
                self._leave(session, request.leave)
                return "left"
            self._hear(session, request)
        return "its connection ended, or it hung up without a leave"

    def _hear(self, session: ReplicaSession, request: pb.SessionRequest) -> None:
        core, number, replica_id, now = self._core, session.number, session.replica_id, self._clock.now()
        match request.WhichOneof("request"):
            case "join" if (join := request.join).replica_id == replica_id:
                check(admission.about_member(join, self.config, self._believable(), session.caller))
                self._stepped(join)
                self._apply(core.join(number, codec.member_from_wire(join), now))
            case "holds":
                holds, quorum = request.holds, QuorumNumber(request.holds.quorum_id, request.holds.round)
                check(admission.about_step(holds.step))
                if holds.gives_up:
                    self._apply(core.give_up(number, quorum, now))
                else:
                    self._apply(core.hold(number, quorum, holds.step, now))
            case "progress":
                check(admission.about_step(request.progress.step))
                report = codec.report_from_wire(request.progress)
                self.history.reported(replica_id, report, time.time(), self._loop.time())
            case "identity":
                check(admission.about_identity(request.identity, self._believable()))
                self._apply(core.identify(number, codec.identity_from_wire(request.identity), now))
            case "broken_links":
                check(admission.about_links(request.broken_links))
                ids = request.broken_links.unreachable_replica_ids
                self._apply(core.report_links(number, ids, now))
            case None if codec.unknown_fields(request):
                pass  # a newer replica says more than this version knows
            case kind:
                raise invalid(f"unexpected {kind or 'empty message'} in the session of {replica_id!r:.100}")

    def _lose(self, number: int, reason: str) -> None:
        if self._server is not None:
            self._apply(self._core.lost(number, reason, self._clock.now()))

    def _leave(self, session: ReplicaSession, leave: pb.Leave) -> None:
        if self._core.replica_of(session.number) is None:
            return
        reason = leave.reason[: admission.TEXT_MAX]
        self.events.emit("leave", member=session.replica_id, reason=reason)
        self._apply(self._core.leave(session.number, self._clock.now(), leave.step, leave.quorum_id))
        self._answer(session.replica_id, _REPLICA_GONE)

    def _admit(self, replica_id: str, complaint: str | None) -> None:
        check(complaint)
        if len(self._core) >= self.config.replicas_max and replica_id not in self._core:
            text = f"this lighthouse has its {self.config.replicas_max} replicas (--replicas_max)"
            raise RefusedError(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, text))

    def _believable(self) -> QuorumNumber:
        return admission.believable(time.time_ns() // 1_000_000, self._core.highest)

    # -- decisions

    def _apply(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, QuorumFormed):
                self._announce(decision)
            elif isinstance(decision, MemberLost):
                self._send_all(decision.sessions, codec.news(decision))
                whom, reason = decision.replica_id, decision.reason
                self.events.emit("loss", quorum_id=decision.quorum_id, member=whom, reason=reason)
                if whom not in self._core:
                    self._answer(whom, _REPLICA_GONE)
            elif isinstance(decision, QuorumOver):
                self._send_all([decision.session], codec.news(decision))
            elif isinstance(decision, QuorumBroken | HoldQuorum | QuorumReleased):
                self._send_all(decision.sessions, codec.news(decision))
                if isinstance(decision, HoldQuorum):
                    self.events.emit("hold", quorum_id=decision.quorum_id, member=decision.replica_id)
            elif isinstance(decision, LeftOut):
                self._leave_out(decision)
            elif isinstance(decision, Refused):
                self.events.emit("refused", member=decision.replica_id, reason=decision.reason)
                text = printable(decision.reason[:_REASON_MAX])
                # With this status it is not to try again.
                self._end(decision.session, why := Refusal(grpc.StatusCode.FAILED_PRECONDITION, text))
                self._answer(decision.replica_id, why)
            elif isinstance(decision, FindMembers):
                if self._search is None or self._search.done():
                    self._search = self._loop.create_task(self._find(decision.replica_ids))
            else:
                self._end(decision.session, _SUPERSEDED)
        self._arm()

    def _announce(self, formed: QuorumFormed) -> None:
        self.quorum = quorum = codec.quorum_to_wire(formed.quorum, time.time())
        steps = {member.replica_id: member.step for member in formed.quorum.participants}
        self.history.formed(formed.quorum.quorum_id, steps, time.time(), self._loop.time())
        self._prove(formed.quorum)
        quorum.secret = self._secret
        quorum.statement.CopyFrom(self._statement)
        if formed.sessions:
            self._send_all(formed.sessions, codec.told(quorum=quorum))
        if formed.callers:
            answer = pb.LighthouseQuorumResponse(quorum=quorum).SerializeToString()
            for replica_id in formed.callers:
                self._answer(replica_id, answer)
        quorum.ClearField("secret")
        if formed.new_id:
            self.events.emit(
                "quorum",
                quorum_id=formed.quorum.quorum_id,
                members=[member.replica_id for member in formed.quorum.participants],
                joined=list(formed.joined),
                left=list(formed.left),
            )
            missed = self._core.missed
            self._addresses = {i: address for i, address in self._addresses.items() if i in missed}
            self._addresses.update((member.replica_id, member.address) for member in quorum.participants)
            self._addresses.update((s.replica_id, s.address) for s in self._sessions.values() if s.address)
        if formed.unproven:
            self.events.emit("unproven", quorum_id=formed.quorum.quorum_id, members=list(formed.unproven))
        if formed.quorum.stands:
            self.events.emit("stands", quorum_id=formed.quorum.quorum_id)

    def _prove(self, quorum: Quorum) -> None:
        """Make what members prove with that they are in a quorum; a secret is made once for an id, with which
        they meet.
        """
        if self._secret_id != quorum.quorum_id:
            self._secret_id = quorum.quorum_id
            self._secret = secrets.token_bytes(_SECRET_BYTES) if quorum.takes_secret else b""
        steps = {member.replica_id: member.step for member in quorum.participants}
        past = Past(quorum.quorum_id, frozenset(steps), max(steps.values()), quorum.stands)
        digest = past.digest(self._key) if self._key else b""
        self._statement = pb.Statement(step=past.step, stands=past.stood, digest=digest)

    def _hear_report(self, register: pb.Register) -> None:
        """Let the core know in which quorum a replica was, if that is stated, or nothing can be."""
        shown = register.last_quorum_statement
        ids = frozenset(register.last_quorum_replica_ids)
        past = Past(register.last_quorum_id, ids, shown.step, shown.stands)
        if self._key and (past, shown.digest) != self._stated:  # all members show the same
            if not hmac.compare_digest(past.digest(self._key), shown.digest):
                return
            self._stated = past, shown.digest
        self._core.reported(register.replica_id, past)

    def _remember(self, event: Event) -> None:
        moment = Moment(event.time, event.kind, event.quorum_id, str(event.fields.get("member", "")))
        self.history.happened(moment._replace(text=event.sentence()), self._loop.time())

    def _stepped(self, member: pb.QuorumMember) -> None:
        self.history.stepped(member.replica_id, member.step, time.time(), self._loop.time())

    async def _find(self, replica_ids: Sequence[str]) -> None:
        """Tell the core which of these replicas' processes are gone."""
        for first in range(0, len(replica_ids), _FIND_AT_ONCE):
            some = replica_ids[first : first + _FIND_AT_ONCE]
            are_gone = await asyncio.gather(*map(self._is_gone, some))
            for replica_id in itertools.compress(some, are_gone):
                self._apply(self._core.gone(replica_id, self._clock.now()))

    async def _is_gone(self, replica_id: str) -> bool:
        try:
            address = parse_address(text := self._addresses.get(replica_id, ""))
        except AddressError:
            return False
        # At a fixed port (TORCHFT_MANAGER_PORT) its own successor would answer.
        name = replica_id.rpartition(":")[0]
        later = (s.replica_id for s in self._sessions.values() if s.address == text)
        if name and any(one != replica_id and one.rpartition(":")[0] == name for one in later):
            return True
        return isinstance(await why_unreachable(address, _FIND_S), ConnectionRefusedError)

    def _leave_out(self, left: LeftOut) -> None:
        for number, replica_id in left.sessions:
            self._send_all([number], codec.left_out(left, replica_id))
        links = [f"{one} - {other}" for one, other in left.links[:_LINKS_TOLD_MAX]]
        members, reasons = (
            list(left.replica_ids),
            [f"{i} {why}" for i, why in left.reasons[:_LINKS_TOLD_MAX]],
        )
        self.events.emit("left_out", quorum_id=left.quorum_id, members=members, links=links, reasons=reasons)

    def _send_all(self, numbers: Iterable[int], message: bytes) -> None:
        for number in numbers:
            if (session := self._sessions.get(number)) is not None:
                session.send(message)

    def _end(self, number: int, why: Refusal) -> None:
        session = self._sessions.get(number)
        if session is not None:
            session.end(why)

    def _answer(self, replica_id: str, result: bytes | Refusal) -> None:
        for call in self._calls.pop(replica_id, ()):
            settle(call, result)

    # -- time

    def _arm(self) -> None:
        """Make sure that the core is woken in time. A timer that turns out to be early does no harm."""
        deadline = self._core.next_deadline()
        if deadline is None:
            return
        when = self._loop.time() + deadline - self._clock.now()
        if self._timer is None or when < self._timer.when():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_at(when, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._apply(self._core.advance(self._clock.now()))


def _exists(text: str) -> RefusedError:
    return RefusedError(Refusal(grpc.StatusCode.ALREADY_EXISTS, text))


class ReplicaSession(Session):
    """The session of a replica. `number` tells sessions apart for the quorum core; `address` is where the
    replica says that it serves, and `kill_token` the token with which it may be killed there.
    """

    def __init__(self, number: int, register: pb.Register, context: Context, queue_max: int) -> None:
        super().__init__(context, queue_max)
        self.number = number
        self.replica_id = register.replica_id
        self.address = register.address
        self.kill_token = register.kill_token


def _handlers(lighthouse: Lighthouse) -> grpc.GenericRpcHandler[Any, Any]:
    spare_ranks = lighthouse.spare_ranks
    return service(
        "torchft.LighthouseService",
        streams={
            "Session": (lighthouse.serve_session, pb.SessionRequest),
            "OfferSpare": (spare_ranks.serve_spare, pb.SpareRequest),
        },
        calls={
            "Quorum": (lighthouse.serve_quorum, pb.LighthouseQuorumRequest),
            "Heartbeat": (lighthouse.serve_heartbeat, pb.LighthouseHeartbeatRequest),
            "FillVacancy": (spare_ranks.serve_vacancy, pb.FillVacancyRequest),
        },
    )


_NO_SPARE = Refusal(grpc.StatusCode.NOT_FOUND, "no spare rank is free (torchft-like spare starts one)")


class SpareRanks:
    """The lighthouse's desk for spare ranks: streams of those that wait, and calls of those that need one.

    A spare says that it has taken the place that it was told. One whose stream ends without that is gone:
    gRPC shows the death of a caller as the end of its messages, as if it had ended in good order.
    """

    def __init__(self, config: LighthouseConfig, events: EventLog) -> None:
        self._config = config
        self._events = events
        self._vacancies = Vacancies()
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._callers: dict[int, asyncio.Future[str]] = {}

    def names(self) -> list[str]:
        """Return the names of the spare ranks that wait for a place."""
        return [spare.spare_id for spare in self._vacancies]

    def end(self, why: Refusal) -> None:
        """End every stream and call."""
        for session in self._sessions.values():
            session.end(why)
        self._answer(list(self._callers), why)

    async def serve_spare(self, _requests: object, context: Context) -> None:
        """Serve the stream of one spare, until it has taken a place, or is gone."""
        register: pb.SpareRegister = (await read_register(context, pb.SpareRequest)).register
        check(admission.about_spare(register, len(self._vacancies), self._config))
        number, session = next(self._numbers), Session(context, queue_max=16)
        has_taken = False
        try:
            async with session:
                self._sessions[number] = session
                session.send(pb.SpareResponse(registered=pb.SpareRegistered()).SerializeToString())
                self._events.emit("spare", member=register.spare_id, host=register.host)
                self._apply(self._vacancies.register(number, register.spare_id, register.host))
                has_taken = await self._serve(number, session)
        finally:
            self._sessions.pop(number, None)
            end = self._vacancies.taken if has_taken else self._vacancies.lost
            self._apply(end(number))

    async def serve_vacancy(self, request: pb.FillVacancyRequest, context: Context) -> bytes:
        """Answer once a spare has taken the place, or that there is none."""
        message, caller = request.vacancy, caller_of(context)
        check(admission.about_vacancy(message, len(self._callers), self._config, caller))
        vacancy = Vacancy(
            message.group_id,
            message.group_rank,
            message.host,
            f"{message.store_address} {message.attempt}",
            pb.SpareResponse(vacancy=message).SerializeToString(),
        )
        number = next(self._numbers)
        answer = self._callers[number] = asyncio.get_running_loop().create_future()
        try:
            self._apply(self._vacancies.ask(number, vacancy, waits=request.waits))
            return pb.FillVacancyResponse(spare_id=await answer).SerializeToString()
        finally:
            del self._callers[number]
            self._vacancies.withdraw(number)

    async def _serve(self, number: int, session: Session) -> bool:
        """Hear what a spare says; return whether it has taken its place."""
        while (request := await session.read()) is not None:
            kind = request.WhichOneof("request")
            if kind == "taken":
                return session.ended is None
            if kind != "declined":
                raise invalid(f"unexpected {kind or 'empty message'} of a spare")
            self._apply(self._vacancies.declined(number))
        return False

    def _apply(self, decisions: Iterable[Told | Filled | NoSpare]) -> None:
        for decision in decisions:
            if isinstance(decision, Told):
                if (session := self._sessions.get(decision.session)) is not None:
                    session.send(decision.vacancy.message)
            elif isinstance(decision, Filled):
                self._answer(decision.callers, decision.spare_id)
                group, rank = decision.vacancy.key
                self._events.emit("replaced", member=decision.spare_id, group=group, rank=rank)
            elif isinstance(decision, NoSpare):
                self._answer(decision.callers, _NO_SPARE)

    def _answer(self, callers: Iterable[int], result: str | Refusal) -> None:
        for number in callers:
            if (answer := self._callers.get(number)) is not None:
                settle(answer, result)
