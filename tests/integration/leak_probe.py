"""A process that does something again and again, and tells what that has left behind.

Two ranks, each with a thread of its own. Most rounds use the group; some abort it in the middle of a
collective, some in the middle of `configure`.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.managers import manager_alone
from tests.standby import stand_by
from torchft_like import LighthouseServer, Optimizer, Restart, restartable
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.errors import ProcessGroupAbortedError
from torchft_like.fsdp import ShardedState
from torchft_like.message_queue import MessageQueue
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ManagedProcessGroup,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
    ProcessGroupWrapper,
)

from . import footprint
from .footprint import MB, Allowance, Footprint, excess_after, left_by
from .gloo_member import LIMIT_S

RANKS = 2


class Subject(Protocol):
    """Something that can be configured again and again."""

    def round(self, index: int) -> None:
        """Configure it once, or nearly."""

    def end(self) -> None:
        """Give everything back."""


def left_by_rounds(_: object, subject: str, store: int, warm_up: int, repeats: int) -> list[str]:
    """Return what is left after `repeats` rounds; an empty list if nothing is.

    `store` is the port of another process: a store keeps what it is told, and so grows.
    """
    if "Baby" in subject:
        stand_by()
    torch.set_num_threads(1)
    probed = SUBJECTS[subject](store)
    try:
        return left_by(probed.round, warm_up, repeats, allowance(repeats))
    finally:
        probed.end()


def allowance(repeats: int) -> Allowance:
    """Return what the allocator may take.

    Two of torch's own Gloo groups, made and destroyed again and again, keep 3 KB more each time; ours
    keep up to 4 KB, a round being two groups too.
    """
    return Allowance(mappings=32 + repeats // 10, bytes=4 * MB + repeats * 4096)


class Pair:
    """Two groups that the test configures."""

    def __init__(self, store: int, make: Callable[[], ProcessGroup]) -> None:
        self._store = store
        self._prefixes = itertools.count()
        self._threads = ThreadPoolExecutor(RANKS)
        self._groups = [make() for _ in range(RANKS)]
        self._tensors = [torch.ones(256) for _ in range(RANKS)]

    def round(self, index: int) -> None:
        if index % 5 == 3:
            return self._abort_configure(index)
        self._together(self._configure, self._prefix())
        if index % 5 == 4:
            return self._abort_collective(index)
        self._together(self._reduce)
        return None

    def end(self) -> None:
        for group in self._groups:
            group.shutdown()
        self._threads.shutdown()

    def _configure(self, rank: int, prefix: str) -> None:
        self._groups[rank].configure(prefix, rank, RANKS)

    def _reduce(self, rank: int) -> None:
        tensor = self._tensors[rank].fill_(1.0)
        self._groups[rank].allreduce([tensor]).wait()
        assert tensor[0] == RANKS

    def _abort_configure(self, index: int) -> None:
        """Abort one rank's `configure`, which waits for a rank that never comes."""
        rank = index % RANKS
        waiting = self._threads.submit(self._configure, rank, self._prefix())
        while not waiting.done():  # an abort before `configure` begins does not end it
            self._groups[rank].abort("the probe has enough")
            wait([waiting], timeout=0.002)
        assert isinstance(waiting.exception(LIMIT_S), ProcessGroupAbortedError)

    def _abort_collective(self, index: int) -> None:
        rank = index % RANKS
        waiting: Future[Any] = self._threads.submit(self._reduce, rank)
        self._groups[rank].abort("the probe has enough")
        assert waiting.exception(LIMIT_S) is not None

    def _together(self, act: Callable[..., None], *args: object) -> None:
        for future in [self._threads.submit(act, rank, *args) for rank in range(RANKS)]:
            future.result(LIMIT_S)

    def _prefix(self) -> str:
        return f"127.0.0.1:{self._store}/{os.getpid()}/{next(self._prefixes)}"


