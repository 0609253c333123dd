"""A process that a trainer forks, as a data loader does, leaves the trainer's groups alone."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import Processes

pytestmark = pytest.mark.integration

PROGRAM = """
import os, sys, torch
from concurrent.futures import ThreadPoolExecutor
from torch.distributed import TCPStore
from torchft_like import ProcessGroupBabyGloo, ProcessGroupGloo
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
groups = [{group}(60), {group}(60)]
pool = ThreadPoolExecutor(2)
prefix = f"127.0.0.1:{{store.port}}/a"
list(pool.map(lambda rank: groups[rank].configure(prefix, rank, 2), range(2)))

def reduce(rank):
    tensor = torch.ones(3)
    groups[rank].allreduce([tensor]).wait()
    return tensor.sum().item()

list(pool.map(reduce, range(2)))
forked = os.fork()
if forked == 0:
    sys.exit(0)  # with Python's cleanup
assert os.waitpid(forked, 0)[1] == 0
print("sums after the fork", list(pool.map(reduce, range(2))), flush=True)
"""


@pytest.mark.parametrize("group", ["ProcessGroupGloo", "ProcessGroupBabyGloo"])
def test_a_fork_that_ends_breaks_nothing(processes: Processes, group: str) -> None:
    trainer = processes.start(sys.executable, "-W", "ignore", "-c", PROGRAM.format(group=group))
    trainer.wait_for_output(r"sums after the fork \[6\.0, 6\.0\]")
    assert trainer.wait() == 0
