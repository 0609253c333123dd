"""DiLoCo while replicas die between two syncs and within one, and come back: one global state after each."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.cluster import also_slow
from torchft_like.testing.cluster import Cluster, Group

pytestmark = [pytest.mark.integration, pytest.mark.agreement]

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
            arguments = [name, str(fragments), str(delay), str(alpha), quantize_to, fault]
            group = cluster.launch(name, ["tests.integration.local_sgd_job", *arguments])
            group.ranks[0].may_end = True  # each may be the one that the fault strikes
            return group

        def wait_for_syncs_of(groups: list[Group]) -> None:
            seen = [len(group.ranks[0].records("sync")) for group in groups]

            def have_synced() -> bool:
                new = [g.ranks[0].records("sync")[n:] for g, n in zip(groups, seen, strict=True)]
                return all(sum(r["participants"] == len(groups) for r in records) >= 3 for records in new)

            names = ", ".join(group.name for group in groups)
            cluster.wait_until(have_synced, f"three syncs of {names}")

        living = [start(name) for name in "abc"]
        wait_for_syncs_of(living)
        for _ in range(ROUNDS):
            cluster.pull_trigger()
            if place == "heal":
                living.append(start(f"{living[-1].name}2"))  # a source of this one is struck
            victim, _ = cluster.wait_for_fault(*living)
            cluster.wait_for_end(victim)
            living.remove(victim)
            wait_for_syncs_of(living)
            if place != "heal":
                living.append(start(victim.name))
            wait_for_syncs_of(living)
        digests = defaultdict(set)
        for record in (r for group in cluster.groups for r in group.ranks[0].records("sync")):
            digests[record["step"]].add(record["digest"])
        assert {step: found for step, found in digests.items() if len(found) > 1} == {}
        assert sorted(digests) == list(range(1, max(digests) + 1))
