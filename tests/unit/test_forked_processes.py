"""Forks of a process that has torch loaded."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import WAIT_LIMIT_S
from tests.waiting import soon
from torchft_like.testing import forks
from torchft_like.testing.processes import OutputError, Processes, RunningProcess

MODULE = "tests.unit.forked_module"


def start(folder: Path, *arguments: str, descriptors: Sequence[int] = ()) -> RunningProcess:
    command, variables = [MODULE, *arguments], {"COLOR": "green"}
    return RunningProcess(command, folder / "log", variables, is_fork=True, descriptors=descriptors)


def test_one_ends_with_the_process_that_forks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(forks, "_servers", [])
    monkeypatch.setattr(forks, "_modules", [])  # to load torch takes seconds
    found = psutil.Process(start(tmp_path, "sleep").pid)
    psutil.Process(found.ppid()).kill()
    found.wait(WAIT_LIMIT_S)
    assert not found.is_running()
    forks._servers[0].stop()


def test_one_is_as_nice_as_who_has_ordered_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.getpriority", lambda *_: 19)
    found = start(tmp_path, "sleep")
    assert soon(lambda: psutil.Process(found.pid).nice() == 19)
    found.kill()


# Its fork says its process id and ends, or waits.
OF_A_FORK = """
import sys
from torchft_like.testing.processes import RunningProcess

inner = RunningProcess(["tests.unit.forked_module", sys.argv[1]], is_fork=True)
print("inner", inner.pid, flush=True)
sys.exit(inner.wait())
"""


def test_a_fork_has_forks_of_the_same_server_which_end_with_it(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(OF_A_FORK)
    outer = RunningProcess([str(script), "show"], tmp_path / "log", is_fork=True)
    assert outer.wait(WAIT_LIMIT_S) == 3, outer.output
    outer = RunningProcess([str(script), "sleep"], tmp_path / "log", is_fork=True)
    inner = psutil.Process(int(outer.wait_for_output(r"inner (\d+)").group(1)))
    assert inner.ppid() == psutil.Process(outer.pid).ppid()
    outer.kill()
    inner.wait(WAIT_LIMIT_S)


OF_AN_END = """
import atexit, os, sys, threading

class Kept:
    def __del__(self, write=os.write):
        write(1, b"taken apart\\n")

threading.kept = Kept()
atexit.register(print, "handler", flush=True)
threading.Thread(target=print, args=["thread"]).start()
sys.exit(3)
"""


@pytest.mark.parametrize(("whole", "last"), [("", ""), ("1", "taken apart\n")])
def test_one_ends_as_a_process_does_and_takes_its_interpreter_apart_if_it_is_told_to(
    tmp_path: Path, whole: str, last: str
) -> None:
    (script := tmp_path / "script.py").write_text(OF_AN_END)
    ended = RunningProcess([str(script)], variables={forks.WHOLE_END_ENV: whole}, is_fork=True)
    assert ended.wait(WAIT_LIMIT_S) == 3, ended.output
    assert ended.output == f"thread\nhandler\n{last}"


# The fixture: nothing that a test started outlives it.


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
