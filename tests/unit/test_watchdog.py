"""TORCHFT_WATCHDOG_TIMEOUT_SEC: a process in which no timeout works any more ends, and no other does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

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


def run(then: str, limit: str | None, blocks: bool) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TORCHFT_WATCHDOG_TIMEOUT_SEC"} | {
        "PYTHONPATH": str(ROOT)
    }
    if limit is not None:
        env["TORCHFT_WATCHDOG_TIMEOUT_SEC"] = limit
    program = PROGRAM.format(then=then, blocks=blocks)
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )


def test_a_callback_that_does_not_return_ends_the_process() -> None:
    done = run("time.sleep(600)", "0.5", blocks=True)
    assert done.returncode == 1
    assert "the callback of a timeout ran for 0.5 s (TORCHFT_WATCHDOG_TIMEOUT_SEC)" in done.stderr
    assert "in callback" in done.stderr


@pytest.mark.parametrize(("limit", "blocks"), [("0.2", False), (None, True), ("", True)])
def test_others_go_on(limit: str | None, blocks: bool) -> None:
    assert run("time.sleep(1); print('went on')", limit, blocks).stdout == "went on\n"


@pytest.mark.parametrize("limit", ["soon", "0", "-1", "nan", "inf"])
def test_a_limit_that_is_none_is_an_error(limit: str) -> None:
    assert f"TORCHFT_WATCHDOG_TIMEOUT_SEC is '{limit}': it must be" in run("", limit, blocks=False).stderr
