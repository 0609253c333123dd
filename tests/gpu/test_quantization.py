"""Rows on a GPU: triton's kernels are used, and write the bits that a CPU writes."""

from __future__ import annotations

import pytest
import torch

from torchft_like import quantization
from torchft_like.quantization import FORMATS, ROW, ROW_BYTES, Format, rows_for

RANKS, NUMBERS = 4, 1000 * ROW + 9
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_kernels_are_used(to: Format) -> None:
    assert quantization._kernels_for(torch.device("cuda", 0), to) is not None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_a_gpu_writes_the_bits_that_a_cpu_writes(to: Format, dtype: torch.dtype) -> None:
    """What ranks send, what an owner makes of it with an average over three, and what all read."""
    torch.manual_seed(7)
    magnitudes = torch.linspace(-9, 9, NUMBERS).exp2()
    given = [(torch.randn(NUMBERS) * magnitudes).to(dtype) for _ in range(RANKS)]
    found = []
    for device in ("cpu", "cuda"):
        parts = torch.empty(RANKS, rows_for(NUMBERS), ROW_BYTES, dtype=torch.uint8, device=device)
        for numbers, rows in zip(given, parts, strict=True):
            quantization.quantize(numbers.to(device), rows, to)
        total = torch.empty(len(parts[0]), ROW, device=device)
        quantization.add_up(parts, total, None, to)
        own, lost = torch.empty_like(parts[0]), torch.empty_like(total)
        quantization.reduce(parts, own, 3, to, lost)
        result = torch.empty(NUMBERS, dtype=dtype, device=device)
        quantization.dequantize(own, result, to)
        found.append([each.cpu() for each in (parts, total, own, lost, result)])
    assert all(map(torch.equal, *found))
