"""Tensors as a group can move and add them: what callers pass is checked, and told to the other ranks.

Backends add few of the dtypes that tensors have. A complex number is added as two real ones; a bool as a
number that is zero or not; a small integer as a larger one, and cut, which is how it would have wrapped
around; numbers of eight bits after the point as float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from torchft_like.agreement.statements import Terms, specification
from torchft_like.communicator.sizes import checked_dim
from torchft_like.dtypes import REDUCIBLE
from torchft_like.writing import is_dense, overlaps_itself

_ADDED_AS: Mapping[torch.dtype, torch.dtype] = {
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


def checked_tensor(value: object) -> Tensor:
    """The value, if it is a dense tensor.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"a dense torch tensor was expected, not {type(value).__name__}")
    if not is_dense(value):
        kind = "a nested one" if value.is_nested else f"{value.dtype} with {value.layout} on {value.device}"
        raise TypeError(f"a dense torch tensor was expected, not {kind}")
    return value


def checked_target(value: object) -> Tensor:
    """The value, if it is a dense tensor whose every element can be overwritten.

    Raises:
        TypeError: it is no dense tensor.
        ValueError: some of its elements are one in memory.
    """
    tensor = checked_tensor(value)
    if overlaps_itself(tensor):
        raise ValueError("an expanded tensor cannot be overwritten: pass its `.contiguous()`")
    return tensor


def checked_along(tensors: Sequence[object], dim: int) -> int:
    """The dimension that `dim` means, of one or several tensors with the same number of rows along it.

    Raises:
        TypeError: one of them is no dense tensor.
        ValueError: there are none, they have no such dimension, or not the same number of rows.
    """
    if not tensors:
        raise ValueError("a list of tensors is empty")
    checked = [checked_tensor(tensor) for tensor in tensors]
    places = [checked_dim(dim, tensor.dim()) for tensor in checked]
    if len(set(places)) > 1:
        raise ValueError(f"dim {dim} is not the same dimension of tensors of {[t.dim() for t in checked]}")
    rows = [tensor.shape[places[0]] for tensor in checked]
    if len(set(rows)) > 1:
        raise ValueError(f"the tensors of a list have different numbers of rows along dim {dim}: {rows}")
    return places[0]


def specifications(tensors: Sequence[Tensor], open_dim: int | None = None) -> tuple[str, ...]:
    """What the ranks must agree on about tensors; their rows along `open_dim` are each rank's own choice."""
    return tuple(specification(tensor.dtype, tensor.shape, open_dim) for tensor in tensors)


def device_terms(tensors: Sequence[Tensor], device_types: Collection[str]) -> Terms:
    """Which process group takes each tensor, by the type of its device: ranks must use the same one.

    Args:
        device_types: those that have a group; tensors of others go through memory of the CPU.
    """
    if len(device_types) == 1:
        return ()
    kinds = (tensor.device.type for tensor in tensors)
    return (("device", ", ".join(kind if kind in device_types else "cpu" for kind in kinds)),)


def addable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that backends and torch add: the tensor itself where it has one.

    Raises:
        ValueError: there is none.
    """
    if tensor.dtype in REDUCIBLE:
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


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat: backends move bytes of any dtype, and numbers of few."""
    flat = tensor.reshape(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def from_bytes(data: bytes, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of bytes of its own."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
