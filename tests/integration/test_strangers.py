"""Strangers beside a job of real processes with tokens and certificates: nothing they do costs it a step."""

from __future__ import annotations

import itertools
import socket
import struct
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from queue import Queue
from typing import Any

import grpc
import psutil
import pytest
import torch
from torch import nn

from lighthouse import wire
from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.core.trust import Role, make_texts, parse_trust
from lighthouse.listening import listen_tcp
from lighthouse.net import _EXPECTED_NAME, DISTRUST, make_channel
from lighthouse.tls import TLS_ENV
from lighthouse.trust import INSECURE_ENV, TOKEN_FILE_ENV
from lighthouse.wire import torchft_pb2 as pb
from tests.certificates import certify, stranger_context, stranger_credentials
from tests.integration.cluster import CHECKED, PATIENT_MS, Cluster
from tests.integration.lighthouse_clients import LIMIT_S, refusal, registered
from tests.integration.test_manager_api import make_manager
from tests.ports import free_ports
from tests.stress.hostile import connected
from torchft_like.cli import main
from torchft_like.coordination import LighthouseClient
from torchft_like.core.store import VALIDATION_MAGIC, Query
from torchft_like.errors import TrustError
from torchft_like.manager.client import ManagerClient
from torchft_like.manager.config import MANAGER_PORT_ENV
from torchft_like.process_group.store_server import UNKNOWN_MAX, StoreServer
from torchft_like.testing.cluster import Group
from torchft_like.testing.processes import Processes

pytestmark = [pytest.mark.integration, *CHECKED]

TEXTS = make_texts()
OBSERVER = f"Bearer {parse_trust(TEXTS[Role.OBSERVE], 'a text').shown}"
PARTICIPANT = f"Bearer {parse_trust(TEXTS[Role.PARTICIPATE], 'a text').shown}"
SILENT_CONNECTIONS, FAT_MEMBERS, FAT_BYTES = 60, 400, 20_000


def at_lighthouse(canary: str, victims: list[str]) -> list[tuple[str, list[Any]]]:
    """What takes a job over that trusts everybody, by method. Who believes it connects to the canary."""
    join = pb.QuorumMember(replica_id="stranger", address=canary, store_address=canary, step=1_000_000)
    register = pb.SessionRequest(register=pb.Register(replica_id="stranger", address=canary))
    links = pb.BrokenLinks(unreachable_replica_ids=victims)
    vacancy = pb.Vacancy(group_id=victims[0], group_rank=1, world_size=2, store_address=canary)
    return [
        (wire.SESSION, [register, pb.SessionRequest(join=join)]),
        (wire.SESSION, [register]),  # a member that never comes
        (wire.SESSION, [register, pb.SessionRequest(broken_links=links)]),
        (wire.SESSION, [pb.SessionRequest(register=pb.Register(replica_id=victims[0], address=canary))]),
        (wire.QUORUM, [pb.LighthouseQuorumRequest(requester=join)]),
        (wire.HEARTBEAT, [pb.LighthouseHeartbeatRequest(replica_id="stranger")]),
        (wire.OFFER_SPARE, [pb.SpareRequest(register=pb.SpareRegister(spare_id="stranger"))]),
        (wire.FILL_VACANCY, [pb.FillVacancyRequest(vacancy=vacancy)]),
    ]


