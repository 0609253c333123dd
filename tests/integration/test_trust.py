"""Servers of a process that has tokens: each method with the token of each role, and without one."""

from __future__ import annotations

import http.client
import logging
import re
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from lighthouse import net, trust, wire
from lighthouse.address import Address, parse_address
from lighthouse.core.trust import Role, make_texts, parse_trust
from lighthouse.net import make_channel
from lighthouse.page import cli
from lighthouse.page.cli import NoPageError, Pages
from lighthouse.page.server import PageServer
from lighthouse.trust import ROLES, TOKEN_ENV, TOKEN_FILE_ENV
from lighthouse.wire import torchft_pb2 as pb
from tests.integration import lighthouse_clients
from tests.integration.lighthouse_clients import LIMIT_S, registered
from tests.unit.manager.test_service import Ear
from tests.waiting import wait_for
from torchft_like.checkpointing import http_fetch
from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.cli import main
from torchft_like.coordination import LighthouseClient, LighthouseServer
from torchft_like.errors import CheckpointError, ConfigError, TrustError
from torchft_like.manager.client import ManagerClient
from torchft_like.manager_server.rank_link import SessionLink
from torchft_like.manager_server.server import ManagerServer
from torchft_like.process_group.store_server import StoreServer
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

LIMIT = timedelta(seconds=LIMIT_S)
SESSIONS = (wire.SESSION, wire.RANK_SESSION)
TEXTS = make_texts()
TOKENS = {role: parse_trust(text, "a text").shown for role, text in TEXTS.items()}
HEADERS = [None, "", "Bearer", f"Bearer {'x' * 64}", f"Bearer {TOKENS[Role.OBSERVE]}"]


class Job:
    """A lighthouse and a ManagerServer of two ranks, in a process that participates."""

    def __init__(self) -> None:
        self.lighthouse = LighthouseServer()
        self.manager = ManagerServer(
            "group", self.lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2
        )
        self.killed: list[str] = []
        self.manager.kill = self.killed.append  # type: ignore[assignment]

    def server_of(self, method: str) -> Address:
        server = self.lighthouse if "Lighthouse" in method else self.manager
        return parse_address(server.address())

    def close(self) -> None:
        self.manager.shutdown()
        self.lighthouse.shutdown()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "participate"
    path.write_text(TEXTS[Role.PARTICIPATE])
    return path


@pytest.fixture(autouse=True)
def participant(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_FILE_ENV, str(file))


@pytest.fixture(scope="module")
def job(file: Path) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_FILE_ENV, str(file))
        found = Job()
    yield found
    found.close()


def refusal(server: Address, method: str, header: str | None) -> grpc.StatusCode:
    """Call a method with nothing that makes sense; return the status."""
    with make_channel(server) as channel:
        code = lighthouse_clients.refusal(channel, method, [] if method in SESSIONS else [b"\xff"], header)
    assert code is not None, "it was served"
    return code


def test_every_method_of_the_protocol_asks_for_a_role() -> None:
    methods = {value for name, value in vars(wire).items() if name.isupper()}
    assert methods == set(ROLES)


@pytest.mark.parametrize("header", HEADERS, ids=["none", "empty", "kind", "unknown", "observer"])
@pytest.mark.parametrize("method", ROLES)
def test_no_method_serves_who_has_no_token_or_may_only_observe(
    job: Job, method: str, header: str | None
) -> None:
    is_observer = header == HEADERS[-1]
    code = grpc.StatusCode.PERMISSION_DENIED if is_observer else grpc.StatusCode.UNAUTHENTICATED
    assert refusal(job.server_of(method), method, header) is code


@pytest.mark.parametrize("method", [method for method in ROLES if method != wire.KILL])
def test_a_participant_is_listened_to(job: Job, method: str) -> None:
    """What it says here makes no sense, and that is the answer."""
    code = refusal(job.server_of(method), method, f"Bearer {TOKENS[Role.PARTICIPATE]}")
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_an_operator_kills_and_a_participant_does_not(job: Job) -> None:
    server = job.server_of(wire.KILL)
    assert (
        refusal(server, wire.KILL, f"Bearer {TOKENS[Role.PARTICIPATE]}") is grpc.StatusCode.PERMISSION_DENIED
    )
    assert not job.killed
    assert refusal(server, wire.KILL, f"Bearer {TOKENS[Role.OPERATE]}") is grpc.StatusCode.INVALID_ARGUMENT


