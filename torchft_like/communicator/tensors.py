"""Tensors in the form in which a group can move and add them, and checks of the caller's tensors.

Backends add few of the dtypes that tensors have. A complex number is added as two real ones, a bool as an
int32, a small integer as a larger one and cut afterwards, which is how it would have wrapped around, and a
float8 number as float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from torchft_like.communicator.sizes import checked_dim
from torchft_like.core.agreement.statements import Terms, specification
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
    """Return the value, if it is a dense tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"a dense torch tensor was expected, not {type(value).__name__}")
    if not is_dense(value):
        kind = "a nested one" if value.is_nested else f"{value.dtype} with {value.layout} on {value.device}"
        raise TypeError(f"a dense torch tensor was expected, not {kind}")
    return value


def checked_target(value: object) -> Tensor:
    """Return the value, if it is a dense tensor whose every element can be overwritten.

    Raises:
        TypeError: the value is no dense tensor.
        ValueError: some of its elements share memory.
    """
    tensor = checked_tensor(value)
    if overlaps_itself(tensor):
        raise ValueError("an expanded tensor cannot be overwritten: pass its `.contiguous()`")
    return tensor


def checked_along(tensors: Sequence[object], dim: int) -> int:
    """Return the dimension that `dim` means, for tensors with the same number of rows along it.

    Raises:
        TypeError: a value is no dense tensor.
        ValueError: there are no tensors, they have no such dimension, or not the same number of rows.
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
    """Describe tensors for the ranks to agree on; each rank chooses its own rows along `open_dim`."""
    return tuple(specification(tensor.dtype, tensor.shape, open_dim) for tensor in tensors)


def device_terms(tensors: Sequence[Tensor], device_types: Collection[str]) -> Terms:
    """Describe which process group moves each tensor, by the type of its device: ranks must use the same one.

    Args:
        device_types: the types that have a group; tensors of other types go through memory of the CPU.
    """
    if len(device_types) == 1:
        return ()
    kinds = (tensor.device.type for tensor in tensors)
    return (("device", ", ".join(kind if kind in device_types else "cpu" for kind in kinds)),)


def is_addable_as_is(value: object) -> bool:
    """Return whether the value is a tensor that a backend adds up as it is, apart from gaps."""
    return (
        type(value) is Tensor
        and value.dtype in REDUCIBLE
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_neg()
    )


def addable(tensor: Tensor) -> Tensor:
    """Return the same numbers in a dtype that backends and torch add: the tensor itself if it has one."""
    if tensor.dtype in REDUCIBLE:
        return tensor
    if tensor.dtype.is_complex:
        return torch.view_as_real(tensor.resolve_conj())
    if (wider := _ADDED_AS.get(tensor.dtype)) is None:
        raise ValueError(f"tensors of {tensor.dtype} cannot be added")
    return tensor.to(wider)


def as_before(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a sum of `addable` tensors back to the dtype of its terms."""
    if dtype.is_complex:
        return torch.view_as_complex(total)
    return total if total.dtype == dtype else total.to(dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the flat memory of a contiguous tensor: backends move bytes of any dtype, but numbers of few."""
    flat = tensor.reshape(-1)
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def from_bytes(data: bytes, device: torch.device | str = "cpu") -> Tensor:
    """Return a tensor with a copy of the bytes."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
