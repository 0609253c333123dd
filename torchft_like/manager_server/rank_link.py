"""The rank's side of the connection to its ManagerServer.

Rank 0 shares a process with the ManagerServer and calls it directly; the other ranks keep a session open.
Both have the same few methods (`RankLink`) and get the same few messages (`RankListener`), always on the
coordination loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Protocol

import grpc
import grpc.aio

from lighthouse import codec, wire
from lighthouse.address import LOOPBACK, Address
from lighthouse.listening import SignOfLife
from lighthouse.net import DISTRUST
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.conversation import Conversation
from torchft_like.core.quorum_secret import QuorumSecret
from torchft_like.core.replica_group import (
    GroupLeftNotice,
    GroupLostNotice,
    HoldRanks,
    LeftOutNotice,
    LossNotice,
    RankJoin,
    RankQuorum,
    RankVerdict,
    ReleaseRanks,
    StepLostNotice,
    SuspectNotice,
    ToRank,
    Verdict,
)
from torchft_like.core.stall_watch import Wait
from torchft_like.core.state_comparison import Divergence
from torchft_like.errors import ConnectError, TrustError
from torchft_like.manager_server.duplex import CONNECTION_REFUSED, DuplexCall, MalformedMessageError
from torchft_like.manager_server.suspicion import DEAD_S, HostProbe, silent_peers, until_dead
from torchft_like.runtime.event_loop import LoopThread, coordination_loop

CONNECT_RETRY_S = 0.05
GROUP_KEY = "group-key"  # the header in which a rank shows the key of its replica group
REFUSALS = (grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.INVALID_ARGUMENT)
LEAVE_ANSWER_S = 5.0  # for a busy host; without an answer the server takes the end for a death

RankCall = DuplexCall[pb.RankSessionRequest, pb.RankSessionResponse]

_logger = logging.getLogger(__name__)


class ServerGoneError(ConnectError):
    """No process listens where a rank is to find its ManagerServer, which has ended."""


class OtherStartError(TrustError):
    """A ManagerServer does not know a rank's key: it is of another start of the group, or another group's."""


class RankListener(Protocol):
    """The receiver of messages to a rank. Methods run on the coordination loop, and must never block."""

    def hear(self, message: ToRank) -> int | None:
        """Handle a message; return the step that HoldRanks asks for, or None if that comes later."""


class LocalListener(RankListener, Protocol):
    """The receiver in the ManagerServer's own process, which the server can also query."""

    def lighthouse_disconnected(self, reason: str) -> None:
        """Handle the loss of the connection to the lighthouse, which is being restored."""

    def lighthouse_connected(self) -> None:
        """Handle a new connection to the lighthouse."""

    def waits_for(self) -> Wait | None:
        """Return which operation of other replica groups the rank waits for in its step."""

    def step_and_source(self) -> tuple[int, str]:
        """Return how many steps the rank has committed, and the replica it heals from, "" for none."""


class RankLink(Protocol):
    """A rank's messages to its ManagerServer. Any thread but the coordination loop's may call these."""

    @property
    def replica_id(self) -> str:
        """The replica group's name, as rank 0 has made it unique."""

    def join(self, join: RankJoin) -> None:
        """Ask for a quorum."""

    def why_unasked(self) -> str:
        """Return why this rank gets no quorum, if other ranks of the group are why and this process knows."""

    def vote(self, group_rank: int, vote: Verdict) -> None:
        """Vote on a step: the verdict that this rank wants."""

    def leave(self, reason: str, step: int = 0, quorum_id: int = 0) -> None:
        """Leave in good order before this step, and close; see `ManagerServer.leave`."""

    def close(self) -> None:
        """Close without a leave: the others take that for this rank's death."""


