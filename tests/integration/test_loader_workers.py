"""A trainer with a Manager loads its data by forked workers."""

from __future__ import annotations

import sys

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

CHILD = """
import os, sys
from datetime import timedelta
from torchft_like.coordination import LighthouseClient, LighthouseServer

server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1)
forked = os.fork()
if forked == 0:
    try:
        LighthouseClient(server.address(), timedelta(seconds=30)).heartbeat("a")
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(forked, 0)
"""


def test_workers_that_are_forked_while_threads_speak_grpc_live(processes: Processes) -> None:
    trainer = processes.start(sys.executable, "-c", LOADERS)
    trainer.wait_for_output(r"loaded \{8\}")
    assert trainer.wait() == 0
    assert "fork" not in trainer.output


def test_a_fork_that_would_speak_grpc_is_told_how_it_could(processes: Processes) -> None:
    parent = processes.start(sys.executable, "-c", CHILD)
    parent.wait_for_output(r"spoke gRPC before it forked this one.* by spawn or forkserver")
    assert parent.wait() == 0
