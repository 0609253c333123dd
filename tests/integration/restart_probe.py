"""A process that runs its training function again and again, and tells what that has left behind.

Each try leaves everything open that it has made, in the middle of a step: a Manager, torch's default group, a
sharded model, a process group, a message queue, and threads of its own.
"""

from __future__ import annotations

import os
import threading

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.managers import manager_alone
from torchft_like import LighthouseServer, Optimizer, ProcessGroupGloo, Restart, restartable
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.fsdp import ShardedState
from torchft_like.message_queue import MessageQueue

from . import footprint
from .footprint import MB, Allowance, Footprint, excess_after

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
