"""Real servers under clients that are malformed, huge, slow or half open: healthy ones never notice."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, closing

import grpc
import pytest

from lighthouse import wire
from lighthouse.address import Address
from lighthouse.core.config import MESSAGE_BYTES_MAX, LighthouseConfig
from lighthouse.net import make_channel
from lighthouse.wire import torchft_pb2 as pb
from tests.integration.lighthouse_clients import refusal
from tests.stress import hostile
from tests.stress.beside import Beside
from tests.stress.scene import MB, SERVERS, Held, Scene

pytestmark = pytest.mark.integration

SILENT = 150  # more than the checkpoint server's 64 connections
FILES_MORE = 5
MB_MORE = 80.0
NESTED = b"\xa3\x06" * 500_000


@pytest.mark.parametrize("server", SERVERS)
def test_malformed_clients_end_their_own_connections_only(scene: Scene, server: str) -> None:
    with scene.healthy(server) as healthy:
        before = scene.held(server)
        hostile.send_all_malformed(scene.address(server))
        healthy.goes_on()
        assert "Traceback" not in scene.said()
        after = scene.settled(server, before.files + FILES_MORE)
        assert after.files <= before.files + FILES_MORE, (before, after)
        assert after.resident_mb <= before.resident_mb + MB_MORE, (before, after)


@pytest.mark.parametrize("server", SERVERS)
def test_silent_and_slow_clients_take_no_place_from_others(scene: Scene, server: str) -> None:
    address = scene.address(server)
    with scene.healthy(server) as healthy, ExitStack() as stack:
        before = scene.held(server)
        silent = [stack.enter_context(hostile.connected(address)) for _ in range(SILENT)]
        slow = stack.enter_context(closing(hostile.Trickle(address, 20)))
        for _ in range(60):
            slow.say_one_byte()
            healthy.goes_on(2)
        for client in silent:
            hostile.reset(client)
        slow.close()
        healthy.goes_on()
        after = scene.settled(server, before.files + FILES_MORE)
        assert after.files <= before.files + FILES_MORE, (before, after)


HUGE = [
    (wire.SESSION, pb.SessionRequest(register=pb.Register(replica_id="x" * MB))),
    (wire.SESSION, pb.SessionRequest(register=pb.Register(replica_id="h", address="x" * 8 * MB))),
    (
        wire.SESSION,
        pb.SessionRequest(register=pb.Register(replica_id="h", last_quorum_replica_ids=["y"] * 100_000)),
    ),
    (wire.QUORUM, pb.LighthouseQuorumRequest(requester=pb.QuorumMember(replica_id="h", data="x" * MB))),
    (wire.QUORUM, pb.LighthouseQuorumRequest(requester=pb.QuorumMember(replica_id="h", step=2**63 - 1))),
    (wire.QUORUM, pb.LighthouseQuorumRequest(requester=pb.QuorumMember(replica_id="h", step=-1))),
    (wire.QUORUM, b"\xff" * 100),
    (wire.HEARTBEAT, pb.LighthouseHeartbeatRequest(replica_id="x" * MB)),
    (wire.HEARTBEAT, pb.LighthouseHeartbeatRequest(replica_id="a\n\x1b[2Jb")),
    (wire.HEARTBEAT, NESTED),
    (wire.RANK_SESSION, pb.RankSessionRequest(leave=pb.Leave(reason="x" * 2 * MB))),
    (wire.RANK_SESSION, pb.RankSessionRequest(register=pb.RankRegister(group_rank=2**63 - 1))),
    (wire.RANK_SESSION, pb.RankSessionRequest(register=pb.RankRegister(group_rank=-1))),
    (wire.RANK_SESSION, b"\xff" * 100),
    (wire.MANAGER_QUORUM, pb.ManagerQuorumRequest(group_rank=5)),
    (wire.MANAGER_QUORUM, pb.ManagerQuorumRequest(checkpoint_metadata="x" * 2 * MB)),
    (wire.CHECKPOINT_METADATA, pb.CheckpointMetadataRequest(rank=-(2**63))),
    (wire.SHOULD_COMMIT, pb.ShouldCommitRequest(group_rank=2**63 - 1, step=-1)),
    (wire.SHOULD_COMMIT, NESTED),
    (wire.KILL, b"\xff" * 100),
]
REFUSALS = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.NOT_FOUND)


@pytest.mark.parametrize("server", ["lighthouse", "manager"])
def test_huge_and_senseless_messages_are_refused_with_a_status(scene: Scene, server: str) -> None:
    service = "LighthouseService" if server == "lighthouse" else "ManagerService"
    with scene.healthy(server) as healthy:
        before = scene.held(server)
        for method, message in HUGE:
            if service in method:
                with make_channel(scene.address(server)) as channel:
                    assert refusal(channel, method, [message]) in REFUSALS, (method, str(message)[:100])
        healthy.goes_on()
        assert "Traceback" not in scene.said()
        assert scene.held(server).resident_mb <= before.resident_mb + MB_MORE


def test_a_quorum_of_all_replicas_fits_into_a_message() -> None:
    for replicas_max in (1, 8, 10_000, 100_000):
        config = LighthouseConfig(replicas_max=replicas_max)
        largest = pb.QuorumMember(replica_id="x" * (config.member_bytes_max - 4))
        assert largest.ByteSize() <= config.member_bytes_max
        one = pb.SessionResponse(quorum=pb.Quorum(participants=[largest])).ByteSize()
        assert replicas_max * (one + 4) <= MESSAGE_BYTES_MAX


# Thousands of connections that come and go: nothing is kept of them, and healthy clients never notice.
#
# A bounded flood is part of the tests; `make stress` runs the full one and prints its numbers
# (`STRESS_CONNECTIONS` says how many, for each server).


CONNECTIONS = int(os.environ.get("STRESS_CONNECTIONS", "400"))
WARM_UP = 100
FILES_CALM = 40
THREADS_MORE = 8
# What gRPC and the allocator keep after a flood does not grow with the next one. A leak of four kilobytes
# for each of ten thousand connections would be found.
FLOOD_MB_MORE = 40.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", SERVERS)
def test_connections_that_come_and_go_leave_nothing(scene: Scene, server: str) -> None:
    address = scene.address(server)
    with scene.healthy(server) as healthy:
        before, quiet = calm(scene, server, healthy)
        began = time.monotonic()
        accepted = asyncio.run(hostile.flood([address], CONNECTIONS))
        rate = accepted / (time.monotonic() - began)
        after, busy = assert_nothing_is_left(scene, server, healthy, before)
        print(
            f"\n{server}: {accepted} connections that come and go, {rate:.0f} per second; {before} -> {after}"
        )
        print(f"  healthy before: {quiet}\n  healthy during: {busy}")
        assert accepted >= CONNECTIONS * 0.9


@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", SERVERS)
def test_connections_that_stay_and_say_nothing_leave_nothing(scene: Scene, server: str) -> None:
    address = scene.address(server)
    with scene.healthy(server) as healthy:
        stay(address)  # what so many at once take is kept by the allocator, and used by the next
        before, quiet = calm(scene, server, healthy)
        peak = stay(address, lambda: seen(scene, server, healthy))
        after, busy = assert_nothing_is_left(scene, server, healthy, before)
        print(f"\n{server}: {CONNECTIONS // 2} connections that stay; {before} -> {peak} -> {after}")
        print(f"  healthy before: {quiet}\n  healthy during: {busy}")


def stay(address: Address, meanwhile: Callable[[], Held | None] = lambda: None) -> Held | None:
    """Have many silent connections open at once, and tell what was found meanwhile."""
    with ExitStack() as stack:
        for _ in range(CONNECTIONS // 2):
            stack.enter_context(hostile.connected(address))
        return meanwhile()


def seen(scene: Scene, server: str, healthy: Beside) -> Held:
    """What the server holds while the healthy go on."""
    healthy.goes_on()
    return scene.held(server)


def calm(scene: Scene, server: str, healthy: Beside) -> tuple[Held, str]:
    """What the server holds once its allocator and its threads have seen some clients."""
    asyncio.run(hostile.flood([scene.address(server)], WARM_UP))
    before = scene.settled(server, FILES_CALM)
    healthy.take_times()
    healthy.goes_on()
    return before, healthy.take_times()


def assert_nothing_is_left(scene: Scene, server: str, healthy: Beside, before: Held) -> tuple[Held, str]:
    """What it holds when all are gone, which is what it held before; and how the healthy fared."""
    healthy.goes_on()
    busy = healthy.take_times()
    after = scene.settled(server, before.files + FILES_MORE, before.threads + THREADS_MORE)
    assert after.files <= before.files + FILES_MORE, (before, after)
    assert after.threads <= before.threads + THREADS_MORE, (before, after)
    assert after.resident_mb <= before.resident_mb + FLOOD_MB_MORE, (before, after)
    return after, busy
