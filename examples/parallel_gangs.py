"""Two kinds of parallelism on CPU: a model split over two processes, and its batch over two such pairs.

    python examples/parallel_gangs.py

starts four processes on this machine, which split the root gang into tensor parallel and data parallel
gangs, train a two-layer network for a few steps, and compare it with the same network in one piece.
What you should see: who is with whom, a loss that falls, and a difference of zero but for rounding.

It survives nothing: for gangs whose members may die see `ManagedGang` in docs/gangs.md. Under torchrun
(`torchrun --nproc_per_node=4 examples/parallel_gangs.py`) it starts no processes of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from torchft_like.gang import (
    Gangs,
    ProcessGroupGang,
    ReduceOperation,
    create_parallel_gangs,
    maybe_get_current_gangs,
)
from torchft_like.process_group.store import serve_store

PROCESSES = 4
TP_SIZE = 2
INPUTS, HIDDEN, OUTPUTS, BATCH = 8, 16, 4, 12
STEPS, LEARNING_RATE = 20, 0.2
STORE_TIMEOUT = timedelta(seconds=60)


def main() -> None:
    if len(sys.argv) > 1:
        sys.exit(__doc__)
    if "RANK" in os.environ:
        train()
    else:
        sys.exit(start_processes())


def start_processes() -> int:
    """Do what torchrun does: give every process its rank and a store to meet in; return the worst exit
    code.
    """
    store, _ = serve_store("127.0.0.1", STORE_TIMEOUT)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(PROCESSES)}
    ours = {"TORCHELASTIC_USE_AGENT_STORE": "True"}  # nobody else has to serve it
    started = [
        subprocess.Popen([sys.executable, __file__], env={**os.environ, **where, **ours, "RANK": str(rank)})
        for rank in range(PROCESSES)
    ]
    try:
        return max(abs(process.wait()) for process in started)
    finally:
        for process in started:
            process.kill()


def train() -> None:
    torch.set_num_threads(1)
    root = ProcessGroupGang.create_default_process_group(torch.device("cpu"))
    gangs = create_parallel_gangs(root, tp_size=TP_SIZE)
    show_who_is_with_whom(gangs)

    torch.manual_seed(0)  # the same numbers everywhere: each process takes its share of them
    whole = nn.Sequential(
        nn.Linear(INPUTS, HIDDEN, bias=False), nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS, bias=False)
    )
    inputs, targets = torch.randn(BATCH, INPUTS), torch.randn(BATCH, OUTPUTS)
    with gangs:  # so that the layers find their gang
        part = SplitNetwork(whole)
    rows = slice(gangs.dp.rank, None, gangs.dp.size)

    for step in range(STEPS):
        loss = nn.functional.mse_loss(part(inputs[rows]), targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        for parameter in part.parameters():
            gangs.dp.all_reduce(gradient_of(parameter), ReduceOperation.MEAN)
        descend(part)
        gangs.dp.all_reduce(mean := loss.detach().clone(), ReduceOperation.MEAN)

        reference = nn.functional.mse_loss(whole(inputs), targets)
        reference.backward()  # type: ignore[no-untyped-call]
        descend(whole)
        if root.rank == 0 and step % 5 == 4:
            print(f"step {step + 1:2d}  loss {mean:.4f}  in one piece {reference:.4f}", flush=True)

    worst = (part.first - part.share_of(whole)[0]).abs().max().detach()
    root.all_reduce(worst, ReduceOperation.MAX)
    if root.rank == 0:
        print(f"largest difference from the network in one piece: {worst:.1e}", flush=True)
    gangs.close()
    if worst > 1e-5:
        sys.exit("the split network is another one")


class SplitNetwork(nn.Module):
    """A tensor parallel gang's share of a network: some of the hidden units, with all that leads to them."""

    def __init__(self, whole: nn.Sequential) -> None:
        super().__init__()
        gangs = maybe_get_current_gangs()
        if gangs is None:
            raise RuntimeError("a SplitNetwork is made in `with gangs:`")
        self.gang = gangs.tp
        first, second = self.share_of(whole)
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(inputs @ self.first.t())
        summed: Tensor = SumOverGang.apply(hidden @ self.second.t(), self.gang)  # type: ignore[no-untyped-call]
        return summed

    def share_of(self, whole: nn.Sequential) -> tuple[Tensor, Tensor]:
        """Return this process's part of both weights."""
        width = HIDDEN // self.gang.size
        units = slice(self.gang.rank * width, (self.gang.rank + 1) * width)
        first, second = (parameter.detach() for parameter in whole.parameters())
        return first[units], second[:, units]


class SumOverGang(torch.autograd.Function):
    """The sum of the members' tensors, and as its gradient the gradient of that sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, gang: ProcessGroupGang) -> Tensor:
        gang.all_reduce(summed := partial.clone(), ReduceOperation.SUM)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def descend(model: nn.Module) -> None:
    """Take one step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(gradient_of(parameter), alpha=LEARNING_RATE)
            parameter.grad = None


def gradient_of(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("backward() has not come to a parameter")
    return parameter.grad


def show_who_is_with_whom(gangs: Gangs) -> None:
    def members(gang: Any) -> list[int]:
        ranks = torch.empty(gang.size, dtype=torch.int64)
        gang.all_gather(ranks, torch.tensor([gangs.root.rank]))
        return ranks.tolist()

    tp, dp = members(gangs.tp), members(gangs.dp)
    for rank in range(gangs.root.size):
        gangs.root.barrier()
        if gangs.root.rank == rank:
            print(f"process {rank}: tensor parallel with {tp}, data parallel with {dp}", flush=True)
    gangs.root.barrier()


if __name__ == "__main__":
    main()
