"""The limits of a gRPC server, each of them reached, with somebody who was there before and stays."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import grpc.aio
import pytest

from lighthouse.address import Address, parse_address
from lighthouse.net import ServerLimits, make_aio_server, make_channel
from tests.integration.lighthouse_clients import LIMIT_S
from tests.stress import hostile
from torchft_like.runtime.event_loop import coordination_loop

pytestmark = pytest.mark.integration

ECHO = "/test/Echo"
Serve = Callable[[ServerLimits], Address]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts servers that answer each message of a stream with itself."""
    servers: list[grpc.aio.Server] = []

    def start(limits: ServerLimits) -> Address:
        async def begin() -> Address:
            handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
            service = grpc.method_handlers_generic_handler("test", handlers)
            made, bound = make_aio_server(parse_address("127.0.0.1:0"), [service], limits)
            servers.append(made)
            await made.start()
            return bound

        return coordination_loop().run(begin())

    yield start
    for made in servers:
        coordination_loop().run(made.stop(0))


async def echo(messages: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
    while isinstance(message := await context.read(), bytes):
        await context.write(message)


class Talk:
    """A stream on a connection of its own."""

    def __init__(self, server: Address) -> None:
        self._channel = make_channel(server)
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = self._channel.stream_stream(ECHO, None, None)
        self._answers = iter(call(iter(self._said.get, None), timeout=LIMIT_S))

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._said.put(None)
        self._channel.close()

    def say(self, message: bytes) -> bytes:
        self._said.put(message)
        answer: bytes = next(self._answers)
        return answer


@pytest.mark.parametrize(
    ("limits", "size"),
    [(ServerLimits(request_bytes=1000), 1001), (ServerLimits(calls=1), 1)],
    ids=["bytes", "calls"],
)
def test_a_message_or_a_call_above_the_limit_is_refused_alone(
    serve: Serve, limits: ServerLimits, size: int
) -> None:
    server = serve(limits)
    with Talk(server) as early:
        assert early.say(b"x" * 1000) == b"x" * 1000
        with Talk(server) as late, pytest.raises(grpc.RpcError) as refused:
            late.say(b"x" * size)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert early.say(b"y") == b"y"


def test_a_connection_above_the_limit_is_closed(serve: Serve) -> None:
    server = serve(ServerLimits(connections=1))
    with Talk(server) as early:
        assert early.say(b"x") == b"x"
        with hostile.connected(server) as late:
            assert late.recv(1000) == b""
        assert early.say(b"y") == b"y"


def test_a_client_gets_in_once_those_that_never_speak_are_closed(serve: Serve) -> None:
    server = serve(ServerLimits(connections=2, handshake_s=0.5))
    with hostile.connected(server), hostile.connected(server), let_in(server) as late:
        assert late.say(b"y") == b"y"


def test_a_connection_that_never_speaks_is_closed(serve: Serve) -> None:
    server = serve(ServerLimits(handshake_s=0.2))
    with let_in(server) as early, hostile.connected(server) as silent:
        while silent.recv(1000):  # what a server says first, and why it hangs up
            pass
        assert early.say(b"y") == b"y"


@contextmanager
def let_in(server: Address) -> Iterator[Talk]:
    """A stream, at the first try that the server lets in: on a busy machine one may speak too late, too."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        with Talk(server) as client:
            try:
                assert client.say(b"x") == b"x"
            except grpc.RpcError:
                assert time.monotonic() < deadline
            else:
                yield client
                return


def test_a_connection_without_a_call_is_closed_and_the_next_call_opens_another(serve: Serve) -> None:
    server = serve(ServerLimits(idle_s=0.3))
    states: queue.SimpleQueue[grpc.ChannelConnectivity] = queue.SimpleQueue()
    with make_channel(server) as channel:
        channel.subscribe(states.put)
        for _ in range(2):
            assert list(channel.stream_stream(ECHO, None, None)(iter([b"x"]), timeout=LIMIT_S)) == [b"x"]
            while states.get(timeout=LIMIT_S) is not grpc.ChannelConnectivity.IDLE:
                pass
