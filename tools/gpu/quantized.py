"""How fast triton's kernels quantize, add up and read rows on the device, beside torch's own operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tools.gpu.figures import figure, run_probe
from tools.gpu.fingerprints import seconds_on
from torchft_like import quantization
from torchft_like.quantization import FORMATS, ROW, ROW_BYTES, Format

RANKS = 4


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


if __name__ == "__main__":
    run_probe(main)
