"""A bidirectional gRPC stream from the caller's side: sending never waits, and messages are read one by
one.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from lighthouse.address import Address
from lighthouse.codec import reader
from lighthouse.net import credentials, make_aio_channel
from torchft_like.errors import ConnectError

CONNECTION_REFUSED = "connection refused"  # in what gRPC says where no process listens

Request = TypeVar("Request")
Response = TypeVar("Response")


class MalformedMessageError(ConnectError):
    """The other side sent bytes that are no message, or a message that makes no sense."""


class DuplexCall(Generic[Request, Response]):
    """One call of a stream-stream method, over a connection of its own; made and used on the event loop.

    Args:
        address: of the server.
        method: the full name, `/package.Service/Method`.
        request_type, response_type: the classes of the messages.
        shown: metadata beside this process's token.
    """

    def __init__(
        self,
        address: Address,
        method: str,
        request_type: Any,
        response_type: type[Response],
        shown: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._channel = make_aio_channel(address)
        open_call: Any = self._channel.stream_stream(
            method,
            request_serializer=request_type.SerializeToString,
            response_deserializer=reader(response_type),
        )
        self._call: Any = open_call(metadata=(*credentials(), *shown))
        self._queue: asyncio.Queue[Request | None] = asyncio.Queue()
        self._writer = asyncio.create_task(self._write())

    def send(self, request: Request) -> None:
        """Queue one message."""
        self._queue.put_nowait(request)

    async def read(self) -> Response | None:
        """Return the next message; None if the other side has ended the call in good order.

        Raises:
            grpc.aio.AioRpcError: the call failed.
            MalformedMessageError: the received bytes are no message; nothing after them can be relied upon.
        """
        response: Any = await self._call.read()
        if response is None:
            raise MalformedMessageError("what came is no message of the protocol")
        return None if response is grpc.aio.EOF else response  # type: ignore[attr-defined]

    async def finish(self, last: Request) -> None:
        """Send a last message, end this side in good order, and wait until the other side has, too."""
        self.send(last)
        self._queue.put_nowait(None)
        await self._writer
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await self._call.code()

    async def close(self) -> None:
        """End the call, however far it has come, and the connection."""
        self._call.cancel()
        self._writer.cancel()
        await asyncio.wait([self._writer])
        await self._channel.close(None)

    async def _write(self) -> None:
        # An error here is an error of the whole call, and the reader gets it.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while (request := await self._queue.get()) is not None:
                await self._call.write(request)
            await self._call.done_writing()
