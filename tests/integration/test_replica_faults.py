"""A replica group of one rank dies, stops or hangs, anywhere; the others go on, and it comes back."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.integration.cluster import CHECKED, Cluster, also_slow
from tests.integration.lighthouse_clients import SessionClient
from tests.integration.options import WorkerOptions
from torchft_like.testing.cluster import Group

pytestmark = [pytest.mark.integration, *CHECKED]

# All have to come within it, or two of the three form each quorum and the third heals, in turn, for ever.
JOIN_TIMEOUT_MS = 4000
ASYNC_AND_SYNC = pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])


def assert_lost(lost: Group, by: list[Group], since: float = 0.0) -> None:
    """All of these were told that this one is gone, and had a step fail for it."""
    for group in by:
        assert lost.name in [event["member"].partition(":")[0] for event in group.events("loss", since)]
        assert group.failures(since)


@ASYNC_AND_SYNC
def test_survivors_commit_after_one_is_killed_and_the_last_after_all(
    tmp_path: Path, use_async_quorum: bool
) -> None:
    with Cluster(tmp_path) as cluster:
        options = WorkerOptions(use_async_quorum=use_async_quorum)
        a, b, c = cluster.start_all("abc", options=options)
        c.kill()
        cluster.wait_for_quorum_of(a, b)
        assert_lost(c, by=[a, b])

        again = cluster.start("c", options=options)
        cluster.wait_for_quorum_of(a, b, again)
        assert again.events("heal")

        since = time.time()
        for group in (b, again):
            group.signal(signal.SIGKILL)
        cluster.wait_for_quorum_of(a)
        assert {event["member"] for event in a.events("loss", since)} == {b.replica_id, again.replica_id}


def test_survivors_commit_beside_sessions_in_which_nobody_asks_for_a_quorum(tmp_path: Path) -> None:
    """More than the survivors: slow starters, say, or trainers that hang before their first step."""
    with Cluster(tmp_path, join_timeout_ms=JOIN_TIMEOUT_MS) as cluster, ExitStack() as idle:
        for number in range(4):
            session = SessionClient(cluster.lighthouse_address, f"idle:{number}")
            idle.enter_context(session).registered()
        a, b, c = cluster.start_all("abc")
        c.kill()
        cluster.wait_for_quorum_of(a, b)
        assert_lost(c, by=[a, b])


def test_the_others_commit_beside_one_that_cannot_be_configured_until_it_can(tmp_path: Path) -> None:
    """It says so itself, so none of those whose steps it spoils is taken for the culprit."""
    with Cluster(tmp_path) as cluster:
        cluster.pull_trigger()
        a, b, c = cluster.start_all("abc")
        d = cluster.start("d", options=WorkerOptions(faults=(cluster.plan("raise", "configure"),)))
        [reason] = cluster.wait_for_event(d, "left_out")["reasons"]
        assert "has spoilt 2 quorums lately by itself, and is out for 1 s: OSError: [Errno 5]" in reason
        cluster.wait_for_quorum_of(a, b, c)
        (tmp_path / "trigger").unlink()
        cluster.wait_for_quorum_of(a, b, c, d)
    events = cluster.lighthouse_events.records("left_out")
    assert {name for event in events for name in event["members"]} == {d.replica_id}


def test_one_goes_on_alone_while_the_training_threads_of_the_two_others_hang(tmp_path: Path) -> None:
    """Their servers give the quorum up for them, so that no step of it can be committed any more."""
    with Cluster(tmp_path, join_timeout_ms=JOIN_TIMEOUT_MS) as cluster:
        hang = WorkerOptions(faults=(cluster.plan("hang", "step"),))
        a, b, c = groups = [cluster.start(name, options=hang if name in "bc" else None) for name in "abc"]
        cluster.wait_for_quorum_of(*groups)
        cluster.pull_trigger()
        cluster.wait_for_fault(b, c)
        cluster.pull_trigger()
        cluster.wait_until(lambda: b.faults() and c.faults(), "both hang")
        cluster.wait_for_quorum_of(a)
        assert a.last_commit.members == {a.replica_id}
        for group in (b, c):
            group.signal(signal.SIGUSR1)
        cluster.wait_for_quorum_of(*groups)


def test_a_newcomer_waits_for_the_only_one_that_has_the_steps_while_that_is_silent(tmp_path: Path) -> None:
    """It would begin the job anew, and the other one would be foreign to that."""
    with Cluster(tmp_path, is_patient=False) as cluster:
        a, b = cluster.start_all("ab")
        a.signal(signal.SIGSTOP)
        b.kill()
        told = cluster.lighthouse_events
        cluster.wait_until(lambda: len(told.records("loss")) > 1, "the lighthouse misses both")
        again = cluster.start("b")
        cluster.wait_until(lambda: again.ranks[0].records("attempt"), "it has joined")
        a.signal(signal.SIGCONT)
        cluster.wait_for_quorum_of(a, again)
        assert again.events("heal")


def test_training_waits_while_there_are_fewer_than_min_replicas(tmp_path: Path) -> None:
    with Cluster(tmp_path, min_replicas=2) as cluster:
        a, b = cluster.start_all("ab")
        b.kill()
        cluster.wait_for_event(a, "loss")
        again = cluster.start("b")
        cluster.wait_for_quorum_of(a, again)
        assert all(len(commit.members) == 2 for commit in cluster.history().commits)


@pytest.mark.parametrize("reduce", ["ddp", "manager"])
def test_survivors_commit_after_a_kill_in_a_collective(tmp_path: Path, reduce: str) -> None:
    with Cluster(tmp_path) as cluster:
        options = WorkerOptions(reduce=reduce, faults=(cluster.plan("kill", "backward"),))
        groups = cluster.start_all("abc", options=options)
        cluster.pull_trigger()
        dead, since = cluster.wait_for_fault(*groups)
        groups.remove(dead)
        cluster.wait_for_quorum_of(*groups)
        assert_lost(dead, by=groups, since=since)


@ASYNC_AND_SYNC
def test_a_replica_stopped_in_a_collective_heals_afterwards(tmp_path: Path, use_async_quorum: bool) -> None:
    with Cluster(tmp_path, is_patient=False) as cluster:
        options = WorkerOptions(use_async_quorum=use_async_quorum, faults=(cluster.plan("stop", "backward"),))
        a, b, c = groups = cluster.start_all("abc", options=options)
        cluster.pull_trigger()
        zombie, since = cluster.wait_for_fault(*groups)
        cluster.wait_until(lambda: zombie.ranks[0].is_stopped, "the zombie is stopped")
        groups.remove(zombie)
        cluster.wait_for_quorum_of(*groups)
        assert_lost(zombie, by=groups, since=since)

        zombie.signal(signal.SIGCONT)
        cluster.wait_for_quorum_of(a, b, c)
        assert zombie.events("heal", since)


@pytest.mark.parametrize("act", ["kill", also_slow("stop")])
def test_members_commit_after_a_joiner_fails_while_the_group_is_configured(tmp_path: Path, act: str) -> None:
    with Cluster(tmp_path, is_patient=act == "kill") as cluster:
        a, b = cluster.start_all("ab")
        c = cluster.start("c", options=WorkerOptions(faults=(f"{act}@configure",)))
        _, since = cluster.wait_for_fault(c)
        cluster.wait_for_quorum_of(a, b)
        assert_lost(c, by=[a, b], since=since)

        if act == "stop":
            c.signal(signal.SIGCONT)
            cluster.wait_for_quorum_of(a, b, c)


@pytest.mark.parametrize("act", [also_slow("kill"), "stop"])
def test_a_joiner_commits_after_a_member_fails_as_the_group_is_made(tmp_path: Path, act: str) -> None:
    with Cluster(tmp_path, is_patient=act == "kill") as cluster:
        a, b = groups = cluster.start_all(
            "ab", options=WorkerOptions(faults=(cluster.plan(act, "configure"),))
        )
        cluster.pull_trigger()
        c = cluster.start("c")
        failed, since = cluster.wait_for_fault(a, b)
        groups.remove(failed)
        cluster.wait_for_quorum_of(*groups, c)
        assert_lost(failed, by=[*groups, c], since=since)

        if act == "stop":
            failed.signal(signal.SIGCONT)
            cluster.wait_for_quorum_of(a, b, c)


@pytest.mark.parametrize(
    ("place", "timeout_s"),
    [("step", WorkerOptions.timeout_s), ("backward", 2.0)],
    ids=["the join timeout", "the operation timeout"],
)
def test_the_others_time_out_a_trainer_that_hangs(tmp_path: Path, place: str, timeout_s: float) -> None:
    with Cluster(tmp_path, join_timeout_ms=JOIN_TIMEOUT_MS) as cluster:
        options = WorkerOptions(timeout_s=timeout_s, faults=(cluster.plan("hang", place),))
        a, b, c = groups = cluster.start_all("abc", options=options)
        cluster.pull_trigger()
        hanging, since = cluster.wait_for_fault(*groups)
        groups.remove(hanging)
        cluster.wait_for_quorum_of(*groups)
        for group in groups:
            assert not group.events("loss", since), "it answers, so it is not lost"
            assert place == "step" or group.failures(since)

        hanging.signal(signal.SIGUSR1)
        cluster.wait_for_quorum_of(a, b, c)
        assert hanging.events("heal", since)


def test_a_spare_takes_over_for_a_participant_that_dies(tmp_path: Path) -> None:
    options = WorkerOptions(min_replica_size=2, world_size_mode="FIXED_WITH_SPARES")
    with Cluster(tmp_path, min_replicas=2) as cluster:
        groups = cluster.start_all("abc", options=options)
        spare = next(group for group in groups if not group.last_commit.participating)
        dies, stays = (group for group in groups if group is not spare)
        dies.kill()
        cluster.wait_for_quorum_of(stays, spare)
        assert spare.last_commit.participating
        assert {commit.participants for commit in cluster.history().commits} == {2}


@pytest.mark.parametrize("size", [also_slow(1), 2])
def test_a_spare_that_waits_takes_the_place_of_a_group_that_dies(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It disturbs nobody while it waits, and then it is in the first quorum without the dead."""
    with Cluster(tmp_path, lighthouse_flags=["--replicas=2"]) as cluster:
        dies, stays = cluster.start_all("ab", size=size)
        monkeypatch.setenv("TORCHFT_SPARE", "1")
        spare = cluster.start("c", size=size)
        since = float(cluster.wait_for_event(spare, "left_out")["time"])
        cluster.wait_for_quorum_of(dies, stays)
        assert not stays.events("quorum", since)
        dies.kill()
        cluster.wait_for_quorum_of(stays, spare)
        first = stays.events("quorum", since)[0]
        assert set(first["members"]) == {stays.replica_id, spare.replica_id}


