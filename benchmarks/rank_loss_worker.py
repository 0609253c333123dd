"""A rank of a replica group whose small model is sharded by FSDP; it reports each step that it commits.

SIGUSR1 makes its next step fail with an error after which the function is run again. With TORCHFT_SPARE=rank
it is a spare, of whatever group it comes to.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchft_like import Manager, Optimizer, ProcessGroupGloo, Restart, restartable, stop_on_signals
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.digest import state_digest
from torchft_like.fsdp import ShardedState
from torchft_like.in_process import health

PAUSE_S = 0.05
WIDTH = 64
FIRST = Restart()
_wanted: list[int] = []


class Waiting(logging.Handler):
    """Reports that this process waits for a place, as a spare."""

    def emit(self, record: logging.LogRecord) -> None:
        if "waits for a place" in record.getMessage():
            report("waits")


class InjectedError(Exception):
    """The fault."""


def report(event: str, **fields: object) -> None:
    line = json.dumps({"event": event, "pid": os.getpid(), "time": time.time(), **fields})
    os.write(1, f"{line}\n".encode())


@restartable(restart_on=[InjectedError], max_restarts=10**6, health_check=health.device)
def train(restart: Restart = FIRST) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    group = os.environ["REPLICA_GROUP_ID"]
    where = {"group": group, "rank": rank}
    report("try", number=restart.attempt, reason=restart.reason[:200], **where)
    torch.manual_seed(7)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1, replica_id=group
    )
    with manager, stop_on_signals(manager) as stop:
        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(2, size),
            mesh_dim_names=("dp_replicate", "dp_shard"),
            replicate_dim=0,
            manager=manager,
        )
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        fully_shard(model, mesh=mesh)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = Optimizer(manager, sgd)
        state = ShardedState(model, sgd)
        manager.register_state_dict_fn("train", state.load_state_dict, state.state_dict)
        while not stop.requested:
            step = manager.current_step()
            generator = torch.Generator().manual_seed(step * 100 + int(group) * 10 + rank)
            inputs, targets = (torch.randn(16, width, generator=generator) for width in (8, 4))
            time.sleep(PAUSE_S)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            if _wanted:
                _wanted.clear()
                report("error", **where)
                raise InjectedError("SIGUSR1")
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            committed = manager.current_step()
            if committed > step:
                digest = state_digest(state.state_dict())
                report("step", step=committed, digest=digest, members=manager.num_participants(), **where)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, lambda *_: _wanted.append(1))
    torch.set_num_threads(1)
    spare = logging.getLogger("torchft_like.in_process.spare")
    spare.setLevel(logging.INFO)
    spare.addHandler(Waiting())
    train()
