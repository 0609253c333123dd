"""A trainer with a Manager loads its data by forked workers."""

from __future__ import annotations

import os
import signal
import sys

import psutil
import pytest

from tests.conftest import Processes

pytestmark = pytest.mark.integration

LOADERS = """
import threading, torch
from torch.utils.data import DataLoader
from torchft_like.coordination import LighthouseClient, LighthouseServer
from datetime import timedelta

server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
client = LighthouseClient(server.address(), timedelta(seconds=30))
over = threading.Event()

def speak():
    while not over.is_set():
        client.heartbeat("a")

threads = [threading.Thread(target=speak) for _ in range(2)]
for thread in threads:
    thread.start()
try:
    sums = {sum(map(len, DataLoader(torch.arange(8), num_workers=2, batch_size=2))) for _ in range(30)}
    print("loaded", sums, flush=True)
finally:
    over.set()
"""


def test_workers_that_are_forked_while_threads_speak_grpc_live(processes: Processes) -> None:
    trainer = processes.start(sys.executable, "-c", LOADERS)
    trainer.wait_for_output(r"loaded \{8\}")
    assert trainer.wait() == 0
    assert "fork" not in trainer.output


TRAINER = """
import logging, sys, torch
from torch import nn
from torch.utils.data import DataLoader
from torchft_like import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

logging.basicConfig(level=logging.WARNING)
name, workers = sys.argv[1], int(sys.argv[2])
model = nn.Linear(1, 1)
manager = Manager(
    pg=ProcessGroupGloo(), load_state_dict=model.load_state_dict, state_dict=model.state_dict,
    min_replica_size=1, replica_id=name,
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), 0.01))
loader = DataLoader(torch.ones(10_000_000, 1), batch_size=4, num_workers=workers)
for batch in loader:
    optimizer.zero_grad()
    ddp(batch).sum().backward()
    optimizer.step()
    print(f"step {manager.current_step()} of {manager.num_participants()}", flush=True)
"""


def test_workers_of_a_killed_trainer_do_not_keep_its_connections(processes: Processes) -> None:
    """The lighthouse probes silent connections once an hour, so only the connection's end shows the death."""
    options = ("--bind", "127.0.0.1:0", "--keepalive_time_ms", "3600000", "--keepalive_timeout_ms", "3600000")
    lighthouse = processes.start(sys.executable, "-m", "lighthouse", *options)
    url = lighthouse.wait_for_output(r"listening on (\S+)")[1]
    env = {"TORCHFT_LIGHTHOUSE": url}
    killed, survivor = (
        processes.start(sys.executable, "-W", "ignore", "-c", TRAINER, name, workers, env=env)
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
