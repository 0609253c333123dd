"""Which part of a tensor goes to which rank, and which tensors are sent together: plain numbers. This module
is pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

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
    """Return `rank`, if it is a rank of the group."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < world_size:
        raise ValueError(f"{name} {rank!r} is no rank of the group: they are 0 to {world_size - 1}")
    return rank


def checked_sizes(sizes: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Return the rows of each rank as a tuple."""
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
    """Compute what `rank` sends and receives when chunks of one size, one on each rank, become the ranks'
    parts.

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
    """Choose the tensors of a message that are sent together: a large one alone, small ones of one device
    joined.

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
