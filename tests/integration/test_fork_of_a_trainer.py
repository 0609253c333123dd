"""A process that a trainer forks, as a data loader does, leaves the trainer's groups alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchft_like.testing.processes import Processes

pytestmark = pytest.mark.integration

GROUPS = """
from tests.standby import stand_by
stand_by()
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

SIGNALS = """
import os, signal, time
from torchft_like import stop_on_signals

class Manager:
    stop_agreed, told = False, []

    def interrupt(self, e):
        self.told.append("interrupt")

    def request_stop(self):
        self.told.append("stop")

def fork():
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, b"!")
            while True:  # signal.pause may miss a signal that comes just before it
                time.sleep(0.05)
        except KeyboardInterrupt:
            os._exit(5)
    os.read(readable, 1)
    return pid

manager = Manager()
with stop_on_signals(manager), stop_on_signals(manager):
    for number, how in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 5)):
        pid = fork()
        os.kill(pid, number)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == how
    forked = os.fork()
if forked == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 7
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print("told:", manager.told, flush=True)
"""

OUTLIVED = """
import os, signal
from torchft_like import stop_on_signals

class Manager:
    stop_agreed = False

    def interrupt(self, e): ...
    def request_stop(self): ...

with stop_on_signals(Manager()):
    if (forked := os.fork()) == 0:
        signal.pause()
print("over before its fork", flush=True)
os.kill(forked, signal.SIGKILL)
os.waitpid(forked, 0)
"""

CONNECTIONS = """
import os, sys, socket, time, torch
from concurrent.futures import ThreadPoolExecutor
import psutil
from torch.distributed import TCPStore
from torchft_like import ProcessGroupGloo

def connected():
    return [c for c in psutil.Process().net_connections("tcp") if c.raddr]

mine = socket.create_server(("127.0.0.1", 0))  # the script's own, which a fork keeps
client = socket.create_connection(mine.getsockname())  # likewise
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
own = {c.fd for c in connected()}
groups = [ProcessGroupGloo(60), ProcessGroupGloo(60)]
pool = ThreadPoolExecutor(2)
list(pool.map(lambda rank: groups[rank].configure(f"127.0.0.1:{store.port}/a", rank, 2), range(2)))
while any(c.status == psutil.CONN_CLOSE_WAIT for c in connected()):
    time.sleep(0.01)  # the store hangs up late on those who have met
before = {c.fd for c in connected()}
forked = os.fork()
if forked == 0:
    print("the fork has its script's only:", {c.fd for c in connected()} == own, flush=True)
    os._exit(0)
os.waitpid(forked, 0)
after = {c.fd for c in connected()}
works = [group.allreduce([torch.ones(1)]) for group in groups]
is_kept = own < after <= before and all(work.wait() for work in works)
print("the parent has more, and keeps it:", is_kept, flush=True)
"""

MANAGERS = """
import os, sys, torch
from torch.distributed import ReduceOp
from torchft_like import Manager, ProcessGroupGloo
from torchft_like.coordination import LighthouseServer
from torchft_like.errors import ShutdownError

server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
os.environ["TORCHFT_LIGHTHOUSE"] = server.address()

def make(name):
    return Manager(
        pg=ProcessGroupGloo(), load_state_dict=lambda state: None, state_dict=dict, min_replica_size=1,
        replica_id=name,
    )

def step(manager):
    manager.start_quorum()
    ones = torch.ones(1)
    manager.allreduce(ones, reduce_op=ReduceOp.SUM).wait()
    return manager.should_commit() and ones.item()

inherited = make("parent")
step(inherited)
forked = os.fork()
if forked == 0:
    try:
        inherited.start_quorum()
    except ShutdownError as error:
        print(error, flush=True)
    with make("child") as own:
        while step(own) != 2:
            pass
    print("the fork has stepped with its parent", flush=True)
    sys.exit(0)  # with Python's cleanup, and the inherited Manager's
while not (ended := os.waitpid(forked, os.WNOHANG)[0]):
    step(inherited)
assert step(inherited)
print("the parent steps on", flush=True)
"""

# What holds of a fork -> the program of its trainer, and what that, and the fork, say in the end.
FACTS: dict[str, tuple[str, list[str]]] = {
    "its end breaks nothing": (
        GROUPS.format(group="ProcessGroupGloo"),
        [r"sums after the fork \[6\.0, 6\.0\]"],
    ),
    "its end breaks no Baby group": (
        GROUPS.format(group="ProcessGroupBabyGloo"),
        [r"sums after the fork \[6\.0, 6\.0\]"],
    ),
    "it obeys signals which its trainer never hears": (SIGNALS, [r"told: \[\]"]),
    "its trainer stops listening before it ends": (OUTLIVED, ["over before its fork"]),
    "it keeps its script's connections, and not ours": (
        CONNECTIONS,
        ["the fork has its script's only: True", "the parent has more, and keeps it: True"],
    ),
    "it has a Manager of its own beside its parent's": (
        MANAGERS,
        [
            r"this Manager is that of process \d+",
            "the fork has stepped with its parent",
            "the parent steps on",
        ],
    ),
}


@pytest.mark.parametrize("fact", FACTS)
def test_of_a_fork(processes: Processes, tmp_path: Path, fact: str) -> None:
    program, said = FACTS[fact]
    script = tmp_path / "trainer.py"
    script.write_text(program)
    trainer = processes.fork(str(script))
    for words in said:
        trainer.wait_for_output(words)
    assert trainer.wait() == 0
    assert "lost parent" not in trainer.output
