"""Replica groups of two ranks: one rank fails, its whole group leaves, the others go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions

pytestmark = [pytest.mark.integration, *CHECKED]


@pytest.mark.parametrize("lost_rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_group_that_lost_a_rank_leaves_as_a_whole_and_the_others_commit(
    tmp_path: Path, lost_rank: int, number: signal.Signals
) -> None:
    with Cluster(tmp_path) as cluster:
        a, b = cluster.start_all("ab", size=2)
        lost, left_over = b.ranks[lost_rank], b.ranks[1 - lost_rank]
        left_over.may_end = True
        lost.signal(number)
        cluster.wait_for_quorum_of(a)
        assert {event["member"] for event in a.events("loss")} == {b.replica_id}
        cluster.wait_until(lambda: left_over.exit_code is not None, "the other rank of the group ends")
        assert left_over.exit_code == 1
        assert "GroupLostError" in left_over.last_error


def test_a_rank_that_waits_for_a_stopped_one_within_its_group_is_released(tmp_path: Path) -> None:
    """FSDP gathers parameters over torch's default group, whose own timeout is half an hour."""
    options = WorkerOptions(reduce="sharded", inner_backend="torchft-gloo")
    with Cluster(tmp_path, limit_s=100.0) as cluster:  # six processes import all of torch.distributed
        a, b = cluster.start_all("ab", size=2, options=options)
        left_over, lost = b.ranks
        left_over.may_end = True
        lost.signal(signal.SIGSTOP)
        cluster.wait_for_quorum_of(a)
        cluster.wait_until(lambda: left_over.exit_code is not None, "the other rank of the group ends")
        assert left_over.exit_code == 1
        assert f"rank 1 of replica group {b.replica_id} is gone" in left_over.output


def test_a_group_that_is_restarted_as_a_whole_heals_every_rank(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        a, b = cluster.start_all("ab", size=2)
        b.kill()
        again = cluster.start("b", size=2)
        cluster.wait_for_quorum_of(a, again)
        for rank in again.ranks:
            assert rank.events("heal")
