"""How fast a fingerprint reads a state on the device, beside a copy on it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from tools.gpu.figures import figure, run_probe
from torchft_like.divergence import StateFingerprint

OVER_READ_BAR = 2.0
ROUNDS = 7


def main(*, dry: bool) -> None:
    device = torch.device("cpu" if dry else "cuda")
    size, tensor_bytes = (64 << 20, 16 << 20) if dry else (4 << 30, 64 << 20)

    for dtype in (torch.float32, torch.bfloat16):
        elements = tensor_bytes // dtype.itemsize
        tensors = [torch.randn(elements, device=device).to(dtype) for _ in range(size // tensor_bytes)]
        target, fingerprint = torch.empty_like(tensors[0]), StateFingerprint(tensors, slices=1)
        copied = seconds_on(device, lambda: [target.copy_(tensor) for tensor in tensors])  # noqa: B023 - called at once
        taken = seconds_on(device, lambda: fingerprint.take(0).result())  # noqa: B023 - called at once
        read = copied / 2  # a copy reads and writes
        name = str(dtype).removeprefix("torch.")
        figure(f"{name}: read", size / taken / 1e9, "GB/s")
        figure(f"{name}: bandwidth, by a copy", size / read / 1e9, "GB/s")
        figure(f"{name}: time over that of one read", taken / read, "x", bar=OVER_READ_BAR)


def seconds_on(device: torch.device, act: Callable[[], object]) -> float:
    """Return the median of the seconds that an act takes, until the device has done it."""
    times = []
    for _ in range(ROUNDS + 1):
        _synchronize(device)
        begin = perf_counter()
        act()
        _synchronize(device)
        times.append(perf_counter() - begin)
    return median(times[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    run_probe(main)
