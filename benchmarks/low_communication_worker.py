"""A replica that trains with DDP, or with DiLoCo if it is told how often to sync, and reports once.

Without a rank it pretrains the model with which the replicas begin, alone.

Its record has the loss on text that no replica has trained on, and the bytes that it has sent. It ends when
it is told to, so that no replica lacks a peer in its last step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tiny_gpt import TinyGPT, next_byte_loss
from torch import Tensor

from torchft_like import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft_like.local_sgd import DiLoCo
from torchft_like.process_group import ProcessGroupWrapper
from torchft_like.process_group.collectives import Collective, tensors_of

CONTEXT, BATCH, HELD_OUT = 64, 8, 20  # of so many windows one is not trained on
CURVE_WINDOWS = 128  # of those, for a point of the curve
WARM_UP, LEARNING_RATE = 20, 1e-3
PRETRAINING_STEPS, PRETRAINING_BATCH, PRETRAINING_RATE = 700, 16, 3e-3


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = TinyGPT(width=64, layers=2, context=CONTEXT)
    text = Text(args)
    if args.rank is None:
        pretrain(model, text)
        torch.save(model.state_dict(), args.model)
        print(json.dumps({"pretrained": True}), flush=True)
        sys.stdin.readline()
    else:
        model.load_state_dict(torch.load(args.model))
        train(model, text, args)


def pretrain(model: TinyGPT, text: Text) -> None:
    adamw = torch.optim.AdamW(model.parameters(), lr=PRETRAINING_RATE)
    for step in range(PRETRAINING_STEPS):
        inputs, targets = text.batch(step, PRETRAINING_BATCH)
        adamw.zero_grad()
        next_byte_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        adamw.step()


def train(model: TinyGPT, text: Text, args: argparse.Namespace) -> None:
    adamw = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    rate = torch.optim.lr_scheduler.LambdaLR(
        adamw,
        lambda step: min(1, (step + 1) / WARM_UP) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps)),
    )
    group = Counted(pg=ProcessGroupGloo(60.0))
    manager = Manager(
        group,
        model.load_state_dict,
        model.state_dict,
        min_replica_size=args.replicas,
        use_async_quorum=not args.sync_every,
        replica_id=f"replica-{args.rank}",
    )
    with manager, contextlib.ExitStack() as block:
        trained: torch.nn.Module = model
        optimizer: Any = adamw
        if args.sync_every:
            block.enter_context(diloco(manager, model, adamw, args))
        else:
            trained, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
        quorums, curve = set[int](), list[float]()
        for step in range(args.steps):
            inputs, targets = text.batch(step)
            optimizer.zero_grad()
            next_byte_loss(trained(inputs), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            rate.step()
            if manager.current_step():
                quorums.add(manager.quorum_id)
            if (step + 1) % args.curve_every == 0:
                curve.append(text.loss_of(model, CURVE_WINDOWS))
        assert len(quorums) == 1, "a replica was lost, and its optimizer with it: there is no result"
        record = {"loss": text.loss_of(model), "bytes": round(group.sent), "curve": curve}
        print(json.dumps(record), flush=True)
        sys.stdin.readline()  # no replica lacks a peer in its last step


def diloco(
    manager: Manager, model: TinyGPT, adamw: torch.optim.Optimizer, args: argparse.Namespace
) -> DiLoCo:
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return DiLoCo(
        manager,
        [model],
        adamw,
        outer,
        sync_every=args.sync_every,
        use_bucketization=True,
        should_quantize=args.quantize,
        error_feedback=args.error_feedback,
    )


class Counted(ProcessGroupWrapper):
    """A group that counts the bytes that a rank sends: an allreduce as a ring does it."""

    sent = 0.0

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call, ranks = collective.bind(args, kwargs), self.size()
        copies = {"allreduce": 2 / ranks, "alltoall_base": 1 / ranks, "_allgather_base": 1}[collective.name]
        self.sent += sum(tensor.nbytes for tensor in tensors_of(call.inputs)) * copies * (ranks - 1)
        return super()._run(collective, args, kwargs)


class Text:
    """The source text of the standard library, in windows."""

    def __init__(self, args: argparse.Namespace) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        self._bytes = torch.frombuffer(
            bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
        )
        windows = range((len(self._bytes) - 1) // CONTEXT)
        self._trained = [window for window in windows if window % HELD_OUT]
        self._key = f"{args.seed}/{args.rank}"
        self.held_out = self._windows(random.Random("held out").sample(windows[::HELD_OUT], 1024))

    @torch.no_grad()
    def loss_of(self, model: TinyGPT, windows: int | None = None) -> float:
        """Return the loss on the first windows that nobody trains on, by default on all."""
        inputs, targets = (tokens[:windows] for tokens in self.held_out)
        return next_byte_loss(model(inputs), targets).item()

    def batch(self, step: int, size: int = BATCH) -> tuple[Tensor, Tensor]:
        return self._windows(random.Random(f"{self._key}/{step}").sample(self._trained, size))

    def _windows(self, chosen: list[int]) -> tuple[Tensor, Tensor]:
        tokens = torch.stack([self._bytes[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in chosen]).long()
        return tokens[:, :-1], tokens[:, 1:]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the file of the pretrained model")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync-every", type=int, default=0, help="DiLoCo's; 0 is DDP")
    parser.add_argument("--quantize", default="")
    parser.add_argument("--curve-every", type=int, default=50, help="steps between two points of the curve")
    parser.add_argument("--error-feedback", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
