"""Processes that have torch loaded from the start."""

from __future__ import annotations

import json
import signal
import subprocess

import psutil
import pytest

from tests import warm
from tests.conftest import WAIT_LIMIT_S
from tests.warm import WarmProcess

MODULE = "tests.unit.warm_module"


def test_one_has_its_own_arguments_environment_output_session_and_exit_code() -> None:
    process = WarmProcess(MODULE, ["one", "two words"], {"COLOR": "green"})
    assert process.stdout is not None
    with process.stdout as output:
        shown = json.loads(output.read())
    assert process.wait(WAIT_LIMIT_S) == 3
    assert shown == {
        "arguments": ["one", "two words"],
        "environment": {"COLOR": "green"},
        "session": process.pid,
        "was loaded": True,
    }


def test_one_is_killed_and_its_end_is_known() -> None:
    process = WarmProcess(MODULE, ["sleep"], {})
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(WAIT_LIMIT_S) == process.poll() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # to nobody
    assert process.stdout is not None
    process.stdout.close()


def test_one_ends_with_the_process_that_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm, "_servers", [])
    process = WarmProcess(MODULE, ["sleep"], {})
    assert process.stdout is not None
    with process.stdout:
        found = psutil.Process(process.pid)
        psutil.Process(found.ppid()).kill()
        found.wait(WAIT_LIMIT_S)
    warm._servers[0].stop()
