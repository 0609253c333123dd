"""The demo as its user runs it: through both faults, and where it has to fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lighthouse.events import read_events

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

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

CRASHING_SCRIPT = "raise RuntimeError('this replica cannot even start')"


class DemoProcess:
    """The demo as a child process that leaves its replicas, if it leaves any, to be found."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.output = directory / "output"
        command = [sys.executable, str(EXAMPLES / "demo.py"), "--output-dir", str(self.output), *options]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def wait(self) -> tuple[int, str]:
        """Exit code and everything that it printed."""
        said, _ = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said

    def wait_until_training(self) -> list[psutil.Process]:
        """The replicas, and the loader workers that they have by now, once a quorum is there."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "quorum" in line:
                return psutil.Process(self.process.pid).children(recursive=True)
        raise AssertionError("the demo ended before the first quorum")


@contextlib.contextmanager
def demo(directory: Path, *options: str) -> Iterator[DemoProcess]:
    running = DemoProcess(directory, *options)
    try:
        yield running
    finally:
        running.process.kill()  # and with it its replicas, by the kernel
        running.process.communicate()


def incarnations(output: Path, replica: int) -> set[Any]:
    return {event["replica_id"] for event in read_events(output / f"replica-{replica}.events.jsonl")}


def test_all_replicas_end_bit_identical_through_a_kill_and_a_stop(tmp_path: Path) -> None:
    with demo(tmp_path, "--steps", "120", "--batch-size", "1") as running:
        code, said = running.wait()
    assert code == 0, said
    summary = json.loads((running.output / "result.json").read_text())
    assert len({result["digest"] for result in summary["results"].values()}) == 1
    assert min(result["step"] for result in summary["results"].values()) >= 120
    assert [fault["fault"] for fault in summary["faults"]] == ["SIGSTOP", "SIGKILL"]
    assert (running.output / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "bit-identical" in said

    # Both faults were felt: the survivors lost the victims, and only the killed one began anew.
    events = list(read_events(running.output / "replica-0.events.jsonl"))
    lost = {str(event["member"]).partition(":")[0] for event in events if event["kind"] == "loss"}
    assert {"replica-1", "replica-2"} <= lost
    assert [len(incarnations(running.output, replica)) for replica in range(3)] == [1, 1, 2]


def test_one_flipped_bit_in_one_replica_fails_the_demo(tmp_path: Path) -> None:
    script = tmp_path / "corrupting.py"
    script.write_text(CORRUPTING_SCRIPT)
    options = ("--replicas", "2", "--steps", "10", "--no-faults", "--script", str(script))
    with demo(tmp_path, *options) as running:
        code, said = running.wait()
    assert code == 1, said
    assert "the replicas hold 2 different states" in said
    assert "bit-identical" not in said


def test_a_replica_that_crashes_fails_the_demo_with_the_end_of_its_log(tmp_path: Path) -> None:
    script = tmp_path / "crashing.py"
    script.write_text(CRASHING_SCRIPT)
    with demo(tmp_path, "--script", str(script)) as running:
        code, said = running.wait()
    assert code == 1
    assert "ended by itself with exit code 1" in said
    assert "this replica cannot even start" in said


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)]
)
def test_no_replica_outlives_the_demo(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with demo(tmp_path, "--replicas", "2", "--no-faults") as running:
        replicas = running.wait_until_training()
        assert len(psutil.Process(running.process.pid).children()) == 2
        os.kill(running.process.pid, number)
        assert running.wait()[0] == code
        assert psutil.wait_procs(replicas, timeout=LIMIT_S)[1] == []
