"""The gRPC interface of the ManagerServer: sessions of ranks, and torchft's unary calls.

Each handler turns messages into calls of the server's methods and waits for the answers through a
`RankListener`. Nothing is decided here.
"""

from __future__ import annotations

import asyncio
import hmac
import operator
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import grpc.aio

from lighthouse import codec
from lighthouse.address import Address, parse_address
from lighthouse.admission import TEXT_MAX
from lighthouse.errors import AddressError
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.conversation import Conversation
from torchft_like.core.replica_group import (
    GroupLeftNotice,
    GroupLostNotice,
    RankJoin,
    RankQuorum,
    RankVerdict,
    ToRank,
    Verdict,
)
from torchft_like.manager_server.rank_link import (
    GROUP_KEY,
    message_to_wire,
    quorum_result_to_wire,
    verdict_fields,
    verdict_from_wire,
)

if TYPE_CHECKING:
    from torchft_like.manager_server.server import ManagerServer

Context = grpc.aio.ServicerContext[Any, Any]

REGISTER_S = 10.0  # seconds in which a session has to name its rank
M = TypeVar("M")


def manager_service(server: ManagerServer) -> grpc.GenericRpcHandler[Any, Any]:
    """Make the handlers of the service torchft.ManagerService."""
    stream, unary = grpc.stream_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
    handlers = _Handlers(server)
    methods: dict[str, tuple[Any, Any, Any]] = {
        "Session": (stream, handlers.session, pb.RankSessionRequest),
        "Quorum": (unary, handlers.quorum, pb.ManagerQuorumRequest),
        "CheckpointMetadata": (unary, handlers.checkpoint_metadata, pb.CheckpointMetadataRequest),
        "ShouldCommit": (unary, handlers.should_commit, pb.ShouldCommitRequest),
        "Kill": (unary, handlers.kill, pb.KillRequest),
    }
    write = operator.methodcaller("SerializeToString")
    return grpc.method_handlers_generic_handler(
        "torchft.ManagerService",
        {name: make(answer, codec.reader(kind), write) for name, (make, answer, kind) in methods.items()},
    )


class _Handlers:
    def __init__(self, server: ManagerServer) -> None:
        self._server = server

    async def session(
        self, requests: AsyncIterator[pb.RankSessionRequest | None], context: Context
    ) -> AsyncIterator[pb.RankSessionResponse]:
        first = await _first(requests)
        if first is None or first.WhichOneof("request") != "register":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a rank's session begins with `register`")
            return
        register = first.register
        group_rank = register.group_rank
        await self._check_rank(group_rank, context)
        line = await self._line_of(register, first.received, context)
        connection = line.connect()
        reader: asyncio.Task[None] | None = None
        try:
            yield pb.RankSessionResponse(
                registered=pb.RankRegistered(replica_id=self._server.replica_id),
                received=line.conversation.tell_count(),
            )
            reader = asyncio.create_task(self._read(requests, group_rank, line, connection))
            while (response := await connection.get()) is not None:
                response.received = line.conversation.tell_count()
                yield response
        finally:
            if reader is not None:
                reader.cancel()
            if line.disconnect(connection):
                self._server.rank_silent(group_rank, line, line.address)

    async def _line_of(self, register: pb.RankRegister, received: int, context: Context) -> _SessionLine:
        """Return the line to a rank's process, which has received so much: that of before, or a new one."""
        server, process = self._server, register.process or uuid.uuid4().bytes
        if register.replica_id not in ("", server.replica_id):
            text = f"{register.replica_id:.100} is gone: {server.replica_id} has its address"
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, text)
        await self._check_key(context)
        line = server.listener_of(register.group_rank)
        if isinstance(line, _SessionLine) and line.process == process:
            if not line.conversation.arrived(received):
                text = "this rank has read too little, or more than was said"
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
            server.rank_resumed(register.group_rank)
            return line
        line = _SessionLine(process, register.address)
        if not server.rank_attached(register.group_rank, line, process):
            await self._refuse_second(register.group_rank, context)
        return line

    async def _read(
        self,
        requests: AsyncIterator[pb.RankSessionRequest | None],
        group_rank: int,
        line: _SessionLine,
        connection: _Connection,
    ) -> None:
        try:
            async for request in requests:
                if request is None or not line.is_current(connection):
                    return  # bytes that are no message make the session useless
                if not line.conversation.arrived(request.received):
                    return
                kind = request.WhichOneof("request")
                if kind is not None:
                    line.conversation.hear()
                match kind:
                    case "join":
                        self._server.rank_joined(rank_join(request.join, group_rank))
                    case "vote":
                        self._server.rank_voted(group_rank, verdict_from_wire(request.vote))
                    case "holds":
                        self._server.rank_holds(group_rank, request.holds.quorum_id, request.holds.step)
                    case "leave":
                        leave = request.leave
                        reason = leave.reason[:TEXT_MAX]
                        self._server.rank_left(group_rank, reason, leave.step, leave.quorum_id)
                        return  # the rank waits for this side to end the stream
                if line.conversation.owes_count:
                    connection.put_nowait(pb.RankSessionResponse())
        finally:
            connection.put_nowait(None)

    async def quorum(
        self, request: pb.ManagerQuorumRequest | None, context: Context
    ) -> pb.ManagerQuorumResponse:
        request = await _well_formed(request, context)
        call = await self._attach_call(request.group_rank, context)
        self._server.rank_joined(rank_join(request, request.group_rank))
        try:
            return quorum_result_to_wire(await call.result)
        except _GroupLostError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
            raise
        except asyncio.CancelledError:
            self._server.rank_withdrew(request.group_rank, call)
            raise

    async def should_commit(
        self, request: pb.ShouldCommitRequest | None, context: Context
    ) -> pb.ShouldCommitResponse:
        request = await _well_formed(request, context)
        call = await self._attach_call(request.group_rank, context)
        self._server.rank_voted(request.group_rank, verdict_from_wire(request))
        try:
            return pb.ShouldCommitResponse(**verdict_fields(await call.verdict_given))
        except _GroupLostError as error:
            await context.abort(grpc.StatusCode.ABORTED, str(error))
            raise

    async def checkpoint_metadata(
        self, request: pb.CheckpointMetadataRequest | None, context: Context
    ) -> pb.CheckpointMetadataResponse:
        request = await _well_formed(request, context)
        metadata = self._server.group.checkpoint_metadata(request.rank)
        if metadata is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"rank {request.rank} of {self._server.replica_id} has not joined yet",
            )
        return pb.CheckpointMetadataResponse(checkpoint_metadata=metadata or "")

    async def kill(self, request: pb.KillRequest | None, context: Context) -> pb.KillResponse:
        request = await _well_formed(request, context)
        self._server.kill(request.msg)
        return pb.KillResponse()

    async def _attach_call(self, group_rank: int, context: Context) -> _UnaryCall:
        await self._check_rank(group_rank, context)
        await self._check_key(context)
        call = _UnaryCall()
        if not self._server.rank_attached(group_rank, call):
            await self._refuse_second(group_rank, context)
        return call

    async def _refuse_second(self, group_rank: int, context: Context) -> None:
        reason = (
            self._server.group.lost_reason
            or f"rank {group_rank} of {self._server.replica_id} is here already"
        )
        await context.abort(grpc.StatusCode.ALREADY_EXISTS, reason)

    async def _check_key(self, context: Context) -> None:
        if not (key := self._server.rank_key):
            return
        shown = [str(value) for name, value in context.invocation_metadata() or () if name == GROUP_KEY]
        if not hmac.compare_digest("".join(shown).encode(), key.encode()):
            text = f"only a rank of {self._server.replica_id} says that: its store tells its ranks a key"
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, text)

    async def _check_rank(self, group_rank: int, context: Context) -> None:
        if not 0 <= group_rank < self._server.group.world_size:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"group rank {group_rank} is not in [0, {self._server.group.world_size})",
            )


