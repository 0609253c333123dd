"""The ranks of a replica group run their training function again, in the same processes, after an error."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from lighthouse.events import read_events
from tests.integration.cluster import PATIENT_MS, Cluster, also_slow
from tests.ports import free_ports
from torchft_like.testing.cluster import Group, LighthouseProcess
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

LIMIT_S = 120.0
JOB = "tests.integration.restart_job"
TORCHRUN = (
    "tests.integration.forking_torchrun",
    "--standalone",
    "--local-addr=127.0.0.1",
    "--nproc_per_node=2",
)


def said(output: str, what: str) -> list[dict[str, Any]]:
    """What ranks have said with this key."""
    lines = [json.loads(line) for line in re.findall(r"^\{.*\}$", output, re.MULTILINE)]
    return [line for line in lines if what in line]


def by_rank(output: str, what: str) -> dict[int, list[Any]]:
    return {rank: [line[what] for line in said(output, what) if line["rank"] == rank] for rank in (0, 1)}


def last_heal(events: list[Any]) -> tuple[Any, bool]:
    """Return a rank's last heal, and whether that was to the step in which its process stood before it."""
    heal = [event for event in events if event["kind"] == "heal"][-1]
    commits = [event for event in events if event["kind"] == "commit"]
    stood = [event["step"] for event in commits if event["replica_id"] != heal["replica_id"]][-1:]
    healed_to = next(
        event["step"] - event["committed"]
        for event in commits
        if event["replica_id"] == heal["replica_id"] and event["time"] > heal["time"]
    )
    return heal, stood == [healed_to]


def launch(cluster: Cluster, *options: str) -> Group:
    """Start a replica group of two ranks, which is alone in its job."""
    return cluster.launch(
        "a", [JOB, "--name=a", "--groups=1", "--steps=12", "--pause=0.01", *options], size=2
    )


@pytest.mark.timeout(3 * LIMIT_S)
def test_ranks_under_torchrun_start_again_together_and_end_with_the_bits_of_the_others(
    processes: Processes,
) -> None:
    with LighthouseProcess("--min_replicas=1") as lighthouse:
        job = [*TORCHRUN, "-m", JOB, "--steps=30", "--pause=0.05"]
        variables = {"TORCHFT_LIGHTHOUSE": lighthouse.url, "OMP_NUM_THREADS": "1"}
        a = processes.fork(*job, "--name=a", "--fault-at=5", env=variables)
        b = processes.fork(*job, "--name=b", env=variables)
        assert (a.wait(LIMIT_S), b.wait(LIMIT_S)) == (0, 0), a.output + b.output
    assert by_rank(a.output, "attempt") == {0: [0, 1], 1: [0, 1]}
    assert by_rank(b.output, "attempt") == {0: [0], 1: [0]}
    assert by_rank(a.output, "error")[1] == [None, "InjectedError"]
    assert len({line["pid"] for line in said(a.output, "rank")}) == 2, "no process is new"
    healed_at = by_rank(a.output, "committed")[0][1]
    assert healed_at >= 6, "it has healed from the others, which went on meanwhile"
    finished = by_rank(a.output, "finished")
    assert finished == by_rank(b.output, "finished")
    assert by_rank(a.output, "digest") == by_rank(b.output, "digest")


def test_ranks_start_again_without_another_group_and_without_torchrun(tmp_path: Path) -> None:
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        group = launch(cluster, "--fault-at=3", "--fault-on=0")
        cluster.wait_for_end(group)
        assert [rank.exit_code for rank in group.ranks] == [0, 0], group.ranks[0].output
        for number, rank in enumerate(group.ranks):
            assert by_rank(rank.output, "attempt")[number] == [0, 1]
            assert by_rank(rank.output, "finished")[number] == [12]


def test_an_error_that_nobody_knows_ends_all_ranks_and_each_says_why(tmp_path: Path) -> None:
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        group = launch(cluster, "--fault-at=3", "--fault=unknown")
        cluster.wait_for_end(group)
        for number, rank in enumerate(group.ranks):
            assert rank.exit_code == 1
            assert by_rank(rank.output, "attempt")[number] == [0]
            assert re.search("not run again in this process: .*rank 1: ZeroDivisionError: a bug", rank.output)
        assert "in fail_oddly" in group.ranks[1].output, "it is this rank's own error that it ends with"