class ManagedPair:
    """Two managed groups; their Managers configure them because every step fails."""

    def __init__(self, store: int) -> None:
        self._lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=RANKS, join_timeout_ms=100)
        self._threads = ThreadPoolExecutor(RANKS)
        here: dict[str, Any] = {"store_addr": "127.0.0.1", "store_port": store, "min_replica_size": RANKS}
        self._managers = [
            manager_alone(f"probe_{rank}", self._lighthouse.address(), pg=ProcessGroupGloo(), **here)
            for rank in range(RANKS)
        ]
        self._groups = [ManagedProcessGroup(manager) for manager in self._managers]

    def round(self, index: int) -> None:
        for future in [self._threads.submit(self._fail_a_step, rank) for rank in range(RANKS)]:
            future.result(LIMIT_S)

    def end(self) -> None:
        for manager in self._managers:
            manager.shutdown()
        self._lighthouse.shutdown()
        self._threads.shutdown()

    def _fail_a_step(self, rank: int) -> None:
        manager = self._managers[rank]
        manager.start_quorum()
        epoch = manager.process_group.epoch
        manager.wait_quorum()
        self._groups[rank].allreduce([torch.ones(256)]).wait()
        manager.report_error(RuntimeError("the probe lets every step fail"))
        assert not manager.should_commit()
        assert manager.process_group.epoch >= epoch


class Alone:
    """A group of one."""

    def __init__(self, _: int) -> None:
        self._group = ProcessGroupDummy(0, 1)

    def round(self, index: int) -> None:
        self._group.configure(f"127.0.0.1:1/{index}", 0, 1)
        self._group.allreduce([torch.ones(256)]).wait()

    def end(self) -> None:
        self._group.shutdown()


SUBJECTS: dict[str, Callable[[int], Subject]] = {
    "Gloo": lambda store: Pair(store, ProcessGroupGloo),
    "Wrapper": lambda store: Pair(store, lambda: ProcessGroupWrapper(pg=ProcessGroupGloo())),
    "ErrorSwallowing": lambda store: Pair(
        store, lambda: ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo())
    ),
    "Managed": ManagedPair,
    "Dummy": Alone,
    "BabyGloo": lambda store: Pair(store, ProcessGroupBabyGloo),
}

# A training function that is run again and again. Each try leaves everything open that it has made, in the
# middle of a step: a Manager, torch's default group, a sharded model, a process group, a queue, and threads.
HELD_BYTES = 48 * MB  # the C library may keep freed blocks of up to 32 MB


class InjectedError(Exception):
    """The fault of every try."""


def left_by_restarts(_: object, warm_up: int, repeats: int, kept: bool = False) -> list[str]:
    """Return what is left after `repeats` restarts, those of the warm-up not counted.

    With `kept` each try lets something outlive it, for a test of the probe.
    """
    torch.set_num_threads(1)
    lighthouse = LighthouseServer(min_replicas=1)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    if kept:
        footprint.SETTLE_S = 0.5  # nothing of it will end
    before: list[Footprint] = []
    hoard: list[object] = []

    @restartable(restart_on=[InjectedError], max_restarts=warm_up + repeats)
    def main(restart: Restart | None = None) -> list[str]:
        assert restart is not None
        if restart.attempt == warm_up:
            before.append(footprint.settled())
        if restart.attempt == warm_up + repeats:
            return excess_after(before[0], Allowance(32 + repeats // 10, 4 * MB + repeats * 16 * 1024))
        made = train(lighthouse.address())
        if kept:
            hoard.append(made)
        raise InjectedError

    try:
        return main()
    finally:
        lighthouse.shutdown()


def train(lighthouse: str) -> object:
    """Do one step, and most of another."""
    manager = manager_alone("probe", lighthouse, pg=ProcessGroupGloo())
    mesh = ft_init_device_mesh(
        device_type="cpu",
        mesh_shape=(1, 1),
        mesh_dim_names=("dp_replicate", "dp_shard"),
        replicate_dim=0,
        manager=manager,
    )
    model = nn.Linear(64, 64)
    fully_shard(model, mesh=mesh)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = Optimizer(manager, sgd)
    state = ShardedState(model, sgd)
    manager.register_state_dict_fn("train", state.load_state_dict, state.state_dict)
    manager.register_replay(optimizer.replay())
    other = ProcessGroupGloo()
    queue = MessageQueue(1, 1, max_chunk_bytes=1024)
    held = torch.ones(HELD_BYTES, dtype=torch.uint8)
    told = threading.Event()
    threading.Thread(target=told.wait, args=[0.01]).start()
    for is_last in (False, True):
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        if not is_last:
            optimizer.step()
    assert manager.current_step() == 1
    return manager, other, queue, held
