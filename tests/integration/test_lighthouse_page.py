"""The page of a real lighthouse over HTTP: status, metrics, who may kill, and what hostile clients can do."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import itertools
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lighthouse.core.trust import Role
from lighthouse.page.server import CONNECTIONS_MAX, SNAPSHOT_S, Scope, role_of
from lighthouse.server import Lighthouse
from lighthouse.wire import torchft_pb2 as pb
from tests.browser import Browser, needs_chromium
from tests.conftest import ROOT
from tests.integration.cluster import Cluster, checked
from tests.integration.lighthouse_clients import LIMIT_S, SessionClient, registered
from tests.managers import lighthouse_here
from tests.ports import free_ports
from torchft_like.cli import main
from torchft_like.testing.cluster import LISTENING, LighthouseProcess
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

ADDRESS = "http://h:1"
HOSTILE = "<script>alert(1)</script>'\"&amp;/../status?\\"


class Site:
    """A lighthouse with a page, and requests to it."""

    def __init__(self, daemon: LighthouseProcess) -> None:
        self.daemon = daemon
        self.address = re.findall(r"lighthouse page on http://(\S+)", daemon.output)[0]

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.address, timeout=LIMIT_S)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            return answer, answer.read()

    def status(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.ask("/status")[1])
        return document

    def wait_for(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Ask again until the status is as it should be; a document is a second old at most."""
        deadline = time.monotonic() + LIMIT_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline, json.dumps(status, indent=1)
            time.sleep(0.05)
        return status

    def samples(self) -> dict[str, float]:
        text = self.ask("/metrics")[1].decode()
        families = text_string_to_metric_families(text)
        return {f"{s.name}{s.labels or ''}": s.value for family in families for s in family.samples}


@pytest.fixture
def site() -> Iterator[Site]:
    with LighthouseProcess("--min_replicas=2", "--page=127.0.0.1:0") as daemon:
        yield Site(daemon)


def rows(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in status["replicas"]}


def test_it_shows_members_their_steps_a_loss_and_the_recovery(site: Site) -> None:
    assert site.status()["job"]["why_no_quorum"] == "nobody has joined"
    with registered(site.daemon.address, "a", "b", "c") as (a, b, c):
        a.join(step=4, address=ADDRESS)
        alone = site.wait_for(lambda s: rows(s).get("a", {}).get("state") == "joined")
        assert alone["job"]["why_no_quorum"] == "fewer than min_replicas (1 of 2)"
        for client, step in ((b, 4), (c, 1)):
            client.join(step=step, address=ADDRESS)
        for client in (a, b, c):
            client.quorum()
        for step in range(8, 13):
            a.send(progress=pb.Progress(step=step, waits_for="allreduce", waiting_permille=610))
            b.send(progress=pb.Progress(step=step, waiting_permille=20))
        c.send(progress=pb.Progress(step=1, heals_from="b"))
        status = site.wait_for(
            lambda s: [row["step"] for row in s["replicas"]] == [12, 12, 1] and rows(s)["c"]["heal"]["source"]
        )
        one, other, third = status["replicas"]
        assert [one[k] for k in ("step", "waits_for", "waiting_permille")] == [12, "allreduce", 610]
        assert (other["state"], other["address"], other["sign"]) == ("member", ADDRESS, "session")
        assert (status["job"]["straggler"], third["heal"]["source"]) == ("b", "b")
        job = status["job"]
        assert (job["state"], job["members"], job["step"]) == ("formed", 3, 12)

        c.send(leave=pb.Leave(reason="done", step=13))
        b.__exit__(None, None, None)
        broken = site.wait_for(lambda s: s["job"]["gone"] == 2)
        assert broken["job"]["state"] == "broken"
        assert "lost b: its connection ended" in rows(broken)["b"]["trouble"]
        with registered(site.daemon.address, "d") as (d,):
            d.join(step=0, address=ADDRESS)
            a.join(step=12, address=ADDRESS)
            assert a.member_lost().replica_id == "b"
            a.quorum()
            a.send(progress=pb.Progress(step=13))
            recovered = site.wait_for(lambda s: s["recoveries"][0]["step_s"])
        assert recovered["recoveries"][0]["lost"] == ["b"]
        kinds = {moment["kind"] for moment in recovered["timeline"]}
        assert kinds >= {"register", "quorum", "leave", "loss"}
        assert site.samples()["torchft_lighthouse_losses_total"] >= 1


