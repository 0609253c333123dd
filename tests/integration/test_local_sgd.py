"""DiLoCo while replicas die between two syncs and within one, and come back: one global state after each."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, also_slow
from torchft_like.testing.cluster import Cluster, Group

pytestmark = [pytest.mark.integration, *CHECKED]

ROUNDS = 4


@pytest.mark.parametrize(
    ("place", "fragments", "delay", "alpha", "quantize_to"),
    [
        ("step", 1, 0, 0.0, ""),
        ("backward", 2, 2, 0.5, "int8"),
        ("sum", 2, 1, 0.5, ""),
        ("vote", 2, 2, 0.5, "fp8"),
        ("heal", 2, 1, 0.0, ""),
        also_slow("step", 2, 1, 0.5, "fp8"),
        also_slow("backward", 2, 2, 0.0, ""),
        also_slow("sum", 2, 0, 0.0, "int8"),
        also_slow("vote", 1, 0, 0.0, ""),
    ],
)
def test_global_parameters_are_the_same_after_each_sync_through_deaths_and_heals(
    tmp_path: Path, place: str, fragments: int, delay: int, alpha: float, quantize_to: str
) -> None:
    with Cluster(tmp_path) as cluster:
        fault = cluster.plan("kill", place)

        def start(name: str) -> Group:
            arguments = [name, cluster.index_of(name), fragments, delay, alpha, quantize_to, fault]
            group = cluster.launch(name, ["tests.integration.local_sgd_job", *map(str, arguments)])
            group.ranks[0].may_end = True  # each may be the one that the fault strikes
            return group

        living = [start(name) for name in "abc"]
        cluster.wait_for_quorum_of(*living)
        for _ in range(ROUNDS):
            cluster.pull_trigger()
            if place == "heal":
                living.append(start(f"{living[-1].name}2"))  # a source of this one is struck
            victim, _ = cluster.wait_for_fault(*living)
            cluster.wait_for_end(victim)
            living.remove(victim)
            cluster.wait_for_quorum_of(*living)
            if place != "heal":
                living.append(start(victim.name))
            cluster.wait_for_quorum_of(*living)
        digests = defaultdict(set)
        for commit in cluster.history().commits:
            # Who commits a step and dies before the others could leaves it to them, in their next quorum.
            digests[commit.step, commit.quorum_id].add(commit.digest)
        assert {step: found for step, found in digests.items() if len(found) > 1} == {}
        steps = {step for step, _ in digests}
        assert steps == set(range(1, max(steps) + 1))
