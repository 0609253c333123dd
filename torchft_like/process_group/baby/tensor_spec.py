"""A tensor as a fixed struct: the number of its storage, and how the tensor lies in it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

TensorSpec = bytes  # number of dimensions, storage, dtype, offset in elements, sizes, strides

# Both processes run the same torch, so they agree on the order.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}
# torch allows no more dimensions
_STRUCTS = [struct.Struct(f"<BQBq{2 * dimensions}q") for dimensions in range(65)]


def spec_of(tensor: Tensor, storage: int) -> TensorSpec:
    """Describe a tensor in its own storage."""
    return _spec(tensor, storage, int(tensor.storage_offset()), tensor.stride())


def contiguous_spec(tensor: Tensor, storage: int, offset: int) -> TensorSpec:
    """Describe a place for the tensor's elements in another storage, in contiguous order."""
    strides: list[int] = []
    step = 1
    for size in reversed(tensor.shape):
        strides.append(step)
        step *= max(size, 1)
    return _spec(tensor, storage, offset, strides[::-1])


def storage_of(spec: TensorSpec) -> int:
    """Return the number of the storage in which the tensor lies."""
    return int.from_bytes(spec[1:9], "little")


def tensor_at(storage: torch.UntypedStorage, spec: TensorSpec) -> Tensor:
    """Make the tensor that a description stands for."""
    dimensions, _, dtype, offset, *forms = _STRUCTS[spec[0]].unpack(spec)
    empty = torch.empty(0, dtype=_DTYPES[dtype], device=storage.device)
    return empty.set_(storage, offset, forms[:dimensions], forms[dimensions:])


def _spec(tensor: Tensor, storage: int, offset: int, strides: Sequence[int]) -> TensorSpec:
    shape = tensor.shape
    dimensions = len(shape)
    return _STRUCTS[dimensions].pack(dimensions, storage, _INDEX[tensor.dtype], offset, *shape, *strides)
