"""A rank of a replica group whose training function is run again in the same process after an error.

The model is sharded over the group by FSDP, and each layer over --tp ranks. Some ranks have a fault in the
group's first try, between the forward and the backward pass of a step that all groups are in. All lines that
it prints are JSON.
With TORCHFT_SPARE=rank it is a spare, which takes over the name of a group in REPLICA_GROUP_ID.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torchft_like import Manager, Optimizer, ProcessGroupGloo, Restart, restartable
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.digest import state_digest
from torchft_like.fsdp import ShardedState
from torchft_like.testing.training import prepare_process

FIRST = Restart()


class InjectedError(Exception):
    """The fault."""


def fail(_: Path) -> None:
    raise InjectedError("once")


def fail_oddly(_: Path) -> None:
    raise ZeroDivisionError("a bug")


def die(_: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(go: Path) -> None:
    if not go.exists():
        say(waits=True)
    while not go.exists():
        time.sleep(0.01)


FAULTS: dict[str, Callable[[Path], None]] = {
    "known": fail,
    "unknown": fail_oddly,
    "deadly": die,
    "waits": wait_for,
}


def say(**what: object) -> None:
    line = json.dumps({"rank": int(os.environ["RANK"]), "pid": os.getpid(), **what})
    os.write(1, f"{line}\n".encode())  # in one piece: the ranks share a file


@restartable(restart_on=[InjectedError], max_restarts=2, keep_state=True)
def train(args: argparse.Namespace, restart: Restart = FIRST) -> None:
    rank, group_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = os.environ.get("REPLICA_GROUP_ID", args.name)
    error = restart.error and restart.error.__name__
    say(attempt=restart.attempt, error=error, spare=restart.is_replacement, time=time.time())
    if restart.attempt == args.dies_in_try and rank in args.fault_on:
        die(args.go)
    torch.manual_seed(7)
    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=args.min_replicas,
        replica_id=name,
    )
    with manager:
        if args.inner:
            manager.init_process_group(args.inner)
        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(2, group_size // args.tp, args.tp),
            mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
            replicate_dim=0,
            manager=manager,
        )
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        if args.tp > 1:
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp_replicate", "dp_shard"])
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        optimizer = Optimizer(manager, sgd)
        state = ShardedState(model, sgd)
        manager.register_state_dict_fn("train", state.load_state_dict, state.state_dict)
        is_first, are_together = True, False
        while not are_together or manager.current_step() < args.steps:
            step = manager.current_step()
            generator = torch.Generator().manual_seed(step * 100 + ord(name) * 10 + rank // args.tp)
            inputs, targets = (torch.randn(16, width, generator=generator) for width in (8, 4))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            is_due = 0 <= args.fault_at <= step and manager.num_participants() >= args.groups
            if is_due and restart.attempt == 0 and rank in args.fault_on:
                FAULTS[args.fault](args.go)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            has_committed = manager.current_step() > step
            are_together = has_committed and manager.num_participants() >= args.groups
            if is_first and has_committed:
                is_first = False
                say(committed=manager.current_step(), time=time.time())
            time.sleep(args.pause)
        while args.stays_until is not None and not args.stays_until.exists():
            time.sleep(0.01)
        say(finished=manager.current_step(), digest=state_digest(state.state_dict()))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=2, help="commit the last step together")
    parser.add_argument("--min-replicas", type=int, default=1, help="no step is committed by fewer groups")
    parser.add_argument("--fault", choices=FAULTS, default="known")
    parser.add_argument("--go", type=Path, default=Path(), help="the file for which a rank waits")
    parser.add_argument(
        "--fault-at", type=int, default=-1, help="the first step in which all groups are there"
    )
    parser.add_argument("--fault-on", type=int, nargs="+", default=[1], help="the ranks")
    parser.add_argument("--dies-in-try", type=int, help="in which those ranks die before they have a Manager")
    parser.add_argument(
        "--inner", help="the backend of the groups inside the replica group; torch's by default"
    )
    parser.add_argument("--tp", type=int, default=1, help="the ranks that share a layer and its data")
    parser.add_argument("--stays-until", type=Path, help="the file for which a rank waits at its end")
    parser.add_argument("--pause", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    prepare_process()
    train(parse_args())
