"""Processes that have a certificate: whom they serve, whom they ask, and what can be read on the way."""

from __future__ import annotations

import contextlib
import http.client
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from lighthouse import net, wire
from lighthouse.address import Address, parse_address
from lighthouse.listening import listen_tcp
from lighthouse.page.cli import Pages
from lighthouse.page.server import CONNECTIONS_MAX, PageServer
from lighthouse.tls import AUTHORITIES, TLS_ENV, process_identity
from lighthouse.trust import TOKEN_ENV, TOKEN_FILE_ENV
from tests.certificates import certify, stranger_context, stranger_credentials
from tests.integration.lighthouse_clients import LIMIT_S, registered
from tests.integration.test_parameter_server import Adder, assert_serves
from tests.managers import lighthouse_here
from torchft_like import parameter_server
from torchft_like.checkpointing import HTTPTransport
from torchft_like.checkpointing.http_fetch import Fetch
from torchft_like.coordination import LighthouseClient, LighthouseServer
from torchft_like.errors import CheckpointError, ConnectError, TrustError
from torchft_like.manager.client import ManagerClient
from torchft_like.manager_server.server import ManagerServer
from torchft_like.parameter_server import PATH
from torchft_like.process_group.store_server import StoreServer
from torchft_like.testing.relay import Relay

pytestmark = pytest.mark.integration

