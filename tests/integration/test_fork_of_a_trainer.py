"""A process that a trainer forks, as a data loader does, leaves the trainer's groups alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchft_like.testing.processes import Processes, RunningProcess

pytestmark = pytest.mark.integration


def start(processes: Processes, folder: Path, program: str) -> RunningProcess:
    """Run a program as the main module of a process that has torch loaded already."""
    script = folder / "trainer.py"
    script.write_text(program)
    return processes.fork(str(script))


PROGRAM = """
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


@pytest.mark.parametrize("group", ["ProcessGroupGloo", "ProcessGroupBabyGloo"])
def test_a_fork_that_ends_breaks_nothing(processes: Processes, tmp_path: Path, group: str) -> None:
    trainer = start(processes, tmp_path, PROGRAM.format(group=group))
    trainer.wait_for_output(r"sums after the fork \[6\.0, 6\.0\]")
    assert trainer.wait() == 0


SIGNALS_PROGRAM = """
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


def test_a_fork_obeys_signals_which_its_trainer_never_hears(processes: Processes, tmp_path: Path) -> None:
    trainer = start(processes, tmp_path, SIGNALS_PROGRAM)
    trainer.wait_for_output(r"told: \[\]")
    assert trainer.wait() == 0


OUTLIVED_PROGRAM = """
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


def test_a_trainer_stops_listening_before_its_forks_end(processes: Processes, tmp_path: Path) -> None:
    trainer = start(processes, tmp_path, OUTLIVED_PROGRAM)
    trainer.wait_for_output("over before its fork")
    assert trainer.wait() == 0


CONNECTIONS_PROGRAM = """
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


def test_a_fork_keeps_its_scripts_connections_not_ours(processes: Processes, tmp_path: Path) -> None:
    trainer = start(processes, tmp_path, CONNECTIONS_PROGRAM)
    trainer.wait_for_output("the fork has its script's only: True")
    trainer.wait_for_output("the parent has more, and keeps it: True")
    assert trainer.wait() == 0


MANAGERS_PROGRAM = """
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


def test_a_fork_has_a_manager_of_its_own_beside_its_parents(processes: Processes, tmp_path: Path) -> None:
    trainer = start(processes, tmp_path, MANAGERS_PROGRAM)
    trainer.wait_for_output(r"this Manager is that of process \d+")
    trainer.wait_for_output("the fork has stepped with its parent")
    trainer.wait_for_output("the parent steps on")
    assert trainer.wait() == 0
    assert "lost parent" not in trainer.output