def test_a_member_that_gives_a_quorum_up_is_not_gone(site: Site) -> None:
    with registered(site.daemon.address, "a") as (a,):
        with registered(site.daemon.address, "b") as (b,):
            for client in (a, b):
                client.join(step=4, address=ADDRESS)
            quorum_id = {client.quorum().quorum_id for client in (a, b)}.pop()
            a.join(step=4, address=ADDRESS, broken_quorum_id=quorum_id)
            states = "broken", "joined"
            broken = site.wait_for(lambda s: (s["job"]["state"], rows(s)["a"]["state"]) == states)
            assert broken["job"]["gone"] == 0
        lost = site.wait_for(lambda s: s["job"]["gone"])
        assert (lost["job"]["gone"], rows(lost)["b"]["state"]) == (1, "gone")


def test_what_a_newcomer_claims_is_not_the_step_of_the_job(site: Site) -> None:
    with registered(site.daemon.address, "a", "b") as members:
        for client in members:
            client.join(step=4, address=ADDRESS)
        for client in members:
            client.quorum()
        with registered(site.daemon.address, "liar") as (liar,):
            liar.join(step=10**6, address=ADDRESS)
            claims = site.wait_for(lambda s: rows(s).get("liar", {}).get("step") == 10**6)
            assert claims["job"]["step"] == 4
            for client in members:
                client.join(step=4, address=ADDRESS)
            believed = site.wait_for(lambda s: s["job"]["members"] == 3)
            assert (believed["job"]["step"], rows(believed)["liar"]["step"]) == (4, 0)


def test_one_document_serves_all_and_is_sent_once_to_each(site: Site) -> None:
    answer, body = site.ask("/status")
    again, nothing = site.ask("/status", If_None_Match=answer.headers["ETag"])
    assert (again.status, nothing, again.headers["ETag"]) == (304, b"", answer.headers["ETag"])
    packed, compressed = site.ask("/status", Accept_Encoding="gzip", If_None_Match='"other"')
    assert (packed.status, gzip.decompress(compressed)) == (200, body)
    assert site.ask("/status", "HEAD")[1] == b""


def test_health_and_errors(site: Site) -> None:
    assert site.ask("/healthz")[1] == b"ok\n"
    assert (site.ask("/nothing")[0].status, site.ask("/status", "POST")[0].status) == (404, 405)
    assert site.ask("/replica/a/kill")[0].status == 405


def test_the_page_is_small_whole_and_runs_nothing_else(site: Site) -> None:
    answer, body = site.ask("/")
    assert len(body) < 150_000
    assert not re.search(rb"(?:src|href)=.?https?://", body)
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_no_metric_grows_with_the_replicas_or_has_their_names(site: Site) -> None:
    few = site.samples()
    with registered(site.daemon.address, HOSTILE, "b", "c") as clients:
        for client in clients:
            client.join(step=3, address=ADDRESS)
        site.wait_for(lambda s: s["job"]["members"] == 3)
        many = site.samples()
    assert many.keys() == few.keys()
    assert (many["torchft_lighthouse_quorum_members"], many["torchft_lighthouse_step"]) == (3, 3)
    dashboard = (ROOT / "docs" / "grafana-dashboard.json").read_text()
    shown = set(re.findall(r"torchft_lighthouse_\w+", dashboard))
    assert shown
    assert shown <= {name.partition("{")[0] for name in many}


