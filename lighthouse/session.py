"""The lighthouse's end of one session: an open stream with a bounded queue towards its reader.

Sending never waits. Messages go out as fast as the replica reads them; when more than the bound are
waiting the session is ended, so that a slow reader harms only itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from lighthouse.net import caller_of

REGISTER_S = 10.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The status and the text with which an RPC ends instead of an answer."""

    code: grpc.StatusCode
    text: str


class RefusedError(Exception):
    """An RPC cannot be served; its caller is told why."""

    def __init__(self, why: Refusal) -> None:
        super().__init__(why.text)
        self.why = why


def invalid(text: str) -> RefusedError:
    """Return the error for a request that is none of the protocol, or beyond its limits."""
    return RefusedError(Refusal(grpc.StatusCode.INVALID_ARGUMENT, text))


async def read_register(context: grpc.aio.ServicerContext[Any, bytes], kind: Any) -> Any:
    """Return the register with which a stream of requests of this kind has to begin, within REGISTER_S."""
    try:
        async with asyncio.timeout(REGISTER_S):
            request: Any = await context.read()
    except TimeoutError:
        raise invalid(f"the session did not begin with a register within {REGISTER_S:g} s") from None
    found = request.WhichOneof("request") if isinstance(request, kind) else None
    if found != "register":
        raise invalid(f"the first message of a session must be a register, not {found or 'empty'}")
    return request.register


class ReplicaSession:
    """An open session, made and used on the server's loop inside the RPC's own task.

    `number` tells sessions apart for the quorum core; `address` is where the replica says that it serves,
    `caller` the IP address from which it calls,
    and `kill_token` the token with which it may be killed there; `ended` says why this side ended it, if it
    did.
    """

    def __init__(
        self,
        number: int,
        replica_id: str,
        address: str,
        context: grpc.aio.ServicerContext[Any, bytes],
        queue_max: int,
    ) -> None:
        self.number = number
        self.replica_id = replica_id
        self.address = address
        self.caller = caller_of(context)
        self.kill_token = ""
        self.ended: Refusal | None = None
        self._context = context
        self._queue_max = queue_max
        self._queue: deque[bytes] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._handler = asyncio.current_task()

    def send(self, message: bytes) -> None:
        """Queue one serialized message, or end the session when its reader is too far behind."""
        if self.ended is not None:
            return
        if len(self._queue) >= self._queue_max:
            self.end(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "the session's messages are not being read"))
            return
        self._queue.append(message)
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write())

    def end(self, why: Refusal) -> None:
        """End the RPC from this side; its handler sees a cancellation and reports `why`."""
        if self.ended is None and self._handler is not None:
            self.ended = why
            self._handler.cancel()

    def close(self) -> None:
        """Stop writing; messages that still wait are dropped."""
        self._queue.clear()
        if self._writer is not None:
            self._writer.cancel()

    async def _write(self) -> None:
        try:
            while self._queue:
                await self._context.write(self._queue[0])
                self._queue.popleft()
        except Exception as error:  # noqa: BLE001 - gRPC promises no type; every failure means the same
            self.end(Refusal(grpc.StatusCode.UNAVAILABLE, f"cannot write to the session: {error!r}"))
        finally:
            self._writer = None
