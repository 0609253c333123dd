"""A rank of a replica group whose training function is run again in the same process after an error.

The model is sharded over the group by FSDP. One rank has a fault in its first try, between the forward and
the backward pass of a step. All lines that it prints are JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchft_like import Manager, Optimizer, ProcessGroupGloo, Restart, restartable
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.digest import state_digest
from torchft_like.fsdp import ShardedState
from torchft_like.testing.training import prepare_process

FIRST = Restart()
RANK, GROUP_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


class InjectedError(Exception):
    """The fault."""


def fail() -> None:
    raise InjectedError("once")


def fail_oddly() -> None:
    raise ZeroDivisionError("a bug")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {"known": fail, "unknown": fail_oddly, "deadly": die}


def say(**what: object) -> None:
    line = json.dumps({"rank": RANK, "pid": os.getpid(), **what})
    os.write(1, f"{line}\n".encode())  # in one piece: the ranks share a file


@restartable(restart_on=[InjectedError], max_restarts=2)
def train(args: argparse.Namespace, restart: Restart = FIRST) -> None:
    say(attempt=restart.attempt, error=restart.error and restart.error.__name__, time=time.time())
    torch.manual_seed(7)
    manager = Manager(
        pg=ProcessGroupGloo(), load_state_dict=None, state_dict=None, min_replica_size=1, replica_id=args.name
    )
    with manager:
        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(2, GROUP_SIZE),
            mesh_dim_names=("dp_replicate", "dp_shard"),
            replicate_dim=0,
            manager=manager,
        )
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        fully_shard(model, mesh=mesh)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = Optimizer(manager, sgd)
        state = ShardedState(model, sgd)
        manager.register_state_dict_fn("train", state.load_state_dict, state.state_dict)
        is_first = True
        while manager.current_step() < args.steps or manager.num_participants() < args.groups:
            step = manager.current_step()
            generator = torch.Generator().manual_seed(step * 100 + ord(args.name) * 10 + RANK)
            inputs, targets = (torch.randn(16, width, generator=generator) for width in (8, 4))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            if (step, RANK, restart.attempt) == (args.fault_at, args.fault_on, 0):
                FAULTS[args.fault]()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if is_first and manager.current_step() > step:
                is_first = False
                say(committed=manager.current_step(), time=time.time())
            time.sleep(args.pause)
        say(finished=manager.current_step(), digest=state_digest(state.state_dict()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--fault", choices=FAULTS, default="known")
    parser.add_argument("--fault-at", type=int, default=-1, help="the step")
    parser.add_argument("--fault-on", type=int, default=1, help="the rank")
    parser.add_argument("--pause", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    prepare_process()
    train(parse_args())
