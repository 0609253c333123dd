"""A tensor as plain data: which storage, by number, and how the tensor lies in it."""

from __future__ import annotations

import torch
from torch import Tensor

# (storage, dtype, offset in elements, sizes, strides)
TensorSpec = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]

# Both ends are the same torch, so they agree on the order.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_INDEX = {dtype: index for index, dtype in enumerate(_DTYPES)}


def spec_of(tensor: Tensor, storage: int, offset: int | None = None) -> TensorSpec:
    """Describe a tensor in a storage; at its own offset unless another is given."""
    start = int(tensor.storage_offset()) if offset is None else offset
    return storage, _INDEX[tensor.dtype], start, tuple(tensor.shape), tensor.stride()


def tensor_at(storage: torch.UntypedStorage, spec: TensorSpec) -> Tensor:
    """The tensor that a description stands for."""
    _, dtype, offset, sizes, strides = spec
    return torch.empty(0, dtype=_DTYPES[dtype], device=storage.device).set_(storage, offset, sizes, strides)