def test_members_tell_their_steps_while_somebody_looks(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as sessions:
        early = sessions.enter_context(SessionClient(site.daemon.address, "early"))
        assert not early.registered().is_watched
        site.status()
        assert early.config_changed().is_watched
        late = sessions.enter_context(SessionClient(site.daemon.address, "late"))
        assert late.registered().is_watched

    async def look_once(lighthouse: Lighthouse) -> None:
        lighthouse.look()

    monkeypatch.setattr("lighthouse.server.WATCHED_S", 0.2)
    with lighthouse_here() as lighthouse, SessionClient(lighthouse.address(), "a") as client:
        assert not client.registered().is_watched
        lighthouse._loop.run(look_once(lighthouse._lighthouse))
        assert client.config_changed().is_watched
        assert not client.config_changed().is_watched


def test_a_hostile_name_is_data(site: Site) -> None:
    with registered(site.daemon.address, HOSTILE):
        status = site.wait_for(lambda s: s["replicas"])
        answer, _ = site.ask("/status")
    assert [row["id"] for row in status["replicas"]] == [HOSTILE]
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 400),
        ({"X_Torchft_Kill": "yes", "Host": "evil.example"}, 403),
        ({"X_Torchft_Kill": "yes", "X_Forwarded_For": "192.0.2.7"}, 403),
        ({"X_Torchft_Kill": "yes"}, 404),
    ],
    ids=["a form", "a rebound name", "through a proxy", "nobody of that name"],
)
def test_who_may_kill(site: Site, headers: dict[str, str], status: int) -> None:
    answer, _ = site.ask(f"/replica/{quote(HOSTILE, safe='')}/kill", "POST", **headers)
    assert answer.status == status
    assert not [m for m in site.status()["timeline"] if m["kind"] == "kill"]


@pytest.mark.parametrize(
    ("client", "everybody", "role"),
    [
        ("127.0.0.1", False, Role.OPERATE),
        ("::ffff:127.0.0.1", False, Role.OPERATE),
        ("192.0.2.7", False, Role.OBSERVE),
        ("192.0.2.7", True, Role.OPERATE),
    ],
)
def test_who_is_elsewhere_observes(client: str, everybody: bool, role: Role) -> None:
    scope: Scope = {"client": (client, 1), "headers": [(b"host", b"localhost:29511")]}
    assert role_of(scope, everybody) is role


def test_silent_connections_shut_nobody_out_and_cost_no_session(site: Site) -> None:
    host, _, port = site.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((host, int(port))))
            for _ in range(CONNECTIONS_MAX + 20)
        ]
        assert site.ask("/healthz")[1] == b"ok\n"
        silent[0].settimeout(LIMIT_S)
        assert silent[0].recv(1) == b"", "the oldest made room"
    with registered(site.daemon.address, "a"):
        site.wait_for(lambda s: len(s["replicas"]) == 1)


def test_a_trainer_that_takes_the_page_for_the_lighthouse_is_named_once(site: Site) -> None:
    host, _, port = site.address.partition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), LIMIT_S) as trainer:
            trainer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert trainer.recv(1) == b""
    said = f"127.0.0.1 speaks gRPC to the page, at port {port}: trainers need the lighthouse's own"
    assert site.daemon.output.count(said) == 1
    assert "HTTP request" not in site.daemon.output


def test_the_daemon_ends_while_somebody_looks(site: Site) -> None:
    connection = http.client.HTTPConnection(site.address, timeout=LIMIT_S)
    connection.request("GET", "/healthz")
    connection.getresponse().read()
    assert site.daemon.stop() == 0
    connection.close()


@pytest.mark.parametrize("is_asked_for", [False, True])
def test_a_taken_port_costs_the_page_or_if_it_was_asked_for_the_start(
    processes: Processes, is_asked_for: bool
) -> None:
    port, next_port = free_ports(2)
    flags = [f"--page=127.0.0.1:{next_port}"] if is_asked_for else []
    with socket.create_server(("127.0.0.1", next_port)):
        daemon = processes.fork("lighthouse", f"--bind=127.0.0.1:{port}", *flags)
        if is_asked_for:
            assert daemon.wait(LIMIT_S) == 2
        else:
            daemon.wait_for_output(LISTENING, LIMIT_S)
    assert f"cannot listen on 127.0.0.1:{next_port}: Address already in use" in daemon.output