class SessionLink:
    """The connection of a rank that is not in the ManagerServer's process: one session after the other, which
    carry one conversation.

    Args:
        host: the address of this host at which rank 0 finds out whether this process still exists.
        dead_s: how long rank 0 may be silent before the group is lost.
        key: that of the replica group, as `ManagerServer.rank_key` is; "" for none.

    Raises:
        ServerGoneError: no process listens at the address.
        OtherStartError, TrustError: the ManagerServer refuses the key, or this process.
        ConnectError: the ManagerServer did not answer within `connect_timeout_s`.
        ConfigError: a setting of this process is wrong.
    """

    def __init__(
        self,
        address: Address,
        group_rank: int,
        listener: RankListener,
        connect_timeout_s: float,
        host: str = LOOPBACK,
        dead_s: float = DEAD_S,
        key: str = "",
    ) -> None:
        self._address = address
        self._group_rank = group_rank
        self._listener = listener
        self._dead_s = dead_s
        self._shown = ((GROUP_KEY, key),) if key else ()
        self._loop: LoopThread = coordination_loop()
        self._process = uuid.uuid4().bytes
        self._sign_of_life = SignOfLife(Address(host, 0))
        self._probes: set[asyncio.Task[None]] = set()
        self._conversation: Conversation[pb.RankSessionRequest] = Conversation()
        self._closing = False
        self._registered = asyncio.Event()
        self.replica_id: str = ""
        self._last_error = "no answer"
        self._call: RankCall | None = None  # once registered
        self._doubt: asyncio.Task[None] | None = None  # while there is no session
        self._is_suspect = False
        self._failure: Exception | None = None  # of the first session, which another one would have, too
        try:
            self._loop.run(self._start(connect_timeout_s), cancels=True)
        except BaseException:
            self._loop.loop.call_soon_threadsafe(self._sign_of_life.close)
            raise

    def join(self, join: RankJoin) -> None:
        fields = join._asdict()
        if join.form is not None:
            fields["form"] = codec.form_to_wire(join.form)
        self._send(pb.RankSessionRequest(join=pb.ManagerQuorumRequest(**fields)))

    def why_unasked(self) -> str:
        return ""  # rank 0 knows

    def vote(self, group_rank: int, vote: Verdict) -> None:
        fields = {**verdict_fields(vote), "went_well": vote.went_well}
        request = pb.ShouldCommitRequest(group_rank=group_rank, **fields)
        self._send(pb.RankSessionRequest(vote=request))

    def leave(self, reason: str, step: int = 0, quorum_id: int = 0) -> None:
        self._closing = True
        leave = pb.Leave(reason=reason, step=step, quorum_id=quorum_id)
        self._send(pb.RankSessionRequest(leave=leave))
        self._loop.run(self._end(LEAVE_ANSWER_S))

    def close(self) -> None:
        self._closing = True
        self._loop.run(self._end(0.0))

    def _send(self, request: pb.RankSessionRequest) -> None:
        self._loop.loop.call_soon_threadsafe(self._say, request)

    def _say(self, request: pb.RankSessionRequest) -> None:
        if not self._conversation.say(request):
            self._lose("it takes no messages")
        elif self._call is not None:
            self._write(self._call, request)

    def _write(self, call: RankCall, request: pb.RankSessionRequest) -> None:
        request.received = self._conversation.tell_count()
        call.send(request)

    async def _start(self, connect_timeout_s: float) -> None:
        """Open the first session, again and again until it is accepted, or no server listens any more."""
        await self._sign_of_life.take_calls()
        self._task = asyncio.create_task(self._keep_open())
        registered = asyncio.ensure_future(self._registered.wait())
        try:
            await asyncio.wait(
                [registered, self._task], timeout=connect_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            registered.cancel()
            if not self._registered.is_set():
                await self._end(0.0)
        if self._registered.is_set():
            return
        if self._failure is not None:
            raise self._failure
        raise ConnectError(
            f"rank {self._group_rank} cannot reach its ManagerServer at {self._address} within "
            f"{connect_timeout_s:g} s ({self._last_error}); check that rank 0 of this replica group is "
            "running, that its host is reachable from here, and that no other rank has this number"
        )

    async def _keep_open(self) -> None:
        """Open one session after the other, until this rank leaves or its group is lost."""
        try:
            while not self._closing:
                try:
                    await self._serve()
                except grpc.aio.AioRpcError as error:
                    self._last_error = error.details() or error.code().name
                    if (code := error.code()) in DISTRUST and not self._registered.is_set():
                        kind = OtherStartError if code is grpc.StatusCode.PERMISSION_DENIED else TrustError
                        text = f"the ManagerServer at {self._address} refuses this rank: {self._last_error}"
                        self._failure = kind(text)
                        return
                    if self._registered.is_set() and error.code() in REFUSALS:
                        self._lose(self._last_error)
                    if not self._registered.is_set() and CONNECTION_REFUSED in self._last_error.lower():
                        self._failure = ServerGoneError(f"no ManagerServer listens at {self._address}")
                        return
                except MalformedMessageError as error:
                    self._last_error = str(error)
                except Exception as error:  # of the listener, perhaps of a user's process group
                    if not self._registered.is_set():
                        self._failure = error
                        return
                    _logger.exception("what the ManagerServer said could not be dealt with; hanging up")
                    self._lose(f"rank {self._group_rank} has hung up ({type(error).__name__}: {error})")
                if self._closing:
                    return
                if self._registered.is_set() and self._doubt is None:
                    self._doubt = asyncio.create_task(self._doubt_server())
                await asyncio.sleep(CONNECT_RETRY_S)
        finally:
            self._sign_of_life.close()
            for probe in self._probes:
                probe.cancel()
            self._trust()

    async def _serve(self) -> None:
        """Serve one session, from its register to its end."""
        types = pb.RankSessionRequest, pb.RankSessionResponse
        call: RankCall = DuplexCall(self._address, wire.RANK_SESSION, *types, self._shown)
        register = pb.RankRegister(
            group_rank=self._group_rank,
            process=self._process,
            address=str(self._sign_of_life.address),
            replica_id=self.replica_id,
        )
        try:
            self._write(call, pb.RankSessionRequest(register=register))
            while (response := await call.read()) is not None:
                if not self._conversation.arrived(response.received):
                    raise MalformedMessageError("the ManagerServer has received more than was sent")
                if response.WhichOneof("response") == "registered":
                    self._resume(call, response.registered)
                elif response.WhichOneof("response") is not None:
                    self._conversation.hear()
                    self._dispatch(response)
                    if self._conversation.owes_count:
                        self._write(call, pb.RankSessionRequest())
            self._last_error = "its ManagerServer ended the session"
        finally:
            self._call = None
            await call.close()

    def _resume(self, call: RankCall, registered: pb.RankRegistered) -> None:
        """Go on where the last session ended."""
        self._trust()
        self._call, self.replica_id = call, registered.replica_id
        self._registered.set()
        for request in self._conversation.to_repeat:
            self._write(call, request)

    # -- when rank 0 is silent

    async def _doubt_server(self) -> None:
        self._lose(await until_dead(self._address, self._loop.clock, self._dead_s, self._suspect))

    def _suspect(self) -> None:
        self._is_suspect = True
        self._tell_suspicion(f"rank 0 of this replica group is silent: {self._last_error}")

    def _trust(self) -> None:
        """End the suspicion: rank 0 answers, or it is of interest no more."""
        if self._doubt is not None:
            self._doubt.cancel()
            self._doubt = None
        if self._is_suspect:
            self._is_suspect = False
            self._tell_suspicion("")

    def _tell_suspicion(self, reason: str) -> None:
        try:
            self._listener.hear(SuspectNotice(0, reason))
        except Exception:  # perhaps of a user's process group
            _logger.exception("what follows from rank 0's silence could not be carried out")

    def _lose(self, reason: str) -> None:
        if not self._closing:
            self._closing = True
            self._task.cancel()
            text = f"rank 0 (ManagerServer at {self._address}) is gone: {reason}"
            self._listener.hear(GroupLostNotice(text))

    def _dispatch(self, response: pb.RankSessionResponse) -> None:
        if (message := message_from_wire(response, self._group_rank)) is None:
            return
        if isinstance(message, HostProbe):
            self._begin(message)
            return
        self._closing |= isinstance(message, GroupLostNotice)
        step = self._listener.hear(message)
        if isinstance(message, HoldRanks) and step is not None:
            self._say(pb.RankSessionRequest(holds=pb.Holds(quorum_id=message.quorum_id, step=step)))

    def _begin(self, order: HostProbe) -> None:
        task = asyncio.create_task(self._probe(order))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe(self, order: HostProbe) -> None:
        silent = await silent_peers(order.probe, self._loop.clock)
        probed = pb.PeersProbed(number=order.number, silent_replica_ids=silent)
        self._say(pb.RankSessionRequest(probed=probed))

    async def _end(self, answer_s: float) -> None:
        if answer_s:
            await asyncio.wait([self._task], timeout=answer_s)
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


# Messages to a rank that have the same fields in a session, by their names there.
_NOTICES: Mapping[str, Any] = {
    "step_lost": StepLostNotice,
    "member_lost": LossNotice,
    "left_out": LeftOutNotice,
    "hold": HoldRanks,
    "release": ReleaseRanks,
    "suspected": SuspectNotice,
    "probe": HostProbe,
    "group_lost": GroupLostNotice,
}
_NAMES: Mapping[Any, str] = {GroupLeftNotice: "group_lost", **{kind: name for name, kind in _NOTICES.items()}}


def message_to_wire(message: ToRank | HostProbe) -> pb.RankSessionResponse:
    """Convert a message to a rank, with the fields of a newer lighthouse's that it may have."""
    if isinstance(message, RankQuorum):
        return pb.RankSessionResponse(quorum=quorum_result_to_wire(message.result))
    if isinstance(message, RankVerdict):
        return pb.RankSessionResponse(vote=pb.ShouldCommitResponse(**verdict_fields(message.verdict)))
    name, fields = _NAMES[type(message)], message._asdict()
    kind = type(getattr(pb.RankSessionResponse(), name))
    known = kind(**{key: fields[key] for key in kind.DESCRIPTOR.fields_by_name if key in fields})
    known.MergeFromString(fields.get("unknown", b""))
    return pb.RankSessionResponse(**{name: known})


def message_from_wire(response: pb.RankSessionResponse, group_rank: int) -> ToRank | HostProbe | None:
    """Convert a message to this rank; None if it is one that only a newer version knows."""
    name = response.WhichOneof("response") or ""
    if name == "quorum":
        return RankQuorum(group_rank, quorum_result_from_wire(response.quorum))
    if name == "vote":
        return RankVerdict(group_rank, verdict_from_wire(response.vote))
    if (kind := _NOTICES.get(name)) is None:
        return None
    to_whom = {"group_ranks": (group_rank,)} if "group_ranks" in kind._fields else {}
    notice: ToRank | HostProbe = kind(**to_whom, **codec.fields_of(getattr(response, name), kind))
    return notice


def verdict_from_wire(message: pb.ShouldCommitRequest | pb.ShouldCommitResponse) -> Verdict:
    """Convert a rank's vote, or its group's verdict, to a value."""
    return Verdict(committed=message.should_commit, **codec.fields_of(message, Verdict))


def verdict_fields(verdict: Verdict) -> dict[str, Any]:
    """Return the fields that a vote's message and a verdict's have in common."""
    fields = verdict._asdict()
    del fields["went_well"]
    return {"should_commit": fields.pop("committed"), **fields}


def quorum_result_from_wire(response: pb.ManagerQuorumResponse) -> QuorumResult:
    """Convert a wire message to a value.

    Raises:
        MalformedMessageError: the ranks are not among the members, or some members have a handle and some
          have none.
    """
    _check_ranks(response)
    divergence = None
    if response.HasField("divergence"):
        divergence = Divergence(**codec.fields_of(response.divergence, Divergence))
    fields = {**codec.fields_of(response, QuorumResult), "secret": QuorumSecret(response.secret)}
    return QuorumResult(**fields, divergence=divergence)


def _check_ranks(response: pb.ManagerQuorumResponse) -> None:
    """Check the ranks by which members are looked up, and the number of handles."""
    size = len(response.replica_ids)
    ranks = [response.replica_rank, response.recover_src_replica_rank, response.max_replica_rank]
    ranks += [*response.recover_dst_replica_ranks, *response.source_ranks, *response.helped_ranks]
    if not all(0 <= rank < size for rank in ranks):
        raise MalformedMessageError(f"the quorum's ranks are not all among its {size} members")
    if len(response.reconfigure_handles) not in (0, size):
        handles = len(response.reconfigure_handles)
        raise MalformedMessageError(f"the quorum has {handles} reconfigure_handles for its {size} members")


def quorum_result_to_wire(result: QuorumResult) -> pb.ManagerQuorumResponse:
    """Convert a value to a wire message; None fields stay unset."""
    fields = result._asdict()
    if result.divergence is not None:
        fields["divergence"] = pb.Divergence(**asdict(result.divergence))
    return pb.ManagerQuorumResponse(**{k: v for k, v in fields.items() if v is not None})
