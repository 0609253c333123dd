"""Train a small GPT on the source text of Python's standard library; any replica may die on the way.

Start a lighthouse, then one process per replica group, as many as you like:

    python -m lighthouse --bind 127.0.0.1:29510 --min_replicas 2
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python examples/train_ddp.py --replica-id 0
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 python examples/train_ddp.py --replica-id 1

or let torchrun start them, and start them again when they fail:

    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 \\
        torchrun --standalone --nproc_per_node=1 --max-restarts=3 examples/train_ddp.py --replica-id 0

Kill one, stop one, start it again: the others go on, and the one that comes back fetches their
state. With --checkpoint-dir kill all of them, and the lighthouse, too: started again, they go on from the
newest checkpoint. What makes it so is the Manager and two wrappers; the loop is an ordinary training loop.
With TORCHFT_EVENT_FILE set, the Manager appends what happens to that file, one JSON record a line.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from arguments import SECONDS_MAX, SEED_MAX, number
from checkpoints import Checkpoints
from library_text import StandardLibraryText
from tiny_gpt import HEADS, TinyGPT, next_byte_loss

from lighthouse.events import JsonLinesFile
from torchft_like import (
    DistributedDataParallel,
    GlobalBatches,
    GlobalBatchLoader,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft_like.digest import state_digest
from torchft_like.errors import ConnectError, CoordinationError, ForeignMemberError
from torchft_like.shutdown_signals import stop_on_signals

CONTEXT = 128  # bytes that the model sees at once


def main() -> None:
    args = parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")  # the Manager says who comes and goes
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)

    data = StandardLibraryText(CONTEXT)
    model = TinyGPT(width=args.width, context=CONTEXT)
    adamw = torch.optim.AdamW(model.parameters(), lr=args.lr)

    def save_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": adamw.state_dict()}

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state,
        state_dict=save_state,
        min_replica_size=args.min_replicas,
        replica_id=f"replica-{args.replica_id}",
    )
    with manager, stop_on_signals(manager) as stop:
        ddp_model = DistributedDataParallel(manager, model)
        optimizer = Optimizer(manager, adamw)
        checkpoints = Checkpoints(args.checkpoint_dir, args.checkpoint_every, manager, model, adamw)
        checkpoints.resume()
        of_all = GlobalBatches(len(data), args.batch_size * args.num_replicas, seed=args.seed)
        batches = GlobalBatchLoader(manager, data, of_all, num_workers=args.workers)
        progress = Progress(args, manager)

        together = 0  # replicas that committed the last step
        while not stop.requested and not is_done(manager, args, together):
            begun = manager.current_step()
            optimizer.zero_grad()
            inputs, targets = next(batches)
            loss = next_byte_loss(ddp_model(inputs), targets)
            (loss * batches.weight).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            together = manager.num_participants() if manager.current_step() > begun else 0
            checkpoints.save_if_due()
            progress.report(loss.item())
        checkpoints.finish()

        result = {"replica": args.replica_id, "step": manager.current_step()}
    print(json.dumps({**result, "digest": state_digest(save_state())}), flush=True)
    if not is_done(manager, args, together):  # a SIGTERM; a launcher takes 0 for the end of the job
        sys.exit(128 + signal.SIGTERM)


def is_done(manager: Manager, args: argparse.Namespace, together: int) -> bool:
    """Return whether the last step is committed, and with --finish-together by all of the replicas."""
    everybody = together >= args.num_replicas
    return manager.current_step() >= args.steps and (everybody or not args.finish_together)


class Progress:
    """Prints a line every few steps, and writes every step as a JSON line into the metrics file."""

    def __init__(self, args: argparse.Namespace, manager: Manager) -> None:
        self.args = args
        self.manager = manager
        # On a full disk it loses records, and training goes on.
        self.file = JsonLinesFile(args.metrics_file) if args.metrics_file else None
        self.began = time.monotonic()
        self.step = 0

    def report(self, loss: float) -> None:
        """Report a step that is over; `loss` is of this replica's batch, before the step."""
        step, participants = self.manager.current_step(), self.manager.num_participants()
        if self.file:
            record = {
                "time": time.time(),
                "replica": self.args.replica_id,
                "step": step,
                "loss": loss,
                "participants": participants,
                "participating": self.manager.is_participating(),  # not while it heals
            }
            self.file.append(json.dumps(record))
        if step % self.args.log_every == 0:
            print(f"step {step:5d}  loss {loss:.3f}  participants {participants}", flush=True)
        if step > self.step:  # one that was not committed is tried again at once
            time.sleep(max(0.0, self.began + self.args.step_time - time.monotonic()))
        self.step, self.began = step, time.monotonic()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small GPT with fault-tolerant data parallelism.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--replica-id", type=int, default=0, help="which replica group this is, from 0")
    parser.add_argument(
        "--num-replicas", type=number(int, 1), default=3, help="replica groups that are meant to be there"
    )
    parser.add_argument(
        "--min-replicas", type=number(int, 1), default=1, help="no step is committed by fewer"
    )
    parser.add_argument("--steps", type=number(int, 0), default=300, help="committed steps until the end")
    parser.add_argument("--finish-together", action="store_true", help="go on until all replicas are there")
    parser.add_argument(
        "--batch-size",
        type=number(int, 1),
        default=8,
        help="windows of 128 bytes in a step, times --num-replicas; whoever is there shares them",
    )
    parser.add_argument(
        "--width", type=number(int, HEADS), default=96, help="of the model; the same for all replicas"
    )
    parser.add_argument("--lr", type=number(float, 0), default=2e-3, help="learning rate of AdamW")
    parser.add_argument(
        "--seed", type=number(int, 0, SEED_MAX), default=0, help="of the weights and of the batches"
    )
    parser.add_argument(
        "--workers", type=number(int, 0), default=2, help="processes that load the batches ahead"
    )
    parser.add_argument("--threads", type=number(int, 1), default=1, help="CPU threads of this process")
    parser.add_argument("--checkpoint-dir", type=Path, help="save here, and resume from here")
    parser.add_argument(
        "--checkpoint-every", type=number(int, 1), default=25, help="steps between two checkpoints"
    )
    parser.add_argument(
        "--step-time",
        type=number(float, 0, SECONDS_MAX),
        default=0.0,
        help="seconds that a step takes at the least",
    )
    parser.add_argument(
        "--log-every", type=number(int, 1), default=10, help="steps between two progress lines"
    )
    parser.add_argument("--metrics-file", type=Path, help="append a JSON line per step to this file")
    args = parser.parse_args()
    if not 0 <= args.replica_id < args.num_replicas:
        parser.error(f"--replica-id {args.replica_id} is not in 0..{args.num_replicas - 1} (--num-replicas)")
    if args.width % HEADS:
        parser.error(f"--width {args.width} is no multiple of {HEADS}, the number of attention heads")
    if args.metrics_file and (args.metrics_file.is_dir() or not args.metrics_file.parent.is_dir()):
        parser.error(f"--metrics-file {args.metrics_file} is no file in a folder that there is")
    return args


if __name__ == "__main__":
    try:
        main()
    except (CoordinationError, ConnectError, ForeignMemberError) as error:  # a wrong setting, or nobody there
        sys.exit(f"train_ddp.py: {error}")
