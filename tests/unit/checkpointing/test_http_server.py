"""Whatever a client sends, or does not send, the checkpoint server goes on and its threads are bounded."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lighthouse.address import LOOPBACK, Address
from lighthouse.listening import listen_tcp
from tests.unit.checkpointing.clients import drain, request
from tests.unit.message_queue.queues import wait_for
from torchft_like.checkpointing import http_transport
from torchft_like.checkpointing.http_transport import CheckpointServer, ServerLimits
from torchft_like.checkpointing.state_stream import EncodedState


@pytest.fixture
def server() -> Iterator[CheckpointServer]:
    limits = ServerLimits(request_s=2.0, chunk_s=1.0, transfer_s=30, connections=3)
    server = CheckpointServer(Address(LOOPBACK, 0), limits)
    yield server
    server.close(wait=True)


class TestHostileClients:
    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/checkpoint/x?part=0&parts=1&wait_ms=0",
            "/checkpoint/5",
            "/checkpoint/5?part=1&parts=1&wait_ms=0",
            "/checkpoint/5?part=0&parts=0&wait_ms=0",
            "/checkpoint/-5?part=0&parts=1&wait_ms=0",
            "/checkpoint/" + "9" * 5000 + "?part=0&parts=1&wait_ms=0",
            "/../../etc/passwd",
        ],
    )
    def test_a_bad_request_is_answered_with_400(self, server: CheckpointServer, path: str) -> None:
        with request(server.port, path) as client:
            assert client.recv(1000).split()[1] == b"400"

    def test_no_mutation_of_a_request_harms_the_server(self, server: CheckpointServer) -> None:
        chance = random.Random(1)
        good = b"GET /checkpoint/5?part=0&parts=1&wait_ms=0 HTTP/1.1\r\nHost: x\r\nAccept: y\r\n\r\n"
        for _ in range(100):
            mutated = bytearray(good)
            for _ in range(chance.randint(1, 6)):
                at = chance.randrange(len(mutated) - 8)
                mutated[at : at + chance.randint(0, 3)] = chance.randbytes(chance.randint(0, 3))
            with socket.create_connection((LOOPBACK, server.port), timeout=30) as client:
                client.sendall(mutated)
                drain(client)
        with request(server.port, "/checkpoint/5?part=0&parts=1&wait_ms=0") as client:
            assert client.recv(1000).split()[1] == b"202"

    def test_a_request_that_never_ends_is_cut_off(self, server: CheckpointServer) -> None:
        with socket.create_connection((LOOPBACK, server.port), timeout=30) as client:
            client.sendall(b"GET / HT")
            assert drain(client) == 0

    def test_a_request_without_end_is_cut_off_by_its_size(self, server: CheckpointServer) -> None:
        with socket.create_connection((LOOPBACK, server.port), timeout=30) as client:
            try:
                for _ in range(10_000):
                    client.sendall(b"a" * 4096)
            except ConnectionError:
                return
        pytest.fail("40 MB of request were taken")

    def test_a_client_that_does_not_read_is_cut_off(self, server: CheckpointServer) -> None:
        state = EncodedState({"w": torch.zeros(20_000_000)})
        server.offer(5, state)
        with request(server.port, "/checkpoint/5?part=0&parts=1&wait_ms=0") as client:
            assert b" 200 OK" in client.recv(1000)
            for connection in list(server._connections.values()):
                connection.thread.join(30)
                assert not connection.thread.is_alive()
            assert drain(client) < state.part_nbytes()

    def test_connections_beyond_the_limit_are_refused(self, server: CheckpointServer) -> None:
        waiting = [request(server.port, "/checkpoint/5?part=0&parts=1&wait_ms=4000") for _ in range(3)]
        with socket.create_connection((LOOPBACK, server.port), timeout=30) as client:
            assert client.recv(1000).split()[1] == b"503"
        server.offer(5, EncodedState(None))
        for client in waiting:
            with client:
                drain(client)
        with request(server.port, "/checkpoint/5?part=0&parts=1&wait_ms=0") as client:
            assert client.recv(1000).split()[1] == b"200"

    def test_who_waits_for_a_step_is_told_why_it_does_not_come(self, server: CheckpointServer) -> None:
        with request(server.port, "/checkpoint/5?part=0&parts=1&wait_ms=4000") as waiting:
            server.refuse(5, "TypeError: no\r\nstate")
            answer = b"".join(iter(lambda: waiting.recv(4096), b"")).decode()
        assert answer.startswith("HTTP/1.0 424 TypeError: no")
        assert "\r\nstate" not in answer.partition("\r\n\r\n")[0]
        server.offer(5, EncodedState(None))
        with request(server.port, "/checkpoint/5?part=0&parts=1&wait_ms=0") as client:
            assert client.recv(1000).split()[1] == b"200"

    def test_a_wait_is_bounded(self, server: CheckpointServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_transport, "WAIT_S_MAX", 0.1)
        with request(server.port, "/checkpoint/5?part=0&parts=1&wait_ms=999999999") as client:
            assert client.recv(1000).split()[1] == b"202"


class TestWaitForReceivers:
    PATH = "/checkpoint/5?part=0&parts=1&wait_ms=4000"

    @pytest.fixture
    def threads(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(1) as pool:
            yield pool

    def test_it_ends_when_all_have_it(self, server: CheckpointServer, threads: ThreadPoolExecutor) -> None:
        server.offer(5, EncodedState(None), receivers=2)
        waiting = threads.submit(server.wait_fetched, 300.0)
        for _ in range(2):
            assert not waiting.done()
            with request(server.port, self.PATH) as client:
                drain(client)
        waiting.result(60)

    def test_it_ends_when_none_comes(self, server: CheckpointServer, threads: ThreadPoolExecutor) -> None:
        server.offer(5, EncodedState(None), receivers=1)
        threads.submit(server.wait_fetched, 0.01).result(60)

    def test_it_ends_when_the_offer_does(self, server: CheckpointServer, threads: ThreadPoolExecutor) -> None:
        server.offer(5, EncodedState(None), receivers=1)
        waiting = threads.submit(server.wait_fetched, 300.0)
        wait_for(lambda: bool(server.changed._waiters))  # type: ignore[attr-defined]
        server.withdraw()
        waiting.result(60)

    def test_a_transfer_that_takes_longer_is_waited_for(self, threads: ThreadPoolExecutor) -> None:
        server = CheckpointServer(Address(LOOPBACK, 0), ServerLimits(chunk_s=60))

        def fetched_after_the_wait() -> float:
            server.wait_fetched(0.01)
            return server._fetched

        try:
            state = EncodedState({"w": torch.zeros(20_000_000)})
            server.offer(5, state, receivers=1)
            with request(server.port, self.PATH) as client:
                assert b" 200 OK" in client.recv(100)
                waiting = threads.submit(fetched_after_the_wait)
                assert drain(client) > state.part_nbytes() - 100
            assert waiting.result(60) == 1
        finally:
            server.close(wait=True)


@pytest.mark.no_leak
def test_without_a_thread_it_does_not_keep_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen_tcp(Address(LOOPBACK, 0))
    monkeypatch.setattr(http_transport, "listen_tcp", lambda _: listener)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        CheckpointServer(Address(LOOPBACK, 0), ServerLimits())
    assert listener.fileno() == -1
