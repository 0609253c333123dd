"""Two replica groups of two hosts each, of which those that are not their ranks 0's cannot reach each other:
one is left out, and the other goes on with a third, whose ranks are all on one host.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.managers import PATIENCE_MS, PATIENCE_S, error_of, manager_alone
from torchft_like import ProcessGroupGloo
from torchft_like.testing.chaos.network import Network, Rules, why_unavailable
from torchft_like.testing.cluster import LIGHTHOUSE
from torchft_like.testing.ranks import Rank, Ranks, end_all

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(why_unavailable()), reason=str(why_unavailable())),
]
GROUPS = {"a": ("a0", "a1"), "b": ("b0", "b1"), "c": ("c0", "c0")}  # by name: the hosts of the ranks
HOSTS = ("a0", "a1", "b0", "b1", "c0")
LINK = frozenset({("a1", "b1"), ("b1", "a1")})
RULES = {"cut": Rules(cut=LINK), "refused": Rules(refused=LINK), "narrow": Rules(narrow=LINK)}
MORE_THAN_A_PACKET = 2000


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with Network((LIGHTHOUSE, *HOSTS), tmp_path, seed=1) as network:
        yield network


@pytest.fixture
def groups(network: Network) -> Iterator[dict[str, Ranks]]:
    """The ranks of each group. Nobody is lost for a late answer of a busy machine: the link alone decides."""
    patient = {"TORCHFT_KEEPALIVE_TIMEOUT_MS": str(PATIENCE_MS), "OMP_NUM_THREADS": "1"}
    groups = {
        name: Ranks(
            Rank(
                variables=patient | {"TORCHFT_HOSTNAME": network.address(host)},
                namespace=network.namespace(host),
            )
            for host in hosts
        )
        for name, hosts in GROUPS.items()
    }
    try:
        yield groups
    finally:
        end_all([rank for ranks in groups.values() for rank in ranks])


def make(here: SimpleNamespace, name: str, number: int, lighthouse: str, hosts: list[str]) -> None:
    torch.set_num_threads(1)
    place = {"rank": number, "world_size": 2, "store_addr": hosts[0], "store_port": 29500}
    pg = ProcessGroupGloo(PATIENCE_S)
    here.manager = manager_alone(name, lighthouse, pg=pg, hostname=hosts[number], **place)


def train(here: SimpleNamespace, size: int) -> int:
    """Take steps until one of so many groups is committed; return how many were lost before."""
    lost = 0
    while True:
        here.manager.start_quorum()
        error_of(lambda: here.manager.allreduce(torch.ones(MORE_THAN_A_PACKET)).wait())
        if not here.manager.should_commit():
            lost += 1
        elif here.manager.replica_world_size() == size:
            return lost


@pytest.mark.progress
@pytest.mark.parametrize("kind", list(RULES))
def test_groups_whose_other_hosts_do_not_reach_each_other(
    kind: str, network: Network, lighthouse: str, groups: dict[str, Ranks]
) -> None:
    a, b, c = groups.values()
    for name, ranks in groups.items():
        hosts = [network.address(host) for host in GROUPS[name]]
        for number, rank in enumerate(ranks):
            rank.tell(make, name, number, lighthouse, hosts)
            rank.tell(train, len(GROUPS))
    for ranks in groups.values():
        ranks.answers()
        ranks.answers()

    network.apply(RULES[kind])
    for ranks, size in ((a, 2), (b, 3), (c, 2)):
        for rank in ranks:
            rank.tell(train, size)
    lost = [*a.answers(), *c.answers()]
    assert not any(rank.has_answer() for rank in b)
    network.apply(Rules())
    for rank in (*a, *c):
        rank.tell(train, len(GROUPS))
    for ranks in groups.values():
        ranks.answers()
    assert all(0 < each < 10 for each in lost), lost
