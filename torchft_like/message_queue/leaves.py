"""Messages as bytes: the leaves of plain data on their way into shared memory and out of it.

Each byte is copied once on either side. A message that a reader gets shares no memory with the queue.
"""

from __future__ import annotations

import io
import os
import struct
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from torchft_like.errors import QueueCorruptError, QueueMemoryError
from torchft_like.message_queue.memory import available_bytes, creating, seal_content
from torchft_like.message_queue.ring import Bytes, RingReader
from torchft_like.plain_data import MESSAGES, Structure, TensorSpec

# The file's number, bytes of the structure, bytes in all.
FILE_RECORD = struct.Struct("<QQQ")


def file_of(parts: Sequence[Bytes], nbytes: int) -> int:
    """Return the descriptor of a file in memory with all parts, one after the other."""
    purpose = f"a message of {nbytes} bytes, more than the ring holds,"
    with creating(nbytes, purpose) as descriptor:
        at = 0
        for part in parts:
            left = memoryview(part)
            while left:
                written = os.pwrite(descriptor, left, at)
                at += written
                left = left[written:]
        seal_content(descriptor)
    return descriptor


class _Leaves:
    """The leaves of one message, in their order; `fill` fills memory with the next bytes."""

    def __init__(self, fill: Callable[[memoryview], None]) -> None:
        self._fill = fill

    def tensor(self, spec: TensorSpec) -> Tensor:
        if not (nbytes := spec.nbytes):
            return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        try:
            raw = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:  # torch raises it where others raise MemoryError
            raise MemoryError(str(error)) from error
        self._fill(raw.numpy().data)
        return raw.view(spec.dtype).view(spec.shape)

    def memory(self, nbytes: int) -> memoryview:
        raw = np.empty(nbytes, np.uint8).data
        if nbytes:
            self._fill(raw)
        return raw

    def data(self, nbytes: int) -> bytes:
        if not nbytes:
            return b""
        whole = io.BytesIO()  # a BytesIO gives its memory away as bytes without a copy
        whole.seek(nbytes - 1)
        whole.write(b"\0")
        with whole.getbuffer() as raw:
            self._fill(raw)
        return whole.getvalue()


_NO_LEAVES = _Leaves(lambda _: None)


def assembled(structure: bytes, nbytes: int = 0, fill: Callable[[memoryview], None] | None = None) -> object:
    """Return the message with this structure, whose leaves are so many bytes, with which `fill` fills memory.

    Raises:
        PlainDataError, QueueCorruptError: it is none.
        QueueMemoryError: there is no room for a copy of it.
    """
    try:
        known = Structure(structure, MESSAGES)
        due = sum(spec.nbytes for spec in known.specs) if known.specs else 0
        if nbytes != due:
            raise QueueCorruptError(
                f"a message has leaves of {nbytes} bytes, and by its own account of {due}"
            )
        return known.value(_NO_LEAVES if fill is None else _Leaves(fill))
    except MemoryError as error:
        raise QueueMemoryError("a copy of the message", len(structure) + nbytes, available_bytes()) from error


def reading_ring(ring: RingReader, at: int) -> Callable[[memoryview], None]:
    """Return a function that fills memory with the bytes of a message's leaves, which begin at `at`."""

    def fill(memory: memoryview) -> None:
        nonlocal at
        begin = 0
        for segment in ring.segments(at, len(memory)):
            memory[begin : begin + len(segment)] = segment
            begin += len(segment)
        at += begin

    return fill


def reading_file(descriptor: int, nbytes: int) -> Callable[[memoryview], None]:
    """Return a function that fills memory with the bytes of a file.

    It reads and maps nothing, so that no peer can take the memory away.
    """
    if os.fstat(descriptor).st_size != nbytes:
        raise QueueCorruptError("the file of a message has another size than the message")
    offset = 0

    def fill(memory: memoryview) -> None:
        nonlocal offset
        while memory:
            read = os.preadv(descriptor, [memory], offset)
            if not read:
                raise QueueCorruptError("the file of a message ends too early")
            offset += read
            memory = memory[read:]

    return fill
