"""Replicas that really train, and do not notice what is done to every server of their job."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from lighthouse.address import Address, parse_address
from tests.integration.cluster import Cluster
from tests.integration.lighthouse_clients import LIMIT_S
from tests.stress import hostile
from torchft_like.manager.client import ManagerClient
from torchft_like.testing.cluster import Group

pytestmark = [pytest.mark.integration, pytest.mark.slow]

CONNECTIONS = 1500
SETTINGS_FRAME = 4  # what a gRPC server says first, asked or not
HEARD_S = 2.0


@pytest.mark.timeout(300)
def test_two_replica_groups_train_on_while_all_their_servers_are_pestered(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        a, b = cluster.start_all("ab")
        servers = [parse_address(cluster.lighthouse_address), *servers_of(a), *servers_of(b)]
        assert len(servers) == 5
        since, quorum_id, step = time.time(), a.last_commit.quorum_id, a.step
        slow = [hostile.Trickle(server, 4) for server in servers]
        for server in servers:
            hostile.send_all_malformed(server)
            for one in slow:
                one.say_one_byte()
        asyncio.run(hostile.flood(servers, CONNECTIONS))
        cluster.wait_for_quorum_of(a, b, steps=20)
        for one in slow:
            one.close()
        assert a.step > step + 20
        assert a.failures(since) == b.failures(since) == []
        assert a.last_commit.quorum_id == b.last_commit.quorum_id == quorum_id


def servers_of(group: Group) -> list[Address]:
    """The group's ManagerServer and its checkpoint server."""
    connections = psutil.Process(group.ranks[0].pid).net_connections("tcp")
    listening = [Address("127.0.0.1", c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN]
    manager = next(address for address in listening if speaks_grpc(address))
    client = ManagerClient(manager.url)
    metadata = client._checkpoint_metadata(0, timedelta(seconds=LIMIT_S))
    client.close()
    return [manager, parse_address(metadata)]


def speaks_grpc(address: Address) -> bool:
    """Without a word: what listens there may be torch's."""
    with hostile.connected(address) as client:
        client.settimeout(HEARD_S)
        try:
            return client.recv(9)[3:4] == bytes([SETTINGS_FRAME])
        except TimeoutError:
            return False
