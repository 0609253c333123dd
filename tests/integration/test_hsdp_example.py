"""examples/train_hsdp.py as its user runs it: a group is killed and heals, what was saved is resumed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lighthouse.events import read_events
from tests.integration.cluster import Cluster
from torchft_like.testing.cluster import Group
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_hsdp.py"
LIMIT_S = 280.0  # twenty seconds on a machine that does nothing else


def reports(group: Group, what: str) -> list[dict[str, Any]]:
    """The reports of that kind of a group that has ended."""
    assert [rank.exit_code for rank in group.ranks] == [0, 0], group.ranks[0].output
    return [json.loads(line) for line in re.findall(rf'\{{"{what}": .*\}}', group.ranks[0].output)]


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_it_starts_everything_itself_and_a_killed_group_heals(tmp_path: Path, processes: Processes) -> None:
    # Steps for six seconds: one group may start later than the other, and has to be killed before the end.
    options = ("--local", "--kill-at-step=3", "--steps=60", "--pause=0.1")
    events = tmp_path / "events.jsonl"
    process = processes.start(sys.executable, str(EXAMPLE), *options, env={"TORCHFT_EVENT_FILE": str(events)})
    assert process.wait(LIMIT_S) == 0, process.output
    assert "all groups ended with the same bits" in process.output
    check_that_group_1_was_lost_and_healed(list(read_events(events)))


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
def test_a_spare_takes_the_place_of_a_killed_rank_and_nobody_else_is_started_again(
    tmp_path: Path, processes: Processes
) -> None:
    options = ("--local", "--kill-at-step=3", "--steps=60", "--pause=0.1", "--spares=1")
    picture = f"--picture={tmp_path / 'lives.png'}"
    process = processes.start(sys.executable, str(EXAMPLE), *options, picture)
    assert process.wait(LIMIT_S) == 0, process.output
    assert "all groups ended with the same bits" in process.output
    assert "1 spares were used; 3 processes ran from the start to the end" in process.output
    assert (tmp_path / "lives.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(3 * LIMIT_S + 20)
def test_a_killed_group_heals_and_a_new_job_goes_on(tmp_path: Path) -> None:
    """As by torchrun, which starts the ranks of a group that was killed again."""
    saving = f"--checkpoint-dir={tmp_path / 'saved'}"
    with Cluster(tmp_path, is_patient=True, limit_s=LIMIT_S) as cluster:

        def launch(index: int, *options: str) -> Group:
            command = [str(EXAMPLE), f"--replica-id={index}", saving, *options]
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
        check_that_group_1_was_lost_and_healed([*survivor.events(), *killed.events(), *again.events()])
        finished = [report for group in (survivor, again, third) for report in reports(group, "finished")]
        assert [report["finished"] for report in finished] == [0, 1, 2]
        assert len({(report["step"], report["digest"]) for report in finished}) == 1

        last = finished[0]["step"]
        new = launch(0, "--num-replicas=1", f"--steps={last + 1}")
        cluster.wait_for_end(new)
        (resumed,) = reports(new, "resumed")
        assert (resumed["step"], resumed["digest"]) == (last, finished[0]["digest"])
        assert reports(new, "finished")[0]["step"] == last + 1


def check_that_group_1_was_lost_and_healed(events: list[dict[str, Any]]) -> None:
    events = [event for event in events if event["source"] != "lighthouse"]
    ids = list(dict.fromkeys(str(event["replica_id"]) for event in events))
    (survivor,) = (replica_id for replica_id in ids if replica_id.startswith("group-0:"))
    first, second = (replica_id for replica_id in ids if replica_id.startswith("group-1:"))
    of_survivor = [event for event in events if event["replica_id"] == survivor]
    assert {event["member"] for event in of_survivor if event["kind"] == "loss"} == {first}
    commits = [event for event in of_survivor if event["kind"] == "commit" and event["committed"]]
    assert sum(event["participants"] == 1 for event in commits) > 1
    heals = [event for event in events if event["kind"] == "heal" and event["replica_id"] == second]
    assert {event["group_rank"] for event in heals} == {0, 1}
