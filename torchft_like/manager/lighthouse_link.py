"""The line from a ManagerServer to the lighthouse: a session that is always being kept open.

One coroutine owns the line. It connects, registers, reads until the stream ends, reports the end,
waits a moment and begins again; the listener says what to register with and what to repeat. Where
the lighthouse knows no sessions (torchft's own), the same listener is served by unary calls.

Everything here runs on the coordination loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterable, AsyncIterator
from typing import Protocol

import grpc
import grpc.aio

from lighthouse import wire
from lighthouse.net import Address, make_aio_channel
from lighthouse.wire import torchft_pb2 as pb

RECONNECT_MIN_S = 0.02
RECONNECT_MAX_S = 0.25
LEAVE_ANSWER_S = 0.5
UNARY_RETRY_S = 0.1


class LighthouseListener(Protocol):
    """Who the line belongs to."""

    def registration(self) -> pb.Register:
        """What to say first."""

    def lighthouse_connected(self) -> None:
        """The lighthouse listens; it has forgotten whatever was joined before."""

    def lighthouse_disconnected(self, reason: str) -> None:
        """The line is down; it is being restored."""

    def quorum_formed(self, quorum: pb.Quorum) -> None:
        """A quorum that contains this replica group."""

    def member_lost(self, lost: pb.MemberLost) -> None:
        """A member of a quorum is gone."""


class LighthouseLink:
    """Keeps one line to the lighthouse open until `close`."""

    def __init__(self, address: Address, listener: LighthouseListener, heartbeat_interval_s: float) -> None:
        self._address = address
        self._listener = listener
        self._heartbeat_interval_s = heartbeat_interval_s
        self._outgoing: asyncio.Queue[pb.SessionRequest | None] = asyncio.Queue()
        self.last_error = "no answer"
        self._connected = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None
        self._serve = self._serve_session
        self._task = asyncio.create_task(self._keep_open())

    async def wait_connected(self, timeout_s: float) -> bool:
        """Whether the lighthouse answered within the timeout."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._connected.wait(), timeout_s)
        return self._connected.is_set()

    def join(self, member: pb.QuorumMember) -> None:
        """Ask for a quorum; it arrives at the listener."""
        self._outgoing.put_nowait(pb.SessionRequest(join=member))

    async def leave(self, reason: str) -> None:
        """Say goodbye, so that nobody is alarmed, and close."""
        if self._connected.is_set():
            self._outgoing.put_nowait(pb.SessionRequest(leave=pb.Leave(reason=reason)))
            self._outgoing.put_nowait(None)
            await asyncio.wait([self._task], timeout=LEAVE_ANSWER_S)
        await self.close()

    async def close(self) -> None:
        """Hang up without a word: to the lighthouse this is a death."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._close_channel()

    async def _keep_open(self) -> None:
        backoff = RECONNECT_MIN_S
        while True:
            # What waits in the queue was said to a lighthouse that is gone; the listener says it anew.
            self._outgoing = asyncio.Queue()
            self._channel = make_aio_channel(self._address)
            try:
                if await self._serve(self._channel):
                    return
                reason = "the lighthouse ended the session"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    self._serve = self._serve_unary
            self.last_error = reason
            await self._close_channel()
            if self._connected.is_set():
                self._connected.clear()
                backoff = RECONNECT_MIN_S
                self._listener.lighthouse_disconnected(reason)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - spreads the crowd
            backoff = min(2 * backoff, RECONNECT_MAX_S)

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    def _mark_connected(self) -> None:
        self._connected.set()
        self._listener.lighthouse_connected()

    # -------------------------------------------------------------- sessions

    async def _serve_session(self, channel: grpc.aio.Channel) -> bool:
        """One session, from register to its end. True when it ended because this side left."""
        open_session = channel.stream_stream(
            wire.SESSION,
            request_serializer=pb.SessionRequest.SerializeToString,
            response_deserializer=pb.SessionResponse.FromString,
        )
        requests = _Requests(self._listener.registration(), self._connected, self._outgoing)
        responses: AsyncIterable[pb.SessionResponse] = open_session(requests.stream())
        async for response in responses:
            self._dispatch(response)
        return requests.left

    def _dispatch(self, response: pb.SessionResponse) -> None:
        match response.WhichOneof("response"):
            case "registered":
                self._mark_connected()
            case "quorum":
                self._listener.quorum_formed(response.quorum)
            case "member_lost":
                self._listener.member_lost(response.member_lost)
            case _:  # a newer lighthouse may say more than this client understands
                pass

    # ------------------------------------------------------ torchft's lighthouse

    async def _serve_unary(self, channel: grpc.aio.Channel) -> bool:
        """Heartbeats and blocking Quorum calls, until one fails."""
        heartbeat = channel.unary_unary(
            wire.HEARTBEAT,
            request_serializer=pb.LighthouseHeartbeatRequest.SerializeToString,
            response_deserializer=pb.LighthouseHeartbeatResponse.FromString,
        )
        request = pb.LighthouseHeartbeatRequest(replica_id=self._listener.registration().replica_id)
        await heartbeat(request)
        self._mark_connected()
        quorums = asyncio.create_task(self._call_quorums(channel))
        try:
            while not quorums.done():
                await heartbeat(request, timeout=5.0)
                await asyncio.wait([quorums], timeout=self._heartbeat_interval_s)
            return quorums.result()
        finally:
            quorums.cancel()

    async def _call_quorums(self, channel: grpc.aio.Channel) -> bool:
        quorum = channel.unary_unary(
            wire.QUORUM,
            request_serializer=pb.LighthouseQuorumRequest.SerializeToString,
            response_deserializer=pb.LighthouseQuorumResponse.FromString,
        )
        while (request := await self._outgoing.get()) is not None:
            if request.WhichOneof("request") == "join":
                response = await quorum(pb.LighthouseQuorumRequest(requester=request.join))
                self._listener.quorum_formed(response.quorum)
        return True


class _Requests:
    """What one session says: the registration, and once that is accepted whatever is queued."""

    def __init__(
        self, register: pb.Register, accepted: asyncio.Event, queued: asyncio.Queue[pb.SessionRequest | None]
    ) -> None:
        self.left = False
        self._register = register
        self._accepted = accepted
        self._queued = queued

    async def stream(self) -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(register=self._register)
        await self._accepted.wait()
        while (request := await self._queued.get()) is not None:
            yield request
        self.left = True
