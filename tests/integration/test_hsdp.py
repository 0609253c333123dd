"""Models sharded over the ranks of a replica group: a group dies and heals, and the numbers are right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.integration.cluster import CHECKED, Cluster, also_slow
from tests.integration.options import WorkerOptions
from tests.integration.sharded import GROUP_SIZE, WAYS, Replayed, replay
from torchft_like.testing.cluster import Rank

pytestmark = [pytest.mark.integration, *CHECKED]

LIMIT_S = 100.0  # six processes import all of torch.distributed, two at a time on a small machine


@pytest.mark.parametrize("state", ["shards", "dtensors", also_slow("full")])
def test_sharded_models_survive_a_death_and_arrive_as_plain_training(tmp_path: Path, state: str) -> None:
    options = WorkerOptions(reduce="sharded", state=state, pause_s=0.3)
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        a, b = cluster.start_all("ab", size=GROUP_SIZE, options=options)
        b.kill()
        cluster.wait_for_quorum_of(a)
        assert {event["member"] for event in a.events("loss")} == {b.replica_id}
        again = cluster.start("b", size=GROUP_SIZE, options=options)
        cluster.wait_for_quorum_of(a, again)
        assert all(rank.events("heal") for rank in again.ranks)
        assert any(len(c.members) > c.participants for c in a.ranks[0].commits()), "b did not heal beside a"
        survivor = a.ranks[0]
        commits = tuple(survivor.commits())
        for way in WAYS:
            replayed = list(replay(commits, "ab", way, written_by(survivor, way)))
            for rank in (*a.ranks, *b.ranks, *again.ranks):
                assert steps_that_match(rank, replayed, way) > 0


def steps_that_match(rank: Rank, plain: list[Replayed], way: str) -> int:
    """How many of the steps that `rank` wrote down were compared with plain training on the same data."""
    written = written_by(rank, way)
    matching = 0
    for replayed in plain:
        if (step := replayed.step) in written:
            torch.testing.assert_close(
                written[step], replayed.parameters, rtol=1e-5, atol=replayed.tolerance, msg=told_of(way, step)
            )
            matching += 1
    return matching


def written_by(rank: Rank, way: str) -> dict[int, torch.Tensor]:
    return {r["step"]: torch.tensor(r["values"]) for r in rank.records("parameters") if r["way"] == way}


def told_of(way: str, step: int) -> Callable[[str], str]:
    return lambda message: f"{way}, step {step}: {message}"
