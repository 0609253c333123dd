"""Whatever a client sends, or does not send, the checkpoint server goes on and its threads are bounded; and
whom it gives a state.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPResponse

import pytest
import torch

from lighthouse.address import LOOPBACK, Address
from lighthouse.listening import listen_tcp
from tests.faults import raising
from tests.unit.checkpointing.clients import asking, drain, request
from tests.unit.checkpointing.conftest import LIMIT, Make
from tests.waiting import wait_for
from torchft_like.checkpointing import http_server
from torchft_like.checkpointing.http_server import CheckpointServer, ServerLimits
from torchft_like.checkpointing.state_stream import Snapshot
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.errors import CheckpointError

CONNECTIONS = 8


@pytest.fixture
def server() -> Iterator[CheckpointServer]:
    limits = ServerLimits(request_s=2.0, chunk_s=1.0, transfer_s=30, connections=CONNECTIONS)
    server = CheckpointServer(Address(LOOPBACK, 0), limits)
    yield server
    server.close(wait=True)


class TestHostileClients:
    @pytest.mark.parametrize(
        "path",
        [
            "/",
            "/checkpoint/x/header?wait_ms=0",
            "/checkpoint/5",
            "/checkpoint/5/payload",
            "/checkpoint/5/payload?from=4",
            "/checkpoint/5/payload?from=0&to=99999999999999",
            "/checkpoint/5/pickle",
            "/checkpoint/-5/header?wait_ms=0",
            "/checkpoint/" + "9" * 5000 + "/header",
            "/../../etc/passwd",
        ],
    )
    def test_a_bad_request_is_answered_with_400(self, server: CheckpointServer, path: str) -> None:
        with request(server.port, path) as client:
            assert client.recv(1000).split()[1] == b"400"

    def test_a_request_that_never_ends_is_cut_off(self, server: CheckpointServer) -> None:
        with socket.create_connection((LOOPBACK, server.port), timeout=30) as client:
            client.sendall(b"GET / HT")
            assert drain(client) == 0

    def test_a_request_without_end_is_cut_off_by_its_size(self, server: CheckpointServer) -> None:
        client = socket.create_connection((LOOPBACK, server.port), timeout=30)
        with client, pytest.raises(ConnectionError):
            client.sendall(b"a" * 40_000_000)

    def test_a_client_that_does_not_read_is_cut_off(self, server: CheckpointServer) -> None:
        state = Snapshot({"w": torch.zeros(20_000_000)}).fill()
        server.offer(5, state)
        with request(server.port, "/checkpoint/5/payload?from=0&to=80000000") as client:
            assert b" 200 " in client.recv(1000)
            for connection in list(server._connections.values()):
                connection.thread.join(30)
                assert not connection.thread.is_alive()
            assert drain(client) < state.nbytes

    def test_connections_beyond_the_limit_are_refused(self, server: CheckpointServer) -> None:
        waiting = [request(server.port, "/checkpoint/5/header?wait_ms=4000") for _ in range(CONNECTIONS)]
        # Who has not asked may lose its place to the next.
        wait_for(lambda: [c.has_asked for c in list(server._connections.values())] == [True] * CONNECTIONS)
        with socket.create_connection((LOOPBACK, server.port), timeout=30) as client:
            assert client.recv(1000).split()[1] == b"503"
        server.offer(5, Snapshot(None).fill())
        for client in waiting:
            with client:
                drain(client)
        with request(server.port, "/checkpoint/5/header?wait_ms=0") as client:
            assert client.recv(1000).split()[1] == b"200"

    def test_who_waits_for_a_step_is_told_why_it_does_not_come(self, server: CheckpointServer) -> None:
        with request(server.port, "/checkpoint/5/header?wait_ms=4000") as waiting:
            server.offer(5, None, refusal="TypeError: no\r\nstate")
            answer = b"".join(iter(lambda: waiting.recv(4096), b"")).decode()
        assert answer.startswith("HTTP/1.1 424 TypeError: no")
        assert "\r\nstate" not in answer.partition("\r\n\r\n")[0]
        server.offer(5, Snapshot(None).fill())
        with request(server.port, "/checkpoint/5/header?wait_ms=0") as client:
            assert client.recv(1000).split()[1] == b"200"

    def test_a_range_that_is_not_there_is_refused(self, server: CheckpointServer) -> None:
        server.offer(5, Snapshot({"w": torch.zeros(64)}).fill())
        for start, stop in [(0, 257), (0, 0), (9, 8), (256, 257)]:
            with request(server.port, f"/checkpoint/5/payload?from={start}&to={stop}") as client:
                assert client.recv(1000).split()[1] == b"400"

    def test_a_connection_carries_many_requests_for_the_snapshot_with_which_it_began(
        self, server: CheckpointServer
    ) -> None:
        server.offer(5, Snapshot({"w": torch.ones(64)}).fill())
        with (
            request(server.port, "/checkpoint/5/payload?from=0&to=128") as client,
            client.makefile("rb") as answers,
        ):
            first = [answers.readline() for _ in range(5)]
            assert len(answers.read(128)) == 128
            server.withdraw()
            client.sendall(b"GET /checkpoint/5/payload?from=128&to=256 HTTP/1.1\r\n\r\n")
            assert [answers.readline() for _ in range(5)] == first

    def test_the_last_bytes_of_an_answer_wait_for_no_acknowledgement(self, server: CheckpointServer) -> None:
        server.offer(5, Snapshot({"w": torch.ones(64)}).fill())
        with request(server.port, "/checkpoint/5/sums") as client:
            assert client.recv(1000).split()[1] == b"200"
            (peer,) = server._connections
            assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    def test_a_client_that_ends_between_two_requests_is_not_told_of_as_lost(
        self, server: CheckpointServer, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        socket.create_connection((LOOPBACK, server.port), timeout=30).close()
        server.offer(5, Snapshot({"w": torch.zeros(1)}).fill())
        with (
            request(server.port, "/checkpoint/5/header?wait_ms=0") as client,
            HTTPResponse(client) as response,
        ):
            response.begin()
            assert response.status == 200
            response.read()  # or the kernel tells the server that the client has not read all
        wait_for(lambda: not server._connections)
        assert "client was lost" not in caplog.text

    def test_a_client_that_asks_for_nothing_more_is_cut_off(self, server: CheckpointServer) -> None:
        with request(server.port, "/checkpoint/5/header?wait_ms=0") as client:
            assert drain(client) > 0

    def test_a_wait_is_bounded(self, server: CheckpointServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http_server, "WAIT_S_MAX", 0.1)
        with request(server.port, "/checkpoint/5/header?wait_ms=999999999") as client:
            assert client.recv(1000).split()[1] == b"202"


class TestConnectionsThatComeLate:
    """Those of a fetch that has begun over others, after the offer was withdrawn."""

    @pytest.fixture
    def server(self) -> Iterator[CheckpointServer]:
        server = CheckpointServer(Address(LOOPBACK, 0), ServerLimits(chunk_s=60))  # none ends meanwhile
        yield server
        server.close(wait=True)

    def test_they_get_the_offer_while_another_one_is_there(self, server: CheckpointServer) -> None:
        server.key = "ours"
        server.offer(5, Snapshot({"w": torch.ones(64)}).fill())
        with request(server.port, "/checkpoint/5/header", "a 256", "ours") as first:
            assert b" 200 " in first.recv(1000)
            server.withdraw()
            server.key = "later"
            for what in ("payload?from=0&to=256", "sums"):
                with request(server.port, f"/checkpoint/5/{what}", "a 256", "ours") as late:
                    assert b" 200 " in late.recv(1000)
            for fetch, key in (("b 256", "ours"), ("a 256", "theirs")):
                with request(server.port, "/checkpoint/5/sums", fetch, key) as other:
                    assert b" 403 " in other.recv(1000)

    @pytest.mark.parametrize("what", ["payload?from=0&to=256", "sums", "done"])
    def test_without_another_one_they_are_refused_at_once(self, server: CheckpointServer, what: str) -> None:
        with request(server.port, f"/checkpoint/5/{what}", "a 256") as late:
            assert late.recv(1000).startswith(b"HTTP/1.1 410 it is not offered any more")


class TestWaitForReceivers:
    PATH = "/checkpoint/5/done"

    @pytest.fixture
    def threads(self) -> Iterator[ThreadPoolExecutor]:
        with ThreadPoolExecutor(1) as pool:
            yield pool

    def test_it_ends_when_all_have_it(self, server: CheckpointServer, threads: ThreadPoolExecutor) -> None:
        server.offer(5, Snapshot(None).fill(), receivers=2)
        waiting = threads.submit(server.wait_fetched, 300.0)
        for fetch in ("a 0", "a 0", "b 0"):
            assert not waiting.done()
            with request(server.port, self.PATH, fetch) as client:
                drain(client)
        waiting.result(60)

    def test_it_ends_when_none_comes(self, server: CheckpointServer, threads: ThreadPoolExecutor) -> None:
        server.offer(5, Snapshot(None).fill(), receivers=1)
        assert threads.submit(server.wait_fetched, 0.01).exception(60) is None

    def test_it_ends_when_the_offer_does(self, server: CheckpointServer, threads: ThreadPoolExecutor) -> None:
        server.offer(5, Snapshot(None).fill(), receivers=1)
        waiting = threads.submit(server.wait_fetched, 300.0)
        wait_for(lambda: bool(server.changed._waiters))  # type: ignore[attr-defined]
        assert not waiting.done()
        server.withdraw()
        assert waiting.exception(60) is None

    def test_a_transfer_that_takes_longer_is_waited_for(self, threads: ThreadPoolExecutor) -> None:
        server = CheckpointServer(Address(LOOPBACK, 0), ServerLimits(chunk_s=60))

        def left_after_the_wait() -> list[int]:
            server.wait_fetched(0.01)
            return list(server._left.values())

        try:
            state = Snapshot({"w": torch.zeros(20_000_000)}).fill()
            server.offer(5, state, receivers=1)
            with request(server.port, f"/checkpoint/5/payload?from=0&to={state.nbytes}") as client:
                assert b" 200 " in client.recv(100)
                waiting = threads.submit(left_after_the_wait)
                left = state.nbytes - 100
                while left > 0:
                    left -= len(client.recv(1 << 20))
                assert not waiting.done()
                client.sendall(asking(self.PATH, "a 0"))
                client.shutdown(socket.SHUT_WR)
                drain(client)
            assert waiting.result(60) == [0]
        finally:
            server.close(wait=True)


@pytest.mark.no_leak
def test_without_a_thread_it_does_not_keep_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = listen_tcp(Address(LOOPBACK, 0))
    monkeypatch.setattr(http_server, "listen_guarded", lambda _: listener)
    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        CheckpointServer(Address(LOOPBACK, 0), ServerLimits())
    assert listener.fileno() == -1


# -- a state is given to the members of the quorum in which it is offered


def status(server: CheckpointServer, key: str, what: str = "header?wait_ms=0") -> int:
    with request(server.port, f"/checkpoint/5/{what}", key=key) as client:
        return int(client.recv(1000).split()[1])


@pytest.mark.parametrize("what", ["header?wait_ms=0", "sums", "payload?from=0&to=9"])
def test_who_shows_no_key_or_that_of_another_quorum_is_refused(server: CheckpointServer, what: str) -> None:
    server.key = "before"
    server.offer(4, Snapshot({"w": torch.zeros(64)}).fill())
    server.withdraw()
    server.key = "now"
    assert [status(server, key, what) for key in ("", "other", "nowadays", "before")] == [403, 403, 403, 403]
    server.offer(5, Snapshot({"w": torch.zeros(64)}).fill())
    assert [status(server, key, what) for key in ("", "other", "nowadays", "before")] == [403, 403, 403, 403]
    assert status(server, "now", what) == 200


def test_a_refusal_tells_strangers_nothing(server: CheckpointServer) -> None:
    server.key = "now"
    server.offer(5, None, refusal="the state has 7 secrets")
    assert [status(server, key) for key in ("", "now")] == [403, 424]


def test_an_offer_that_is_kept_goes_on_for_those_of_the_quorum_in_which_it_was_made(
    server: CheckpointServer,
) -> None:
    """As where a replica catches up: its fetch lasts for several quorums."""
    server.key = "first"
    server.offer(5, Snapshot({"w": torch.zeros(64)}).fill())
    for later in ("second", "third"):
        server.key = later
        assert [status(server, key) for key in ("first", later)] == [200, 202]
    server.withdraw()
    assert [status(server, key) for key in ("first", "second", "third")] == [403, 403, 202]


def test_who_waits_with_the_key_of_a_quorum_gets_no_state_of_the_next_one(server: CheckpointServer) -> None:
    server.key = "first"
    with (
        request(server.port, "/checkpoint/5/header?wait_ms=1000", key="first") as early,
        request(server.port, "/checkpoint/5/header?wait_ms=4000", key="first"),
    ):
        server.key = "second"
        server.offer(5, Snapshot({"w": torch.zeros(64)}).fill())
        assert early.recv(1000).split()[1] in (b"202", b"403")  # it may have come late
    assert status(server, "second") == 200


def test_a_transport_shows_its_key_to_the_source(transports: Make) -> None:
    source, receiver = transports(), transports()
    source.use_key("now")
    source.send_checkpoint([1], 5, {"w": torch.ones(4)}, LIMIT)
    sources = [Source(0, source.metadata())]
    state = receiver.recv_checkpoint_from(sources, 5, LIMIT, Destination(key="now"))
    assert torch.equal(state["w"], torch.ones(4))
    with pytest.raises(CheckpointError, match="it answered 403 this is for members of the quorum"):
        receiver.recv_checkpoint_from(sources, 5, LIMIT, Destination(key="before"))