def test_the_lighthouse_kills_with_a_token_that_only_its_victim_knows(job: Job) -> None:
    lighthouse = job.lighthouse
    lighthouse._loop.run(lighthouse._lighthouse.kill("group", "a test"))
    assert job.killed == ["a test asked for it"]
    (shown,) = (session.kill_token for session in lighthouse._lighthouse._sessions.values())
    assert shown not in (*TOKENS.values(), "")
    job.killed.clear()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients of this process show nothing; its servers know their tokens."""
    for module in (net, http_fetch, cli):
        monkeypatch.setattr(module, "authorization", lambda: "")


@pytest.mark.usefixtures("stranger")
def test_a_client_without_a_token_raises_at_once(job: Job) -> None:
    client, caller = LighthouseClient(job.lighthouse.address(), LIMIT), ManagerClient(job.manager.address())
    for call in (
        lambda: client.heartbeat("other", LIMIT),
        lambda: client.quorum("other", LIMIT),
        lambda: caller.should_commit(0, 1, False, LIMIT),
    ):
        with pytest.raises(TrustError, match="none that is valid"):
            call()
    client.close()
    caller.close()


@pytest.mark.usefixtures("stranger")
def test_a_replica_group_without_a_token_is_refused_at_once(job: Job) -> None:
    place = "stranger", job.lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 1
    with pytest.raises(TrustError, match=r"refuses this replica group.*TORCHFT_TOKEN_FILE"):
        ManagerServer(*place, connect_timeout=timedelta(days=1))
    assert "stranger" not in job.lighthouse.describe()


@pytest.mark.usefixtures("stranger")
def test_a_rank_without_a_token_is_refused_at_once(job: Job) -> None:
    with pytest.raises(TrustError, match=r"refuses this rank.*TORCHFT_TOKEN_FILE"):
        SessionLink(parse_address(job.manager.address()), 1, Ear(), 86400.0)


def test_a_participant_of_another_group_is_no_rank_of_this_one(job: Job) -> None:
    place, caller = parse_address(job.manager.address()), ManagerClient(job.manager.address())
    for say in (
        lambda: SessionLink(place, 1, Ear(), 86400.0),
        lambda: SessionLink(place, 1, Ear(), 86400.0, key="0" * len(job.manager.rank_key)),
        lambda: caller.should_commit(1, 1, False, LIMIT),
        lambda: caller._quorum(1, 1, "", False, LIMIT),
    ):
        with pytest.raises(TrustError, match="only a rank of group says that") as refused:
            say()
        assert job.manager.rank_key not in str(refused.value)
    caller.close()


def test_a_state_is_sent_to_a_peer_with_a_token_and_not_to_a_stranger(
    file: Path, request: pytest.FixtureRequest
) -> None:
    source: HTTPTransport[Any] = HTTPTransport(LIMIT, hostname="127.0.0.1")
    peer: HTTPTransport[Any] = HTTPTransport(LIMIT, hostname="127.0.0.1")
    try:
        source.send_checkpoint([1], 7, {"weight": torch.ones(3)}, LIMIT)
        assert peer.recv_checkpoint(0, source.metadata(), 7, LIMIT)["weight"].tolist() == [1, 1, 1]
        request.getfixturevalue("stranger")
        with pytest.raises(CheckpointError, match="401 this replica asks for a token"):
            peer.recv_checkpoint(0, source.metadata(), 7, LIMIT)
        for what in ("header", "sums", "payload?from=0&to=12", "header?wait_ms=1"):
            for header in HEADERS:
                assert get(source.metadata(), f"/checkpoint/7/{what}", header)[0] == 401
    finally:
        source.shutdown()
        peer.shutdown()


def get(server: str, path: str, header: str | None, method: str = "GET") -> tuple[int, str]:
    address = parse_address(server)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=LIMIT_S)
    headers = {} if header is None else {"Authorization": header}
    try:
        connection.request(method, path, headers={"X-Torchft-Kill": "yes", **headers})
        answer = connection.getresponse()
        answer.read()
        return answer.status, answer.headers.get("Torchft-Role", "")
    finally:
        connection.close()


@pytest.fixture
def page(job: Job) -> Iterator[str]:
    loop = job.lighthouse._loop
    served = loop.run(PageServer.start(job.lighthouse._lighthouse, Address("127.0.0.1", 0)))
    yield served.address.url
    loop.run(served.stop())


@pytest.mark.parametrize("path", ["/", "/status", "/metrics", "/anything"])
def test_the_page_shows_a_stranger_nothing(page: str, path: str) -> None:
    for header in HEADERS[:-1]:
        assert get(page, path, header)[0] == 401
    assert get(page, path, HEADERS[-1])[0] == (404 if path == "/anything" else 200)


def test_the_page_says_to_everybody_that_it_works(page: str) -> None:
    assert get(page, "/healthz", None)[0] == 200


def test_the_role_at_the_page_is_that_of_the_token(page: str) -> None:
    for role, token in TOKENS.items():
        assert get(page, "/status", f"Bearer {token}") == (200, role.name.lower())


def test_who_is_on_the_lighthouses_host_kills_only_as_operator(job: Job, page: str) -> None:
    path = "/replica/group/kill"
    assert get(page, path, None, "POST")[0] == 401
    for role in (Role.OBSERVE, Role.PARTICIPATE):
        assert get(page, path, f"Bearer {TOKENS[role]}", "POST")[0] == 403
    assert not job.killed
    assert get(page, path, f"Bearer {TOKENS[Role.OPERATE]}", "POST")[0] == 202
    assert len(job.killed) == 1
    job.killed.clear()


def test_the_command_line_shows_its_token(page: str, request: pytest.FixtureRequest) -> None:
    assert "job" in Pages(page).status()
    request.getfixturevalue("stranger")
    with pytest.raises(NoPageError, match="asks for a token: set TORCHFT_TOKEN_FILE"):
        Pages(page).status()


def test_the_command_line_kills_as_an_operator_only(
    job: Job, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "group"
    assert main(["kill", "unheard-of", page]) == 1
    assert "no replica group is called unheard-of; there are: group" in capsys.readouterr().err
    assert main(["kill", name, page]) == 1
    assert "group is not killed: that takes the token of those who operate" in capsys.readouterr().err
    assert not job.killed
    monkeypatch.setattr(cli, "authorization", lambda: f"Bearer {TOKENS[Role.OPERATE]}")
    assert main(["kill", name, page]) == 0
    assert len(job.killed) == 1
    job.killed.clear()


def test_a_name_that_begins_several_ids_is_nobodys() -> None:
    assert cli.chosen("a", ["a:1", "ab:1", "b:1"]) == "a:1"
    assert cli.chosen("a:1b4e", ["a:1b4e28ba", "a:2b4e28ba"]) == "a:1b4e28ba", "as `status` prints it"
    with pytest.raises(cli.RefusedError, match="2 replica groups are called a; there are: a:1, a:2"):
        cli.chosen("a", ["a:1", "a:2", "b"])


def test_everybody_may_not_operate_a_lighthouse_with_tokens(job: Job) -> None:
    start = PageServer.start(job.lighthouse._lighthouse, Address("127.0.0.1", 0), everybody_operates=True)
    with pytest.raises(ConfigError, match="leave one out"):
        job.lighthouse._loop.run(start)


def test_a_token_that_replaces_another_is_good_at_once_and_the_other_no_longer(job: Job, file: Path) -> None:
    old, new = (f"Bearer {token}" for token in (TOKENS[Role.PARTICIPATE], "new-" * 8))
    server = job.server_of(wire.HEARTBEAT)
    before = file.read_text()
    with registered(job.lighthouse.address(), "stays") as (stays,):
        try:
            file.write_text(f"participate {'new-' * 8}\n{before}")
            for header in (old, new):
                assert refusal(server, wire.HEARTBEAT, header) is grpc.StatusCode.INVALID_ARGUMENT
            file.write_text(f"participate {'new-' * 8}\n")
            assert refusal(server, wire.HEARTBEAT, new) is grpc.StatusCode.INVALID_ARGUMENT
            assert refusal(server, wire.HEARTBEAT, old) is grpc.StatusCode.UNAUTHENTICATED
            stays.send(leave=pb.Leave(reason="heard to the end"))
            wait_for(lambda: "heard to the end" in str(job.lighthouse._lighthouse.history.moments))
        finally:
            file.write_text(before)


def test_a_server_that_others_may_reach_without_a_token_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trust, "_warned", set())
    monkeypatch.delenv(TOKEN_FILE_ENV, raising=False)
    monkeypatch.delenv(TOKEN_ENV, raising=False)
    with caplog.at_level(logging.WARNING):
        for bind in ("127.0.0.1:0", "[::1]:0"):
            LighthouseServer(bind).shutdown()
        monkeypatch.setenv(trust.INSECURE_ENV, "1")
        LighthouseServer("0.0.0.0:0").shutdown()
        assert not caplog.records
        monkeypatch.delenv(trust.INSECURE_ENV)
        for _ in range(2):
            LighthouseServer("0.0.0.0:0").shutdown()
    (record,) = caplog.records
    assert re.match(r"0\.0\.0\.0:[1-9]\d* asks for no token", record.getMessage()), "the port that it got"
    monkeypatch.setenv(trust.INSECURE_ENV, "0")
    place = "a", "http://127.0.0.1:1", "127.0.0.1", "0.0.0.0:0", "127.0.0.1:1", 1
    listeners: list[Callable[[], object]] = [
        lambda: LighthouseServer("0.0.0.0:0"),
        lambda: HTTPTransport(LIMIT, hostname="127.0.0.1", bind_host="0.0.0.0"),
        lambda: ManagerServer(*place),
        lambda: StoreServer(Address("0.0.0.0", 0)),
    ]
    for listens in listeners:
        with pytest.raises(ConfigError, match="asks for no token and no certificate"):
            listens()


def test_under_torchfts_name_an_open_lighthouse_warns_and_starts(processes: Processes) -> None:
    command = "from lighthouse.cli import main_as_torchft as main; main()"
    variables = {TOKEN_FILE_ENV: "", trust.INSECURE_ENV: ""}
    daemon = processes.start(sys.executable, "-c", command, "--bind=0.0.0.0:0", "--page=off", env=variables)
    daemon.wait_for_output("listening on")
    assert re.search(r"0\.0\.0\.0:\d+ asks for no token and no certificate", daemon.output)
