"""TORCHFT_WATCHDOG_TIMEOUT_SEC: a process in which no timeout works any more ends, and no other does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torchft_like.futures import WATCHDOG_TIMEOUT_SEC
from torchft_like.testing.processes import Processes, RunningProcess

PROGRAM = """
import threading, time
from datetime import timedelta
from torchft_like.futures import context_timeout
blocks = {blocks}
done = threading.Event()
def callback():
    done.set()
    if blocks:
        time.sleep(600)
with context_timeout(callback, timedelta(seconds=0.01)):
    done.wait()
{then}
"""


Run = Callable[[str, str | None, bool], RunningProcess]


@pytest.fixture
def run(processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the program to its end, with a limit or without."""
    monkeypatch.delenv(WATCHDOG_TIMEOUT_SEC, raising=False)
    script = tmp_path / "program.py"

    def run(then: str, limit: str | None, blocks: bool) -> RunningProcess:
        script.write_text(PROGRAM.format(then=then, blocks=blocks))
        done = processes.fork(str(script), env={} if limit is None else {WATCHDOG_TIMEOUT_SEC: limit})
        done.wait()
        return done

    return run


def test_a_callback_that_does_not_return_ends_the_process(run: Run) -> None:
    done = run("time.sleep(600)", "0.5", True)
    assert done.exit_code == 1
    assert "the callback of a timeout ran for 0.5 s (TORCHFT_WATCHDOG_TIMEOUT_SEC)" in done.output
    assert "in callback" in done.output


@pytest.mark.parametrize(("limit", "blocks"), [("0.2", False), (None, True), ("", True)])
def test_others_go_on(run: Run, limit: str | None, blocks: bool) -> None:
    assert run("time.sleep(1); print('went on')", limit, blocks).output == "went on\n"


@pytest.mark.parametrize("limit", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_an_error(run: Run, limit: str) -> None:
    assert f"TORCHFT_WATCHDOG_TIMEOUT_SEC is '{limit}': it must be" in run("", limit, False).output