async def _first(
    requests: AsyncIterator[pb.RankSessionRequest | None],
) -> pb.RankSessionRequest | None:
    try:
        async with asyncio.timeout(REGISTER_S):
            return await anext(requests, None)
    except TimeoutError:
        return None


async def _well_formed(request: M | None, context: Context) -> M:
    if request is None:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "this is no message of the protocol")
        raise AssertionError  # unreachable: `abort` raises
    return request


def rank_join(request: pb.ManagerQuorumRequest, group_rank: int) -> RankJoin:
    """Convert a wire message to a value; the rank is that of the session, not the message's."""
    form = codec.form_from_wire(request.form) if request.HasField("form") else None
    return RankJoin(**{**codec.fields_of(request, RankJoin), "group_rank": group_rank, "form": form})


_Connection = asyncio.Queue[pb.RankSessionResponse | None]


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
        self._connection: _Connection | None = None

    def connect(self) -> _Connection:
        """Return the queue of a new session's stream, which ends that of the one before; None ends it."""
        self._end()
        connection: _Connection = asyncio.Queue()
        self._connection = connection
        for response in self.conversation.to_repeat:
            connection.put_nowait(response)
        return connection

    def is_current(self, connection: _Connection) -> bool:
        """Return whether no other session has taken this one's place."""
        return connection is self._connection

    def disconnect(self, connection: _Connection) -> bool:
        """End a session; return False if another one has taken its place."""
        is_last = connection is self._connection
        if is_last:
            self._connection = None
        return is_last

    def hear(self, message: ToRank) -> None:
        response = message_to_wire(message)
        if self.conversation.is_over:
            return
        if not self.conversation.say(response):
            self._end()
        elif self._connection is not None:
            self._connection.put_nowait(response)

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.put_nowait(None)

    def lighthouse_connected(self, *_: object) -> None:
        """Do nothing: only rank 0 hears of the lighthouse."""

    lighthouse_disconnected = lighthouse_connected


def _address(text: str) -> Address | None:
    try:
        return parse_address(text)
    except AddressError:
        return None


class _GroupLostError(Exception):
    """A unary call cannot be answered any more."""


class _UnaryCall:
    """A `RankListener` that waits for one answer."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.result: asyncio.Future[QuorumResult] = loop.create_future()
        self.verdict_given: asyncio.Future[Verdict] = loop.create_future()

    def hear(self, message: ToRank) -> None:
        """Take the answer, or that there is none; a quorum with a unary caller does not stand."""
        match message:
            case RankQuorum(_, result) if not self.result.done():
                self.result.set_result(result)
            case RankVerdict(_, verdict) if not self.verdict_given.done():
                self.verdict_given.set_result(verdict)
            case GroupLeftNotice() | GroupLostNotice():
                for future in (self.result, self.verdict_given):
                    if not future.done():
                        future.set_exception(_GroupLostError(message.reason))
                        future.exception()  # the other future may have no waiter to retrieve its error

    def lighthouse_connected(self, *_: object) -> None:
        """Do nothing: a unary caller hears its answer only."""

    lighthouse_disconnected = lighthouse_connected
