"""Whether what a test found is what it expected, bit for bit."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch

from torchft_like.dtypes import as_bytes


def same(left: Any, right: Any) -> bool:
    """Return whether two states are equal in type, value and, for floats, bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, np.ndarray | np.generic):
        return bool(
            left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return len(left) == len(right) and all(
            same(a, b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right)
    if isinstance(left, complex):
        return same([left.real, left.imag], [right.real, right.imag])
    return bool(left == right)


def bits(tensor: torch.Tensor) -> bytes:
    return as_bytes(tensor.contiguous()).numpy().tobytes()
