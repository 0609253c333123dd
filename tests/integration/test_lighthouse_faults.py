"""The lighthouse dies or is away: no replica restarts, and ids go on where they were."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions

pytestmark = [pytest.mark.integration, *CHECKED]


@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
def test_steps_go_on_under_growing_ids_after_the_lighthouse_is_killed_and_restarted(
    tmp_path: Path, use_async_quorum: bool
) -> None:
    with Cluster(tmp_path) as cluster:
        options = WorkerOptions(use_async_quorum=use_async_quorum)
        a, b = cluster.start_all("ab", options=options)
        for _ in range(2):
            used = a.last_commit.quorum_id
            since = time.time()
            cluster.lighthouse.kill()
            for group in (a, b):
                cluster.wait_for_event(group, "disconnected", since)
            cluster.start_lighthouse()
            for group in (a, b):
                cluster.wait_for_event(group, "connected", since)
            cluster.wait_for_quorum_of(a, b)
            assert a.last_commit.quorum_id >= used

        c = cluster.start("c", options=options)
        cluster.wait_for_quorum_of(a, b, c)
        assert c.last_commit.quorum_id > used


def test_a_replica_that_dies_while_the_lighthouse_is_away_is_left_behind(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        a, b, c = cluster.start_all("abc")
        cluster.lighthouse.kill()
        cluster.wait_for_event(a, "disconnected")
        c.kill()
        cluster.start_lighthouse()
        cluster.wait_for_quorum_of(a, b)


def test_a_trainer_gives_up_with_a_clear_error_when_the_lighthouse_stays_away(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        (a,) = cluster.start_all("a", options=WorkerOptions(quorum_timeout_s=1.0))
        cluster.lighthouse.kill()
        cluster.wait_for_end(a)
        assert a.ranks[0].exit_code == 1
        error = a.ranks[0].last_error
        assert "QuorumTimeoutError" in error
        assert cluster.lighthouse_address.removeprefix("http://") in error