@pytest.mark.parametrize(
    ("size", "tp", "killed"), [(3, 1, [0, 1]), also_slow(3, 1, [1]), also_slow(4, 2, [0])], ids=str
)
def test_a_spare_takes_the_place_of_a_rank_that_was_killed(
    tmp_path: Path, size: int, tp: int, killed: list[int]
) -> None:
    """The other ranks go on in their processes, and all end with the bits of the other group."""
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        go = tmp_path / "go"
        waits = "--fault=waits", f"--go={go}", "--fault-on", *map(str, range(size))
        options = "--steps=20", "--pause=0.05", f"--tp={tp}", "--fault-at=1", *waits
        spares = [
            cluster.launch(f"spare{number}", [JOB, *options], variables={"TORCHFT_SPARE": "rank"})
            for number in range(2)
        ]
        cluster.lighthouse.wait_for_output("(?s)waits for a place.*waits for a place", LIMIT_S)
        a, b = (
            cluster.launch(name, [JOB, *options], size=size, variables={"REPLICA_GROUP_ID": name})
            for name in "ab"
        )
        for rank in [*a.ranks, *b.ranks, *(spare.ranks[0] for spare in spares)]:
            rank.may_end = True
        for rank in [*a.ranks, *b.ranks]:
            rank.wait_for_output('"waits"', LIMIT_S)
        for number in killed:
            a.ranks[number].signal(signal.SIGKILL)
        go.touch()
        lives = [rank for number, rank in enumerate(a.ranks) if number not in killed]
        cluster.wait_for_end(b)
        taken = [spare.ranks[0] for spare in spares if said(spare.ranks[0].output, "attempt")]
        cluster.wait_until(lambda: all(rank.exit_code == 0 for rank in [*lives, *taken]), "all ranks end")
        assert sorted(said(rank.output, "attempt")[0]["rank"] for rank in taken) == killed
        for rank in lives:
            assert [line["attempt"] for line in said(rank.output, "attempt")] == [0, 1]
        finished = {
            line["rank"]: line["digest"] for rank in [*lives, *taken] for line in said(rank.output, "digest")
        }
        assert finished == {
            line["rank"]: line["digest"] for rank in b.ranks for line in said(rank.output, "digest")
        }


@pytest.mark.parametrize("dies_in_try", [0, also_slow(1)], ids=str)
def test_a_rank_that_dies_before_it_has_a_manager_holds_nobody_up(tmp_path: Path, dies_in_try: int) -> None:
    """The others wait for it in torch's `init_process_group`, without a limit to speak of, or for the
    ManagerServer of a rank 0 that has already ended its try.
    """
    with Cluster(tmp_path, limit_s=LIMIT_S, is_patient=True) as cluster:
        options = "--name=a", "--groups=1", "--steps=6", "--fault-at=2", f"--dies-in-try={dies_in_try}"
        limit = {"TORCHFT_CONNECT_TIMEOUT_SEC": "15"}
        spare = cluster.launch("spare", [JOB, *options], variables={"TORCHFT_SPARE": "rank", **limit}).ranks[
            0
        ]
        cluster.lighthouse.wait_for_output("waits for a place", LIMIT_S)
        group = cluster.launch("a", [JOB, *options], size=3, variables=limit)
        lives = [rank for rank in group.ranks if rank.number != 1]
        for rank in (*group.ranks, spare):
            rank.may_end = True
        cluster.wait_until(lambda: all(rank.exit_code == 0 for rank in (*lives, spare)), "all ranks end")
        assert next(line["attempt"] for line in said(spare.output, "attempt")) == dies_in_try + 1
        assert {said(rank.output, "finished")[0]["finished"] for rank in (*lives, spare)} == {6}


@pytest.mark.parametrize("min_replicas", [2, also_slow(1)], ids=str)
def test_a_rank_takes_the_state_that_it_has_kept_where_no_other_group_could_go_on(
    tmp_path: Path, min_replicas: int
) -> None:
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        job = JOB, "--steps=30", "--pause=0.05", f"--min-replicas={min_replicas}"
        spare = cluster.launch("spare", job, variables={"TORCHFT_SPARE": "rank"}).ranks[0]
        cluster.lighthouse.wait_for_output("waits for a place", LIMIT_S)
        # It dies in the middle of a step, which the other group then cannot commit either.
        dies = "--fault=deadly", "--fault-at=5"
        a = cluster.launch("a", [*job, *dies], size=3, variables={"REPLICA_GROUP_ID": "a"})
        b = cluster.launch("b", job, size=3, variables={"REPLICA_GROUP_ID": "b"})
        lives = [rank for rank in a.ranks if rank.number != 1]
        for rank in (*a.ranks, *b.ranks, spare):
            rank.may_end = True
        ended = [*lives, *b.ranks, spare]
        cluster.wait_until(lambda: all(rank.exit_code == 0 for rank in ended), "all ranks end")
        for rank in (*lives, spare):
            heal, has_kept = last_heal(list(read_events(rank.event_file.path)))
            assert has_kept or rank is spare or min_replicas == 1
            assert heal["kept"] >= heal["bytes"] if has_kept else heal["kept"] == 0, heal
            assert bool(heal["addresses"]) is not has_kept, "no byte of it came from the other group"
        digests = [
            {line["rank"]: line["digest"] for rank in group for line in said(rank.output, "digest")}
            for group in ([*lives, spare], b.ranks)
        ]
        assert digests[0] == digests[1]
        assert len(digests[0]) == 3


