"""What callers pass as tensors: checked, and told to the other ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from torchft_like.group_coordinator.plans import checked_dim, shape_text
from torchft_like.writing import is_dense, overlaps_itself

Terms = tuple[tuple[str, str], ...]


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


def tensor_terms(tensor: Tensor, open_dim: int | None = None) -> Terms:
    """What the ranks must agree on about a tensor; `open_dim` is for each rank to choose."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ("dtype", dtype), ("shape", shape_text(tensor.shape, open_dim))


def lane_terms(tensors: Sequence[Tensor], lanes: Collection[str]) -> Terms:
    """By the kind of device, which process group takes each tensor: ranks in different ones wait in vain."""
    if len(lanes) == 1:
        return ()
    kinds = ", ".join(tensor.device.type if tensor.device.type in lanes else "cpu" for tensor in tensors)
    return (("device", kinds),)


def tensors_terms(tensors: Sequence[Tensor], dim: int, open_dim: int | None) -> Terms:
    """What the ranks must agree on about tensors that are joined or split along `dim`."""
    dtypes = ", ".join(tensor_terms(tensor)[0][1] for tensor in tensors)
    shapes = ", ".join(shape_text(tensor.shape, open_dim) for tensor in tensors)
    return ("dtype", dtypes), ("shape", shapes), ("dim", str(dim))
