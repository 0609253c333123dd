"""When a process counts as ended."""

from __future__ import annotations

import subprocess
import sys

import psutil
import pytest

from tests.waiting import wait_for
from torchft_like.testing.processes import Processes, is_alive, wait_ended

pytestmark = pytest.mark.integration
LIMIT_S = 60.0

# The system shows a process whose first thread has ended as a zombie.
OUTLIVED_BY_A_THREAD = """
import ctypes, os, platform, sys, threading

def end_with_the_input():
    sys.stdin.read()
    os._exit(0)

threading.Thread(target=end_with_the_input).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
"""
ORPHANED = """
import subprocess
print(subprocess.Popen(["sleep", "infinity"]).pid, flush=True)
"""


def test_a_process_lives_as_long_as_one_of_its_threads() -> None:
    with subprocess.Popen([sys.executable, "-c", OUTLIVED_BY_A_THREAD], stdin=subprocess.PIPE) as child:
        process = psutil.Process(child.pid)
        wait_for(lambda: process.status() == psutil.STATUS_ZOMBIE)
        assert is_alive(process)
        assert not wait_ended([process], 0.0)
        assert child.stdin is not None
        child.stdin.close()
        assert wait_ended([process], LIMIT_S)


def test_an_orphan_has_ended_though_nobody_reaps_it(processes: Processes) -> None:
    parent = processes.start(sys.executable, "-c", ORPHANED)
    orphan = psutil.Process(int(parent.wait_for_output(r"\d+")[0]))
    parent.wait(LIMIT_S)
    assert is_alive(orphan)
    orphan.kill()
    assert wait_ended([orphan], LIMIT_S)
