"""A group's device memory that its subprocesses see, in which the tensors of operations are staged.

Exporting, mapping and unmapping a tensor of the caller's takes longer than copying it, and torch waits for
the device once a thousand are exported. So the group has memory of its own, which each subprocess maps once.
No subprocess ever touches the caller's tensors.

INVARIANTS
* A block is given back when the device has passed all that both processes do with it.
* An arena lives for as long as its memory may be touched: by its group, by exporters until their subprocess
  is dead, by copies that the device has not passed. If a subprocess does not die, the arena lives for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable

import torch

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.baby.blocks import SLAB_BYTES_MAX, Block, Blocks
from torchft_like.process_group.baby.cuda_ipc import Export, IsPast, TorchCuda

LARGE_BYTES = 2 * 1024 * 1024


class Arena(Blocks[Export]):
    """A pool of blocks on one device.

    Args:
        device: the device of the group.
    """

    BLOCK_BYTES_MIN = 512  # the alignment of torch's own allocator

    def __init__(self, device: torch.device, cuda: TorchCuda) -> None:
        super().__init__()
        self.device = device
        self._cuda = cuda
        self._exports: list[Export] = []
        self._late: list[tuple[IsPast, list[Block[Export]]]] = []
        weakref.finalize(self, _release, self._exports).atexit = False

    def give_back_when(self, is_past: IsPast, blocks: Iterable[Block[Export]]) -> None:
        """Take blocks back as soon as the device has passed the point that `is_past` asks about."""
        with _settling:
            self._late.append((is_past, list(blocks)))
            _with_late_blocks.add(self)

    def lose(self) -> None:
        """Keep the arena for ever, because a subprocess that cannot be killed maps it."""
        _lost.append(self)

    def _take(self, nbytes: int) -> Block[Export]:
        with _settling:
            for arena in tuple(_with_late_blocks):
                arena._collect()
        return super()._take(nbytes)

    def _size(self, nbytes: int) -> int:
        if nbytes <= SLAB_BYTES_MAX:
            return super()._size(nbytes)
        return -(-nbytes // LARGE_BYTES) * LARGE_BYTES

    def _make_segment(self, nbytes: int) -> tuple[Export, torch.UntypedStorage]:
        # The current stream may still use memory that is free only by the order of its work.
        stream = self._cuda.new_stream(self.device.index, 0)
        try:
            with self._cuda.on(stream):
                memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        except torch.OutOfMemoryError as error:
            raise ProcessGroupError(
                f"no memory left on {self.device} to stage {nbytes} bytes for the subprocess: use smaller "
                "tensors, or fewer at a time, or ProcessGroupNCCL, which stages nothing"
            ) from error
        stream.synchronize()
        export = Export(memory, self._cuda)
        self._exports.append(export)
        return export, memory

    def _collect(self) -> None:
        late, self._late = self._late, []
        for is_past, blocks in late:
            if is_past():
                self.give_back(blocks)
            else:
                self._late.append((is_past, blocks))
        if not self._late:
            _with_late_blocks.discard(self)


_settling = threading.Lock()
_with_late_blocks: set[Arena] = set()
_lost: list[Arena] = []


def _release(exports: list[Export]) -> None:
    for export in exports:
        export.release()
