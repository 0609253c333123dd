"""Replica groups that train under Managers, with deaths, heals and a flipped bit; over NCCL on one GPU.

What the harness checks in the end of each (no step was committed with different bits, nothing was lost): see
`Cluster`. Without a GPU the same runs over Gloo, with `make slow`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.group_job import each_backend
from tests.integration.cluster import Cluster
from tests.integration.options import WorkerOptions
from tests.integration.sharded import GROUP_SIZE

pytestmark = pytest.mark.slow

LIMIT_S = 100.0


@each_backend
@pytest.mark.parametrize("reduce", ["ddp", "manager"])
def test_three_replicas_lose_one_twice_and_it_heals(tmp_path: Path, backend: str, reduce: str) -> None:
    options = WorkerOptions(backend=backend, reduce=reduce)
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        a, b, c = cluster.start_all("abc", options=options)
        for _ in range(2):
            c.kill()
            cluster.wait_for_quorum_of(a, b)
            c = cluster.start("c", options=options)
            cluster.wait_for_quorum_of(a, b, c)
            assert c.events("heal")


@each_backend
def test_a_flipped_bit_is_found_and_healed(tmp_path: Path, backend: str) -> None:
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        flip = cluster.plan("flip-parameter", "step")
        a = cluster.start("a", options=WorkerOptions(backend=backend, slices=1, faults=(flip,)))
        b, c = (cluster.start(name, options=WorkerOptions(backend=backend, slices=1)) for name in "bc")
        cluster.wait_for_quorum_of(a, b, c)
        cluster.pull_trigger()
        cluster.wait_for_event(a, "divergence")
        cluster.wait_for_event(a, "heal")
        cluster.wait_for_quorum_of(a, b, c)
        assert [fault["act"] for fault in a.faults()] == ["flip-parameter"]


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_a_sharded_group_dies_and_heals(tmp_path: Path, backend: str) -> None:
    """HSDP, two groups of two ranks: between the groups over ours, within a group over torch's own."""
    options = WorkerOptions(backend=backend, reduce="sharded", pause_s=0.1)
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        a, b = cluster.start_all("ab", size=GROUP_SIZE, options=options)
        b.kill()
        cluster.wait_for_quorum_of(a)
        again = cluster.start("b", size=GROUP_SIZE, options=options)
        cluster.wait_for_quorum_of(a, again)
        assert all(rank.events("heal") for rank in again.ranks)
