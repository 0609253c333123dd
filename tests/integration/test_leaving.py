"""Leaving in good order disturbs nobody; an interrupt ends what it hits and leaves no process behind."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions
from torchft_like.testing.cluster import Group
from torchft_like.testing.forks import WHOLE_END_ENV
from torchft_like.testing.processes import RunningProcess

pytestmark = [pytest.mark.integration, *CHECKED]


@pytest.fixture(autouse=True)
def _ends_wholly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the replicas take their interpreters apart."""
    monkeypatch.setenv(WHOLE_END_ENV, "1")


LEAVES_MAX = 6  # of which one has to be in time, on a machine however busy


def was_in_time(leavers: list[Group], others: list[Group], since: float) -> bool:
    """Return whether nobody has lost a step to a leave since then.

    The others lose the step before which a group has left if one of them had entered it by then, and no
    other step (docs/architecture.md: "Nobody loses a step").
    """
    left_before = {event["step"] for group in leavers for event in group.events("shutdown")}
    failures = [group.failures(since) for group in (*leavers, *others)]
    assert {failure["step"] for each in failures for failure in each} <= left_before
    return not any(failures)


def assert_interrupt_ends(cluster: Cluster, process: RunningProcess) -> None:
    """SIGINT, as Ctrl-C sends it, ends the process and everything that it has started."""
    process.signal(signal.SIGINT)
    cluster.wait_until(lambda: process.is_gone, "the interrupted process ends")


@pytest.mark.parametrize("size", [1, 2], ids=["groups of 1", "groups of 2"])
def test_replicas_that_leave_on_sigterm_cost_the_others_no_step(tmp_path: Path, size: int) -> None:
    with Cluster(tmp_path) as cluster:
        staying = cluster.start_all("abc" if size == 2 else "abcd", size=size)
        while len(staying) > 2:
            leaver = staying.pop()
            for _ in range(LEAVES_MAX):
                since = time.time()
                leaver.signal(signal.SIGTERM)
                cluster.wait_for_end(leaver)
                cluster.wait_for_quorum_of(*staying)
                assert [rank.exit_code for rank in leaver.ranks] == [0] * size
                if was_in_time([leaver], staying, since):
                    break
                leaver = cluster.start(leaver.name, size=size)
                cluster.wait_for_quorum_of(*staying, leaver)
            else:
                pytest.fail("each leave has cost a step")


@pytest.mark.parametrize("asked", [0, 1])
def test_a_replica_group_leaves_as_one_when_one_of_its_ranks_is_asked_to(tmp_path: Path, asked: int) -> None:
    with Cluster(tmp_path) as cluster:
        a, b, c = cluster.start_all("abc", size=2)
        since = time.time()
        c.ranks[asked].signal(signal.SIGTERM)
        cluster.wait_for_end(c)
        cluster.wait_for_quorum_of(a, b)
        assert [rank.exit_code for rank in c.ranks] == [0, 0]
        assert c.ranks[0].commits()[-1].step == c.ranks[1].commits()[-1].step
        was_in_time([c], [a, b], since)


@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
def test_replicas_that_come_and_go_cost_the_others_no_step(tmp_path: Path, use_async_quorum: bool) -> None:
    with Cluster(tmp_path) as cluster:
        options = WorkerOptions(use_async_quorum=use_async_quorum)
        a, b = cluster.start_all("ab", options=options)
        for _ in range(LEAVES_MAX):
            since = time.time()
            guests = [cluster.start(name, options=replace(options, steps=10)) for name in "cd"]
            cluster.wait_for_end(*guests)
            cluster.wait_for_quorum_of(a, b)
            for guest in guests:
                assert guest.ranks[0].exit_code == 0
                assert len(guest.ranks[0].commits()) == 10
            if was_in_time(guests, [a, b], since):
                return
        pytest.fail("each leave has cost a step")


def test_an_interrupt_ends_a_replica_that_trains_with_its_lighthouse_and_without(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        a, b = cluster.start_all("ab")
        assert_interrupt_ends(cluster, b.ranks[0])
        cluster.wait_for_quorum_of(a)
        cluster.lighthouse.kill()
        cluster.wait_for_event(a, "disconnected")
        assert_interrupt_ends(cluster, a.ranks[0])


def test_an_interrupt_ends_every_rank_of_a_group(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        (a,) = cluster.start_all("a", size=2)
        a.signal(signal.SIGINT)
        for rank in a.ranks:
            assert_interrupt_ends(cluster, rank)


def test_an_interrupt_ends_a_replica_that_waits_for_a_peer_in_a_collective(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        options = WorkerOptions(faults=(cluster.plan("hang", "backward"),))
        a, b = cluster.start_all("ab", options=options)
        cluster.pull_trigger()
        hanging, _ = cluster.wait_for_fault(a, b)
        waiting = b if hanging is a else a
        assert_interrupt_ends(cluster, waiting.ranks[0])


def test_an_interrupt_ends_a_replica_that_has_just_registered_or_waits_for_a_quorum(tmp_path: Path) -> None:
    """It strikes while the model is wrapped; torch's reducer swallows a KeyboardInterrupt now and then."""
    with Cluster(tmp_path, min_replicas=2) as cluster:
        a = cluster.start("a")
        cluster.wait_until(lambda: cluster.lighthouse_events.records("register"), "a is registered")
        assert_interrupt_ends(cluster, a.ranks[0])
        a = cluster.start("a")
        cluster.wait_until(lambda: a.ranks[0].records("attempt"), "a begins a step")
        assert_interrupt_ends(cluster, a.ranks[0])
        assert not a.ranks[0].commits()
