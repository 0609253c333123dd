"""Examples as their users run them: a group is killed and heals, and all end with the same bits."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lighthouse.events import read_events
from tests.conftest import ROOT
from tests.integration.cluster import REST, Cluster, also_slow
from torchft_like.testing.chaos.network import why_unavailable
from torchft_like.testing.cluster import Group
from torchft_like.testing.processes import Processes, wait_ended

pytestmark = pytest.mark.integration

EXAMPLES = ROOT / "examples"
LIMIT_S = 280.0  # twenty seconds on a machine that does nothing else


def run(processes: Processes, events: Path, example: str, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Run an example that starts everything itself, and kills a group; return its output, and its events."""
    command = [sys.executable, str(EXAMPLES / example), "--local", "--kill-at-step=3", *options]
    process = processes.start(*command, env={"TORCHFT_EVENT_FILE": str(events)})
    assert process.wait(LIMIT_S) == 0, process.output
    assert "all groups ended with the same bits" in process.output
    return process.output, [event for event in read_events(events) if event["source"] != "lighthouse"]


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    "link",
    [
        pytest.param("", marks=REST, id="on one host"),
        pytest.param("100,20", marks=pytest.mark.slow, id="over a link"),
    ],
)
def test_diloco_heals(tmp_path: Path, processes: Processes, link: str) -> None:
    if link and (reason := why_unavailable()):
        pytest.skip(reason)
    # Enough steps that a group that starts later than the other one finds it on its way.
    options = f"--link={link}", f"--steps={12 if link else 60}"
    _, events = run(processes, tmp_path / "events.jsonl", "train_diloco.py", *options)
    starts = [str(event["replica_id"]) for event in events if event["kind"] == "settings"]
    assert sorted(start.partition(":")[0] for start in starts) == ["group-0", "group-1", "group-1"]
    killed, again = (start for start in starts if start.startswith("group-1:"))
    # On a busy machine a late answer may cost somebody else a sync, too.
    assert killed in {event["member"] for event in events if event["kind"] == "loss"}
    assert again in {event["replica_id"] for event in events if event["kind"] == "heal"}


# Steps for six seconds: one group may start later than the other, and has to be killed before the end.
SHARDED = ("train_hsdp.py", "--steps=60", "--pause=0.1")


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_killed_group_of_shards_heals(tmp_path: Path, processes: Processes) -> None:
    _, events = run(processes, tmp_path / "events.jsonl", *SHARDED)
    assert_group_1_was_lost_and_healed(events)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_spare_takes_the_place_of_a_killed_rank_and_nobody_else_is_started_again(
    tmp_path: Path, processes: Processes
) -> None:
    picture = tmp_path / "lives.png"
    output, _ = run(processes, tmp_path / "events.jsonl", *SHARDED, "--spares=1", f"--picture={picture}")
    assert "1 spares were used; 3 processes ran from the start to the end" in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def reports(group: Group, what: str) -> list[dict[str, Any]]:
    """The reports of that kind of a group that has ended."""
    assert [rank.exit_code for rank in group.ranks] == [0, 0], group.ranks[0].output
    return [json.loads(line) for line in re.findall(rf'\{{"{what}": .*\}}', group.ranks[0].output)]


