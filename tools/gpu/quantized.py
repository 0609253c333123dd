"""How fast triton's kernels quantize, add up and read rows on the device, beside torch's own operations; and
what an all-reduce takes that sends bytes, beside one that sends the numbers.

The two ranks share a device, and loopback carries what they send.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch.distributed import AllreduceOptions

from tools.gpu.contenders import OURS, TORCHFT, Contender, Here, ranks_of, synchronize
from tools.gpu.figures import attempted, figure, median_figure, run_probe
from tools.gpu.fingerprints import seconds_on
from torchft_like import quantization
from torchft_like.quantization import FORMATS, ROW, ROW_BYTES, Format

RANKS = 4
ROUNDS = 5


def main(*, dry: bool) -> None:
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    count = 1 << (10 if dry else 18)  # rows: 268 million bytes of float32
    numbers = torch.randn(count * ROW, device=device)
    parts = torch.empty(RANKS, count // RANKS, ROW_BYTES, dtype=torch.uint8, device=device)
    rows, own = parts.view(count, ROW_BYTES), torch.empty_like(parts[0])
    for to in FORMATS.values():
        calls: dict[str, tuple[int, tuple[Any, ...]]] = {
            "quantize": (4 * numbers.numel() + rows.numel(), (numbers, rows, to)),
            "reduce": (parts.numel() + own.numel(), (parts, own, RANKS, to, None)),
            "dequantize": (4 * numbers.numel() + rows.numel(), (rows, numbers, to)),
        }
        for name, (moved, arguments) in calls.items():
            _compare(device, f"{to.name}: {name}", moved, to, name, arguments)
    for package in (OURS,) if dry else (OURS, TORCHFT):  # torchft's needs triton
        contender = Contender(package, package)
        attempted(lambda: _compare_sums(contender, 1 << (16 if dry else 24), dry=dry), package)  # noqa: B023


def _compare(
    device: torch.device, what: str, moved: int, to: Format, name: str, arguments: tuple[Any, ...]
) -> None:
    by_torch: Callable[..., None] = getattr(quantization, f"_{name}")
    slow = seconds_on(device, partial(by_torch, *arguments))
    figure(f"{what}, by torch", moved / slow / 1e9, "GB/s")
    if (kernels := quantization._kernels_for(device, to)) is not None:
        fast = seconds_on(device, partial(getattr(kernels, name), *arguments))
        figure(f"{what}, by triton", moved / fast / 1e9, "GB/s")
        figure(f"{what}, torch's time over triton's", slow / fast, "x")
    elif device.type == "cuda":
        raise RuntimeError(f"there are no kernels for {to.name}: the log says why")


def _compare_sums(contender: Contender, count: int, *, dry: bool) -> None:
    with ranks_of(contender, 2, dry=dry) as ranks:
        for how in ("whole", "in fp8"):
            seconds = [max(ranks.ask(reduce_seconds, count, how != "whole")) for _ in range(ROUNDS + 1)]
            median_figure(
                f"{contender.name}: all-reduce of {4 * count / 1e6:.3g} MB, {how}", seconds[1:], "s"
            )


def reduce_seconds(here: Here, rank: int, count: int, quantized: bool) -> float:
    """Return the seconds of an all-reduce, until the device has done it."""
    tensor = torch.ones(count, device=here.device)
    collectives = importlib.import_module(f"{here.contender.package}.collectives")
    synchronize(here)
    begin = perf_counter()
    if quantized:
        collectives.allreduce_quantized([tensor], AllreduceOptions(), here.group).wait()
    else:
        here.group.allreduce([tensor], AllreduceOptions()).wait()
    synchronize(here)
    seconds = perf_counter() - begin
    if not bool((tensor - 2).abs().amax() < 0.3):
        raise ArithmeticError("the sum is not that of both ranks")
    return seconds


if __name__ == "__main__":
    run_probe(main)
