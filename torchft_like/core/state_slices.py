"""The bytes of a state that belong to a slice. This module is pure arithmetic, and knows nothing of tensors.

The parts of the state, one after the other, each padded to a multiple of 16 bytes, make one long row, which
is cut into slices of equal length. So every byte is in exactly one slice, and a part is cut only where an
element of any dtype ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of one part of the state."""

    part: int
    start: int
    stop: int


class Slices:
    """The division of a state into `count` slices.

    Args:
        sizes: the sizes of the parts, in bytes.
        count: the number of slices, 1 or more.
    """

    def __init__(self, sizes: Sequence[int], count: int) -> None:
        self._sizes = sizes
        self._count = count
        self._offsets = [0, *accumulate(_filled(size) for size in sizes)]
        self._length = _filled(-(-self._offsets[-1] // count))

    def pieces(self, number: int) -> Iterator[Piece]:
        """Yield the pieces of slice `number` modulo `count`, without empty ones."""
        begin = number % self._count * self._length
        end = min(begin + self._length, self._offsets[-1])
        part = bisect_right(self._offsets, begin) - 1
        while part < len(self._sizes) and (offset := self._offsets[part]) < end:
            start, stop = max(begin - offset, 0), min(end - offset, self._sizes[part])
            if start < stop:
                yield Piece(part, start, stop)
            part += 1


def _filled(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