LIMIT = timedelta(seconds=LIMIT_S)
SOON = timedelta(seconds=2)
TLS_HANDSHAKE = b"\x16"
SECRET = 0x5EC2E75EC2E75EC2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The certificates of the job, and of another one."""
    base = tmp_path_factory.mktemp("certificates")
    return {"job": certify(base / "job"), "other": certify(base / "other")}


@pytest.fixture(autouse=True)
def certified(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TLS_ENV, str(folders["job"]))
    for variable in (TOKEN_ENV, TOKEN_FILE_ENV):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture(scope="module")
def job(folders: dict[str, Path]) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TLS_ENV, str(folders["job"]))
        found = Job()
    yield found
    found.close()


class Job:
    """Each kind of server, in a process that has a certificate and no tokens."""

    def __init__(self) -> None:
        self.lighthouse = LighthouseServer(min_replicas=1)
        self.manager = ManagerServer(
            "group", self.lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2
        )
        self.source: HTTPTransport[Any] = HTTPTransport(LIMIT, hostname="127.0.0.1")
        self.source.send_checkpoint([1], 7, {"w": torch.full((9999,), SECRET)}, LIMIT)
        loop = self.lighthouse._loop
        self.page = loop.run(PageServer.start(self.lighthouse._lighthouse, Address("127.0.0.1", 0)))

    def close(self) -> None:
        self.lighthouse._loop.run(self.page.stop())
        self.source.shutdown()
        self.manager.shutdown()
        self.lighthouse.shutdown()


def test_processes_of_the_job_are_served(job: Job) -> None:
    client, caller = LighthouseClient(job.lighthouse.address(), LIMIT), ManagerClient(job.manager.address())
    client.heartbeat("other", LIMIT)
    with pytest.raises(ConnectionError, match="rank 1 of group has not joined yet"):
        caller._checkpoint_metadata(1, LIMIT)
    client.close()
    caller.close()
    assert fetched(job.source.metadata())["w"][0] == SECRET
    addresses = [job.lighthouse.address(), job.manager.address(), job.source.metadata(), job.page.url]
    assert [address.partition(":")[0] for address in addresses] == ["http", "http", "https", "https"]
    assert "job" in Pages(job.page.url).status()


def fetched(url: str) -> Any:
    peer: HTTPTransport[Any] = HTTPTransport(LIMIT, hostname="127.0.0.1")
    try:
        return peer.recv_checkpoint(0, url, 7, LIMIT)
    finally:
        peer.shutdown()


@pytest.mark.parametrize("shows", ["plain", None, "other"])
@pytest.mark.parametrize("server", ["lighthouse", "manager"])
def test_a_stranger_cannot_call(job: Job, folders: dict[str, Path], server: str, shows: str | None) -> None:
    address = str(parse_address(getattr(job, server).address()))
    if shows == "plain":
        channel = grpc.insecure_channel(address)
    else:
        known = stranger_credentials(folders["job"], folders[shows] if shows else None)
        channel = grpc.secure_channel(address, known, [net._EXPECTED_NAME])
    method = wire.HEARTBEAT if server == "lighthouse" else wire.SHOULD_COMMIT
    with channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(method, None, None)(b"", timeout=LIMIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("shows", ["plain", None, "other"])
@pytest.mark.parametrize("path", ["/checkpoint/7/header", "/", "/status", "/healthz"])
def test_a_stranger_reads_nothing(job: Job, folders: dict[str, Path], path: str, shows: str | None) -> None:
    address = parse_address(job.source.metadata() if "checkpoint" in path else job.page.url)
    with socket.create_connection((address.host, address.port), LIMIT_S) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode()
        assert b"HTTP" not in heard(connection, request, shows, folders)


def heard(connection: socket.socket, request: bytes, shows: str | None, folders: dict[str, Path]) -> bytes:
    answer = b""
    try:
        if shows != "plain":
            context = stranger_context(folders[shows] if shows else None)
            connection = context.wrap_socket(connection)
        connection.sendall(request)
        while received := connection.recv(4096):
            answer += received
    except OSError:  # an ssl.SSLError is one, too
        pass
    finally:
        connection.close()
    return answer


def test_nobody_speaks_an_older_tls(job: Job, folders: dict[str, Path]) -> None:
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(contextlib.closing(StoreServer(Address("127.0.0.1", 0))))
        stack.callback((adder := Adder()).shutdown)
        served = (job.source.metadata(), adder.address().removesuffix(PATH))
        for server in [*map(parse_address, served), job.page.address, store.address.server]:
            context = stranger_context(folders["job"])
            for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
                context.maximum_version = version
                is_old = version is not ssl.TLSVersion.TLSv1_3
                with (
                    socket.create_connection((server.host, server.port), LIMIT_S) as connection,
                    pytest.raises(ssl.SSLError) if is_old else contextlib.nullcontext(),
                ):
                    context.wrap_socket(connection).close()


def test_who_has_a_token_needs_no_certificate_for_the_page(
    job: Job, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "observe " + "o" * 64)
    loop = job.lighthouse._loop
    page = loop.run(PageServer.start(job.lighthouse._lighthouse, Address("127.0.0.1", 0)))
    try:
        for header, status in (({}, 401), ({"Authorization": f"Bearer {'o' * 64}"}, 200)):
            context = stranger_context(None)
            browser = http.client.HTTPSConnection(
                page.address.host, page.address.port, timeout=LIMIT_S, context=context
            )
            browser.request("GET", "/status", headers=header)
            assert browser.getresponse().status == status
            browser.close()
    finally:
        loop.run(page.stop())


def test_a_state_passes_encrypted(job: Job) -> None:
    passed = bytearray()
    source = parse_address(job.source.metadata())
    relay = Relay((source.host, source.port), lambda: keep)

    def keep(data: bytes) -> bytes:
        passed.extend(data)
        return data

    assert fetched(f"http://127.0.0.1:{relay.port}")["w"].tolist() == [SECRET] * 9999
    assert len(passed) > 9999 * 8
    assert SECRET.to_bytes(8, "little") not in passed


class FalseSource:
    """An HTTP server that shows a certificate, or speaks no TLS at all, and notes what clients say to it."""

    def __init__(self, folder: Path | None) -> None:
        self._context = None
        if folder is not None:
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        self._listener = listen_tcp(Address("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pool = ThreadPoolExecutor(1)
        self._heard = self._pool.submit(self._hear)

    def _hear(self) -> bytes:
        peer, _ = self._listener.accept()
        peer.settimeout(LIMIT_S)
        with peer, contextlib.suppress(OSError):
            if self._context is not None:
                peer = self._context.wrap_socket(peer, server_side=True)
                return peer.recv(4096)
            if (hello := peer.recv(4096))[:1] != TLS_HANDSHAKE:
                return hello
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        return b""

    def heard(self) -> bytes:
        """Return what the first client said."""
        with self._listener, self._pool:
            return self._heard.result(LIMIT_S)


@pytest.fixture(params=["authority", "name", "plain"])
def false_folder(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path | None:
    """What a false server shows: a certificate of another authority, or of a known one for another name."""
    if request.param == "plain":
        return None
    if request.param == "authority":
        return folders["other"]
    misnamed, known = certify(tmp_path / "misnamed", "impostor"), tmp_path / "known"
    shutil.copytree(folders["job"], known)
    with (known / AUTHORITIES).open("a") as file:
        file.write((misnamed / AUTHORITIES).read_text())
    monkeypatch.setenv(TLS_ENV, str(known))
    return misnamed


def test_a_false_source_hears_nothing(false_folder: Path | None) -> None:
    source = FalseSource(false_folder)
    with pytest.raises(CheckpointError, match="is not of this job"):
        fetched(source.url)
    assert source.heard() == b""


def test_a_false_lighthouse_hears_nothing(false_folder: Path | None) -> None:
    heard: list[bytes] = []
    answer = grpc.unary_unary_rpc_method_handler(lambda request, _: heard.append(request))
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler("torchft.LighthouseService", {"Heartbeat": answer})]
    )
    if false_folder is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pair = (false_folder / "tls.key").read_bytes(), (false_folder / "tls.crt").read_bytes()
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        with pytest.raises(ConnectError, match="TORCHFT_TLS or neither"):
            LighthouseClient(f"127.0.0.1:{port}", SOON)
        assert not heard
    finally:
        server.stop(None)


@pytest.fixture
def own_folder(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of this process's certificate, the job's, which the test may replace."""
    folder = tmp_path / "certificate"
    shutil.copytree(folders["job"], folder)
    monkeypatch.setenv(TLS_ENV, str(folder))
    return folder


