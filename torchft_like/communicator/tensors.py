"""Tensors in the form in which a group can move and add them, and checks of the caller's tensors.

Backends add few of the dtypes that tensors have. A complex number is added as two real ones, a bool as an
int32, a small integer as a larger one and cut afterwards, which is how it would have wrapped around, and a
float8 number as float32. Which part of a tensor goes to which rank is plain arithmetic, at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from torchft_like.core.agreement.statements import Terms, specification
from torchft_like.dtypes import REDUCIBLE
from torchft_like.writing import is_dense, overlaps_itself

SMALL_BYTES_MAX = 64 * 1024
BUCKET_BYTES_MAX = 4 * 1024 * 1024


def checked_dim(dim: int, dimensions: int) -> int:
    """Return `dim`, counted from the front."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise ValueError(f"dim is {dim!r}: it must be a whole number")
    if dimensions == 0:
        raise ValueError("a tensor without dimensions cannot be joined or split along one: reshape it to [1]")
    if not -dimensions <= dim < dimensions:
        raise ValueError(f"dim {dim} is not one of the {dimensions} dimensions of the tensor")
    return dim % dimensions


def checked_rank(rank: int, world_size: int, name: str) -> int:
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise ValueError(f"{name} {rank!r} is no rank of the group: they are 0 to {world_size - 1}")
    return rank


def checked_sizes(sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    found = tuple(sizes)
    if len(found) != world_size:
        raise ValueError(f"{len(found)} sizes for {world_size} ranks: {list(found)[:16]}")
    if any(not isinstance(size, int) or isinstance(size, bool) or size < 0 for size in found):
        raise ValueError(f"sizes must be whole numbers from 0 on, not {list(found)[:16]}")
    return found


def even_sizes(rows: int, parts: int) -> tuple[int, ...]:
    """Split rows as evenly as possible: the first parts have one row more than the last."""
    less, more = divmod(rows, parts)
    return tuple(less + 1 if part < more else less for part in range(parts))


def overlaps(parts: Sequence[int], chunk: int, rank: int) -> tuple[list[int], list[int]]:
    """Compute what `rank` sends and receives when even chunks, one on each rank, become the ranks' parts.

    Args:
        parts: the elements of each rank's part, one part after the other.
        chunk: the elements of each chunk, one chunk after the other; the last ones may go beyond the parts.

    Returns:
        How many elements of the rank's chunk belong to each part, and of its part to each chunk.
    """
    ends = list(itertools.accumulate(parts, initial=0))

    def common(part: int, place: int) -> int:
        return max(0, min(ends[part + 1], (place + 1) * chunk) - max(ends[part], place * chunk))

    ranks = range(len(parts))
    return [common(part, rank) for part in ranks], [common(rank, place) for place in ranks]


def elements_of_row(shape: Sequence[int], dim: int) -> int:
    """Return how many elements have the same index along `dim`."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def with_rows(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """Return `shape` with another number of rows along `dim`."""
    return (*shape[:dim], rows, *shape[dim + 1 :])


def buckets(nbytes: Sequence[int], device_types: Sequence[str]) -> list[tuple[int, ...]]:
    """Choose which tensors of a message are sent together: large ones alone, small ones of a device joined.

    Args:
        nbytes: the bytes of each tensor; empty ones are not sent.
        device_types: the type of each tensor's device; a bucket has tensors of one type.

    Returns:
        The indices of each bucket; the same on every rank, as they depend on nothing else.
    """
    made: list[tuple[int, ...]] = []
    open_buckets: dict[str, tuple[list[int], int]] = {}
    for index, (size, device_type) in enumerate(zip(nbytes, device_types, strict=True)):
        if size > SMALL_BYTES_MAX:
            made.append((index,))
        elif size > 0:
            members, filled = open_buckets.get(device_type, ([], 0))
            if filled + size > BUCKET_BYTES_MAX:
                made.append(tuple(members))
                members, filled = [], 0
            open_buckets[device_type] = ([*members, index], filled + size)
    return [*made, *(tuple(members) for members, _ in open_buckets.values())]


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
    if not isinstance(value, Tensor):
        raise TypeError(f"a dense torch tensor was expected, not {type(value).__name__}")
    if not is_dense(value):
        kind = "a nested one" if value.is_nested else f"{value.dtype} with {value.layout} on {value.device}"
        raise TypeError(f"a dense torch tensor was expected, not {kind}")
    return value


def checked_target(value: object) -> Tensor:
    """Return the value, if it is a dense tensor whose every element has memory of its own."""
    tensor = checked_tensor(value)
    if overlaps_itself(tensor):
        raise ValueError("an expanded tensor cannot be overwritten: pass its `.contiguous()`")
    return tensor


def checked_along(tensors: Sequence[object], dim: int) -> int:
    """Return the dimension that `dim` means, for dense tensors with the same number of rows along it."""
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
