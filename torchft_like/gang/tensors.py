"""Tensors in a form that a backend can move and reduce.

Gloo moves the memory of a tensor that has gaps, gaps included, without an error; and it ends the group over a
dtype that it does not know. So the tensors that go to a backend from here have no gaps, and one of the dtypes
that all backends know. This module knows tensors only, no groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchft_like.errors import NotSupportedError
from torchft_like.gang.base import ReduceOperation
from torchft_like.writing import is_dense, overlaps_itself

_KNOWN = frozenset(
    {
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
# By bytes: the bits are copied.
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}


@contextlib.contextmanager
def dense(tensor: Tensor, *, writes: bool) -> Iterator[Tensor]:
    """Yield the tensor without gaps; what the block writes into it is in `tensor` afterwards.

    Raises:
        ValueError: as from `check_dense`.
    """
    check_dense(tensor, writes=writes)
    original = tensor.detach()
    without_gaps = original.resolve_conj().resolve_neg().contiguous()
    yield without_gaps
    if writes and without_gaps is not original:
        original.copy_(without_gaps)


def check_dense(tensor: Tensor, *, writes: bool) -> None:
    """Check that the numbers of a tensor can be moved, and overwritten if `writes`.

    Raises:
        ValueError: it is sparse, nested or quantized, or has no memory; or elements to be
            overwritten share memory.
    """
    if not is_dense(tensor):
        kind = "nested ones" if tensor.is_nested else f"{tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"a gang takes dense tensors, not {kind}")
    if writes and overlaps_itself(tensor):
        raise ValueError("an expanded tensor cannot be overwritten: pass its `.contiguous()`")


def as_moved(tensor: Tensor) -> Tensor:
    """Return a view of the same memory, of a dtype that every backend can copy."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in _KNOWN else tensor.view(_CARRIERS[tensor.itemsize])


@contextlib.contextmanager
def reducible(tensor: Tensor, op: ReduceOperation) -> Iterator[Tensor]:
    """Yield the tensor in a dtype in which every backend can reduce it, and copy the result back.

    A MEAN of float16 is made in float32: the sum before the division may be more than a float16 holds, and a
    number that is divided first loses its last bits. The means of other dtypes have room.

    Raises:
        NotSupportedError: there is no such dtype.
    """
    numbers = _as_numbers(tensor)
    is_narrow = op is ReduceOperation.MEAN and numbers.dtype is torch.float16
    wider = torch.float32 if is_narrow else _WIDER.get(numbers.dtype)
    if wider is None:
        yield numbers
    else:
        wide = numbers.to(wider)
        yield wide
        numbers.copy_(wide)


def _as_numbers(tensor: Tensor) -> Tensor:
    """Return a view of the same memory: complex numbers as pairs, bools as 0 and 1."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    if tensor.dtype is torch.bool:
        return tensor.view(torch.uint8)
    if tensor.dtype not in _KNOWN and tensor.dtype not in _WIDER:
        raise NotSupportedError(f"{tensor.dtype} tensors cannot be reduced: convert to another dtype")
    return tensor


def effective(op: ReduceOperation, tensor: Tensor) -> ReduceOperation:
    """Return the operation to ask a backend for: to it bools are numbers, of which a sum may be neither 0 nor
    1.
    """
    if tensor.dtype is not torch.bool:
        return op
    is_or = op in (ReduceOperation.SUM, ReduceOperation.MAX)
    return ReduceOperation.MAX if is_or else ReduceOperation.MIN