def test_the_status_in_a_terminal(processes: Processes, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"127.0.0.1:{free_ports(2)[0]}"
    assert main(["status", address]) == 2
    assert "no page of a lighthouse answers" in capsys.readouterr().err
    processes.fork("lighthouse", f"--bind={address}", "--start_grace_ms=0").wait_for_output(
        LISTENING, LIMIT_S
    )
    assert main(["status", address]) == 1
    with registered(address, HOSTILE, "b:1b4e28ba") as clients:
        for client in clients:
            client.join(step=3, address=ADDRESS)
        for client in clients:
            client.quorum()
        time.sleep(SNAPSHOT_S)  # the document may be that old
        assert main(["status", address]) == 0
        first, *_, table = capsys.readouterr().out.partition("quorum of 2, step 3\n")
        assert first.startswith("127.0.0.1")
        assert re.search(r"^b:1b4e +member +3 +h:1$", table, re.MULTILINE)
        assert main(["status", address, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["job"]["members"] == 2


def test_one_look_at_the_status_shows_the_steps_that_members_say_because_of_it(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lighthouse.page.cli.OLD_S", 0.0)
    monkeypatch.setattr("lighthouse.page.cli.NEWS_S", LIMIT_S)

    is_over = threading.Event()

    def train(client: SessionClient) -> None:
        assert client.config_changed().is_watched
        for step in itertools.count(50):
            client.send(progress=pb.Progress(step=step))
            if is_over.wait(0.1):
                return

    with registered(site.daemon.address, "a", "b") as clients, ThreadPoolExecutor() as threads:
        for client in clients:
            client.join(step=3, address=ADDRESS)
        for client in clients:
            client.quorum()
            client.send(progress=pb.Progress(step=4))
        training = [threads.submit(train, client) for client in clients]
        exit_status = main(["status", site.address])
        is_over.set()
        assert exit_status == 0
        for each in training:
            each.result()
    shown = re.search(r"quorum of 2, step (\d+)", capsys.readouterr().out)
    assert shown is not None
    assert int(shown[1]) >= 50


MARKUP = "<img src=x onerror=window.hacked=1><b>x</b>"


@needs_chromium()
@checked
def test_an_operator_sees_the_job_and_kills_a_replica_by_keyboard(tmp_path: Path) -> None:
    with Browser() as browser, Cluster(tmp_path, lighthouse_flags=["--page=127.0.0.1:0"]) as cluster:
        page = re.findall(r"lighthouse page on (\S+)", cluster.lighthouse.output)[0]
        browser.open(page)
        browser.wait_for("document.title.startsWith('No quorum yet')")
        a, b = cluster.start_all("ab")
        browser.wait_for("document.title.startsWith('Training: a quorum of 2')")
        step = browser.wait_for("Number(document.getElementById('step').textContent)")
        browser.wait_for(f"Number(document.getElementById('step').textContent) > {step}")
        assert browser.run("return document.querySelectorAll('#replicas .pill.good').length") == 2

        with registered(cluster.lighthouse_address.removeprefix("http://"), MARKUP):
            names = "[...document.querySelectorAll('#replicas td:first-child')].map(td => td.title)"
            assert browser.wait_for(f"{names}.find(name => name.includes('<'))") == MARKUP
            assert browser.run("return [window.hacked ?? null, document.images.length]") == [None, 0]

        victim = browser.wait_for("document.querySelector('#replicas tr:has(.pill.good) td').title")
        browser.run("document.querySelector('#replicas tr:has(.pill.good) button').focus()")
        browser.press("enter", "escape")
        assert browser.run("return document.getElementById('ask').open") is False
        browser.press("enter", "tab", "enter")
        browser.wait_for("!document.getElementById('ask').open")
        killed, other = (a, b) if a.replica_id == victim else (b, a)
        for rank in killed.ranks:
            rank.may_end = True
        cluster.wait_until(lambda: killed.ranks[0].exit_code is not None, "the end of the killed replica")
        cluster.wait_for_quorum_of(other)
        browser.wait_for("document.querySelector('#timeline .bad')?.textContent === 'loss'")
        browser.wait_for("document.querySelector('#recoveries td.number')?.textContent.endsWith(' s')")
        assert browser.run("return document.querySelector('#timeline').textContent.includes('is killed')")
