"""Where the subprocesses of a Baby group come from; that they end with their trainer; training over them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT, WAIT_LIMIT_S
from tests.integration.cluster import Cluster, checked
from tests.integration.options import WorkerOptions
from torchft_like.testing.cluster import Group
from torchft_like.testing.processes import Processes, RunningProcess, wait_ended

pytestmark = pytest.mark.integration

ALONE = """
import os, torch
from torch.distributed import TCPStore
from torchft_like import ProcessGroupBabyGloo
print("main module runs", flush=True)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
pg = ProcessGroupBabyGloo(60)
pg.configure(f"127.0.0.1:{store.port}/once", 0, 1)
tensor = torch.ones(3)
pg.allreduce([tensor]).wait()
print("reduced", tensor.sum().item(), flush=True)
"""
THEN_WAIT = "import signal; print('ready', flush=True); signal.pause()"
THEN_WAIT_FOR_SIGNAL = """
import signal, sys, time
told = []  # not an Event: a handler that sets it while its lock is held waits for ever
signal.signal(signal.SIGINT, lambda *_: told.append(True))
print('ready', flush=True)
while not told: time.sleep(0.01)
"""


def family_of(trainer: RunningProcess) -> list[psutil.Process]:
    """The fork server, the subprocess in use and the spare."""
    return psutil.Process(trainer.pid).children(recursive=True)


def start_alone(processes: Processes, then: str = THEN_WAIT) -> tuple[RunningProcess, list[psutil.Process]]:
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(f"from tests.standby import stand_by; stand_by()\n{ALONE}{then}")
        script.flush()
        trainer = processes.fork(script.name)
        trainer.wait_for_output("main module runs")
    trainer.wait_for_output("ready")
    assert trainer.output.count("main module runs") == 1
    family = family_of(trainer)
    assert len(family) >= 2
    return trainer, family


def assert_all_gone(family: list[psutil.Process]) -> None:
    assert wait_ended(family, WAIT_LIMIT_S), family


def test_the_main_module_runs_once_without_a_guard(processes: Processes, tmp_path: Path) -> None:
    """That of a script is in the other tests. Here only the trainer's own path leads to the package."""
    script = tmp_path / "train.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{ALONE}")
    interactive = ["/bin/sh", "-c", f"{sys.executable} -i < {script}"]
    trainer = processes.start(*interactive, env={"PYTHONPATH": str(tmp_path)})
    trainer.wait_for_output(r"reduced 3\.0")
    assert trainer.wait() == 0
    assert trainer.output.count("main module runs") == 1


@pytest.mark.parametrize("end", ["sys.exit(3)", "pg.shutdown(); sys.exit(3)"])
def test_all_end_with_the_trainer_which_alone_handles_a_signal(processes: Processes, end: str) -> None:
    then = f"pg.allreduce([tensor]).wait(); print('still', tensor.sum().item(), flush=True); {end}"
    trainer, family = start_alone(processes, THEN_WAIT_FOR_SIGNAL + then)
    os.killpg(trainer.pid, signal.SIGINT)
    trainer.wait_for_output(r"still 3\.0")
    assert trainer.wait() == 3
    assert_all_gone(family)


def test_all_end_with_the_trainer_though_the_fork_server_is_stopped(processes: Processes) -> None:
    trainer, family = start_alone(processes)
    server = next(process for process in family if process.ppid() == trainer.pid)
    server.send_signal(signal.SIGSTOP)
    trainer.signal(signal.SIGKILL)
    assert_all_gone([process for process in family if process != server])
    server.send_signal(signal.SIGCONT)
    assert_all_gone([server])


def test_all_end_with_the_trainer_though_a_fork_of_it_lives_on(processes: Processes) -> None:
    fork = "if os.fork() == 0: os.close(1); os.close(2)\nelse: print('ready', flush=True)\n"
    trainer, family = start_alone(processes, fork + "import signal; signal.pause()")
    baby = [process for process in family if process.name() == "torchft-baby"]
    assert baby
    ending = [*baby, psutil.Process(baby[0].ppid())]
    trainer.signal(signal.SIGKILL)
    trainer.wait()
    assert_all_gone(ending)
    assert any(process.is_running() for process in family if process not in ending)


def test_a_killed_fork_server_is_replaced(processes: Processes) -> None:
    then = (
        "import sys; print('ready', flush=True)\n"
        "import psutil; psutil.wait_procs(psutil.Process().children())\n"
        "try: pg.allreduce([tensor]).wait()\n"
        "except RuntimeError as error: print(type(error).__name__, error, flush=True)\n"
        "pg.configure(f'127.0.0.1:{store.port}/twice', 0, 1)\n"
        "pg.allreduce([tensor]).wait(); print('again', tensor.sum().item(), flush=True)\n"
    )
    trainer, family = start_alone(processes, then)
    next(process for process in family if process.ppid() == trainer.pid).send_signal(signal.SIGKILL)
    trainer.wait_for_output(r"SubprocessLostError.*fork server has ended")
    trainer.wait_for_output(r"again 3\.0")
    assert trainer.output.count("main module runs") == 1  # its second fork server has started cold


BACKEND_PROCESS = "torchft-baby"


def backend_processes(group: Group) -> list[psutil.Process]:
    """Of one rank: the subprocess in use, and the spare."""
    family = psutil.Process(group.ranks[0].pid).children(recursive=True)
    return [process for process in family if process.name() == BACKEND_PROCESS]


@checked
def test_replicas_go_on_after_their_backend_processes_or_one_of_them_were_hit(tmp_path: Path) -> None:
    options = WorkerOptions(backend="baby-gloo", timeout_s=2.0)
    with Cluster(tmp_path) as cluster:
        a, b = cluster.start_all("ab", options=options)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            victims, since = backend_processes(b), time.time()
            assert victims
            for process in victims:
                process.send_signal(number)
            # Its peer may be the first to see it, and tell.
            cluster.wait_until(partial(b.failures, since), "a step of b fails")
            cluster.wait_for_quorum_of(a, b)
            assert wait_ended(victims, WAIT_LIMIT_S), victims
        b.kill()
        cluster.wait_for_quorum_of(a)
        again = cluster.start("b", options=options)
        cluster.wait_for_quorum_of(a, again)
        assert again.events("heal")
