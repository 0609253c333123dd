"""The sums of rows on a GPU, by a kernel that reads each word once.

torch makes of a product and a sum two kernels, with a temporary of 64 bits for each word of 32 between them:
five times the bytes of one read. Needs triton, which torch's CUDA builds bring along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program keeps the factors of so many columns in registers, for so many rows.
COLUMNS = 2048
HEIGHT = 8


def row_sums(matrix: Tensor, factors: Tensor) -> Tensor:
    """The sum of each row's words, each multiplied by its column's factor, modulo 2**64.

    Args:
        matrix: contiguous, of int32 or int64; as many columns as there are factors, a multiple of `COLUMNS`.
        factors: int64.
    """
    rows, row = matrix.shape
    blocks = row // COLUMNS
    parts = torch.empty((rows, blocks), dtype=torch.int64, device=matrix.device)
    with torch.accelerator.device_index(matrix.device.index):  # None for a CPU, of triton's interpreter
        _add_up[blocks, triton.cdiv(rows, HEIGHT)](matrix, factors, parts, rows, row, COLUMNS, HEIGHT)
    return parts.sum(dim=1)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _add_up(words, factors, parts, rows, row, columns: tl.constexpr, height: tl.constexpr):  # type: ignore[no-untyped-def] # a kernel
    block = tl.program_id(0)
    first = tl.program_id(1).to(tl.int64) * height
    places = block * columns + tl.arange(0, columns)
    factor = tl.load(factors + places)
    for offset in range(height):
        number = first + offset
        if number < rows:
            word = tl.load(words + number * row + places).to(tl.int64)
            tl.store(parts + number * (row // columns) + block, tl.sum(word * factor, axis=0))
