"""The arguments of a gang's functions: checks, which communicate with no other process, and tensors in the
form in which a backend can move and reduce them.

Gloo moves the memory of a tensor that has gaps, gaps included, without an error; and it ends the group over a
dtype that it does not know. So the tensors that go to a backend from here have no gaps, and one of the dtypes
that all backends know.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from enum import Enum

import torch
from torch import Tensor

from torchft_like.communicator.tensors import addable
from torchft_like.dtypes import REDUCIBLE
from torchft_like.errors import NotSupportedError
from torchft_like.writing import is_dense, overlaps_itself

# By bytes: the bits are copied.
_CARRIERS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


class ReduceOperation(Enum):
    """The operation of `all_reduce`. For bools SUM and MAX mean "or", PRODUCT and MIN "and"."""

    SUM = 1
    MEAN = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5


def check_source(source_rank: int, size: int) -> int:
    rank = operator.index(source_rank)
    if not 0 <= rank < size:
        raise ValueError(f"source_rank {rank} is not within [0, {size}), the ranks of this gang")
    return rank


def check_partition(partition: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """Return the ranks of several parts of a gang of `size`, which have no rank in common."""
    parts = [tuple(map(operator.index, ranks)) for ranks in partition]
    for ranks in parts:
        if not ranks:
            raise ValueError("a gang needs at least one rank")
        if outside := [rank for rank in ranks if not 0 <= rank < size]:
            raise ValueError(f"ranks {outside} are not within [0, {size}), the ranks of this gang")
        if len(set(ranks)) < len(ranks):
            raise ValueError(f"ranks {list(ranks)} have duplicates")
    members = [rank for ranks in parts for rank in ranks]
    if twice := sorted({rank for rank in members if members.count(rank) > 1}):
        raise ValueError(f"ranks {twice} are in more than one of {[list(ranks) for ranks in parts]}")
    return parts


def check_reduction(tensor: Tensor, op: ReduceOperation) -> None:
    if not isinstance(op, ReduceOperation):
        raise ValueError(f"{op!r} is no ReduceOperation")
    if op is ReduceOperation.MEAN and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(
            f"the mean of {tensor.dtype} tensors is not one of them: convert to a floating point dtype, "
            "or use SUM"
        )
    if tensor.is_complex() and op not in (ReduceOperation.SUM, ReduceOperation.MEAN):
        raise ValueError(f"{op.name} of complex numbers: only SUM and MEAN are defined")


def check_gather(output: Tensor, source: Tensor, size: int) -> None:
    """Raise a ValueError unless `output` has room for all members' tensors, and no more."""
    _check_alike(output, source, "output_tensor")
    stacked = (size, *source.shape)
    joined = (size * source.shape[0], *source.shape[1:]) if source.dim() else None
    if tuple(output.shape) not in (stacked, joined):
        shapes = f"{stacked}" if joined is None else f"{stacked} or {joined}"
        raise ValueError(f"output_tensor has the shape {tuple(output.shape)}, not {shapes}")
    if not output.is_contiguous():
        raise ValueError("output_tensor is not contiguous in memory: gather into one that is, and copy")


def check_gather_list(outputs: Sequence[Tensor], source: Tensor, size: int) -> None:
    """Raise a ValueError unless there is one tensor like `source` for every member."""
    if len(outputs) != size:
        raise ValueError(f"output_tensors has {len(outputs)} tensors for a gang of {size}")
    for place, output in enumerate(outputs):
        _check_alike(output, source, f"output_tensors[{place}]")
        if output.shape != source.shape:
            raise ValueError(
                f"output_tensors[{place}] has the shape {tuple(output.shape)}, not {tuple(source.shape)}"
            )


def _check_alike(output: Tensor, source: Tensor, name: str) -> None:
    if output.dtype != source.dtype:
        raise ValueError(f"{name} is {output.dtype}, input_tensor {source.dtype}")
    if output.device != source.device:
        raise ValueError(f"{name} is on {output.device}, input_tensor on {source.device}")


@contextlib.contextmanager
def dense(tensor: Tensor, *, writes: bool) -> Iterator[Tensor]:
    """Yield the tensor without gaps; what the block writes into it is in `tensor` afterwards."""
    check_dense(tensor, writes=writes)
    original = tensor.detach()
    without_gaps = original.resolve_conj().resolve_neg().contiguous()
    yield without_gaps
    if writes and without_gaps is not original:
        original.copy_(without_gaps)


def check_dense(tensor: Tensor, *, writes: bool) -> None:
    """Raise a ValueError unless the numbers of a tensor can be moved, and overwritten if `writes`."""
    if not is_dense(tensor):
        kind = "nested ones" if tensor.is_nested else f"{tensor.layout} of {tensor.dtype} on {tensor.device}"
        raise ValueError(f"a gang takes dense tensors, not {kind}")
    if writes and overlaps_itself(tensor):
        raise ValueError("an expanded tensor cannot be overwritten: pass its `.contiguous()`")


def as_moved(tensor: Tensor) -> Tensor:
    """Return a view of the same memory, of a dtype that every backend can copy."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor if tensor.dtype in REDUCIBLE else tensor.view(_CARRIERS[tensor.itemsize])


@contextlib.contextmanager
def reducible(tensor: Tensor, op: ReduceOperation) -> Iterator[Tensor]:
    """Yield the tensor in a dtype in which every backend can reduce it, and copy the result back.

    A MEAN of float16 is made in float32: the sum before the division may be more than a float16 holds, and a
    number that is divided first loses its last bits. The means of other dtypes have room.
    """
    is_defined = tensor.dtype is not torch.uint64 or op in (ReduceOperation.SUM, ReduceOperation.PRODUCT)
    try:
        # Bools are 0 and 1 on their own memory, which moves a quarter of the bytes of int32.
        numbers = tensor.view(torch.uint8) if tensor.dtype is torch.bool else addable(tensor)
    except ValueError:
        is_defined = False
    if not is_defined:
        raise NotSupportedError(f"{tensor.dtype} tensors have no {op.name}: convert to another dtype")
    if op is ReduceOperation.MEAN and numbers.dtype is torch.float16:
        numbers = numbers.to(torch.float32)
    yield numbers
    if numbers.data_ptr() != tensor.data_ptr():
        (torch.view_as_real(tensor) if tensor.is_complex() else tensor).copy_(numbers)


def effective(op: ReduceOperation, tensor: Tensor) -> ReduceOperation:
    """Return the operation to ask a backend for, to which bools are numbers: a sum may be 2."""
    if tensor.dtype is not torch.bool:
        return op
    is_or = op in (ReduceOperation.SUM, ReduceOperation.MAX)
    return ReduceOperation.MAX if is_or else ReduceOperation.MIN
