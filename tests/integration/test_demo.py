"""The demo as its user runs it: through both faults, and where it has to fail."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lighthouse.events import read_events
from tests.waiting import soon
from torchft_like.testing.processes import Processes, RunningProcess, wait_ended

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 300  # half a minute on a machine that does nothing else

# Stands in for train_ddp.py and changes one bit of one parameter at the end of replica 1. Earlier, a
# replica that comes late might heal from it, and hold the same wrong bit.
CORRUPTING_SCRIPT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import torch, train_ddp
from torchft_like.digest import state_digest

def digest_of_corrupted(state):
    state["model"]["head.weight"].view(torch.int32)[0, 0] ^= 1
    return state_digest(state)

if sys.argv[sys.argv.index("--replica-id") + 1] == "1":
    train_ddp.state_digest = digest_of_corrupted
train_ddp.main()
"""

# The demo with replicas that are forks, which spares each the loading of torch.
FORKING_DEMO = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import demo, demo_replicas
from torchft_like.testing.processes import RunningProcess

demo_replicas.RunningProcess = lambda command, *more: RunningProcess(command[1:], *more, is_fork=True)
sys.exit(demo.main())
"""
WAITING_SCRIPT = "import subprocess; subprocess.run(['sleep', '600'])"
CRASHING_SCRIPT = "raise RuntimeError('this replica cannot even start')"


def start(processes: Processes, folder: Path, *options: str) -> RunningProcess:
    return processes.fork(str(EXAMPLES / "demo.py"), "--output-dir", str(folder / "output"), *options)


def start_forking(processes: Processes, folder: Path, *options: str) -> RunningProcess:
    (script := folder / "forking.py").write_text(FORKING_DEMO)
    return processes.fork(str(script), "--output-dir", str(folder / "output"), *options)


def incarnations(output: Path, replica: int) -> set[Any]:
    return {event["replica_id"] for event in read_events(output / f"replica-{replica}.events.jsonl")}


def test_all_end_bit_identical_through_a_kill_and_a_stop(processes: Processes, tmp_path: Path) -> None:
    output = tmp_path / "output"
    demo = start_forking(processes, tmp_path, "--steps", "120", "--batch-size", "1")
    assert demo.wait(LIMIT_S) == 0, demo.output
    summary = json.loads((output / "result.json").read_text())
    assert len({result["digest"] for result in summary["results"].values()}) == 1
    assert min(result["step"] for result in summary["results"].values()) >= 120
    assert [fault["fault"] for fault in summary["faults"]] == ["SIGSTOP", "SIGKILL"]
    assert (output / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "bit-identical" in demo.output

    # Both faults were felt: the survivors lost the victims, and only the killed one began anew.
    events = list(read_events(output / "replica-0.events.jsonl"))
    lost = {str(event["member"]).partition(":")[0] for event in events if event["kind"] == "loss"}
    assert {"replica-1", "replica-2"} <= lost
    assert [len(incarnations(output, replica)) for replica in range(3)] == [1, 1, 2]


def test_one_flipped_bit_in_one_replica_fails_the_demo(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "corrupting.py"
    script.write_text(CORRUPTING_SCRIPT)
    options = ("--replicas", "2", "--steps", "5", "--batch-size", "1", "--no-faults")
    demo = start_forking(processes, tmp_path, *options, "--script", str(script))
    assert demo.wait(LIMIT_S) == 1, demo.output
    assert "the replicas hold 2 different states" in demo.output
    assert "bit-identical" not in demo.output


def test_a_crash_fails_the_demo_with_the_end_of_its_log(processes: Processes, tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING_SCRIPT)
    demo = start(processes, tmp_path, "--script", str(script))
    assert demo.wait(LIMIT_S) == 1
    assert "ended by itself with exit code 1" in demo.output
    assert "this replica cannot even start" in demo.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_replica_outlives_the_demo(processes: Processes, tmp_path: Path, number: signal.Signals) -> None:
    """Nor do the processes that a replica has started, where the demo can still do something about it."""
    is_killed = number == signal.SIGKILL
    script = tmp_path / "waiting.py"
    script.write_text("import time; time.sleep(600)" if is_killed else WAITING_SCRIPT)
    demo = start(processes, tmp_path, "--replicas", "2", "--script", str(script))
    assert soon(lambda: len(demo.descendants()) >= (2 if is_killed else 4)), demo.output
    replicas = demo.descendants()
    demo.signal(number)
    assert demo.wait(LIMIT_S) == (-number if is_killed else 130)
    assert wait_ended(replicas, LIMIT_S)
