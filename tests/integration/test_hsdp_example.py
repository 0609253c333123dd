"""examples/train_hsdp.py as its user runs it: a group is killed and heals, what was saved is resumed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lighthouse.events import read_events
from torchft_like.testing.cluster import Cluster
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_hsdp.py"
LIMIT_S = 280.0  # twenty seconds on a machine that does nothing else


def run(processes: Processes, folder: Path, *options: str) -> str:
    """What it printed; it ends by itself and says that all groups hold the same bits."""
    command = [sys.executable, str(EXAMPLE), "--local", "--checkpoint-dir", str(folder / "saved"), *options]
    process = processes.start(*command, env={"TORCHFT_EVENT_FILE": str(folder / "events.jsonl")})
    assert process.wait(LIMIT_S) == 0, process.output
    assert "all groups ended with the same bits" in process.output
    return process.output


def reports(output: str, what: str) -> list[dict[str, Any]]:
    """The reports of that kind: one for each group."""
    return [json.loads(line) for line in re.findall(rf'\{{"{what}": .*\}}', output)]


@pytest.mark.timeout(2 * LIMIT_S + 20)
def test_a_killed_group_heals_and_a_new_job_goes_on(tmp_path: Path, processes: Processes) -> None:
    # Steps for six seconds: one group may start later than the other, and has to be killed before the end.
    killed = run(processes, tmp_path, "--kill-at-step=3", "--steps=60", "--checkpoint-every=4", "--pause=0.1")
    check_that_group_1_was_lost_and_healed(tmp_path / "events.jsonl")
    finished = reports(killed, "finished")
    assert [report["finished"] for report in sorted(finished, key=lambda report: report["finished"])] == [
        0,
        1,
    ]
    assert len({(report["step"], report["digest"]) for report in finished}) == 1

    # A new job, as by torchrun: forks, which spare it the loading of torch.
    options = [
        "--num-replicas=1",
        f"--steps={finished[0]['step'] + 1}",
        f"--checkpoint-dir={tmp_path / 'saved'}",
    ]
    with Cluster(tmp_path, limit_s=LIMIT_S) as cluster:
        group = cluster.launch("group-0", [str(EXAMPLE), *options], size=2)
        cluster.wait_for_end(group)
        went_on = group.ranks[0].output
        assert [rank.exit_code for rank in group.ranks] == [0, 0], went_on
    (resumed,) = reports(went_on, "resumed")
    assert (resumed["step"], resumed["digest"]) == (finished[0]["step"], finished[0]["digest"])
    assert reports(went_on, "finished")[0]["step"] == resumed["step"] + 1


def check_that_group_1_was_lost_and_healed(file: Path) -> None:
    events = [event for event in read_events(file) if event["source"] != "lighthouse"]
    ids = list(dict.fromkeys(str(event["replica_id"]) for event in events))
    (survivor,) = (replica_id for replica_id in ids if replica_id.startswith("group-0:"))
    first, second = (replica_id for replica_id in ids if replica_id.startswith("group-1:"))
    of_survivor = [event for event in events if event["replica_id"] == survivor]
    assert {event["member"] for event in of_survivor if event["kind"] == "loss"} == {first}
    commits = [event for event in of_survivor if event["kind"] == "commit" and event["committed"]]
    assert sum(event["participants"] == 1 for event in commits) > 1
    heals = [event for event in events if event["kind"] == "heal" and event["replica_id"] == second]
    assert {event["group_rank"] for event in heals} == {0, 1}
