"""A hash of 64 bits of the bytes of a tensor, computed on the tensor's device.

The bytes are read as 32-bit words, each is multiplied by a pseudo-random odd 64-bit number of its own, and
the products are added modulo 2**64: multilinear hashing (Lemire and Kaser, "Strongly universal string hashing
is fast", 2014). A change within one word is always found, since an odd factor has an inverse. Changes of
several words cancel each other with a probability below 2**-25 if all of them are of the highest bit, and
below 2**-55 if one is of the lowest. Integer addition is exact in any order, so that the result does not
depend on the device or on the number of its threads.

The words are taken in rows of `ROW` with the same factors for each; the sums of the rows are words
of 64 bits, which are added up in the same way with other factors.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from torchft_like.devices import agreeing_kernels

ROW = 2**16

# A function of a matrix and a factor for each column, which returns the weighted sum of each row.
Kernel = Callable[[Tensor, Tensor], Tensor]

# The number of rows at a time. The products are temporaries, which should stay in a processor's cache; on a
# GPU the kernels should take longer than their launch.
_ROWS_ON_CPU = 1
_ROWS_ELSEWHERE = 2**6


def word_sum(elements: Tensor) -> Tensor:
    """Return the weighted sum over the bytes of `elements`, a plain tensor of one dimension and any dtype.

    Returns:
        An int64 tensor of no dimension on the same device; this does not wait for it.
    """
    words = _as_words(elements)
    factors = _factors("words", words.device)
    rows = _rows_of(words, factors)
    while len(rows) > 1:
        rows = _rows_of(rows, _factors("rows", words.device))
    return rows[0] if len(rows) else torch.zeros((), dtype=torch.int64, device=words.device)


def _rows_of(words: Tensor, factors: Tensor) -> Tensor:
    """Return one sum for each row."""
    if len(words) <= ROW:
        return (words * factors[: len(words)]).sum().reshape(1)
    whole = len(words) // ROW
    matrix = words[: whole * ROW].view(whole, ROW)
    sums = [_kernel_for(words.device)(matrix, factors)]
    if whole * ROW < len(words):
        sums.append(_rows_of(words[whole * ROW :], factors))
    return torch.cat(sums)


@functools.cache
def _kernel_for(device: torch.device) -> Kernel:
    """Return the kernel that adds up rows on a device: the fused one only if it agrees with torch."""

    def agree(kernels: ModuleType) -> bool:
        matrix = torch.arange(3 * ROW, dtype=torch.int32, device=device).mul_(-1_640_531_535).view(3, ROW)
        factors = _factors("words", device)
        return torch.equal(kernels.row_sums(matrix, factors), _row_sums(matrix, factors))

    kernels = agreeing_kernels("torchft_like.divergence.fused", device, agree)
    return _row_sums if kernels is None else cast("Kernel", kernels.row_sums)


def _row_sums(matrix: Tensor, factors: Tensor) -> Tensor:
    """Return the sum of each row's words, each multiplied by its column's factor, modulo 2**64."""
    step = _ROWS_ON_CPU if matrix.device.type == "cpu" else _ROWS_ELSEWHERE
    rows = range(0, len(matrix), step)
    return torch.cat([(matrix[row : row + step] * factors).sum(dim=1) for row in rows])


def _as_words(elements: Tensor) -> Tensor:
    """Return the bytes as int32, on the same memory if that is aligned, and padded with zeros."""
    if elements.dtype == torch.int32:
        return elements
    size = elements.element_size()
    if elements.numel() * size % 4 == 0 and elements.storage_offset() * size % 4 == 0:
        return elements.view(torch.int32)
    data = elements.view(torch.uint8)
    filled = torch.zeros(-(-len(data) // 4) * 4, dtype=torch.uint8, device=data.device)
    filled[: len(data)] = data
    return filled.view(torch.int32)


@functools.cache
def _factors(purpose: str, device: torch.device) -> Tensor:
    """Return `ROW` odd numbers, the same in every process and on every machine."""
    stream = hashlib.shake_128(f"torchft_like divergence {purpose}".encode()).digest(8 * ROW)
    return (torch.frombuffer(bytearray(stream), dtype=torch.int64) | 1).to(device)
