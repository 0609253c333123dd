"""examples/train_diloco.py as its user runs it: a group is killed and heals, over a slow link, too."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lighthouse.events import read_events
from tests.integration.cluster import REST
from torchft_like.testing.chaos.network import why_unavailable
from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_diloco.py"
LIMIT_S = 280.0  # twenty seconds on a machine that does nothing else


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(
    "link",
    [
        pytest.param("", marks=REST, id="on one host"),
        pytest.param("100,20", marks=pytest.mark.slow, id="over a link"),
    ],
)
def test_a_killed_group_heals_and_both_end_with_the_same_bits(
    tmp_path: Path, processes: Processes, link: str
) -> None:
    if link and (reason := why_unavailable()):
        pytest.skip(reason)
    # Enough steps that a group that starts later than the other one finds it on its way.
    steps = 12 if link else 60
    options = ["--local", f"--link={link}", "--kill-at-step=3", f"--steps={steps}"]
    events = tmp_path / "events.jsonl"
    process = processes.start(sys.executable, str(EXAMPLE), *options, env={"TORCHFT_EVENT_FILE": str(events)})
    assert process.wait(LIMIT_S) == 0, process.output
    assert "all groups ended with the same bits" in process.output
    of_managers = [event for event in read_events(events) if event["source"] != "lighthouse"]
    starts = [str(event["replica_id"]) for event in of_managers if event["kind"] == "settings"]
    assert sorted(start.partition(":")[0] for start in starts) == ["group-0", "group-1", "group-1"]
    killed, again = (start for start in starts if start.startswith("group-1:"))
    # On a busy machine a late answer may cost somebody else a sync, too.
    assert killed in {event["member"] for event in of_managers if event["kind"] == "loss"}
    assert again in {event["replica_id"] for event in of_managers if event["kind"] == "heal"}
