"""Checks of the arguments of a gang's functions; they communicate with no other process."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import Tensor

from torchft_like.gang.base import ReduceOperation


def check_source(source_rank: int, size: int) -> int:
    """Return the rank, if a gang of `size` has it.

    Raises:
        ValueError: the gang does not have it.
    """
    rank = operator.index(source_rank)
    if not 0 <= rank < size:
        raise ValueError(f"source_rank {rank} is not within [0, {size}), the ranks of this gang")
    return rank


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """Return the ranks of a part of a gang of `size`.

    Raises:
        ValueError: there are none, or duplicates, or one is out of range.
    """
    checked = tuple(map(operator.index, ranks))
    if not checked:
        raise ValueError("a gang needs at least one rank")
    if outside := [rank for rank in checked if not 0 <= rank < size]:
        raise ValueError(f"ranks {outside} are not within [0, {size}), the ranks of this gang")
    if len(set(checked)) < len(checked):
        raise ValueError(f"ranks {list(checked)} have duplicates")
    return checked


def check_partition(partition: Sequence[Sequence[int]], size: int) -> list[tuple[int, ...]]:
    """Return the ranks of several parts of a gang of `size`.

    Raises:
        ValueError: as for `check_ranks`, or a rank is in two of them.
    """
    parts = [check_ranks(ranks, size) for ranks in partition]
    members = [rank for ranks in parts for rank in ranks]
    if len(set(members)) < len(members):
        twice = sorted({rank for rank in members if members.count(rank) > 1})
        raise ValueError(f"ranks {twice} are in more than one of {[list(ranks) for ranks in parts]}")
    return parts


def check_reduction(tensor: Tensor, op: ReduceOperation) -> None:
    """Check that the operation is defined for the tensor.

    Raises:
        ValueError: it is not.
    """
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
    """Check that `output` has room for the tensors of all members, and no more.

    Raises:
        ValueError: it has not, or its dtype or device is another one than `source`'s.
    """
    _check_alike(output, source, "output_tensor")
    stacked = (size, *source.shape)
    joined = (size * source.shape[0], *source.shape[1:]) if source.dim() else None
    if tuple(output.shape) not in (stacked, joined):
        shapes = f"{stacked}" if joined is None else f"{stacked} or {joined}"
        raise ValueError(f"output_tensor has the shape {tuple(output.shape)}, not {shapes}")
    if not output.is_contiguous():
        raise ValueError("output_tensor is not contiguous in memory: gather into one that is, and copy")


def check_gather_list(outputs: Sequence[Tensor], source: Tensor, size: int) -> None:
    """Check that there is one tensor like `source` for every member.

    Raises:
        ValueError: there is not.
    """
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
