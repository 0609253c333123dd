"""Probes of other replica groups, over real sockets of this host."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lighthouse.address import Address
from lighthouse.listening import CALL_BYTES_MAX, CALLERS_MAX, SignOfLife, why_unreachable
from lighthouse.net import ServerLimits, long_greeting, make_aio_server
from lighthouse.starvation import SilenceClock
from lighthouse.tls import TLS_ENV, process_identity
from tests.certificates import certify
from torchft_like.core.peer_links import Probe
from torchft_like.manager_server import suspicion
from torchft_like.runtime import reach
from torchft_like.runtime.event_loop import LATE_S


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "ATTEMPTS", 2)
    monkeypatch.setattr(reach, "ATTEMPT_EVERY_S", 0.2)
    monkeypatch.setattr(reach, "ANSWER_S", 0.2)
    monkeypatch.setattr(suspicion, "REPEAT_S", 0.05)
    monkeypatch.setattr(suspicion, "RESOLVE_S", 2.0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        yield listener


@pytest.fixture
def silent() -> Iterator[str]:
    """An address at which nobody answers: the system drops what a full queue cannot take."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        fill(listener, stack)
        yield address_of(listener)


def fill(listener: socket.socket, stack: contextlib.ExitStack) -> None:
    """More connections than a queue without room takes."""
    for _ in range(4):
        client = stack.enter_context(socket.socket())
        client.setblocking(False)
        client.connect_ex(listener.getsockname())


def address_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def silent_of(*addresses: str, is_repeated: bool = False, must_listen: bool = False) -> set[int]:
    """The positions of those who gave no answer."""
    peers = tuple((str(n), address) for n, address in enumerate(addresses))
    what = Probe(peers, is_repeated, frozenset(dict(peers)) if must_listen else frozenset())
    return {int(i) for i in asyncio.run(probe(what, insists=True))}


async def probe(what: Probe, *, insists: bool = False) -> frozenset[str]:
    """Probe; if this insists, again where this process was starved, and so has said nothing."""
    loop = asyncio.get_running_loop()
    clock = SilenceClock(loop, LATE_S)
    try:
        while True:
            began = loop.time()
            silent = await suspicion.silent_peers(what, clock)
            if not insists or clock.last_starved <= began:
                return silent
    finally:
        clock.stop()


def test_who_listens_answers_without_accepting(listener: socket.socket) -> None:
    assert silent_of(address_of(listener)) == set()


def test_a_refusal_is_an_answer_unless_the_peer_must_listen(listener: socket.socket) -> None:
    address = address_of(listener)
    listener.close()
    assert silent_of(address) == set()
    assert silent_of(address, must_listen=True) == {0}


def test_who_refuses_only_at_first_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    listens = asyncio.open_connection
    attempts = list[object]()

    async def refuse_at_first(*where: Any) -> Any:
        attempts.append(where)
        if len(attempts) == 1:
            raise ConnectionRefusedError
        return await listens(*where)

    monkeypatch.setattr(asyncio, "open_connection", refuse_at_first)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as listener:
        assert silent_of(address_of(listener), must_listen=True) == set()


def test_who_gives_no_answer_is_silent_and_nobody_else(listener: socket.socket, silent: str) -> None:
    assert silent_of(address_of(listener), silent) == {1}
    assert silent_of(address_of(listener), silent, is_repeated=True) == {1}


def test_who_begins_a_connection_and_takes_no_full_packet_is_silent(listener: socket.socket) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    assert silent_of(address_of(listener)) == {0}


def test_a_sign_of_life_takes_more_calls_than_a_queue_holds_until_it_is_closed() -> None:
    async def call() -> None:
        here = SignOfLife(Address("127.0.0.1", 0))
        await here.take_calls()
        for _ in range(200):
            assert await why_unreachable(here.address, 30.0, long_greeting()) is None
        reader, writer = await asyncio.open_connection(here.address.host, here.address.port)
        writer.write(b"hello")
        here.close()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        assert isinstance(await why_unreachable(here.address, 30.0), ConnectionRefusedError)
        here.close()

    asyncio.run(call())


