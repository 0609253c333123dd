"""Strangers beside a job of real processes that have tokens: nothing they do costs it a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from lighthouse import wire
from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.core.trust import Role, make_texts, parse_trust
from lighthouse.listening import listen_tcp
from lighthouse.net import DISTRUST, make_channel
from lighthouse.tls import TLS_ENV
from lighthouse.trust import TOKEN_FILE_ENV
from lighthouse.wire import torchft_pb2 as pb
from tests.certificates import certify
from tests.integration.cluster import CHECKED, Cluster
from tests.integration.lighthouse_clients import LIMIT_S
from tests.integration.test_trust import get
from torchft_like.manager.client import ManagerClient
from torchft_like.manager.config import MANAGER_PORT_ENV
from torchft_like.testing.cluster import Group

pytestmark = [pytest.mark.integration, *CHECKED]

TEXTS = make_texts()
OBSERVER = f"Bearer {parse_trust(TEXTS[Role.OBSERVE], 'a text').shown}"

JOIN = pb.QuorumMember(replica_id="stranger", address="http://127.0.0.1:1", step=1_000_000, world_size=1)
AT_LIGHTHOUSE: list[tuple[str, list[Any]]] = [
    (
        wire.SESSION,
        [
            pb.SessionRequest(register=pb.Register(replica_id="stranger", address=JOIN.address)),
            pb.SessionRequest(join=JOIN),
        ],
    ),
    (wire.QUORUM, [pb.LighthouseQuorumRequest(requester=JOIN)]),
    (wire.HEARTBEAT, [pb.LighthouseHeartbeatRequest(replica_id="stranger")]),
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
    with Cluster(tmp_path, min_replicas=2) as cluster:
        managers = {}
        for name in "ab":
            managers[name] = Address(LOOPBACK, free_port())
            monkeypatch.setenv(MANAGER_PORT_ENV, str(managers[name].port))
            cluster.start(name)
        monkeypatch.delenv(MANAGER_PORT_ENV)
        a, b = cluster.groups
        cluster.wait_for_quorum_of(a, b)
        with undisturbed(cluster, a, b):
            for header in (None, f"Bearer {'x' * 64}", OBSERVER):
                for method, said in AT_LIGHTHOUSE:
                    assert refused(parse_address(cluster.lighthouse_address), method, said, header)
                for manager in managers.values():
                    for method, said in AT_MANAGER:
                        assert refused(manager, method, said, header)
                    for what in ("header?wait_ms=1", "sums", "payload?from=0&to=9"):
                        step = a.last_commit.step
                        assert get(source_of(manager), f"/checkpoint/{step}/{what}", header)[0] == 401
        monkeypatch.delenv(TOKEN_FILE_ENV)
        with undisturbed(cluster, a, b):
            stranger = cluster.start("stranger")
            cluster.wait_for_end(stranger)
            assert "TrustError: the lighthouse at" in stranger.ranks[0].last_error


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
        assert [rank.events("heal") for rank in again.ranks]


@contextmanager
def undisturbed(cluster: Cluster, *groups: Group) -> Iterator[None]:
    """Check that these groups, and the quorum of them, go on as if nothing had happened."""
    since, quorums = time.time(), len(cluster.lighthouse_events.records("quorum"))
    yield
    cluster.wait_for_quorum_of(*groups)
    assert [group.failures(since) for group in groups] == [[] for _ in groups]
    assert len(cluster.lighthouse_events.records("quorum")) == quorums


def refused(server: Address, method: str, said: list[Any], header: str | None) -> bool:
    metadata = () if header is None else (("authorization", header),)
    first, *_ = said
    with make_channel(server) as channel:
        try:
            if method in (wire.SESSION, wire.RANK_SESSION):
                call = channel.stream_stream(method, type(first).SerializeToString, None)
                list(call(iter(said), timeout=LIMIT_S, metadata=metadata))
            else:
                one = channel.unary_unary(method, type(first).SerializeToString, None)
                one(first, timeout=LIMIT_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code() in DISTRUST
    return False


def source_of(manager: Address) -> str:
    """Return the address of a rank's checkpoint server, which only a participant is told."""
    client = ManagerClient(manager.url)
    try:
        return client._checkpoint_metadata(0, timedelta(seconds=LIMIT_S))
    finally:
        client.close()


def free_port() -> int:
    with listen_tcp(Address(LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])
