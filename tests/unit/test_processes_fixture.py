"""The leak guard itself: nothing that a test started outlives it."""

from __future__ import annotations

import signal
import sys

import psutil
import pytest

from torchft_like.testing.processes import OutputError, Processes

pytest_plugins = ["pytester"]

CHILD_THAT_IGNORES_SIGTERM = (
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(600)"
)
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD_THAT_IGNORES_SIGTERM!r}])
print("child", child.pid, flush=True)
time.sleep(600)
"""


def running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_descendants_are_killed_even_when_stopped_or_orphaned() -> None:
    starter = Processes()
    stopped, orphaned = (starter.start(sys.executable, "-c", PARENT) for _ in range(2))
    children = [int(process.wait_for_output(r"child (\d+)\n").group(1)) for process in (stopped, orphaned)]
    for process in (stopped, orphaned):
        process.wait_for_output("up")
    stopped.signal(signal.SIGSTOP)
    orphaned.signal(signal.SIGKILL)
    assert psutil.Process(orphaned.pid).wait(60) is not None
    assert all(map(running, children))
    starter.kill_all()
    assert not any(map(running, [stopped.pid, orphaned.pid, *children]))


def test_output_that_can_no_longer_come_fails_the_test_and_shows_what_came() -> None:
    starter = Processes()
    try:
        process = starter.start(sys.executable, "-c", "print('something else')")
        with pytest.raises(OutputError, match=r"ended without writing 'ready'; it wrote:\nsomething else"):
            process.wait_for_output("ready")
        assert process.wait() == 0
    finally:
        starter.kill_all()


def test_a_failed_test_shows_what_its_processes_wrote(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import *")
    pytester.makepyfile(
        """
        import sys

        def test_fails(processes):
            processes.start(sys.executable, "-c", "print('last ' + 'words')").wait()
            assert False
        """
    )
    result = pytester.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*output of process*", "last words"])