AT_MANAGER: list[tuple[str, list[Any]]] = [
    (wire.KILL, [pb.KillRequest(msg="a stranger")]),
    (wire.RANK_SESSION, [pb.RankSessionRequest(register=pb.RankRegister(group_rank=0))]),
    (wire.RANK_SESSION, [pb.RankSessionRequest(register=pb.RankRegister(group_rank=1))]),
    (wire.MANAGER_QUORUM, [pb.ManagerQuorumRequest(group_rank=0, step=1_000_000)]),
    (wire.SHOULD_COMMIT, [pb.ShouldCommitRequest(group_rank=0, step=1, should_commit=False)]),
    (wire.CHECKPOINT_METADATA, [pb.CheckpointMetadataRequest(rank=0)]),
]


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process, and whatever it starts, participates."""
    path = tmp_path / "participate"
    path.write_text(TEXTS[Role.PARTICIPATE])
    monkeypatch.setenv(TOKEN_FILE_ENV, str(path))
    return path


def test_strangers_and_observers_cost_a_job_no_step(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among them are some without a certificate, some without a token, and some with those of an observer."""
    job, other = certify(tmp_path / "job"), certify(tmp_path / "other")
    monkeypatch.setenv(TLS_ENV, str(job))
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", str(PATIENT_MS))  # the strangers are patient, too
    with (
        Cluster(tmp_path, min_replicas=2) as cluster,
        listen_tcp(Address(LOOPBACK, 0)) as canary,
    ):
        managers = [Address(LOOPBACK, port) for port in free_ports(2)]
        for name, manager in zip("ab", managers, strict=True):
            monkeypatch.setenv(MANAGER_PORT_ENV, str(manager.port))
            cluster.start(name)
        monkeypatch.delenv(MANAGER_PORT_ENV)
        a, b = cluster.groups
        cluster.wait_for_quorum_of(a, b)
        lighthouse = parse_address(cluster.lighthouse_address)
        sources = [parse_address(source_of(manager)) for manager in managers]
        false = at_lighthouse("http://{}:{}".format(*canary.getsockname()), [str(a.replica_id)])
        attacks = [(lighthouse, *one) for one in false]
        attacks += [(manager, *one) for manager in managers for one in AT_MANAGER]
        with undisturbed(cluster, a, b), ExitStack() as stack:
            for server in (lighthouse, *managers, *sources):
                for _ in range(SILENT_CONNECTIONS):
                    stack.enter_context(connected(server))
            for shows in (None, other):
                for server, method, said in attacks:
                    known = stranger_credentials(job, shows)
                    with grpc.secure_channel(str(server), known, [_EXPECTED_NAME]) as channel:
                        assert refusal(channel, method, said, OBSERVER) is grpc.StatusCode.UNAVAILABLE
                assert not any(fetched(source, a.step, OBSERVER, shows) for source in sources)
            for header in (None, f"Bearer {'x' * 64}", OBSERVER):
                for server, method, said in attacks:
                    with make_channel(server) as channel:
                        assert refusal(channel, method, said, header) in DISTRUST
                assert not any(fetched(source, a.step, header, job) for source in sources)
            # Who participates in the job, and neither in the quorum nor in a replica group.
            assert not any(fetched(source, a.step, PARTICIPANT, job) for source in sources)
            no_rank = *DISTRUST, grpc.StatusCode.INVALID_ARGUMENT  # these groups have no rank 1
            for server, (method, said) in itertools.product(managers, AT_MANAGER):
                if method != wire.CHECKPOINT_METADATA:
                    with make_channel(server) as channel:
                        assert refusal(channel, method, said, PARTICIPANT) in no_rank
            fat = pb.LighthouseQuorumRequest(requester=pb.QuorumMember(data="x" * FAT_BYTES))
            with make_channel(lighthouse) as channel:
                for _ in range(FAT_MEMBERS):
                    assert refusal(channel, wire.QUORUM, [fat], OBSERVER) in DISTRUST
        monkeypatch.delenv(TOKEN_FILE_ENV)
        with undisturbed(cluster, a, b):
            stranger = cluster.start("stranger")
            cluster.wait_for_end(stranger)
            assert "TrustError: the lighthouse at" in stranger.ranks[0].last_error
        canary.settimeout(0)
        with pytest.raises(BlockingIOError):  # nobody has come
            canary.accept()
        files = [path for path in tmp_path.rglob("*") if path.suffix in (".log", ".events", ".journal")]
        written = "".join(path.read_text(errors="replace") for path in files)
        started = [" ".join(psutil.Process(rank.pid).cmdline()) for rank in (*a.ranks, *b.ranks)]
        for text in (written, cluster.lighthouse.output, *started):
            assert text
            assert not any(parse_trust(token, "a text").shown in text for token in TEXTS.values())


def test_a_replica_group_with_a_token_and_a_certificate_heals_from_others(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TLS_ENV, str(certify(tmp_path / "certificate")))
    with Cluster(tmp_path, min_replicas=2) as cluster:
        a, b = cluster.start_all("ab", size=2)
        b.kill()
        cluster.wait_for_event(a, "loss")
        again = cluster.start("b", size=2)
        cluster.wait_for_quorum_of(a, again)
        assert all(rank.events("heal") for rank in again.ranks)
        # ManagerServer, store, source, Gloo in torch's group and in ours; source, sign of life, Gloo in both.
        # A group that has just been configured anew may still listen for a moment where it did before.
        cluster.wait_until(lambda: [*map(len, listening(again))] == [5, 4], "five and four listeners")
        assert {ip.removeprefix("::ffff:") for of in listening(again) for ip in of} == {LOOPBACK}


def listening(group: Group) -> list[list[str]]:
    """Return the addresses at which each rank listens."""
    of_ranks = [psutil.Process(rank.pid).net_connections("tcp") for rank in group.ranks]
    return [[one.laddr.ip for one in of if one.status == psutil.CONN_LISTEN] for of in of_ranks]


def test_two_commands_make_a_lighthouse_that_serves_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: Processes
) -> None:
    """Those with which docs/security.md begins."""
    assert main(["keys", str(tmp_path)]) == 0
    command = ["-m", "torchft_like.chaos", "lighthouse", "--bind", "[::]:0", "--page", "[::]:0"]
    secrets = {TLS_ENV: str(tmp_path / "tls"), INSECURE_ENV: "0"}
    daemon = processes.start(
        sys.executable, *command, env={**secrets, TOKEN_FILE_ENV: str(tmp_path / "operate")}
    )
    port = int(daemon.wait_for_output(r"listening on \S+:(\d+)")[1])
    for variable, value in {**secrets, TOKEN_FILE_ENV: str(tmp_path / "participate")}.items():
        monkeypatch.setenv(variable, value)
    with registered(f"127.0.0.1:{port}", "a") as (a,):
        a.join()
        assert a.quorum()
    monkeypatch.delenv(TOKEN_FILE_ENV)
    with pytest.raises(TrustError):
        LighthouseClient(f"127.0.0.1:{port}", timedelta(seconds=LIMIT_S)).heartbeat("a stranger")


