"""A training step under a Manager over the same step without: a GPT in bf16, one replica, one rank.

With one replica no gradient leaves the GPU; what is left is what hooks, quorum and commit cost.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from tools.gpu import contenders
from tools.gpu.contenders import ANSWER_S, OURS, RAW, TORCHFT, Contender, Here, synchronize
from tools.gpu.figures import attempted, figure, median_figure, run_probe
from torchft_like.testing.ranks import Ranks, running

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from tiny_gpt import TinyGPT

CONTENDERS = (RAW, Contender("ours", OURS), Contender("torchft's", TORCHFT))
OVER_RAW_BAR = 1.01
BATCH = 4
# 28 layers of 12 * 1024² parameters are 352 million.
LARGE = {"width": 1024, "layers": 28, "heads": 16, "context": 1024}
SMALL = {"width": 32, "layers": 2, "heads": 2, "context": 32}


def main(way: str, *, dry: bool) -> None:
    steps, rounds = (2, 2) if dry else (10, 9)
    with ExitStack() as stack:
        alive: dict[str, Ranks] = {}
        for contender in CONTENDERS:
            ranks = stack.enter_context(running(1, ANSWER_S))
            if attempted(lambda: ranks.ask(make, contender, way, dry), contender.name):  # noqa: B023 - called at once
                alive[contender.name] = ranks
        samples: dict[str, list[float]] = {name: [] for name in alive}
        for turn in range(rounds + 1):
            for name, ranks in alive.items():
                (seconds,) = ranks.ask(take, steps)
                if turn:
                    samples[name].append(seconds * 1e3)
    times = {name: median_figure(f"{name}: a step", of_one, "ms") for name, of_one in samples.items()}
    if {"ours", "raw"} <= times.keys():
        figure("ours over raw", times["ours"] / times["raw"], "x", bar=OVER_RAW_BAR)
    if {"ours", "torchft's"} <= times.keys():
        figure("ours over torchft's", times["ours"] / times["torchft's"], "x", bar=1.0)


def make(here: Here, rank: int, contender: Contender, way: str, dry: bool) -> bool:
    contenders.make(here, rank, contender, dry)
    contenders.init_raw(here) if not contender.package else None
    torch.manual_seed(0)
    size = SMALL if dry else LARGE
    model = TinyGPT(**size).to(here.device, torch.bfloat16)
    here.tokens = torch.randint(0, 256, (BATCH, size["context"] + 1), device=here.device)
    if way == "fsdp2":
        _shard(here, model)
    here.optimizer = torch.optim.AdamW(model.parameters(), fused=not dry)
    if contender.package:
        contenders.make_manager(here, model.load_state_dict, model.state_dict)
        package = importlib.import_module(contender.package)
        here.optimizer = package.Optimizer(here.manager, here.optimizer)
    if way == "ddp":
        here.model = _wrapped(here, model)
    else:
        here.model = model
        _average(here, model)
    return True


def _wrapped(here: Here, model: nn.Module) -> nn.Module:
    if not here.contender.package:
        return DistributedDataParallel(model)
    package = importlib.import_module(here.contender.package)
    wrapped: nn.Module = package.DistributedDataParallel(here.manager, model)
    return wrapped


def _shard(here: Here, model: TinyGPT) -> None:
    if not dist.is_initialized():
        group = here.group
        contenders.init_raw(here)
        here.group = group
    mesh = init_device_mesh(here.device.type, (1,))
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _average(here: Here, model: nn.Module) -> None:
    """Average over replicas as users of both packages do: by the Manager, in FSDP's all-reduce hook."""
    if not here.contender.package:
        return

    def average(gradients: Tensor) -> None:
        here.manager.allreduce(gradients).wait()

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_all_reduce_hook(average)


def take(here: Here, rank: int, count: int) -> float:
    """Return the seconds of a step, over so many."""
    synchronize(here)
    begin = perf_counter()
    for _ in range(count):
        here.optimizer.zero_grad()
        logits: Any = here.model(here.tokens[:, :-1])
        cross_entropy(logits.flatten(0, 1).float(), here.tokens[:, 1:].flatten()).backward()  # type: ignore[no-untyped-call]
        here.optimizer.step()
    synchronize(here)
    return (perf_counter() - begin) / count


if __name__ == "__main__":
    run_probe(main, "ddp" if "--ddp" in sys.argv else "fsdp2")
