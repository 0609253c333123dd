"""How process groups are reached: ours and the nightly's servers and clients tell each other on one wire."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from benchmarks.processes import Fleet
from benchmarks.systems import TORCHFT_NIGHTLY, System
from torchft_like.coordination import LighthouseServer, ManagerClient, ManagerServer, QuorumResult

# The first test of a machine installs the peer, which takes longer than a test may.
pytestmark = [pytest.mark.interop, pytest.mark.timeout(900)]

LIMIT = timedelta(seconds=60)

# The nightly's ManagerServer of replica group b, and its clients for rank 1 of both groups.
NIGHTLY = """
import json, signal, sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from torchft.coordination import ManagerClient, ManagerServer
limit = timedelta(seconds=60)
lighthouse, address_of_a = sys.argv[1:]
server = ManagerServer(
    replica_id="b", lighthouse_addr=lighthouse, hostname="127.0.0.1", bind="127.0.0.1:0",
    store_addr="127.0.0.1:2", world_size=2, heartbeat_interval=timedelta(seconds=0.1),
    connect_timeout=limit, quorum_retries=0,
)
def ask(name, address):
    result = ManagerClient(address, limit)._quorum(
        group_rank=1, step=5, checkpoint_metadata="", shrink_only=False, timeout=limit, commit_failures=0,
        reconfigure_handle=f"{name}1", init_sync=True,
    )
    return [result.replica_ids, result.reconfigure_handles]
print(json.dumps({"address": server.address()}), flush=True)
with ThreadPoolExecutor() as ranks:
    results = [ranks.submit(ask, "a", address_of_a), ranks.submit(ask, "b", server.address())]
    print(json.dumps({"heard": [result.result() for result in results]}), flush=True)
signal.pause()
"""


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer(min_replicas=2, join_timeout_ms=60_000)
    yield server
    server.shutdown()


@pytest.fixture
def server_of_a(lighthouse: LighthouseServer) -> Iterator[ManagerServer]:
    server = ManagerServer("a", lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "127.0.0.1:1", 2)
    yield server
    server.shutdown()


@pytest.mark.parametrize("peer", [pytest.param(TORCHFT_NIGHTLY, id="nightly")], indirect=True)
def test_every_rank_hears_how_its_own_rank_in_each_group_is_reached(
    fleet: Fleet, peer: System, lighthouse: LighthouseServer, server_of_a: ManagerServer
) -> None:
    addresses = lighthouse.address(), server_of_a.address()
    theirs = fleet.start("theirs", [peer.interpreter, "-c", NIGHTLY, *addresses])
    address_of_b = fleet.record(theirs)["address"]
    with ThreadPoolExecutor() as ranks:
        results = list(ranks.map(_ask, ("a", "b"), (server_of_a.address(), address_of_b)))
    for result in results:
        assert (result.replica_ids, result.reconfigure_handles) == (("a", "b"), ("a0", "b0"))
    assert fleet.record(theirs, 1)["heard"] == 2 * [[["a", "b"], ["a1", "b1"]]]


def _ask(name: str, address: str) -> QuorumResult:
    """Rank 0 of that replica group."""
    client = ManagerClient(address)
    try:
        return client._quorum(0, 5, "", False, LIMIT, reconfigure_handle=f"{name}0")
    finally:
        client.close()