def test_a_sign_of_life_keeps_few_connections_and_reads_little() -> None:
    async def crowd() -> None:
        here = SignOfLife(Address("127.0.0.1", 0))
        await here.take_calls()
        to = here.address.host, here.address.port
        _, talker = await asyncio.open_connection(*to)
        with contextlib.suppress(ConnectionError):
            while True:
                talker.write(bytes(CALL_BYTES_MAX))
                await talker.drain()
        callers = [await asyncio.open_connection(*to) for _ in range(CALLERS_MAX + 10)]
        refused = {asyncio.create_task(reader.read()) for reader, _ in callers}
        while len(refused) > CALLERS_MAX:
            done, refused = await asyncio.wait(refused, return_when=asyncio.FIRST_COMPLETED)
            assert all(isinstance(one.exception(), ConnectionResetError) or not one.result() for one in done)
        assert await why_unreachable(here.address, 30.0, long_greeting()) is None
        for one in refused:
            one.cancel()
        for _, writer in callers:
            writer.transport.abort()
        here.close()

    asyncio.run(asyncio.wait_for(crowd(), 60.0))


@pytest.mark.parametrize(
    ("group_rank", "where"), [(0, "a"), (7, "a"), (8, "b"), (15, "b"), (16, "c"), (99, "c")]
)
def test_a_rank_meets_a_group_at_the_host_with_the_same_rank(group_rank: int, where: str) -> None:
    assert suspicion.counterpart([(16, "c"), (8, "b")], group_rank, "a") == where


def test_a_server_goes_on_listening_after_the_greeting_of_a_probe() -> None:
    ping, answer = b"\x00\x00\x08\x06\x00" + bytes(4), b"\x00\x00\x08\x06\x01" + bytes(4) + b"question"

    async def greet() -> None:
        server, address = make_aio_server(Address("127.0.0.1", 0), [], ServerLimits())
        await server.start()
        try:
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(long_greeting() + ping + b"question")
            assert await reader.readuntil(answer)
            writer.close()
        finally:
            await server.stop(None)

    asyncio.run(greet())


def test_the_greeting_of_a_probe_begins_a_connection_of_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_ENV, str(certify(tmp_path)))
    received, identity = ssl.MemoryBIO(), process_identity()
    assert identity is not None
    received.write(long_greeting())
    with pytest.raises(ssl.SSLWantReadError):
        identity.server.wrap_bio(received, ssl.MemoryBIO(), server_side=True).do_handshake()


def test_who_has_answered_is_told_of_and_nobody_else(listener: socket.socket, silent: str) -> None:
    told = list[str]()

    async def ask() -> None:
        clock = SilenceClock(asyncio.get_running_loop(), LATE_S)
        await suspicion.silent_peers(Probe((("b", address_of(listener)), ("c", silent))), clock, told.append)
        clock.stop()

    asyncio.run(ask())
    assert told == ["b"]


def test_a_starved_process_says_nothing(silent: str) -> None:
    async def probe_starved() -> frozenset[str]:
        asyncio.get_running_loop().call_later(0.1, time.sleep, 3 * LATE_S)
        return await probe(Probe((("0", silent),), False))

    assert asyncio.run(probe_starved()) == frozenset()


def test_nothing_is_said_of_whom_one_cannot_ask(silent: str) -> None:
    assert silent_of("", "nonsense", "http://no.such.host.invalid:1") == set()


def test_nothing_is_said_for_want_of_descriptors(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(asyncio, "open_connection", fail)
    assert silent_of(address_of(listener)) == set()


def test_nothing_is_said_where_the_name_server_gives_no_answer(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def wait(*_: Any, **__: Any) -> Any:
        over.wait(30.0)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    async def probe_a_name() -> frozenset[str]:
        try:
            return await probe(Probe((("b", "http://host-b.example:1"),)))
        finally:
            over.set()

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    monkeypatch.setattr(suspicion, "RESOLVE_S", 0.2)
    assert asyncio.run(probe_a_name()) == set()


@pytest.mark.parametrize("listening", [True, False])
def test_of_the_addresses_of_a_name_one_that_answers_is_enough(
    monkeypatch: pytest.MonkeyPatch, listening: bool
) -> None:
    """The first one, and the second one if nothing is listening there, drop what is sent to them."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.2", 0), backlog=0))
        port = first.getsockname()[1]
        second = stack.enter_context(socket.create_server(("127.0.0.3", port), backlog=16 * listening))
        for listener in (first, *[second] * (not listening)):
            fill(listener, stack)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{n}", port)) for n in (2, 3)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        assert silent_of(f"http://host-b.example:{port}") == (set() if listening else {0})
