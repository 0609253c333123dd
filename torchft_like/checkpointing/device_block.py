"""A block of a device's memory, through which a state goes from that device to those of other processes of
the host, and never through the host's memory.

The sender makes and exports it for a transfer, and each receiver maps it once. It has two halves, which are
filled in turn: one when all receivers have taken what was in it before, so that it is filled while they
take the other. What is in a half is hashed on both sides, where it lies. Receivers only read.

INVARIANT: the block is given back to torch when no receiver maps it. After a transfer that has failed nobody
knows: the block is kept for the next one.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from torchft_like.checkpointing.copy_ahead import aligned
from torchft_like.divergence.words import word_sum
from torchft_like.errors import CheckpointFormatError, NotSupportedError
from torchft_like.runtime.hosts import own_place
from torchft_like.shared_memory import Export, cuda

BLOCK_BYTES = 256 * 1024 * 1024
OFFER_BYTES = 512
NO_OFFER = bytes(OFFER_BYTES)
# Bytes of the block, its offset in the device's allocation; lengths of the place and of the handle, which
# follow.
_OFFER = struct.Struct("<QQII")


class DeviceBlock:
    """A block of this process.

    Args:
        device: where it lies.
        nbytes: the bytes of the state; the block is no larger than is of use for them.

    Attributes:
        device: where it lies.
        halves: its halves.
        offer: what the receivers need to map it, in OFFER_BYTES.

    Raises:
        NotSupportedError: the memory cannot be shared.
        torch.OutOfMemoryError: the device has none left.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        half = min(aligned(nbytes), BLOCK_BYTES // 2)
        memory = torch.empty(2 * half, dtype=torch.uint8, device=device)
        self.halves = memory[:half], memory[half:]
        self._export = Export(memory.untyped_storage())
        _, handle, size, offset = self._export.details
        place = own_place()
        offer: bytes = _OFFER.pack(size, offset, len(place), len(handle)) + place + handle
        if len(offer) > OFFER_BYTES:
            self.release()
            raise NotSupportedError(f"the handle of the device's memory has {len(handle)} bytes")
        self.offer = offer.ljust(OFFER_BYTES, b"\0")

    def release(self) -> None:
        """Give the memory back: no receiver maps it any more."""
        self._export.release()


def mapped(offer: bytes, device: torch.device) -> tuple[Tensor, ...] | None:
    """Return the halves of a block of another process, mapped for a device of this one; None if that process
    is on another host.

    Raises:
        CheckpointFormatError: the offer is malformed.
        RuntimeError: CUDA or torch cannot map it.
    """
    nbytes, offset, place_bytes, handle_bytes = _OFFER.unpack_from(offer)
    end = _OFFER.size + place_bytes
    if nbytes > BLOCK_BYTES or nbytes % 2 or end + handle_bytes > OFFER_BYTES:
        raise CheckpointFormatError("the offer of a device's memory is malformed")
    if offer[_OFFER.size : end] != own_place():
        return None
    # CUDA reaches the sender's device from this one; that has a number of its own in each process.
    storage = cuda.open(device.index, offer[end : end + handle_bytes], nbytes, offset)
    memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return memory[: nbytes // 2], memory[nbytes // 2 :]


def hash_of(half: Tensor) -> int:
    """Return a hash of the bytes, once the current stream has come to it."""
    return int(word_sum(half).item())
