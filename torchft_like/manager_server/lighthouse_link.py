"""The connection from a ManagerServer to the lighthouse: a session that is opened again whenever it ends.

One coroutine owns the connection. It connects, registers, reads until the stream ends, reports the end, waits
a moment and begins again; the listener knows what to register with and what to repeat. If the lighthouse
knows no sessions, as torchft's own does not, unary calls serve the same listener.

Everything here runs on the coordination loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio

from lighthouse import wire
from lighthouse.address import Address
from lighthouse.net import DISTRUST, default_keepalive, make_aio_channel, unary
from lighthouse.wire import torchft_pb2 as pb
from torchft_like.manager_server.duplex import CONNECTION_REFUSED, DuplexCall, MalformedMessageError

RECONNECT_MIN_S = 0.02
RECONNECT_MAX_S = 0.25
LEAVE_ANSWER_S = 5.0  # for a busy host; without an answer the lighthouse takes the end for a death
REGISTER_S = 5.0
HEARTBEAT_TIMEOUT_S = 5.0
LEASE_MIN_S = 0.001

_logger = logging.getLogger(__name__)


class LighthouseListener(Protocol):
    """The owner of the connection."""

    def registration(self) -> pb.Register:
        """Return the first message of a session."""

    def lighthouse_connected(self) -> None:
        """Repeat the open requests: the lighthouse listens, and has forgotten earlier ones."""

    def lighthouse_disconnected(self, reason: str) -> None:
        """Note that the connection is down; it is being restored."""

    def lease_ended(self) -> None:
        """Go on in a quorum that stands no longer: the lighthouse may form another one by now."""

    def refused(self, reason: str) -> None:
        """End this replica group, which is foreign to the lighthouse's job; the connection is over."""

    def hear(self, response: pb.SessionResponse) -> None:
        """Handle a message to this replica group, which only a newer version may know."""


class LighthouseLink:
    """A connection to the lighthouse, which is kept open until `close`."""

    def __init__(self, address: Address, listener: LighthouseListener, heartbeat_interval_s: float) -> None:
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