@pytest.mark.timeout(3 * LIMIT_S + 20)
def test_a_killed_group_of_shards_heals_and_a_new_job_goes_on(tmp_path: Path) -> None:
    """As by torchrun, which starts the ranks of a group that was killed again."""
    saving = f"--checkpoint-dir={tmp_path / 'saved'}"
    with Cluster(tmp_path, is_patient=True, limit_s=LIMIT_S) as cluster:

        def launch(index: int, *options: str) -> Group:
            command = [str(EXAMPLES / "train_hsdp.py"), f"--replica-id={index}", saving, *options]
            return cluster.launch(f"group-{index}", command, size=2)

        # The job cannot end before the third group comes, which is after the kill.
        every = ("--checkpoint-every=4", "--pause=0.05")
        options = ("--steps=20", *every, "--finish-together", "--num-replicas=3")
        survivor, killed = (launch(index, *options) for index in range(2))
        rank_0 = survivor.ranks[0]
        cluster.wait_until(lambda: re.search(r"step \d+ .* participants 2", rank_0.output), "both train")
        killed.kill()
        alone = r"participants 2\n(?s:.*) participants 1\n"
        cluster.wait_until(lambda: re.search(alone, rank_0.output), "one goes on")
        again, third = (launch(index, *options) for index in (1, 2))
        cluster.wait_for_end(survivor, again, third)
        assert_group_1_was_lost_and_healed([*survivor.events(), *killed.events(), *again.events()])
        finished = [report for group in (survivor, again, third) for report in reports(group, "finished")]
        assert [report["finished"] for report in finished] == [0, 1, 2]
        assert len({(report["step"], report["digest"]) for report in finished}) == 1

        last = finished[0]["step"]
        new = launch(0, "--num-replicas=1", f"--steps={last + 1}")
        cluster.wait_for_end(new)
        (resumed,) = reports(new, "resumed")
        assert (resumed["step"], resumed["digest"]) == (last, finished[0]["digest"])
        assert reports(new, "finished")[0]["step"] == last + 1


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    ("example", "size", "options"),
    [
        ("train_hsdp.py", 2, []),
        also_slow("train_ddp.py", 1, ["--metrics-file=/dev/full"]),
        also_slow("train_diloco.py", 1, []),
    ],
)
def test_an_example_that_is_asked_to_stop_does_not_pass_for_one_that_is_done(
    tmp_path: Path, example: str, size: int, options: list[str]
) -> None:
    """A launcher that takes it for done, as after a node was drained, starts the group never again. The disk
    of the metrics is full.
    """
    with Cluster(tmp_path, is_patient=True, limit_s=LIMIT_S) as cluster:
        endless = ("--num-replicas=1", "--steps=1000000", "--workers=0")
        group = cluster.launch("group-0", [str(EXAMPLES / example), *endless, *options], size=size)
        rank_0 = group.ranks[0]
        cluster.wait_until(lambda: re.search(r"step +\d+ ", rank_0.output), "it trains")
        group.ranks[-1].signal(signal.SIGTERM)
        cluster.wait_for_end(group)
        assert [rank.exit_code for rank in group.ranks] == [128 + signal.SIGTERM] * size


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    "start", ["LocalProcess('rank', {})", also_slow("LocalGroup(0, 1, '127.0.0.1:1', range(0), [])")]
)
def test_the_local_ranks_of_an_example_end_with_a_parent_that_is_killed(
    tmp_path: Path, processes: Processes, start: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "if '--finish-together' in sys.argv:\n"
        "    print('runs', flush=True)\n"
        "else:\n"
        "    from local_groups import LocalGroup\n"
        "    from local_ranks import LocalProcess\n"
        f"    kept = {start}\n"
        "time.sleep(1000)\n"
    )
    paths = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])
    parent = processes.start(sys.executable, str(script), env={"PYTHONPATH": paths})
    parent.wait_for_output(r"\| runs", LIMIT_S)
    ranks = parent.descendants()
    parent.signal(signal.SIGKILL)
    assert ranks
    assert wait_ended(ranks, LIMIT_S)


def assert_group_1_was_lost_and_healed(events: list[dict[str, Any]]) -> None:
    ids = list(dict.fromkeys(str(event["replica_id"]) for event in events))
    (survivor,) = (replica_id for replica_id in ids if replica_id.startswith("group-0:"))
    first, second = (replica_id for replica_id in ids if replica_id.startswith("group-1:"))
    of_survivor = [event for event in events if event["replica_id"] == survivor]
    assert {event["member"] for event in of_survivor if event["kind"] == "loss"} == {first}
    commits = [event for event in of_survivor if event["kind"] == "commit" and event["committed"]]
    assert sum(event["participants"] == 1 for event in commits) > 1
    heals = [event for event in events if event["kind"] == "heal" and event["replica_id"] == second]
    assert {event["group_rank"] for event in heals} == {0, 1}
