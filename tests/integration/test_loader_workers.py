"""A trainer with a Manager loads its data by forked workers."""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest

from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

TRAINER = "tests.integration.loader_trainer"


def test_workers_of_a_killed_trainer_do_not_keep_its_connections(processes: Processes) -> None:
    """The lighthouse probes silent connections once an hour, so only the connection's end shows the death."""
    options = ("--bind", "127.0.0.1:0", "--keepalive_time_ms", "3600000", "--keepalive_timeout_ms", "3600000")
    lighthouse = processes.fork("lighthouse", *options)
    url = lighthouse.wait_for_output(r"listening on (\S+)")[1]
    env = {"TORCHFT_LIGHTHOUSE": url}
    killed, survivor = (
        processes.fork(TRAINER, name, "workers", workers, env=env)
        for name, workers in (("a", "4"), ("b", "0"))
    )
    for trainer in (killed, survivor):
        trainer.wait_for_output(r"step \d+ of 2")
    workers = [child for child in psutil.Process(killed.pid).children() if child.status() != "zombie"]
    assert len(workers) >= 4
    for worker in workers:  # or they would see that their parent is gone
        worker.suspend()
    os.kill(killed.pid, signal.SIGKILL)
    survivor.wait_for_output(r"lost a:\w+: its connection ended")
    survivor.wait_for_output(r"step \d+ of 1")
    assert all(worker.is_running() and worker.status() == "stopped" for worker in workers)


ANY_STEPS = str(10**9)
OWN_LINES = r"step \d+ of \d|start \d+: \w+ \w+ \d|over: .*"
OF_THE_MANAGER = r"WARNING:torchft_like:\[trainer.*"  # whose peers do die


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param(5, marks=pytest.mark.timeout(600)),
        pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)
def test_loaders_start_beside_peers_that_die(processes: Processes, starts: int) -> None:
    """Of all start methods, with workers that speak gRPC: none dies, and nothing is said of them."""
    # Where the machine is busy a lighthouse hangs up on who is slow to answer, and gRPC says so.
    patient = ("--keepalive_time_ms", "3600000", "--keepalive_timeout_ms", "3600000")
    lighthouse = processes.fork("lighthouse", "--bind", "127.0.0.1:0", *patient)
    url = lighthouse.wait_for_output(r"listening on (\S+)")[1]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # torch finds that DDP looks for unused parameters
    env = {"TORCHFT_LIGHTHOUSE": url, "TORCHFT_QUORUM_TIMEOUT_SEC": "600", **quiet}
    trainer = processes.fork(TRAINER, "trainer", "starts", str(starts), env=env)
    trainer.wait_for_output(r"step \d+ of 1")
    ends = 0
    while trainer.exit_code is None:
        is_killed = ends % 2 == 0
        limit = ANY_STEPS if is_killed else "3"
        peer = processes.fork(TRAINER, "peer", "together", limit, env=env)
        while trainer.exit_code is None and peer.exit_code is None:
            if is_killed and re.search(r"step \d+ of 2", peer.output):
                os.kill(peer.pid, signal.SIGKILL)
            time.sleep(0.05)
        ends += peer.exit_code is not None
        peer.kill()
    assert trainer.wait() == 0
    assert f"over: loaded {starts} times in quorums of [1, 2]" in trainer.output
    assert ends >= 2, "the peer has neither died nor left"
    assert trainer.output.count("\nstart ") == starts
    said = [line for line in trainer.output.splitlines() if not re.fullmatch(OWN_LINES, line)]
    assert [line for line in said if not re.fullmatch(OF_THE_MANAGER, line)] == []
