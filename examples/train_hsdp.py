"""Train a small GPT that is sharded over the ranks of a replica group; whole groups may die on the way.

On one machine, with a lighthouse and two replica groups of two ranks each, one of which is killed:

    python examples/train_hsdp.py --local --kill-at-step 20

With --spares 1 a single rank is killed. A spare takes its place, and nobody else is started again, as
--picture lives.png shows:

    python examples/train_hsdp.py --local --kill-at-step 20 --spares 1 --picture lives.png

As on a cluster, each replica group under a torchrun of its own, which starts it again when it fails:

    python -m lighthouse --bind 127.0.0.1:29510 --min_replicas 1
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 torchrun --standalone --nproc_per_node 2 --max-restarts 3 \\
        examples/train_hsdp.py --replica-id 0
    (the same with --replica-id 1)

FSDP shards parameters, gradients and optimizer state over the ranks of a group (`dp_shard`), and averages
gradients over the groups of the quorum (`dp_replicate`). A group that comes back heals over the network,
each rank from the same rank of another group. What is saved in --checkpoint-dir is for the day when no
group is left: started again, they all go on from there.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from arguments import SECONDS_MAX, SEED_MAX, number
from checkpoints import Checkpoints
from library_text import StandardLibraryText
from local_groups import interrupt_at_sigterm, kill_steps, run_groups
from local_ranks import run_ranks
from step_loader import StepLoader
from tiny_gpt import TinyGPT, next_byte_loss
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

from torchft_like import (
    LighthouseServer,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    Restart,
    restartable,
    stop_on_signals,
)
from torchft_like.device_mesh import ft_init_device_mesh
from torchft_like.digest import state_digest
from torchft_like.errors import ConnectError, CoordinationError
from torchft_like.fsdp import ShardedState

CONTEXT = 64  # bytes that the model sees at once
BATCH_SIZE = 4  # windows per rank and step
RANKS = 2  # of each replica group, with --local


FIRST = Restart()


@restartable
def train(args: argparse.Namespace, restart: Restart = FIRST) -> int:
    """Train as one rank of one replica group; again in the same process, if another rank has died.

    Returns:
        The exit status: a launcher takes 0 for the end of the job, which a SIGTERM is not.
    """
    rank, group_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    replica_id = int(os.environ.get("REPLICA_GROUP_ID", args.replica_id))  # a spare is told by the others
    where = {"try": restart.attempt, "group": replica_id, "rank": rank, "time": time.time()}
    say(json.dumps(where))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    torch.manual_seed(args.seed)  # the same on all ranks, each of which keeps its part

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=args.min_replicas,
        replica_id=f"group-{replica_id}",
    )
    with manager, stop_on_signals(manager) as stop:
        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(args.num_replicas, group_size),
            mesh_dim_names=("dp_replicate", "dp_shard"),
            replicate_dim=0,
            manager=manager,
        )
        model = TinyGPT(width=48, layers=2, context=CONTEXT)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        adamw = torch.optim.AdamW(model.parameters(), lr=args.lr)
        optimizer = Optimizer(manager, adamw)

        state = ShardedState(model, adamw)
        manager.register_state_dict_fn("train", state.load_state_dict, state.state_dict)
        checkpoints = Checkpoints(args.checkpoint_dir, args.checkpoint_every, manager, model, adamw)
        if checkpoints.resume():
            report("resumed", replica_id, manager, state)

        everybody = mesh._flatten("dp").get_group()  # all ranks of all groups
        data = Batches(args.seed, shard=replica_id * group_size + rank)
        batches = StepLoader(data, manager.current_step, args.workers)
        together = 0  # replica groups that committed the last step
        while not stop.requested and not is_done(manager, args, together):
            begun = manager.current_step()
            inputs, targets = batches.batch()
            optimizer.zero_grad()
            loss = next_byte_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG, group=everybody)
            optimizer.step()
            checkpoints.save_if_due()
            step, participants = manager.current_step(), manager.num_participants()
            together = participants if step > begun else 0
            if rank == 0:
                say(f"step {step}  loss {mean.item():.3f}  participants {participants}")
            time.sleep(args.pause)
        checkpoints.save()
        checkpoints.finish()
        report("finished", replica_id, manager, state)
    dist.destroy_process_group()
    return 0 if is_done(manager, args, together) else 128 + signal.SIGTERM


def is_done(manager: Manager, args: argparse.Namespace, together: int) -> bool:
    """Return whether the last step is committed, and with --finish-together by all of the groups."""
    everybody = together >= args.num_replicas
    return manager.current_step() >= args.steps and (everybody or not args.finish_together)


def report(what: str, replica_id: int, manager: Manager, state: ShardedState) -> None:
    """Print the step and a digest of all shards of this group, parameters and optimizer."""
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, state_digest(state.state_dict()))
    if dist.get_rank() == 0:
        digest = state_digest({"shards": digests})
        result = {what: replica_id, "step": manager.current_step(), "digest": digest}
        say(json.dumps(result))


def say(line: str) -> None:
    """Print a line in one piece, as other ranks may write into the same pipe."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Batches(Dataset[tuple[Tensor, Tensor]]):
    """The batches of a rank, which depend on seed, shard and step alone."""

    def __init__(self, seed: int, shard: int) -> None:
        self.text = StandardLibraryText(CONTEXT)
        self.key = f"{seed}/{shard}"

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, `[BATCH_SIZE, CONTEXT]` int64 each."""
        end = len(self.text.bytes) - CONTEXT - 1
        starts = random.Random(f"{self.key}/{step}").sample(range(end), BATCH_SIZE)
        inputs, targets = zip(*map(self.text.window, starts), strict=True)
        return torch.stack(inputs), torch.stack(targets)


# ------------------------------------------------------------- all of it on this machine


def run_locally(args: argparse.Namespace) -> int:
    """Run a lighthouse here and the groups as processes; return 0 if all of them end with the same bits."""
    interrupt_at_sigterm()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    try:
        if args.spares:
            job = args.num_replicas, RANKS, args.spares, lighthouse.address()
            return run_ranks(*job, args.kill_at_step, args.picture)
        return run_groups(RANKS, lighthouse.address(), kill_steps(args), [()] * args.num_replicas)
    finally:
        lighthouse.shutdown()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT with fault-tolerant hybrid sharding.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--local",
        action="store_true",
        help="start everything on this machine; groups wait for each other before they end",
    )
    parser.add_argument(
        "--kill-at-step",
        type=number(int, 0),
        help="with --local: kill the last group while it trains with others, once; with spares its last rank",
    )
    parser.add_argument(
        "--spares", type=number(int, 0), default=0, help="with --local: processes that wait for a place"
    )
    parser.add_argument("--picture", type=Path, help="with --spares: draw who has lived when, as PNG")
    parser.add_argument("--replica-id", type=int, default=0, help="which replica group this is, from 0")
    parser.add_argument(
        "--num-replicas", type=number(int, 1), default=2, help="replica groups that share the data"
    )
    parser.add_argument(
        "--min-replicas", type=number(int, 1), default=1, help="no step is committed by fewer"
    )
    parser.add_argument("--steps", type=number(int, 0), default=100, help="committed steps until the end")
    parser.add_argument("--finish-together", action="store_true", help="go on until all groups are there")
    parser.add_argument("--checkpoint-dir", type=Path, help="save here, and resume from here")
    parser.add_argument(
        "--checkpoint-every", type=number(int, 1), default=25, help="steps between two checkpoints"
    )
    parser.add_argument(
        "--workers", type=number(int, 0), default=1, help="processes of a rank that load batches ahead"
    )
    parser.add_argument(
        "--pause", type=number(float, 0, SECONDS_MAX), default=0.0, help="seconds between two steps"
    )
    parser.add_argument("--lr", type=number(float, 0), default=2e-3, help="learning rate of AdamW")
    parser.add_argument(
        "--seed", type=number(int, 0, SEED_MAX), default=0, help="of the weights and of the batches"
    )
    args = parser.parse_args()
    if args.picture and (args.picture.is_dir() or not args.picture.parent.is_dir()):
        parser.error(f"--picture {args.picture} is no file in a folder that there is")
    return args


def main() -> None:
    args = parse_args()
    if args.local:
        try:
            sys.exit(run_locally(args))
        except KeyboardInterrupt:
            sys.exit("interrupted; every group has been ended")
    if "RANK" not in os.environ and os.environ.get("TORCHFT_SPARE") != "rank":
        sys.exit("train_hsdp.py: start it with torchrun, or with --local")
    try:
        sys.exit(train(args))
    except (CoordinationError, ConnectError) as error:  # a wrong setting, or nobody there
        sys.exit(f"train_hsdp.py: {error}")


if __name__ == "__main__":
    main()