# Replica groups of two ranks: one rank fails, its whole group leaves, the others go on.
DEAD_AFTER_S = "3"  # longer than a busy machine keeps a rank from answering


@pytest.mark.parametrize(
    ("lost_rank", "number"),
    [
        (0, signal.SIGKILL),
        (1, signal.SIGSTOP),
        also_slow(1, signal.SIGKILL),
        also_slow(0, signal.SIGSTOP),
    ],
)
def test_a_group_that_lost_a_rank_leaves(
    tmp_path: Path, lost_rank: int, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cluster(tmp_path, is_patient=number is signal.SIGKILL) as cluster:
        a = cluster.start("a", size=2)
        monkeypatch.setenv("TORCHFT_DEAD_AFTER_SEC", DEAD_AFTER_S)
        b = cluster.start("b", size=2)
        cluster.wait_for_quorum_of(a, b)
        lost, left_over = b.ranks[lost_rank], b.ranks[1 - lost_rank]
        left_over.may_end = True
        lost.signal(number)
        cluster.wait_for_quorum_of(a)
        assert {event["member"] for event in a.events("loss")} == {b.replica_id}
        cluster.wait_until(lambda: left_over.exit_code is not None, "the other rank of the group ends")
        assert left_over.exit_code == 1
        assert "GroupLostError" in left_over.last_error


@pytest.mark.suspicion
@pytest.mark.parametrize(("reduce", "stopped_rank"), [("ddp", 0), also_slow("ddp", 1), ("sharded", 1)])
def test_a_group_does_no_step_without_a_rank_that_is_stopped_and_goes_on_with_it(
    tmp_path: Path, stopped_rank: int, reduce: str
) -> None:
    options = WorkerOptions(reduce=reduce, inner_backend="torchft-gloo" if reduce == "sharded" else "")
    # Six processes import all of torch.distributed.
    with Cluster(tmp_path, limit_s=100.0, is_patient=False) as cluster:
        a, b = cluster.start_all("ab", size=2, options=options)
        b.ranks[stopped_rank].signal(signal.SIGSTOP)
        cluster.wait_for_quorum_of(a)
        steps = [len(rank.commits()) for rank in b.ranks]
        cluster.wait_for_quorum_of(a)
        assert [len(rank.commits()) for rank in b.ranks] == steps

        b.ranks[stopped_rank].signal(signal.SIGCONT)
        cluster.wait_for_quorum_of(a, b)
        assert {event["member"] for event in a.events("loss")} == {b.replica_id}
        for rank in b.ranks:
            assert rank.events("heal")
            assert rank.exit_code is None


def test_a_rank_that_waits_for_a_stopped_one_within_its_group_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP gathers parameters over torch's default group, whose own timeout is half an hour."""
    options = WorkerOptions(reduce="sharded", inner_backend="torchft-gloo")
    # Six processes import all of torch.distributed.
    with Cluster(tmp_path, limit_s=100.0, is_patient=False) as cluster:
        a = cluster.start("a", size=2, options=options)
        monkeypatch.setenv("TORCHFT_DEAD_AFTER_SEC", DEAD_AFTER_S)
        b = cluster.start("b", size=2, options=options)
        cluster.wait_for_quorum_of(a, b)
        left_over, lost = b.ranks
        left_over.may_end = True
        lost.signal(signal.SIGSTOP)
        cluster.wait_for_quorum_of(a)
        cluster.wait_until(lambda: left_over.exit_code is not None, "the other rank of the group ends")
        assert left_over.exit_code == 1
        assert f"rank 1 of replica group {b.replica_id} is gone" in left_over.output
