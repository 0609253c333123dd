"""The ring: a number of equal slots in shared memory, how messages lie in it, and fences for its words.

A message is a record, which says how long it is, and its bytes; it takes as many consecutive slots as it
needs, and wraps round at the end. One writer fills slots, every reader reads all of them, and a slot is
filled again once all readers are done with it.

    header page      the writer's words, each on a cache line of its own
    slots            count x slot_bytes
    a reader's page  the reader's words, in a file of its own: it cannot reach anything else

The words are 64 bits, only ever grow (but SLEEPING), and have one writer each:

    PUBLISHED   (writer)  number of the first slot that holds nothing yet
    SLEEPING    (either)  0 while awake, otherwise the number of the sleep
    CLOSED      (writer)  1 once nothing will follow
    CONSUMED    (reader)  number of the first slot that it still needs

INVARIANTS
* The writer touches no slot unless CONSUMED of every reader is beyond its last message.
* A message is complete before PUBLISHED tells of it: whatever happens to the writer, there are no half
  messages.
* A reader takes nothing for granted: each number is checked against the ring before it is used.

This module knows nothing of sockets, waiting, or of what the bytes mean.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from lighthouse.forks import lock_of_each_process
from torchft_like.errors import QueueCorruptError

# Memory fences for two processes that share memory. Two orders matter between them:
#
# * `before_publishing` and `after_seeing`: a message is written before its number is, and read after it.
# * `full_fence`: "I sleep" is written before the last look at the number, and the number before the look at
#   who sleeps. Each side writes one word, then reads the other's: were the write to wait in a buffer while
#   the read goes ahead, both could miss each other, and a sleeper would not be woken.
#
# The fence is a lock that is free: taking it is an atomic read-modify-write with acquire semantics, giving it
# back one with release semantics. On x86 each is a full fence, and stores and loads keep their order anyway,
# so that the first two need nothing. Elsewhere an acquire and a release let a store before them sink in and a
# load after them rise in; a release that an acquire follows lets nothing through (C11 with RCsc atomics,
# which AArch64's are), so two rounds make a full fence.
#
# The lock must be free: `with` releases it whatever interrupts the caller, while a call of `release` may
# never be made. And a fork gets a lock of its own, or it would inherit one that another thread held.
#
# A single aligned 64-bit word of a `memoryview` of format Q is loaded and stored by one instruction. What an
# interpreter does between two statements is far more than a compiler would dare to reorder.
_lock = lock_of_each_process()


def _one_round() -> None:
    with _lock:
        pass


def _two_rounds() -> None:
    with _lock:
        pass
    with _lock:
        pass


_is_x86 = platform.machine() in ("x86_64", "AMD64", "i686")

full_fence: Callable[[], None] = _one_round if _is_x86 else _two_rounds
# None where the processor keeps the order by itself: a call of nothing costs 3 µs when the caches are cold.
before_publishing: Callable[[], None] | None = None if _is_x86 else _two_rounds
after_seeing: Callable[[], None] | None = before_publishing

PAGE_BYTES = 4096
SLOT_BYTES_MIN = 256

# Words by index; a cache line is 8 of them.
PUBLISHED, SLEEPING, CLOSED = 0, 8, 16
CONSUMED = 0

INLINE, IN_FILE = 1, 2

_RECORD = struct.Struct("<QQIII")
RECORD_BYTES = 64

Bytes = bytes | bytearray | memoryview


class Geometry(NamedTuple):
    slots: int
    slot_bytes: int

    @property
    def memory_bytes(self) -> int:
        return PAGE_BYTES + self.slots * self.slot_bytes

    def slots_for(self, nbytes: int) -> int:
        return -(-(nbytes + RECORD_BYTES) // self.slot_bytes)


class RingWriter:
    """The writer's view of the ring. One thread at a time."""

    def __init__(self, memory: memoryview, geometry: Geometry) -> None:
        self.geometry = geometry
        self.words: memoryview = memory[:PAGE_BYTES].cast("Q")
        self._area = memory[PAGE_BYTES:]
        self._size = len(self._area)

    def write(self, kind: int, parts: Sequence[Bytes], nbytes: int, slots: int) -> None:
        """Write a message, its structure first; the caller knows that its slots are free."""
        slots_in_all, slot_bytes = self.geometry
        published = self.words[PUBLISHED]
        at = published % slots_in_all * slot_bytes
        area, size = self._area, self._size
        _RECORD.pack_into(area, at, published, nbytes, len(parts[0]), slots, kind)
        at += RECORD_BYTES
        for part in parts:
            end = at + len(part)
            if end <= size:
                area[at:end] = part
                at = end
            else:
                at = self._put_round(at % size, part)
        if before_publishing:
            before_publishing()
        self.words[PUBLISHED] = published + slots

    def _put_round(self, at: int, data: Bytes) -> int:
        """Write a part that may wrap round the end; return where the next part begins."""
        room = min(self._size - at, len(data))
        self._area[at : at + room] = data[:room]
        self._area[: len(data) - room] = data[room:]
        return (at + len(data)) % self._size

    def release(self) -> None:
        self.words.release()
        self._area.release()


class RingReader:
    """A reader's view of the ring. One thread at a time."""

    def __init__(self, memory: memoryview, geometry: Geometry) -> None:
        self.geometry = geometry
        self.consumed = 0
        self.words: memoryview = memory[:PAGE_BYTES].cast("Q")
        self.area: memoryview = memory[PAGE_BYTES:]

    def next_record(self) -> tuple[int, int, int, int, int]:
        """Return the record of the next message, which PUBLISHED announces, before its bytes are read.

        Returns:
            Where the bytes begin, how many they are, how many are the structure, the slots, and the kind.
        """
        if after_seeing:
            after_seeing()
        slots, slot_bytes = self.geometry
        consumed = self.consumed
        place = consumed % slots * slot_bytes
        number, nbytes, structure_bytes, taken, kind = _RECORD.unpack_from(self.area, place)
        ahead = self.words[PUBLISHED] - consumed
        if number != consumed or not taken <= ahead <= slots or kind not in (INLINE, IN_FILE):
            raise QueueCorruptError(f"slot {consumed} of the ring holds no message")
        if taken != self.geometry.slots_for(nbytes) or structure_bytes > nbytes:
            raise QueueCorruptError(f"the message in slot {consumed} has an impossible length")
        return place + RECORD_BYTES, nbytes, structure_bytes, taken, kind

    def segments(self, at: int, nbytes: int) -> list[memoryview]:
        """Return the memory of so many bytes from a place on; two pieces where the ring wraps round."""
        size = len(self.area)
        at %= size
        if at + nbytes <= size:
            return [self.area[at : at + nbytes]]
        return [self.area[at:], self.area[: at + nbytes - size]]

    def read(self, at: int, nbytes: int) -> bytes:
        end = at + nbytes
        if end > len(self.area):
            return b"".join(self.segments(at, nbytes))
        return self.area[at:end].tobytes()

    def release(self) -> None:
        self.words.release()
        self.area.release()