@pytest.mark.parametrize("shows", ["nothing", "no certificate", "another job's"])
def test_strangers_at_the_stores_cost_a_job_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, shows: str
) -> None:
    """They fill the stores in which process groups meet, squat in them, list them, and say nothing, before a
    replica comes for which all have to meet again.
    """
    if shows != "nothing":
        monkeypatch.setenv(TLS_ENV, str(certify(tmp_path / "job")))
    of_another = certify(tmp_path / "other") if shows == "another job's" else None
    lighthouse = request.getfixturevalue("lighthouse")  # with the certificate, if there is one
    stores: Queue[tuple[StoreServer, int]] = Queue()
    lost: list[str] = []

    def train(name: str) -> None:
        model = nn.Linear(1, 1)
        with make_manager(lighthouse, name, model) as manager:
            complete = 0
            while complete < 3:
                manager.start_quorum()
                manager.allreduce(torch.ones(1)).wait()
                if not manager.should_commit():
                    lost.append(f"{name} loses step {manager.current_step()}: {manager.errored()}")
                if manager.current_step() == 1 and manager._store.meeting_place is not None:
                    stores.put((manager._store.meeting_place, manager.quorum_id))
                complete += manager.num_participants() == 3

    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        replicas = [pool.submit(train, name) for name in "ab"]
        for store, quorum_id in [stores.get(timeout=LIMIT_S) for _ in replicas]:
            for _ in range(UNKNOWN_MAX // 2):
                stack.enter_context(connected(store.address.server))
            strangers = []
            for words in false_requests(quorum_id):
                stranger: socket.socket = stack.enter_context(connected(store.address.server))
                with suppress(OSError):  # an ssl.SSLError is one, too
                    if shows != "nothing":
                        context = stranger_context(of_another)
                        stranger = stack.enter_context(context.wrap_socket(stranger))
                    stranger.sendall(words)
                    strangers.append(stranger)
            for stranger in strangers:
                with suppress(OSError):
                    while stranger.recv(4096):  # the answer to its greeting, and then the end
                        pass
        replicas.append(pool.submit(train, "c"))
        for replica in replicas:
            replica.result(LIMIT_S)
    assert lost == []


def false_requests(quorum_id: int) -> Iterator[bytes]:
    """What a stranger may ask a store who knows what the quorums are called, and not their secrets."""

    def text(data: str | bytes) -> bytes:
        data = data.encode() if isinstance(data, str) else data
        return struct.pack("=Q", len(data)) + data

    greeting = bytes([Query.VALIDATE]) + struct.pack("=I", VALIDATION_MAGIC)
    greeting += bytes([Query.PING]) + struct.pack("=I", 7)
    names = [f"torchft/{number}/0" for number in (quorum_id, quorum_id + 1)]
    for prefix in ("x", *names, *(f"{name}/secret={'0' * 32}" for name in names)):
        key = text(f"/{prefix}/configured/0")
        yield greeting + bytes([Query.ADD]) + key + struct.pack("=q", 1)
        yield greeting + bytes([Query.SET]) + key + text(b"x" * 1_000_000)
    yield greeting + bytes([7])  # how many keys?
    yield greeting + bytes([17])  # which ones?


@contextmanager
def undisturbed(cluster: Cluster, *groups: Group) -> Iterator[None]:
    """Check that these groups, and the quorum of them, go on as if nothing had happened."""
    since, quorums = time.time(), len(cluster.lighthouse_events.records("quorum"))
    yield
    cluster.wait_for_quorum_of(*groups)
    assert [group.failures(since) for group in groups] == [[] for _ in groups]
    assert len(cluster.lighthouse_events.records("quorum")) == quorums


def fetched(source: Address, step: int, header: str | None, shows: Path | None) -> bool:
    """Return whether a rank gives any part of its state to who has this token and this certificate."""
    found = []
    for what in ("header?wait_ms=1", "sums", "payload?from=0&to=9"):
        request = f"GET /checkpoint/{step}/{what} HTTP/1.1\r\n"
        request += "" if header is None else f"Authorization: {header}\r\n"
        with (
            suppress(OSError),  # an ssl.SSLError is one, too
            connected(source) as plain,
            stranger_context(shows).wrap_socket(plain) as connection,
        ):
            connection.sendall(f"{request}\r\n".encode())
            found.append(connection.recv(4096).split()[1:2])
    return any(status not in ([], [b"401"], [b"403"]) for status in found)


def source_of(manager: Address) -> str:
    """Return the address of a rank's checkpoint server, which only a participant is told."""
    client = ManagerClient(manager.url)
    try:
        return client._checkpoint_metadata(0, timedelta(seconds=LIMIT_S))
    finally:
        client.close()
