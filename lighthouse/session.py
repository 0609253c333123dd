"""What the gRPC services of this project have in common: handlers that refuse, and sessions.

A session is an open stream with a bounded queue towards its reader. Sending never waits. Messages go out as
fast as the caller reads them; when more than the bound are waiting the session is ended, so that a slow
reader harms only itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import grpc
import grpc.aio

from lighthouse.codec import reader
from lighthouse.net import caller_of

REGISTER_S = 10.0
DRAIN_S = 1.0

Context = grpc.aio.ServicerContext[Any, bytes]
T = TypeVar("T")


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


def check(complaint: str | None) -> None:
    """Refuse a request of which there is a complaint."""
    if complaint is not None:
        raise invalid(complaint)


def settle(call: asyncio.Future[T], result: T | Refusal) -> None:
    """Answer a call that waits, or refuse it; nothing happens to one that has its answer, or has hung up."""
    if isinstance(result, Refusal):
        if not call.done():
            call.set_exception(RefusedError(result))
            call.exception()  # the caller may hang up before it hears that
    elif not call.done():
        call.set_result(result)


Serve = Callable[[Any, Context], Awaitable[Any]]


def service(
    name: str, streams: Mapping[str, tuple[Serve, Any]], calls: Mapping[str, tuple[Serve, Any]]
) -> grpc.GenericRpcHandler[Any, Any]:
    """Make the handlers of a service.

    Args:
        streams: by method, the function that serves a stream, and the class of its requests, which a Session
          reads.
        calls: by method, the function that answers a request, with bytes, and the class of the request.

    Each function gets the RPC's context, too, and may raise a RefusedError.
    """
    stream, call = grpc.stream_stream_rpc_method_handler, grpc.unary_unary_rpc_method_handler
    kinds: tuple[tuple[Any, Mapping[str, tuple[Serve, Any]]], ...] = ((stream, streams), (call, calls))
    handlers = {
        method: make(_refusing(serve), request_deserializer=reader(kind))
        for make, methods in kinds
        for method, (serve, kind) in methods.items()
    }
    return grpc.method_handlers_generic_handler(name, handlers)


def _refusing(serve: Serve) -> Serve:
    async def answer(request: Any, context: Context) -> Any:
        try:
            if request is None:
                raise invalid("this is no message of the protocol")
            return await serve(request, context)
        except RefusedError as error:
            await context.abort(error.why.code, error.why.text)
            raise

    return answer


async def read_register(context: Context, kind: Any) -> Any:
    """Return the request with the register with which a stream of requests of this kind has to begin, within
    REGISTER_S.
    """
    try:
        async with asyncio.timeout(REGISTER_S):
            request: Any = await context.read()
    except TimeoutError:
        raise invalid(f"the session did not begin with a register within {REGISTER_S:g} s") from None
    found = request.WhichOneof("request") if isinstance(request, kind) else None
    if found != "register":
        raise invalid(f"the first message of a session must be a register, not {found or 'empty'}")
    return request


class Session:
    """An open session, made and used on the server's loop inside the RPC's own task.

        async with Session(context, queue_max=64) as session:
            session.send(b"...")
            while (request := await session.read()) is not None:
                ...

    The end of the block drops messages that still wait.

    Attributes:
        caller: the IP address from which the other side calls.
        ended: why this side has ended it, if it has.

    Raises:
        RefusedError: at the end of the block, why this side has ended it.
    """

    def __init__(self, context: Context, queue_max: int) -> None:
        self.caller = caller_of(context)
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
        """End the RPC from this side; its handler sees a cancellation."""
        if self.ended is None and self._handler is not None:
            self.ended = why
            self._handler.cancel()

    async def drain(self) -> None:
        """Wait until what was sent is on its way, for DRAIN_S at most."""
        if self._writer is not None:
            await asyncio.wait([self._writer], timeout=DRAIN_S)

    async def __aenter__(self) -> Self:
        # The metadata is sent on its own: gRPC could not end the stream after a first write that is cancelled
        # halfway.
        await self._context.send_initial_metadata(())
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._queue.clear()
        if self._writer is not None:
            self._writer.cancel()
        if isinstance(error, RefusedError):
            self.ended = self.ended or error.why
        elif self.ended is not None and not isinstance(error, Exception):
            raise RefusedError(self.ended)

    async def read(self) -> Any:
        """Return the next request; None once the caller has hung up.

        Raises:
            RefusedError: the received bytes are no message.
        """
        request: Any = await self._context.read()
        if request is None:
            raise invalid("what came is no message of the protocol")
        return None if request is grpc.aio.EOF else request  # type: ignore[attr-defined]

    async def _write(self) -> None:
        try:
            while self._queue:
                await self._context.write(self._queue[0])
                self._queue.popleft()
        except Exception as error:  # noqa: BLE001 - gRPC promises no type; every failure means the same
            self.end(Refusal(grpc.StatusCode.UNAVAILABLE, f"cannot write to the session: {error!r}"))
        finally:
            self._writer = None
