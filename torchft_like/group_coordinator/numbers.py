"""Which dtypes a sum is made in: backends add few of those that tensors have.

A complex number is two real ones; a bool is a number that is zero or not; a small integer is added as a
larger one and cut, which is how it would have wrapped around. Numbers of eight bits after the point are
added as float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ADDED_AS_THEY_ARE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)
_ADDED_AS = {
    torch.bool: torch.int32,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32,
    torch.float8_e4m3fnuz: torch.float32,
    torch.float8_e5m2: torch.float32,
    torch.float8_e5m2fnuz: torch.float32,
}


def addable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that backends and torch add: the tensor itself where it has one.

    Raises:
        ValueError: there is none.
    """
    if tensor.dtype in _ADDED_AS_THEY_ARE:
        return tensor
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    if (wider := _ADDED_AS.get(tensor.dtype)) is None:
        raise ValueError(f"tensors of {tensor.dtype} cannot be added")
    return tensor.to(wider)


def as_before(total: Tensor, dtype: torch.dtype) -> Tensor:
    """A sum of `addable` tensors in the dtype of its terms."""
    if dtype.is_complex:
        return torch.view_as_complex(total)
    return total if total.dtype == dtype else total.to(dtype)
