"""The end of a process waits for what threads of its own do in C++. Each test runs a program to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.versions import NEEDS_A_GLOO_THAT_IS_SILENCED
from torchft_like.process_group.checking import CHECK_ENV
from torchft_like.testing.forks import WHOLE_END_ENV
from torchft_like.testing.processes import Processes, RunningProcess

MULTIPLIES = """
import os, sys, threading
import torch
from torchft_like.futures import in_background
from torchft_like.manager.quorum_driver import QuorumWorker

has_begun = threading.Event()

def multiply():
    has_begun.set()
    ones = torch.ones(2000, 2000)
    for _ in range(5):  # it is in C++ nearly all the time
        torch.mm(ones, ones)

{begin}
has_begun.wait()
{then}
"""
# Gloo's allreduce waits for its timeout, as it does for a message that was about to be sent on a connection
# that has ended.
IN_VAIN = """
import threading, torch
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.process_group.gloo import GlooDevice
from torchft_like.runtime import background

background.SECONDS_AT_EXIT = 1e6
GlooDevice.cut = lambda self: 0
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True)
groups = [ProcessGroupGloo(timeout=1e6) for _ in range(2)]
address = f"127.0.0.1:{store.port}/group"
meet = [threading.Thread(target=groups[n].configure, args=(address, str(n), n, 2)) for n in range(2)]
for thread in meet:
    thread.start()
for thread in meet:
    thread.join()
work = groups[0].allreduce([torch.ones(4)])
groups[0].abort()
try:
    work.wait()
except RuntimeError as error:
    print(error)
"""

ON_A_THREAD_OF_ITS_OWN = "in_background('multiplies', multiply)"
ON_A_THREAD_THAT_GOES_ON = "QuorumWorker().submit(multiply)"


@pytest.fixture
def run(processes: Processes, tmp_path: Path) -> Callable[[str, str], RunningProcess]:
    """Runs a program to its end that begins something in one way, and ends in another."""

    def run(begin: str, then: str) -> RunningProcess:
        script = tmp_path / "program.py"
        script.write_text(MULTIPLIES.format(begin=begin, then=then))
        done = processes.fork(str(script), env={WHOLE_END_ENV: "1"})
        done.wait()
        return done

    return run


@pytest.mark.parametrize("begin", [ON_A_THREAD_OF_ITS_OWN, ON_A_THREAD_THAT_GOES_ON])
@pytest.mark.parametrize(("then", "exit_code"), [("", 0), ("sys.exit(3)", 3), ("raise OSError", 1)])
def test_a_process_that_ends_amid_a_call_of_torch_keeps_its_exit_status(
    run: Callable[[str, str], RunningProcess], begin: str, then: str, exit_code: int
) -> None:
    done = run(begin, then)
    assert done.exit_code == exit_code, done.output
    assert "terminate called" not in done.output


def test_a_fork_waits_for_no_thread_of_its_parent(run: Callable[[str, str], RunningProcess]) -> None:
    begin = "in_background('waits', threading.Event().wait)\nhas_begun.set()"
    forks = """
from torchft_like.runtime import background
if (child := os.fork()) == 0:
    sys.exit(4)  # after SECONDS_AT_EXIT, if it waits
background.SECONDS_AT_EXIT = 0.0
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run(
        f"from torchft_like.runtime import background; background.SECONDS_AT_EXIT = 1e6\n{begin}", forks
    )
    assert done.exit_code == 4, done.output


@NEEDS_A_GLOO_THAT_IS_SILENCED
def test_a_process_does_not_wait_for_an_operation_of_gloo_that_nothing_but_its_timeout_ends(
    processes: Processes, tmp_path: Path
) -> None:
    script = tmp_path / "program.py"
    script.write_text(IN_VAIN)
    done = processes.fork(str(script), env={WHOLE_END_ENV: "1", CHECK_ENV: "0"})
    assert done.wait() == 0, done.output
    assert "was aborted" in done.output
    assert "terminate called" not in done.output