def test_a_certificate_is_replaced_while_its_server_runs(folders: dict[str, Path], own_folder: Path) -> None:
    def beats(one: str) -> bool:
        known = stranger_credentials(folders[one], folders[one])
        address = str(parse_address(server.address()))
        with grpc.secure_channel(address, known, [net._EXPECTED_NAME]) as channel:
            try:
                channel.unary_unary(wire.HEARTBEAT, None, None)(b"", timeout=LIMIT_S)
            except grpc.RpcError as error:
                return error.code() is grpc.StatusCode.INVALID_ARGUMENT
        raise AssertionError("an empty heartbeat was taken")

    with lighthouse_here(min_replicas=1) as server, registered(server.address(), "stays") as (stays,):
        assert [beats("job"), beats("other")] == [True, False]
        shutil.copytree(folders["other"], own_folder, dirs_exist_ok=True)
        assert [beats("job"), beats("other")] == [False, True]
        stays.join()
        assert stays.quorum()


def test_the_page_follows_a_certificate_that_was_replaced(
    job: Job, folders: dict[str, Path], own_folder: Path
) -> None:
    loop = job.lighthouse._loop
    page = loop.run(PageServer.start(job.lighthouse._lighthouse, Address("127.0.0.1", 0)))
    try:
        assert "job" in Pages(page.url).status()
        shutil.copytree(folders["other"], own_folder, dirs_exist_ok=True)  # its client has it, too
        assert "job" in Pages(page.url).status()
        request = b"GET /status HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        with socket.create_connection((page.address.host, page.address.port), LIMIT_S) as connection:
            assert b"HTTP" not in heard(connection, request, "job", folders)
    finally:
        loop.run(page.stop())


def test_a_client_that_stays_shows_the_certificate_that_replaced_its_own(
    folders: dict[str, Path], own_folder: Path
) -> None:
    server = LighthouseServer(min_replicas=1)
    client = LighthouseClient(server.address(), LIMIT)
    try:
        client.heartbeat("one that stays")
        shutil.copytree(folders["other"], own_folder, dirs_exist_ok=True)
        port = parse_address(server.address()).port
        server.shutdown()  # and with it the connection
        server = LighthouseServer(bind=f"127.0.0.1:{port}", min_replicas=1)
        client.heartbeat("one that stays", LIMIT)
        assert "one that stays" in server.describe()
    finally:
        client.close()
        server.shutdown()


def test_connections_to_the_page_without_a_handshake_shut_nobody_out(job: Job) -> None:
    where = job.page.address.host, job.page.address.port
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(where, LIMIT_S)) for _ in range(CONNECTIONS_MAX + 20)
        ]
        assert Pages(str(job.page.address)).status()
        assert silent[0].recv(1) == b"", "the oldest made room"


def test_whose_certificate_a_source_refuses_hears_what_to_do(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_source = process_identity()
    assert of_source is not None
    folder = tmp_path / "certificate of another job"
    shutil.copytree(folders["other"], folder)
    shutil.copy(folders["job"] / AUTHORITIES, folder)
    monkeypatch.setenv(TLS_ENV, str(folder))
    over = threading.Event()

    def refuse(listener: socket.socket) -> None:
        with of_source.server.wrap_socket(listener.accept()[0], True, do_handshake_on_connect=False) as peer:
            with contextlib.suppress(ssl.SSLError):
                peer.do_handshake()
            over.wait(LIMIT_S)

    with listen_tcp(Address("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(refuse, listener)
        with pytest.raises(CheckpointError, match="all of a job have TORCHFT_TLS"):
            fetched(f"http://127.0.0.1:{listener.getsockname()[1]}")
        over.set()


def test_a_source_whose_places_are_taken_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source: HTTPTransport[Any] = HTTPTransport(LIMIT, hostname="127.0.0.1")
    source.send_checkpoint([1], 7, {"w": torch.ones(3)}, LIMIT)
    server = source._served()[0]
    plenty, server.limits = server.limits, replace(server.limits, connections=0)
    waits = []

    def wait_for_a_place(fetch: Fetch, source: Any, status: int) -> None:
        waits.append(status)
        server.limits = plenty

    monkeypatch.setattr(Fetch, "asks_again", wait_for_a_place)
    try:
        assert fetched(source.metadata())["w"].tolist() == [1, 1, 1]
    finally:
        source.shutdown()
    assert waits == [503]


def test_a_parameter_server_serves_who_has_a_certificate_and_a_token(
    monkeypatch: pytest.MonkeyPatch, folders: dict[str, Path]
) -> None:
    monkeypatch.setenv(TOKEN_ENV, "o" * 64)
    server = Adder(sessions_max=9)
    address = parse_address(server.address().removesuffix(PATH))
    try:
        assert_serves(server.address())
        monkeypatch.setattr(parameter_server, "authorization", lambda: "")
        with pytest.raises(TrustError, match="asks for a token"):
            Adder.new_session(server.address())
        with socket.create_connection((address.host, address.port), LIMIT_S) as connection:
            assert b"HTTP" not in heard(connection, f"GET {PATH} HTTP/1.1\r\n\r\n".encode(), None, folders)
    finally:
        server.shutdown()
