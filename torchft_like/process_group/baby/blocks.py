"""Blocks of memory that a subprocess sees, cut out of segments and reused.

A segment is memory that the two processes share, named by a number. This module does not know which kind of
memory it is.

INVARIANT: a block is given back only when neither process can touch it any more.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from torchft_like.process_group.baby.tensor_spec import TensorSpec, contiguous_spec

SLAB_BYTES_MAX = 1024 * 1024
SLAB_BLOCKS_MAX = 64


class Numbered(Protocol):
    """A segment of shared memory."""

    @property
    def number(self) -> int:
        """The segment's number, which never stands for two segments."""


S = TypeVar("S", bound=Numbered)


@dataclass(frozen=True, eq=False)
class Block(Generic[S]):
    """A part of a segment. `life` identifies the blocks made between two calls of `close`."""

    segment: S
    storage: torch.UntypedStorage
    start: int
    nbytes: int
    life: object


class Blocks(ABC, Generic[S]):
    """A pool of blocks. Until `close` it keeps as many as the operations under way at the busiest moment
    needed.
    """

    BLOCK_BYTES_MIN = 64

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Block[S]]] = defaultdict(list)
        self._life = object()

    def stage(self, tensor: Tensor) -> tuple[Block[S], TensorSpec]:
        """Return a block with room for the tensor's elements, in contiguous order, and its description.

        Raises:
            ProcessGroupError: there is no memory left for the block.
        """
        block = self._take(tensor.numel() * tensor.element_size())
        return block, contiguous_spec(tensor, block.segment.number, block.start // tensor.element_size())

    def give_back(self, blocks: Iterable[Block[S]]) -> None:
        """Let the blocks be used for other tensors."""
        with self._lock:
            for block in blocks:
                if block.life is self._life:
                    self._free[block.nbytes].append(block)

    def close(self) -> None:
        """Release the memory; that of a block in use is released when the block is dropped."""
        with self._lock:
            self._free.clear()
            self._life = object()

    @abstractmethod
    def _make_segment(self, nbytes: int) -> tuple[S, torch.UntypedStorage]:
        """Make a segment; return it, and the storage that it is in this process."""

    def _size(self, nbytes: int) -> int:
        """Return the size of the block that is used for `nbytes` bytes."""
        return max(self.BLOCK_BYTES_MIN, 1 << (nbytes - 1).bit_length())

    def _take(self, nbytes: int) -> Block[S]:
        size = self._size(nbytes)
        with self._lock:
            if not self._free[size]:
                self._free[size].extend(self._make(size))
            return self._free[size].pop()

    def _make(self, size: int) -> Iterator[Block[S]]:
        slab = max(size, min(SLAB_BLOCKS_MAX * size, SLAB_BYTES_MAX))
        segment, storage = self._make_segment(slab)
        for start in range(0, slab, size):
            yield Block(segment, storage, start, size, self._life)
