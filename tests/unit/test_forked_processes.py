"""Forks of a process that has torch loaded."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import WAIT_LIMIT_S
from torchft_like.testing import forks
from torchft_like.testing.processes import ForkedProcess

MODULE = "tests.unit.forked_module"


def start(folder: Path, *arguments: str, descriptors: Sequence[int] = ()) -> ForkedProcess:
    return ForkedProcess([MODULE, *arguments], folder / "log", {"COLOR": "green"}, descriptors=descriptors)


def test_one_has_its_own_arguments_environment_output_session_and_exit_code(tmp_path: Path) -> None:
    process = start(tmp_path, "one", "two words")
    assert process.wait(WAIT_LIMIT_S) == 3
    assert json.loads(process.output) == {
        "arguments": ["one", "two words"],
        "environment": {**os.environ, "COLOR": "green", "PYTHONUNBUFFERED": "1"},
        "session": process.pid,
        "was loaded": True,
    }


def test_one_gets_the_files_that_it_was_started_with(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    process = start(tmp_path, "write", descriptors=[writing])
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.read() == b"written"
    assert process.wait(WAIT_LIMIT_S) == 0


def test_one_is_killed_and_its_end_is_known(tmp_path: Path) -> None:
    process = start(tmp_path, "sleep")
    assert process.exit_code is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.signal(signal.SIGKILL)
    assert process.wait(WAIT_LIMIT_S) == process.exit_code == -signal.SIGKILL
    process.signal(signal.SIGTERM)  # to nobody


def test_one_ends_with_the_process_that_forks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forks, "_servers", [])
    found = psutil.Process(start(tmp_path, "sleep").pid)
    psutil.Process(found.ppid()).kill()
    found.wait(WAIT_LIMIT_S)
    forks._servers[0].stop()
