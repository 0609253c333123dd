"""A tensor as plain data: which storage, by number, and how the tensor lies in it."""

from __future__ import annotations

import torch
from torch import Tensor

# (storage, dtype, offset in elements, sizes, strides)
TensorSpec = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]

# Both ends are the same torch, so they agree on the order.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}


def spec_of(tensor: Tensor, storage: int) -> TensorSpec:
    """Describe a tensor in its own storage."""
    offset = int(tensor.storage_offset())
    return storage, _INDEX[tensor.dtype], offset, tuple(tensor.shape), tensor.stride()


def contiguous_spec(tensor: Tensor, storage: int, offset: int) -> TensorSpec:
    """Describe a place for the tensor's elements, one after the other, in another storage."""
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return storage, _INDEX[tensor.dtype], offset, tuple(tensor.shape), tuple(reversed(strides))


def tensor_at(storage: torch.UntypedStorage, spec: TensorSpec) -> Tensor:
    """The tensor that a description stands for."""
    _, dtype, offset, sizes, strides = spec
    return torch.empty(0, dtype=_DTYPES[dtype], device=storage.device).set_(storage, offset, sizes, strides)
