"""The ManagerServer: the shell around the replica group's core.

It lives in the process of rank 0, on the coordination loop, which owns all of its state. Towards the
lighthouse it keeps a `LighthouseLink`; towards the ranks it serves sessions and torchft's unary calls over
gRPC, and direct calls for the rank in its own process. All their messages go through
`ReplicaGroup`, and this module carries out the effects that come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import logging
import math
import os
import random
import secrets
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Any, Generic, Self, TypeVar

import grpc
import grpc.aio

from lighthouse import codec, wire
from lighthouse.address import Address, is_loopback, parse_address, parse_host
from lighthouse.admission import TEXT_MAX
from lighthouse.core.history import Report
from lighthouse.core.left_out import REPORTED_MAX
from lighthouse.errors import AddressError
from lighthouse.events import printable, short_name
from lighthouse.net import DISTRUST, ServerLimits, default_keepalive, make_aio_channel, make_aio_server, unary
from lighthouse.session import (
    Context,
    Refusal,
    RefusedError,
    Session,
    invalid,
    read_register,
    service,
    settle,
)
from lighthouse.trust import process_trust
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.conversation import KEPT_MAX, Conversation
from torchft_like.core.peer_links import Probe
from torchft_like.core.quorum_secret import QuorumSecret
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
    LeftOutNotice,
    LossNotice,
    RankJoin,
    RankQuorum,
    RankVerdict,
    ReleaseRanks,
    ReplicaGroup,
    StepLostNotice,
    SuspectNotice,
    ToRank,
    Verdict,
)
from torchft_like.core.stall_watch import LONG_S, LOOK_EVERY_S, ProgressLog, StallWatch
from torchft_like.errors import ConfigError, ConnectError, TrustError
from torchft_like.manager_server.duplex import CONNECTION_REFUSED, DuplexCall, MalformedMessageError
from torchft_like.manager_server.rank_link import (
    GROUP_KEY,
    LocalListener,
    RankListener,
    message_to_wire,
    quorum_result_to_wire,
    verdict_fields,
    verdict_from_wire,
)
from torchft_like.manager_server.suspicion import (
    DEAD_S,
    LIMIT_S,
    HostAddress,
    HostProbe,
    counterpart,
    silent_peers,
    until_dead,
)
from torchft_like.runtime import resources
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.numbers import whole_number

_logger = logging.getLogger(__name__)

# The number of what members of a quorum say to each other, in the store where they meet and later. A change
# in that raises it: members of two versions would lose every step.
PROTOCOL = 1
LOCAL_RANK = 0
RANKS_LEAVE_S = 0.5
STOP_GRACE_S = 0.2
KILL_EXIT_CODE = 1
OTHER_HOSTS_MAX = 128  # of this group that others probe: a lighthouse takes no join of any length
QUEUE_MAX = 2 * KEPT_MAX  # messages for a rank, and the counts of those that it has said
A = TypeVar("A", RankQuorum, RankVerdict)


class ManagerServer:
    """The server of one replica group, which speaks for it to the lighthouse; it has torchft's constructor.

    Args:
        replica_id: a name that is unique for this incarnation of the group.
        lighthouse_addr: `http://host:port` of the lighthouse.
        hostname: the host at which other replica groups reach this server.
        bind: `host:port` to listen on; port 0 takes a free one.
        store_addr: the address of the store in which process groups meet.
        world_size: the number of ranks in the group.
        heartbeat_interval: the time between heartbeats to a lighthouse without sessions (torchft's own).
        connect_timeout: the limit of the first contact with the lighthouse.
        quorum_retries: without effect, as it is the ranks that wait; torchft's server retries by itself.
        waits_for_lighthouse: whether ranks go on in a quorum that stands only while it can be reached.
        job_id: the name of the job, "" if none was given.
        spare: whether the group waits for a free place before it takes part.
        timeout: how long its ranks' operations wait; for so long the others wait for it while it heals.
        dead_after: how long a rank's process may be silent before the group is lost.
        on_quorum: called on the loop with the id and the secret of each quorum, before the ranks hear of it.

    Attributes:
        replica_id: as it was given.
        group: the core, which decides.
        rank_key: a secret of the replica group, which each of its ranks has to show; "" for none, in a
            process without tokens.

    Raises:
        AddressError, BindError: an address is malformed or cannot be listened on.
        ConfigError: there is no replica id, or another value is not of its type.
        ConnectError: the lighthouse did not answer within `connect_timeout`.
    """

    def __init__(
        self,
        replica_id: str,
        lighthouse_addr: str,
        hostname: str,
        bind: str,
        store_addr: str,
        world_size: int,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        connect_timeout: timedelta = timedelta(seconds=60),
        quorum_retries: int = 0,
        waits_for_lighthouse: bool = False,
        job_id: str = "",
        dead_after: timedelta = timedelta(seconds=DEAD_S),
        spare: bool = False,
        timeout: timedelta = timedelta(0),
        on_quorum: Callable[[int, QuorumSecret], None] = lambda *_: None,
    ) -> None:
        if not isinstance(replica_id, str) or not replica_id:
            raise ConfigError(f"replica_id is {replica_id!r:.100}: it must be a text with characters in it")
        if not isinstance(spare, bool):
            raise ConfigError(f"spare is {spare!r:.100}: it must be True or False")
        if store_addr != "":
            parse_address(str(store_addr).removeprefix("tls://").rstrip("/"), "store_addr")
        world_size = whole_number(world_size, "world_size", 1)
        self.replica_id: str = replica_id
        self._is_spare = spare
        self._lighthouse = parse_address(lighthouse_addr, "lighthouse_addr")
        self._store_addr, self._on_quorum = store_addr, on_quorum
        self._hostname = parse_host(hostname, "hostname")
        self._heartbeat_interval_s = seconds_of(heartbeat_interval, "heartbeat_interval")
        how = waits_for_lighthouse, job_id, PROTOCOL
        self.group: ReplicaGroup = ReplicaGroup(replica_id, world_size, *how)
        self._progress = ProgressLog()
        self._statement = pb.Statement()  # of the lighthouse, on the members of the last quorum
        self._ranks: dict[int, RankListener] = {}
        self._local: LocalListener | None = None  # of these
        self._doubts: dict[int, asyncio.Task[None]] = {}  # by rank without a session
        # A lighthouse that shows a token of its own would give it to any process that claims an address.
        self._kill_token = secrets.token_hex(32) if process_trust() is not None else ""
        self.rank_key: str = secrets.token_hex(32) if process_trust() is not None else ""
        self._dead_s = seconds_of(dead_after, "dead_after")
        self._timeout_ms = round(seconds_of(timeout, may_be_0=True) * 1000)
        self._rank_gone = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._hosts: dict[str, Sequence[HostAddress]] = {}  # by replica group: its hosts but rank 0's
        self._probe_numbers = itertools.count()
        self._probed: dict[int, asyncio.Future[frozenset[str]]] = {}  # by number of the probe
        self._loop = coordination_loop()
        self._is_shut_down = False
        self._loop.run(
            self._start(parse_address(bind, "bind"), seconds_of(connect_timeout, "connect_timeout")),
            cancels=True,
        )
        resources.track(self)

    def address(self) -> str:
        """Return `http://host:port`, which other replica groups and ranks use."""
        return self._address.url

    def shutdown(self) -> None:
        """Leave the lighthouse in good order and stop serving. Safe to call again."""
        self.leave("shutdown")

    def leave(self, reason: str, step: int = 0, quorum_id: int = 0) -> None:
        """Leave in good order before this step, without disturbing other groups that have not begun it.

        Args:
            quorum_id: of the last quorum in which no member waits for this group, negative if it was in none;
                0 says nothing of that.
        """
        self._stop_once(reason, step, quorum_id)

    def close(self) -> None:
        """Close without a leave: all others take that for this replica group's death."""
        self._stop_once(None)

    def attach_local_rank(self, group_rank: int, listener: LocalListener) -> Self:
        """Connect the rank that lives in this process; return its `RankLink`, which is this server."""

        async def attach() -> None:
            self._local = listener
            self.rank_attached(group_rank, listener, uuid.uuid4().bytes)
            self._run(self._watch(listener))

        self._loop.run(attach())
        return self

    def join(self, join: RankJoin) -> None:
        """Ask for a quorum, as the rank that lives in this process."""
        self._loop.loop.call_soon_threadsafe(lambda: self._perform(self.group.rank_joined(join)))

    def why_unasked(self) -> str:
        """Return why the rank of this process gets no quorum, if other ranks of the group are why."""
        return self.group.why_unasked(LOCAL_RANK)

    def vote(self, group_rank: int, vote: Verdict) -> None:
        """Vote, as the rank that lives in this process."""
        self._loop.loop.call_soon_threadsafe(lambda: self._perform(self.group.rank_voted(group_rank, vote)))

    # ------------------------------------------------- called on the loop, by ranks

    def rank_attached(self, group_rank: int, listener: RankListener, process: bytes | None = None) -> bool:
        """Register the listener of a rank: that of its process, which opens sessions, or, where that is None,
        of a call that waits for one answer.

        Return False if another process speaks for the rank. A call takes the place of an older one.
        """
        if process is None:
            is_free = not self.group.has_session(group_rank)
        else:
            is_free = self.group.rank_registered(group_rank, process)
        if is_free:
            self._ranks[group_rank] = listener
        return is_free

    def rank_withdrew(self, group_rank: int, listener: RankListener) -> None:
        """Handle a rank that no longer waits for a quorum; ignored for a call that a newer one replaced."""
        if self._ranks.get(group_rank) is listener:
            self.group.rank_withdrew(group_rank)

    def rank_left(self, group_rank: int, reason: str, step: int, quorum_id: int) -> None:
        """Handle a rank that left in good order before this step, and with which the whole group leaves."""
        self._forget(group_rank)
        self._perform(self.group.rank_left(group_rank, reason))
        leaving = self._link.leave(reason, step, quorum_id)
        asyncio.ensure_future(leaving)  # noqa: RUF006 - it ends with the link

    def rank_silent(self, group_rank: int, listener: RankListener, address: Address | None) -> None:
        """Handle a rank's session that ended without a leave; ignored for a listener that was replaced.

        Args:
            address: where connections are refused once the rank's process has ended, if it has said so.
        """
        if self._is_shut_down:
            self.rank_lost(group_rank, listener, "its session ended")
        elif self._ranks.get(group_rank) is listener:
            self._doubts[group_rank] = self._run(self._doubt(group_rank, listener, address))

    def rank_resumed(self, group_rank: int) -> None:
        """Handle another session of a rank's process."""
        if (doubt := self._doubts.pop(group_rank, None)) is not None:
            doubt.cancel()
        self._perform(self.group.rank_resumed(group_rank))

    async def _doubt(self, group_rank: int, listener: RankListener, address: Address | None) -> None:
        def suspect() -> None:
            try:
                self._perform(self.group.rank_suspected(group_rank, "its session ended"))
            except Exception:  # an error of a rank, perhaps of a user's process group
                _logger.exception("what follows from a rank's silence could not be carried out")

        self.rank_lost(
            group_rank, listener, await until_dead(address, self._loop.clock, self._dead_s, suspect)
        )

    def rank_lost(self, group_rank: int, listener: RankListener, reason: str) -> None:
        """Handle a rank whose process is gone; ignored for a listener that was replaced."""
        if self._ranks.get(group_rank) is listener:
            self._forget(group_rank)
            self._perform(self.group.rank_lost(group_rank, reason))

    def _forget(self, group_rank: int) -> None:
        self._ranks.pop(group_rank, None)
        self._rank_gone.set()

    def kill(self, message: str) -> None:
        """End this process at once, as torchft's Kill does."""
        _logger.critical(
            "replica group %s is killed by request: %s", self.replica_id, printable(message[:TEXT_MAX])
        )
        self._loop.loop.call_later(0.05, os._exit, KILL_EXIT_CODE)

    # ------------------------------------------------- what ranks say over gRPC

    async def serve_session(self, _requests: object, context: Context) -> None:
        first: pb.RankSessionRequest = await read_register(context, pb.RankSessionRequest)
        group_rank, replica_id = first.register.group_rank, self.replica_id
        async with Session(context, QUEUE_MAX) as session:
            if first.register.replica_id not in ("", replica_id):
                text = f"{first.register.replica_id:.100} is gone: {replica_id} has its address"
                raise RefusedError(Refusal(grpc.StatusCode.ALREADY_EXISTS, text))
            self._check_rank(group_rank, context)
            line = self._line_of(first.register, first.received)
            registered = pb.RankRegistered(replica_id=replica_id)
            line.connect(session, pb.RankSessionResponse(registered=registered))
            try:
                await self._hear(session, group_rank, line)
            finally:
                if line.disconnect(session):
                    self.rank_silent(group_rank, line, line.address)

    def _line_of(self, register: pb.RankRegister, received: int) -> _SessionLine:
        """Return the line to a rank's process, which has received so much: that of before, or a new one."""
        process = register.process or uuid.uuid4().bytes
        line = self._ranks.get(register.group_rank)
        if isinstance(line, _SessionLine) and line.process == process:
            if not line.conversation.arrived(received):
                raise invalid("this rank has read too little, or more than was said")
            self.rank_resumed(register.group_rank)
            return line
        line = _SessionLine(process, register.address)
        self._attach(register.group_rank, line, process)
        return line

    async def _hear(self, session: Session, group_rank: int, line: _SessionLine) -> None:
        while (request := await session.read()) is not None:
            if not line.conversation.arrived(request.received):
                raise invalid("this rank has read more than was said")
            if (kind := request.WhichOneof("request")) is not None:
                line.conversation.hear()
            match kind:
                case "join":
                    self._perform(self.group.rank_joined(rank_join(request.join, group_rank)))
                case "vote":
                    self._perform(self.group.rank_voted(group_rank, verdict_from_wire(request.vote)))
                case "holds":
                    holds = request.holds
                    self._perform(self.group.rank_holds(group_rank, holds.quorum_id, holds.step))
                case "probed":
                    answer = self._probed.get(request.probed.number)
                    if answer is not None and not answer.done():
                        answer.set_result(frozenset(request.probed.silent_replica_ids))
                case "leave":
                    leave = request.leave
                    self.rank_left(group_rank, leave.reason[:TEXT_MAX], leave.step, leave.quorum_id)
                    await session.drain()
                    return  # the rank waits for this side to end the stream
            if line.conversation.owes_count:
                line.write(pb.RankSessionResponse())

    async def serve_quorum(self, request: pb.ManagerQuorumRequest, context: Context) -> bytes:
        call = self._attach_call(request.group_rank, context, RankQuorum)
        self._perform(self.group.rank_joined(rank_join(request, request.group_rank)))
        try:
            return quorum_result_to_wire((await call.answer).result).SerializeToString()
        except asyncio.CancelledError:
            self.rank_withdrew(request.group_rank, call)
            raise

    async def serve_should_commit(self, request: pb.ShouldCommitRequest, context: Context) -> bytes:
        call = self._attach_call(request.group_rank, context, RankVerdict)
        self._perform(self.group.rank_voted(request.group_rank, verdict_from_wire(request)))
        return pb.ShouldCommitResponse(**verdict_fields((await call.answer).verdict)).SerializeToString()

    async def serve_checkpoint_metadata(self, request: pb.CheckpointMetadataRequest, _: Context) -> bytes:
        if (metadata := self.group.checkpoint_metadata(request.rank)) is None:
            text = f"rank {request.rank} of {self.replica_id} has not joined yet"
            raise RefusedError(Refusal(grpc.StatusCode.NOT_FOUND, text))
        return pb.CheckpointMetadataResponse(checkpoint_metadata=metadata).SerializeToString()

    async def serve_kill(self, request: pb.KillRequest, _: Context) -> bytes:
        self.kill(request.msg)
        return b""

    def _attach_call(self, group_rank: int, context: Context, kind: type[A]) -> _UnaryCall[A]:
        self._check_rank(group_rank, context)
        self._attach(group_rank, call := _UnaryCall(kind))
        return call

    def _attach(self, group_rank: int, listener: RankListener, process: bytes | None = None) -> None:
        if not self.rank_attached(group_rank, listener, process):
            here = f"rank {group_rank} of {self.replica_id} is here already"
            why = self.group.lost_reason or here
            raise RefusedError(Refusal(grpc.StatusCode.ALREADY_EXISTS, why))

    def _check_rank(self, group_rank: int, context: Context) -> None:
        """Refuse a number that is none of a rank, and a caller that does not show the group's key."""
        if not 0 <= group_rank < self.group.world_size:
            raise invalid(f"group rank {group_rank} is not in [0, {self.group.world_size})")
        if not (key := self.rank_key):
            return
        shown = [str(value) for name, value in context.invocation_metadata() or () if name == GROUP_KEY]
        if not hmac.compare_digest("".join(shown).encode(), key.encode()):
            text = f"only a rank of {self.replica_id} says that: its store tells its ranks a key"
            raise RefusedError(Refusal(grpc.StatusCode.PERMISSION_DENIED, text))

    # ------------------------------------------------- called by the lighthouse link

    def registration(self) -> pb.Register:
        """Return the first message of a session."""
        return pb.Register(
            replica_id=self.replica_id,
            address=self._address.url,
            store_address=self._store_addr,
            world_size=self.group.world_size,
            last_quorum_id=self.group.last_quorum_id,
            last_quorum_replica_ids=self.group.last_quorum_replica_ids,
            last_quorum_round=self.group.last_quorum_round,
            last_quorum_stands=self.group.last_quorum_stands,
            spare=self._is_spare,
            kill_token=self._kill_token,
            last_quorum_statement=self._statement,
        )

    def lighthouse_connected(self) -> None:
        """Repeat the open requests: the lighthouse listens, and has forgotten earlier ones."""
        self._progress = ProgressLog()  # that lighthouse has heard nothing
        self._perform(self.group.lighthouse_connected())
        if self._local is not None:
            self._local.lighthouse_connected()

    def lighthouse_disconnected(self, reason: str) -> None:
        """Note that the connection is down; it is being restored."""
        self._perform(self.group.lighthouse_disconnected())
        if self._local is not None:
            self._local.lighthouse_disconnected(reason)

    def lease_ended(self) -> None:
        """Go on in a quorum that stands no longer: the lighthouse may form another one by now."""
        self._perform(self.group.lease_ended())

    def refused(self, reason: str) -> None:
        """End this replica group, which is foreign to the lighthouse's job; the connection is over."""
        self._perform(self.group.refused(reason))

    def hear(self, response: pb.SessionResponse) -> None:
        """Handle a message to this replica group, which only a newer version may know."""
        group = self.group
        match response.WhichOneof("response"):
            case "quorum":
                self._quorum_formed(response.quorum)
            case "hold":
                self._perform(group.hold(response.hold.quorum_id, response.hold.round))
            case "release":
                release = response.release
                self._perform(group.released(release.quorum_id, release.round, release.ask_at))
            case "member_lost":
                lost = response.member_lost
                known = lost.quorum_id, lost.replica_id, lost.reason, lost.is_alive
                self._perform(group.member_lost(*known, codec.unknown_fields(lost), lost.must_answer))
            case "left_out":
                left = response.left_out
                whom = left.quorum_id, left.unreachable_replica_ids, left.reason
                self._perform(group.left_out(*whom, codec.unknown_fields(left)))

    def _quorum_formed(self, quorum: pb.Quorum) -> None:
        self._on_quorum(quorum.quorum_id, QuorumSecret(quorum.secret))
        hosts = {
            member.replica_id: [(each.group_rank, each.address) for each in member.rank_addresses]
            for member in quorum.participants
            if member.rank_addresses
        }
        kept = list(self._hosts)[-REPORTED_MAX:]  # of members that were left out, as many as a report has
        self._hosts = {i: self._hosts[i] for i in kept if i not in hosts} | hosts
        number = quorum.quorum_id, quorum.participants, quorum.round
        of_all = quorum.stands, quorum.first_quorum_id, quorum.secret
        self._perform(self.group.quorum_formed(*number, *of_all))
        if self.group.last_quorum_id == quorum.quorum_id:
            self._statement = quorum.statement

    # ------------------------------------------------------------------- effects

    def _perform(self, effects: Iterable[Effect]) -> None:
        """Carry out all effects. An error of the rank in this process keeps none of them from the others."""
        _do_all(partial(self._carry_out, effect) for effect in effects)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case GroupJoin() | GroupIdentity() | GroupHolds() | BrokenLinks() | GroupAway():
                self._tell_lighthouse(effect)
            case Probe():
                self._run(self._probe(effect))
            case RankQuorum() | RankVerdict():
                self._tell(effect.group_rank, effect)
            case StepLostNotice() | HoldRanks() | ReleaseRanks() | GroupLeftNotice():
                self._tell_all(effect.group_ranks, effect)
            case LossNotice() | LeftOutNotice() | SuspectNotice():
                self._tell_all(list(self._ranks), effect)
            case GroupLostNotice():
                asyncio.ensure_future(self._link.close())  # noqa: RUF006 - it ends with the link
                self._tell_all(list(self._ranks), effect)

    def _tell_all(self, group_ranks: Iterable[int], message: ToRank) -> None:
        _do_all(partial(self._tell, group_rank, message) for group_rank in group_ranks)

    def _tell(self, group_rank: int, message: ToRank) -> None:
        if (rank := self._ranks.get(group_rank)) is None:
            _logger.debug("rank %d is not there for %s", group_rank, message)
        elif (step := rank.hear(message)) is not None and isinstance(message, HoldRanks):
            self._perform(self.group.rank_holds(group_rank, message.quorum_id, step))

    def _tell_lighthouse(
        self, news: GroupJoin | GroupIdentity | GroupHolds | BrokenLinks | GroupAway
    ) -> None:
        match news:
            case GroupAway(is_back):
                (self._link.call_again if is_back else self._link.hang_up)()
            case GroupJoin():
                self._link.say(pb.SessionRequest(join=self._member(news)))
            case GroupIdentity(identity):
                self._link.say(pb.SessionRequest(identity=codec.identity_to_wire(identity)))
            case GroupHolds():
                self._link.say(pb.SessionRequest(holds=pb.Holds(**news._asdict())))
            case BrokenLinks(unreachable):
                names = " ".join(map(short_name, unreachable)) or "nobody any more"
                _logger.warning("[%s] cannot reach: %s", short_name(self.replica_id), printable(names))
                links = pb.BrokenLinks(unreachable_replica_ids=unreachable)
                self._link.say(pb.SessionRequest(broken_links=links))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine in the background, until this server stops."""
        task = self._loop.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _watch(self, listener: LocalListener) -> None:
        """Check regularly whether this process's rank waits for other replica groups longer than usual."""
        watch = StallWatch()
        while True:
            try:
                self._look(watch, listener)
                self._tell_progress(listener)
            except Exception:  # an error of the rank, perhaps of a user's process group
                _logger.exception("what a rank waits for could not be seen to")
            await asyncio.sleep(LOOK_EVERY_S)

    def _tell_progress(self, listener: LocalListener) -> None:
        """Tell the lighthouse how far the rank is, if it wants to hear that and has not heard it."""
        if not (interval_s := self._link.progress_interval_s):
            return
        wait, (step, source) = listener.waits_for(), listener.step_and_source()
        seen = Report(self.group.last_quorum_id, step, wait.kind if wait else "", heals_from=source)
        members = len(self.group.last_quorum_replica_ids)
        if (news := self._progress.look(seen, members, interval_s, self._loop.loop.time())) is not None:
            self._link.say(pb.SessionRequest(progress=pb.Progress(**news._asdict())))

    def _look(self, watch: StallWatch, listener: LocalListener) -> None:
        group = self.group
        quorum_id, members = group.last_quorum_id, len(group.last_quorum_replica_ids)
        now, wait = self._loop.loop.time(), listener.waits_for()
        waited_s = watch.look(quorum_id, members, wait, now)
        if watch.is_overdue(self._link.join_timeout_s, now):
            self._perform(group.step_overdue(quorum_id, self._link.join_timeout_s))
        if waited_s and self._link.hears_of_links:
            self._perform(group.step_stalled(quorum_id, for_long=waited_s > LONG_S))

    async def _probe(self, probe: Probe) -> None:
        others = self._other_hosts()

        def answered(replica_id: str) -> None:
            if not others:
                self._perform(self.group.answered(probe, replica_id))

        silent: frozenset[str] = frozenset()
        try:
            here = silent_peers(probe, self._loop.clock, answered)
            there = (self._probe_from(group_rank, line, probe) for group_rank, line in others)
            silent = frozenset().union(*await asyncio.gather(here, *there))
        except Exception:  # the join waits for the answers, so an error must not keep them away
            _logger.exception("probing the other replica groups failed")
        try:
            self._perform(self.group.probed(probe, silent))
        except Exception:  # an error of a rank, perhaps of a user's process group
            _logger.exception("what follows from a probe could not be carried out")

    async def _probe_from(self, group_rank: int, line: _SessionLine, probe: Probe) -> frozenset[str]:
        """Return which peers give no answer to the host of a rank; none if that does not say in time."""
        addresses = [counterpart(self._hosts.get(i, ()), group_rank, rank_0) for i, rank_0 in probe.peers]
        order = HostProbe.of(probe, next(self._probe_numbers), addresses)
        answer: asyncio.Future[frozenset[str]] = self._loop.loop.create_future()
        self._probed[order.number] = answer
        try:
            line.hear(order)
            async with asyncio.timeout(2 * LIMIT_S):
                return await answer & frozenset(order.replica_ids)
        except TimeoutError:
            return frozenset()
        finally:
            del self._probed[order.number]

    def _other_hosts(self) -> list[tuple[int, _SessionLine]]:
        """Return the first rank on each host of this group but rank 0's, and the line to it, as far as a join
        has room for them.

        No other host reaches a rank that serves at a loopback address.
        """
        first: dict[str, tuple[int, _SessionLine]] = {}
        for group_rank, line in sorted(self._ranks.items(), key=itemgetter(0)):
            if isinstance(line, _SessionLine) and line.address and not is_loopback(line.address.host):
                first.setdefault(line.address.host, (group_rank, line))
        first.pop(self._hostname, None)
        return list(first.values())[:OTHER_HOSTS_MAX]

    def _member(self, join: GroupJoin) -> pb.QuorumMember:
        others = self._other_hosts()
        return pb.QuorumMember(
            rank_addresses=[pb.RankAddress(group_rank=r, address=str(line.address)) for r, line in others],
            replica_id=self.replica_id,
            address=self._address.url,
            store_address=self._store_addr,
            world_size=self.group.world_size,
            timeout_ms=self._timeout_ms,
            **join._asdict(),
        )

    # -------------------------------------------------------------- start and stop

    async def _start(self, bind: Address, connect_timeout_s: float) -> None:
        self._server, bound = make_aio_server(
            bind, [manager_service(self)], ServerLimits(), own_token=self._kill_token
        )
        self._address = Address(self._hostname, bound.port)
        await self._server.start()
        self._link = LighthouseLink(self._lighthouse, self, self._heartbeat_interval_s)
        is_connected = False
        try:
            if is_connected := await self._link.wait_connected(connect_timeout_s):
                return
            reason, is_distrusted = self._link.last_error, self._link.is_distrusted
        finally:  # also after Ctrl-C: the others would wait for a server that no process has
            if not is_connected:
                await self._stop(None)
        if is_distrusted:
            raise TrustError(f"the lighthouse at {self._lighthouse} refuses this replica group: {reason}")
        raise ConnectError(
            f"no lighthouse answered at {self._lighthouse} within {connect_timeout_s:g} s ({reason}); check "
            "that `python -m lighthouse` is running there, that lighthouse_addr (TORCHFT_LIGHTHOUSE) is its "
            "own address, not its page's, that both have TORCHFT_TLS or neither, and that no firewall is "
            "between them"
        )

    def _stop_once(self, reason: str | None, step: int = 0, quorum_id: int = 0) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._loop.run(self._stop(reason, step, quorum_id))

    async def _stop(self, reason: str | None, step: int = 0, quorum_id: int = 0) -> None:
        for task in list(self._tasks):
            task.cancel()
        if reason is None:
            self._forget(LOCAL_RANK)  # the local rank closes, so it is not told
            self._perform(self.group.rank_lost(LOCAL_RANK, "it has hung up"))
            await self._link.close()
        else:
            self._perform(self.group.rank_left(LOCAL_RANK, reason))
            await self._link.leave(reason, step, quorum_id)
            await self._wait_for_other_ranks()
        await self._server.stop(STOP_GRACE_S)

    async def _wait_for_other_ranks(self) -> None:
        """Wait for the other ranks, which get the last verdict from this server and then hang up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RANKS_LEAVE_S):
                while any(rank != LOCAL_RANK for rank in self._ranks):
                    self._rank_gone.clear()
                    await self._rank_gone.wait()


def _do_all(acts: Iterable[Callable[[], None]]) -> None:
    """Do each of these, even if another one raises; raise the first error after that."""
    failures: list[Exception] = []
    for act in acts:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - of a user's process group, perhaps
            failures.append(error)
    if failures:
        raise failures[0]


# -- the gRPC interface


def manager_service(server: ManagerServer) -> grpc.GenericRpcHandler[Any, Any]:
    """Make the handlers of the service torchft.ManagerService."""
    return service(
        "torchft.ManagerService",
        streams={"Session": (server.serve_session, pb.RankSessionRequest)},
        calls={
            "Quorum": (server.serve_quorum, pb.ManagerQuorumRequest),
            "CheckpointMetadata": (server.serve_checkpoint_metadata, pb.CheckpointMetadataRequest),
            "ShouldCommit": (server.serve_should_commit, pb.ShouldCommitRequest),
            "Kill": (server.serve_kill, pb.KillRequest),
        },
    )


def rank_join(request: pb.ManagerQuorumRequest, group_rank: int) -> RankJoin:
    """Convert a wire message to a value; the rank is that of the session, not the message's."""
    form = codec.form_from_wire(request.form) if request.HasField("form") else None
    return RankJoin(**{**codec.fields_of(request, RankJoin), "group_rank": group_rank, "form": form})


class _SessionLine:
    """A `RankListener` that puts the messages to a rank on the stream of its session, and on those of later
    sessions of the same process.

    Attributes:
        process: tells the rank's process from any other that says it is that rank.
        address: where connections are refused once the process has ended; None if it has not said so.
        conversation: what was said over all sessions.
    """

    def __init__(self, process: bytes, address: str) -> None:
        self.process = process
        self.address = _address(address)
        self.conversation: Conversation[pb.RankSessionResponse] = Conversation()
        self._session: Session | None = None

    def connect(self, session: Session, registered: pb.RankSessionResponse) -> None:
        """Speak through a new session, which takes the place of the one before."""
        self._end("a newer session of this rank took this one's place")
        self._session = session
        for response in (registered, *self.conversation.to_repeat):
            self.write(response)

    def disconnect(self, session: Session) -> bool:
        """Note the end of a session; return False if another one has taken its place."""
        is_last = session is self._session
        if is_last:
            self._session = None
        return is_last

    def hear(self, message: ToRank | HostProbe) -> None:
        response = message_to_wire(message)
        if self.conversation.is_over:
            return
        if self.conversation.say(response):
            self.write(response)
        else:
            self._end("this rank has read too little")

    def write(self, response: pb.RankSessionResponse) -> None:
        """Put a message on the session, if there is one, with the count of those that have come."""
        if self._session is not None:
            response.received = self.conversation.tell_count()
            self._session.send(response.SerializeToString())

    def _end(self, why: str) -> None:
        if self._session is not None:
            self._session.end(Refusal(grpc.StatusCode.ABORTED, why))


def _address(text: str) -> Address | None:
    try:
        return parse_address(text)
    except AddressError:
        return None


class _UnaryCall(Generic[A]):
    """A `RankListener` that waits for one answer of a kind; a quorum with a unary caller does not stand."""

    def __init__(self, kind: type[A]) -> None:
        self._kind: type[A] = kind
        self.answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()

    def hear(self, message: ToRank) -> None:
        """Take the answer, or that there is none."""
        if isinstance(message, self._kind):
            settle(self.answer, message)
        elif isinstance(message, GroupLeftNotice | GroupLostNotice):
            settle(self.answer, Refusal(grpc.StatusCode.ABORTED, message.reason))


# -- the connection to the lighthouse

RECONNECT_MIN_S = 0.02
RECONNECT_MAX_S = 0.25
LEAVE_ANSWER_S = 5.0  # for a busy host; without an answer the lighthouse takes the end for a death
REGISTER_S = 5.0
HEARTBEAT_TIMEOUT_S = 5.0
LEASE_MIN_S = 0.001


class LighthouseLink:
    """A connection to the lighthouse, kept open until `close`: a session that is opened again when it ends.

    One coroutine owns the connection. It connects, registers, reads until the stream ends, reports the end,
    waits a moment and begins again; the listener knows what to register with and what to repeat. If the
    lighthouse knows no sessions, as torchft's own does not, unary calls serve the same listener.
    """

    def __init__(self, address: Address, listener: ManagerServer, heartbeat_interval_s: float) -> None:
        self._address = address
        self._listener = listener
        self._heartbeat_interval_s = heartbeat_interval_s
        self._say: Callable[[pb.SessionRequest], None] | None = None
        self._leaving = False
        self.last_error: str = "no answer"
        self.is_distrusted: bool = False  # from the start; later, tokens may be about to be replaced
        self._was_connected = False
        self.join_timeout_s: float = math.inf  # of the lighthouse, once it has told
        # How often it wants to hear of steps, of news at once; 0 is never.
        self.progress_interval_s: float = 0.0
        self._lease_s = 0.0  # how long a quorum may stand after the end of a session; 0 is for ever
        self._lease: asyncio.TimerHandle | None = None  # runs while it is silent
        self._connected = asyncio.Event()
        self.hears_of_links: bool = False  # torchft's lighthouse cannot leave out what cannot be reached
        self._task = asyncio.create_task(self._keep_open())

    async def wait_connected(self, timeout_s: float) -> bool:
        """Return whether the lighthouse answered within the timeout; at once, if it refuses this process."""
        connected = asyncio.ensure_future(self._connected.wait())
        await asyncio.wait([connected, self._task], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        connected.cancel()
        return self._connected.is_set()

    def say(self, request: pb.SessionRequest) -> None:
        """Say something, if there is a session; the listener repeats what the next one has to know."""
        if self._say is not None:
            self._say(request)

    async def leave(self, reason: str, step: int, quorum_id: int = 0) -> None:
        """Send a leave before this step, so that no replica that has not begun it is alarmed, and close."""
        self._leaving = True
        if self._say is not None:
            self._say(pb.SessionRequest(leave=pb.Leave(reason=reason, step=step, quorum_id=quorum_id)))
            await asyncio.wait([self._task], timeout=LEAVE_ANSWER_S)
        await self.close()

    def hang_up(self) -> None:
        """Close without a leave, for which the lighthouse lets the others go on, until `call_again`."""
        self._task.cancel()
        self._end_session("this replica group waits for one of its ranks")

    def call_again(self) -> None:
        """Open sessions again."""
        self._task = asyncio.create_task(self._keep_open(self._task))

    async def close(self) -> None:
        """Close without a leave: the lighthouse takes that for a death."""
        self._task.cancel()
        await asyncio.wait([self._task])
        self._renew_lease(0.0)

    async def _keep_open(self, earlier: asyncio.Task[None] | None = None) -> None:
        """Open one session after the other, after the `earlier` task has ended."""
        if earlier is not None:
            await asyncio.wait([earlier])
            del earlier  # in which its session is, and the task before it
        backoff = RECONNECT_MIN_S
        while not self._leaving:
            reason = "the lighthouse ended the session"
            try:
                await self._serve()
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
                    self._say, self._leaving = None, True
                    self._listener.refused(reason)
                    return
                if error.code() in DISTRUST and not self._was_connected:
                    self.is_distrusted, self.last_error = True, reason
                    return
            except MalformedMessageError as error:
                reason = str(error)
            except TimeoutError:
                reason = f"no answer to the registration within {REGISTER_S:g} s"
            except Exception as error:  # an error of the listener, perhaps of a user's process group
                _logger.exception("what the lighthouse said could not be dealt with; connecting anew")
                reason = f"{type(error).__name__}: {error}"
            self.last_error = reason
            if self._end_session(reason):
                backoff = RECONNECT_MIN_S
            elif CONNECTION_REFUSED in reason.lower():  # while none listens there, none forms a quorum
                self._renew_lease(self._lease_s)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            backoff = min(2 * backoff, RECONNECT_MAX_S)

    def _mark_connected(self, say: Callable[[pb.SessionRequest], None]) -> None:
        self._say = say
        self._connected.set()
        self._was_connected = True
        self._renew_lease(0.0)
        self._listener.lighthouse_connected()

    def _renew_lease(self, seconds: float) -> None:
        """Let the lease run for so many seconds from now; 0 ends it without effect."""
        if self._lease is not None:
            self._lease.cancel()
        self._lease = None
        if seconds > 0:
            self._lease = asyncio.get_running_loop().call_later(seconds, self._listener.lease_ended)

    def _end_session(self, reason: str) -> bool:
        """Tell the listener that the session has ended, unless there was none; return whether it was told."""
        self._say = None
        if self._leaving or not self._connected.is_set():
            return False
        self._connected.clear()
        try:
            self._listener.lighthouse_disconnected(reason)
        except Exception:
            _logger.exception("the listener failed when it was told that the lighthouse is away")
        self._renew_lease(self._lease_s)
        return True

    async def _serve(self) -> None:
        """Serve a session, or unary calls where the lighthouse, this time, knows no sessions."""
        try:
            await self._serve_session()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            await self._serve_unary()

    # -------------------------------------------------------------- sessions

    async def _serve_session(self) -> None:
        """Serve one session, from its register to its end."""
        call: DuplexCall[pb.SessionRequest, pb.SessionResponse]
        call = DuplexCall(self._address, wire.SESSION, pb.SessionRequest, pb.SessionResponse)
        try:
            call.send(pb.SessionRequest(register=self._listener.registration()))
            async with asyncio.timeout(REGISTER_S):
                response = await call.read()
            while response is not None:
                if response.WhichOneof("response") == "registered":
                    self._adopt(response.registered)
                    self.hears_of_links = True
                    self._mark_connected(call.send)
                else:
                    self._dispatch(response)
                response = await call.read()
        finally:
            await call.close()

    def _adopt(self, job: pb.JobConfig) -> None:
        self.join_timeout_s = job.join_timeout_ms / 1000
        self._lease_s = _own_lease_s(job.standing_lease_ms / 1000)
        is_idle = job.progress_interval_ms > 0 and not job.is_watched
        self.progress_interval_s = math.inf if is_idle else job.progress_interval_ms / 1000

    def _dispatch(self, response: pb.SessionResponse) -> None:
        if response.WhichOneof("response") == "config_changed":
            self._adopt(response.config_changed)
        else:
            self._listener.hear(response)

    # ------------------------------------------------------ torchft's lighthouse

    async def _serve_unary(self) -> None:
        """Send heartbeats, and run blocking Quorum calls, until one fails or this side leaves."""
        async with make_aio_channel(self._address) as channel:
            types = pb.LighthouseHeartbeatRequest, pb.LighthouseHeartbeatResponse
            heartbeat = unary(channel, wire.HEARTBEAT, *types)
            request = pb.LighthouseHeartbeatRequest(replica_id=self._listener.registration().replica_id)
            await heartbeat(request)
            said: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
            self.hears_of_links = False
            self._mark_connected(said.put_nowait)
            quorums = asyncio.create_task(self._call_quorums(channel, said))
            try:
                while not quorums.done():
                    await heartbeat(request, timeout=HEARTBEAT_TIMEOUT_S)
                    await asyncio.wait([quorums], timeout=self._heartbeat_interval_s)
                quorums.result()
            finally:
                quorums.cancel()
                await asyncio.wait([quorums])

    async def _call_quorums(self, channel: grpc.aio.Channel, said: asyncio.Queue[pb.SessionRequest]) -> None:
        """Run one call per join, until a leave: torchft's lighthouse notices that by the silence after it.

        That lighthouse knows nothing of links.
        """
        quorum = unary(channel, wire.QUORUM, pb.LighthouseQuorumRequest, pb.LighthouseQuorumResponse)
        answered = 0  # of those that wait: a rank whose timeout was over has asked again before the answer
        while (kind := (request := await said.get()).WhichOneof("request")) != "leave":
            answered -= 1
            if kind == "join" and answered < 0:
                response = await quorum(pb.LighthouseQuorumRequest(requester=request.join))
                answered = said.qsize()
                self._listener.hear(pb.SessionResponse(quorum=response.quorum))


def _own_lease_s(lease_s: float) -> float:
    """Return how long members go on after this side has noticed the end of a session.

    The lighthouse may have noticed it earlier, by the time that PINGs take here, and counts from then.
    """
    return max(lease_s - default_keepalive().notice_s, LEASE_MIN_S) if lease_s > 0 else 0.0
