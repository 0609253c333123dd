"""A quorum stands until something happens: quiet steps need no lighthouse, and changes cost nobody a step.

A lighthouse that dies or is away restarts no replica, and ids go on where they were.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, PATIENT_MS, Cluster, also_slow
from tests.integration.options import WorkerOptions
from torchft_like.testing.cluster import Group

pytestmark = [pytest.mark.integration, *CHECKED]

MORE_STEPS = 10
# Of the lighthouse with its members, as a busy machine may make them late; they notice that it is stopped.
PATIENT = (f"--keepalive_timeout_ms={PATIENT_MS}",)
ABSENCE_S = 2.0  # thirty steps, where nothing holds them up


def wait_for_steps(cluster: Cluster, groups: list[Group]) -> None:
    """Wait until each group has committed some more steps."""
    steps = [group.step for group in groups]
    cluster.wait_until(
        lambda: all(group.step >= step + MORE_STEPS for group, step in zip(groups, steps, strict=True)),
        f"{MORE_STEPS} more steps",
    )


def assert_waiting(groups: list[Group]) -> None:
    """Nobody commits more than the step that it was in, while the lighthouse is away."""
    steps = [group.step for group in groups]
    time.sleep(ABSENCE_S)  # the fault itself has this length
    assert all(group.step <= step + 1 for group, step in zip(groups, steps, strict=True))


@pytest.mark.parametrize("size", [also_slow(1), 2], ids=["groups of 1", "groups of 2"])
def test_a_replica_joins_and_the_lighthouse_dies_and_stops_at_the_cost_of_no_step(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_KEEPALIVE_TIMEOUT_MS", "5000")
    with Cluster(tmp_path, lighthouse_flags=PATIENT, is_patient=False) as cluster:
        groups = cluster.start_all("ab", size=size)
        wait_for_steps(cluster, groups)
        since = time.time()
        groups.append(cluster.start("c", size=size))
        cluster.wait_for_quorum_of(*groups)
        wait_for_steps(cluster, groups)
        assert [group.failures(since) for group in groups[:2]] == [[], []]

        since, ids = time.time(), [group.last_commit.quorum_id for group in groups]
        for leave, come_back in (
            (cluster.lighthouse.kill, cluster.start_lighthouse),
            (
                lambda: cluster.lighthouse.signal(signal.SIGSTOP),
                lambda: cluster.lighthouse.signal(signal.SIGCONT),
            ),
        ):
            gone = time.time()
            leave()
            for group in groups:
                cluster.wait_for_event(group, "disconnected", gone)
            wait_for_steps(cluster, groups)
            come_back()
            for group in groups:
                cluster.wait_for_event(group, "connected", gone)
            wait_for_steps(cluster, groups)
        assert [group.failures(since) for group in groups] == [[], [], []]
        assert [group.last_commit.quorum_id for group in groups] == ids


def test_training_may_wait_for_a_dead_lighthouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE_ABSENCE", "wait")
    with Cluster(tmp_path) as cluster:
        groups = cluster.start_all("ab")
        wait_for_steps(cluster, groups)
        cluster.lighthouse.kill()
        since = time.time()
        for group in groups:
            cluster.wait_for_event(group, "disconnected")
        assert_waiting(groups)
        cluster.start_lighthouse()
        wait_for_steps(cluster, groups)
        assert [group.failures(since) for group in groups] == [[], []]


def test_training_waits_for_a_lighthouse_that_is_silent_for_longer_than_its_lease(tmp_path: Path) -> None:
    flags = *PATIENT, "--standing_lease_ms=1500"
    with Cluster(tmp_path, lighthouse_flags=flags, is_patient=False) as cluster:
        groups = cluster.start_all("ab")
        wait_for_steps(cluster, groups)
        since = time.time()
        cluster.lighthouse.signal(signal.SIGSTOP)
        cluster.wait_until(lambda: all(group.failures(since) for group in groups), "the end of the lease")
        # One says why; the other may have felt that one's abort first.
        cluster.wait_until(
            lambda: "--standing_lease_ms" in str([group.events("abort", since) for group in groups]), "why"
        )
        assert_waiting(groups)
        cluster.lighthouse.signal(signal.SIGCONT)
        wait_for_steps(cluster, groups)


@pytest.mark.parametrize("use_async_quorum", [True, also_slow(False)], ids=["async", "sync"])
def test_ids_grow_over_the_death_of_a_lighthouse(tmp_path: Path, use_async_quorum: bool) -> None:
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

        since = time.time()
        c = cluster.start("c", options=options)
        cluster.wait_for_quorum_of(a, b, c)
        assert c.last_commit.quorum_id > used
        assert [group.failures(since) for group in (a, b)] == [[], []]


def test_a_replica_that_dies_while_the_lighthouse_is_away_is_left_behind(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        a, b, c = cluster.start_all("abc")
        cluster.lighthouse.kill()
        cluster.wait_for_event(a, "disconnected")
        c.kill()
        cluster.start_lighthouse()
        cluster.wait_for_quorum_of(a, b)
        assert a.last_commit.members == {a.replica_id, b.replica_id}


def test_a_trainer_gives_up_with_a_clear_error_when_the_lighthouse_stays_away(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        # Each of its steps has a quorum of its own, which a busy machine has to give it within this time.
        (a,) = cluster.start_all("a", options=WorkerOptions(quorum_timeout_s=5.0))
        cluster.lighthouse.kill()
        cluster.wait_for_end(a)
        assert a.ranks[0].exit_code == 1
        error = a.ranks[0].last_error
        assert "QuorumTimeoutError" in error
        assert cluster.lighthouse_address.removeprefix("http://") in error
