"""Sessions with a parameter server, and what becomes of them when one of their two processes dies."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from queue import Queue
from types import SimpleNamespace

import pytest
import torch

from lighthouse.address import Address
from tests.faults import raising
from tests.ports import free_ports
from tests.waiting import wait_for
from torchft_like import parameter_server
from torchft_like.errors import BindError, ConnectError, ProcessGroupError, SessionsTakenError
from torchft_like.manager.group_store import is_listening
from torchft_like.parameter_server import ParameterServer
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo
from torchft_like.runtime.connecting import connect_tcp
from torchft_like.testing.ranks import Rank

pytestmark = pytest.mark.integration
LIMIT_S = 60.0


class Adder(ParameterServer):
    """Adds 23 to what a client sends, until the client sends a negative number."""

    def __init__(self, sessions_max: int = 1, port: int = 0, store_port: int = 0) -> None:
        self.ends: Queue[Exception | None] = Queue()
        super().__init__(port, store_port, sessions_max=sessions_max)

    @classmethod
    def new_process_group(cls) -> ProcessGroup:
        return ProcessGroupGloo(LIMIT_S)

    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        assert session_id in self.sessions()
        try:
            number = torch.zeros(1)
            while pg.broadcast_one(number, root=1).wait() and number.item() >= 0:
                pg.broadcast_one(number.add_(23), root=0).wait()
        except Exception as error:
            self.ends.put(error)
            raise
        self.ends.put(None)


@pytest.fixture
def server() -> Iterator[Adder]:
    server = Adder()
    yield server
    server.shutdown()


@pytest.fixture
def client() -> Iterator[Rank]:
    client = Rank()
    yield client
    client.end()


def open_session(here: SimpleNamespace, address: str) -> None:
    here.pg = Adder.new_session(address)


def send(here: SimpleNamespace, number: float) -> float:
    tensor = torch.tensor([float(number)])
    here.pg.broadcast_one(tensor, root=1).wait()
    if number >= 0:
        here.pg.broadcast_one(tensor, root=0).wait()
    return tensor.item()


def serve(here: SimpleNamespace) -> str:
    here.server = Adder()
    return str(here.server.address())


def open_when_free(address: str) -> ProcessGroup:
    """A session ends a moment after its last collective."""
    for _ in range(600):
        try:
            return Adder.new_session(address)
        except SessionsTakenError:
            threading.Event().wait(0.1)
    raise AssertionError("the place of a session that has ended is never free")


def assert_serves(address: str) -> None:
    here = SimpleNamespace(pg=open_when_free(address))
    assert send(here, 1) == 24
    send(here, -1)
    here.pg.shutdown()


def test_a_session_serves_until_the_client_ends_it(server: Adder) -> None:
    here = SimpleNamespace(pg=Adder.new_session(server.address()))
    assert [send(here, number) for number in (12, 0)] == [35, 23]
    assert len(server.sessions()) == 1
    send(here, -1)
    assert server.ends.get(timeout=LIMIT_S) is None
    here.pg.shutdown()
    assert_serves(server.address())


def is_kept(server: Adder, session: str) -> bool:
    """Return whether the store has keys of a session."""
    return f"/session/{session}".encode() in server.store._serving.store._rooms


def test_a_client_that_is_killed_costs_its_session_only(server: Adder, client: Rank) -> None:
    client.ask(open_session, server.address())
    assert client.ask(send, 12) == 35
    (session,) = server.sessions()
    assert is_kept(server, session)
    os.kill(client.pid, signal.SIGKILL)
    assert isinstance(server.ends.get(timeout=LIMIT_S), ProcessGroupError)
    assert_serves(server.address())
    assert session not in server.sessions()
    assert not is_kept(server, session)


def test_a_server_that_is_killed_ends_its_sessions(client: Rank) -> None:
    here = SimpleNamespace(pg=Adder.new_session(client.ask(serve)))
    assert send(here, 12) == 35
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(ProcessGroupError):
        send(here, 1)
    here.pg.shutdown()


def test_a_server_has_only_so_many_sessions(server: Adder) -> None:
    here = SimpleNamespace(pg=Adder.new_session(server.address()))
    with pytest.raises(SessionsTakenError, match="all 1 sessions are taken"):
        Adder.new_session(server.address())
    assert send(here, 1) == 24
    send(here, -1)
    here.pg.shutdown()
    assert_serves(server.address())


def test_a_client_that_says_nothing_loses_its_place(server: Adder) -> None:
    port = int(server.address().split(":")[2].split("/")[0])
    with connect_tcp(Address("127.0.0.1", port), LIMIT_S) as silent:
        assert silent.recv(1) == b""
    assert_serves(server.address())


def test_a_client_whose_request_trickles_in_loses_its_place(
    server: Adder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parameter_server, "REQUEST_S", 0.5)
    port = int(server.address().split(":")[2].split("/")[0])
    with connect_tcp(Address("127.0.0.1", port), LIMIT_S) as slow:

        def trickle() -> None:
            for _ in range(int(LIMIT_S / 0.1)):
                slow.sendall(b"x")
                threading.Event().wait(0.1)

        with pytest.raises(ConnectionError):
            trickle()
    assert_serves(server.address())


def test_a_shutdown_ends_open_sessions() -> None:
    server = Adder()
    here = SimpleNamespace(pg=Adder.new_session(server.address()))
    assert send(here, 1) == 24
    server.shutdown()
    assert isinstance(server.ends.get(timeout=LIMIT_S), ProcessGroupError)
    with pytest.raises(ProcessGroupError):
        send(here, 1)
    here.pg.shutdown()
    wait_for(lambda: not is_listening(server.store.address.server))


def test_a_session_that_is_opened_in_a_shutdown_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    server, is_handled = Adder(), threading.Event()
    handle = server._handle_session

    def handle_session(session_id: str, store_addr: str) -> None:
        handle(session_id, store_addr)
        is_handled.set()

    monkeypatch.setattr(server, "_handle_session", handle_session)
    monkeypatch.setattr(server, "_ended", True)  # the shutdown has begun
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(Adder.new_session, server.address())
        assert is_handled.wait(LIMIT_S)
        server.shutdown()
        with pytest.raises(ProcessGroupError):
            opening.result(LIMIT_S)


def test_a_client_for_whom_there_is_no_thread_leaves_its_place(
    server: Adder, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        no_thread = raising(RuntimeError("can't start new thread"))
        patch.setattr(ThreadingHTTPServer, "process_request", no_thread)
        with pytest.raises(ConnectError):
            Adder.new_session(server.address())
    assert_serves(server.address())


@pytest.mark.parametrize("path", ["new_session", "another"])
def test_what_is_no_parameter_server_is_named(server: Adder, path: str) -> None:
    address = server.address().replace("new_session", path)
    if path == "new_session":
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"http://127.0.0.1:{taken.getsockname()[1]}/new_session"
    with pytest.raises(ConnectError, match=r"no parameter server answers at http://127\.0\.0\.1"):
        Adder.new_session(address)


def test_a_server_whose_port_is_taken_leaves_no_store_behind(server: Adder) -> None:
    port = int(server.address().split(":")[2].split("/")[0])
    (store_port,) = free_ports()
    with pytest.raises(BindError, match=f":{port}: ") as kept:  # which keeps the first from being collected
        Adder(port=port, store_port=store_port)
    Adder(store_port=store_port).shutdown()
    assert kept.value.__traceback__ is not None


def test_a_server_for_which_there_is_no_thread_leaves_its_ports(
    server: Adder, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, store_port = free_ports(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError) as kept:
            Adder(port=port, store_port=store_port)
    Adder(port=port, store_port=store_port).shutdown()
    assert kept.value.__traceback__ is not None


def test_a_server_without_sessions_is_refused() -> None:
    with pytest.raises(ValueError, match="serves nobody"):
        Adder(sessions_max=0)
