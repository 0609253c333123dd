"""The sums of rows on a GPU, by a kernel that reads each word once.

torch runs a product and a sum as two kernels, with a temporary of 64 bits for each word of 32 between them:
five times the bytes of one read. This module needs triton, which torch's CUDA builds include.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# A program keeps the factors of COLUMNS columns in registers, for HEIGHT rows.
COLUMNS = 2048
HEIGHT = 8


def row_sums(matrix: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of each row's words, each multiplied by its column's factor, modulo 2**64.

    Args:
        matrix: a contiguous tensor [rows, columns] of int32 or int64; there are as many columns as factors, a
          multiple of `COLUMNS`.
        factors: an int64 tensor [columns].
    """
    rows, row = matrix.shape
    blocks = row // COLUMNS
    parts = torch.empty((rows, blocks), dtype=torch.int64, device=matrix.device)
    # The index is None for a CPU, which triton's interpreter uses.
    with torch.accelerator.device_index(matrix.device.index):
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