@pytest.mark.parametrize("stopped", [0, also_slow(1)], ids=str)
def test_a_spare_takes_the_place_of_a_rank_that_answers_nothing(tmp_path: Path, stopped: int) -> None:
    """When it goes on again it finds that the others have gone on without it, and ends."""
    patient = [f"--keepalive_timeout_ms={PATIENT_MS}"]  # or the lighthouse forgets the spare
    with Cluster(tmp_path, limit_s=LIMIT_S, lighthouse_flags=patient, is_patient=False) as cluster:
        go, has_come_back = tmp_path / "go", tmp_path / "has_come_back"
        waits = "--fault=waits", f"--go={go}", "--fault-at=1", "--fault-on", "0", "1", "2"
        # It asks the others' processes, and these would have ended on a fast machine.
        stay = f"--stays-until={has_come_back}"
        job = [JOB, "--steps=20", "--pause=0.05", "--groups=1", "--inner=torchft-gloo", *waits, stay]
        variables = {"TORCHFT_DEAD_AFTER_SEC": "3"}
        own = {"TORCHFT_SPARE": "rank", "TORCHFT_KEEPALIVE_TIMEOUT_MS": str(PATIENT_MS)}
        spare = cluster.launch("spare", job, variables={**variables, **own}).ranks[0]
        cluster.lighthouse.wait_for_output("waits for a place", LIMIT_S)
        group = cluster.launch("a", job, size=3, variables={**variables, "REPLICA_GROUP_ID": "a"})
        for rank in (*group.ranks, spare):
            rank.may_end = True
        for rank in group.ranks:
            rank.wait_for_output('"waits"', LIMIT_S)
        passed_over = group.ranks[stopped]
        passed_over.signal(signal.SIGSTOP)
        go.touch()
        spare.wait_for_output(f'"rank": {stopped}.*"attempt": 1', LIMIT_S)
        passed_over.signal(signal.SIGCONT)
        cluster.wait_until(lambda: passed_over.exit_code is not None, "the one that was passed over ends")
        has_come_back.touch()
        cluster.wait_until(lambda: all(r.exit_code is not None for r in (*group.ranks, spare)), "all end")
        assert passed_over.exit_code == 1
        assert re.search("gone on without rank|is another process by now", passed_over.output)
        others = [spare, *(rank for rank in group.ranks if rank is not passed_over)]
        assert [said(rank.output, "finished")[0]["finished"] for rank in others] == [20, 20, 20]


@pytest.mark.slow
@pytest.mark.rest
@pytest.mark.timeout(3 * LIMIT_S)
def test_torchrun_leaves_the_neighbours_alone_where_each_rank_has_an_agent_of_its_own(
    processes: Processes,
) -> None:
    (port,) = free_ports()
    with LighthouseProcess("--min_replicas=1") as lighthouse:
        job = JOB, "--name=a", "--groups=1", "--steps=30", "--pause=0.05"
        fault = "--fault-at=5", "--fault-on=0", "--fault=deadly"
        variables = {"TORCHFT_LIGHTHOUSE": lighthouse.url, "OMP_NUM_THREADS": "1"}
        spare = processes.fork(*job, env={**variables, "TORCHFT_SPARE": "rank"})
        lighthouse.wait_for_output("waits for a place", LIMIT_S)
        agent = "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=0"
        at = "--master-addr=127.0.0.1", f"--master-port={port}"
        dies, lives = (
            processes.fork(*agent, f"--node-rank={number}", *at, "-m", *job, *fault, env=variables)
            for number in range(2)
        )
        assert dies.wait(LIMIT_S) == 1
        assert (lives.wait(LIMIT_S), spare.wait(LIMIT_S)) == (0, 0), lives.output + spare.output
    assert by_rank(lives.output, "attempt")[1] == [0, 1]
    assert by_rank(spare.output, "finished")[0] == by_rank(lives.output, "finished")[1]


def test_a_rank_whose_neighbour_was_killed_ends_at_once(tmp_path: Path) -> None:
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        group = launch(cluster, "--fault-at=3", "--fault=deadly")
        cluster.wait_for_end(group)
        survivor = group.ranks[0]
        assert survivor.exit_code == 1
        assert by_rank(survivor.output, "attempt")[0] == [0]
        assert "not run again in this process: rank 1: its process has ended" in survivor.output
