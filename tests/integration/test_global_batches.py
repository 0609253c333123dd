"""Every sample is used once per epoch while replicas die, leave and come."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.integration.sampled_job import BATCHES
from torchft_like.testing.cluster import Cluster, Group

pytestmark = pytest.mark.integration

CHANGES = 12  # each of three is killed, and leaves, and comes back twice


def test_samples_are_used_once_per_epoch_through_changes_of_membership(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:

        def start(name: str) -> Group:
            arguments = [name, str(cluster.index_of(name))]
            return cluster.launch(name, ["tests.integration.sampled_job", *arguments])

        living = {name: start(name) for name in "abc"}
        cluster.wait_for_quorum_of(*living.values())
        for change in range(CHANGES):
            name = "abc"[change // 2 % 3]
            if name in living and change % 4:
                living.pop(name).kill()
            elif name in living:
                (leaver := living.pop(name)).signal(signal.SIGTERM)
                cluster.wait_for_end(leaver)
            else:
                living[name] = start(name)
            cluster.wait_for_quorum_of(*living.values())
        ranks = [rank for group in cluster.groups for rank in group.ranks]
        # They train on: what was taken for a step is written before its commit, and read after it.
        commits = {(commit.step, commit.quorum_id) for rank in ranks for commit in rank.commits()}
        taken: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for record in (record for rank in ranks for record in rank.records("took")):
            taken[record["step"], record["quorum_id"]] += record["samples"]
        steps = {step for step, _ in commits}
        assert len(steps) == max(steps) > BATCHES.steps  # more than an epoch
        for step, quorum_id in commits:
            assert sorted(taken[step - 1, quorum_id]) == sorted(BATCHES.of(step - 1)), (step, quorum_id)
        sizes = {len(commit.members) for rank in ranks for commit in rank.commits()}
        assert sizes >= {2, 3}
