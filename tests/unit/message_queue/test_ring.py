"""The ring over plain memory: what a writer writes is what a reader reads, and nothing else is believed."""

from __future__ import annotations

import contextlib
import random
import struct
import sys
import threading
from types import FrameType

import pytest

from tests.forking import is_so_in_a_fork
from tests.unit.message_queue.queues import LIMIT_S
from torchft_like.errors import QueueCorruptError
from torchft_like.message_queue import ring
from torchft_like.message_queue.leaves import reading_ring
from torchft_like.message_queue.ring import (
    INLINE,
    PAGE_BYTES,
    PUBLISHED,
    RECORD_BYTES,
    Geometry,
    RingReader,
    RingWriter,
)


class Pair:
    """Both ends on the same memory."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.geometry = Geometry(slots, slot_bytes)
        self.memory = bytearray(self.geometry.memory_bytes)
        self.writer = RingWriter(memoryview(self.memory), self.geometry)
        self.reader = RingReader(memoryview(self.memory), self.geometry)

    def write(self, *parts: bytes) -> None:
        nbytes = sum(map(len, parts))
        self.writer.write(INLINE, parts, nbytes, self.geometry.slots_for(nbytes))

    def read(self) -> bytes:
        place, nbytes, structure_bytes, slots, _ = self.reader.next_record()
        leaves = bytearray(nbytes - structure_bytes)
        structure = self.reader.read(place, structure_bytes)
        reading_ring(self.reader, place + structure_bytes)(memoryview(leaves))
        self.reader.consumed += slots
        return structure + bytes(leaves)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(1, 256), (3, 256), (7, 320), (2, 64 * 1024)])
def test_messages_of_every_size_come_out_as_they_went_in(slots: int, slot_bytes: int) -> None:
    pair, luck = Pair(slots, slot_bytes), random.Random(1)
    most = slots * slot_bytes - RECORD_BYTES
    for length in [0, 1, most, most - 1, *(luck.randint(0, most) for _ in range(200))]:
        message = luck.randbytes(length)
        cut = luck.randint(0, length)
        pair.write(message[:cut], message[cut:])
        assert pair.read() == message


def test_a_message_takes_as_many_slots_as_it_needs() -> None:
    geometry = Geometry(4, 256)
    assert [geometry.slots_for(n) for n in (0, 256 - RECORD_BYTES, 257 - RECORD_BYTES)] == [1, 1, 2]
    assert [geometry.slots_for(n) for n in (4 * 256 - RECORD_BYTES, 4 * 256 - RECORD_BYTES + 1)] == [4, 5]


def test_a_message_that_was_overwritten_is_not_believed() -> None:
    pair = Pair(2, 256)
    for _ in range(3):  # a writer that waits for nobody
        pair.write(b"x")
    with pytest.raises(QueueCorruptError, match="holds no message"):
        pair.reader.next_record()


FIELDS = {
    "number": (0, "<Q"),
    "nbytes": (8, "<Q"),
    "structure": (16, "<I"),
    "slots": (20, "<I"),
    "kind": (24, "<I"),
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("number", 5),
        ("nbytes", 2**40),
        ("nbytes", 300),
        ("structure", 11),
        ("slots", 0),
        ("slots", 2),
        ("kind", 9),
    ],
)
def test_a_record_with_a_wrong_field_is_not_believed(field: str, value: int) -> None:
    pair = Pair(4, 256)
    pair.write(b"0123456789")
    pair.write(b"another")
    at, form = FIELDS[field]
    struct.pack_into(form, pair.memory, PAGE_BYTES + at, value)
    with pytest.raises(QueueCorruptError):
        pair.reader.next_record()


def test_a_published_number_that_is_impossible_is_not_believed() -> None:
    pair = Pair(4, 256)
    pair.write(b"x")
    pair.writer.words[PUBLISHED] = 2**63
    with pytest.raises(QueueCorruptError):
        pair.reader.next_record()


# The lock that fences memory is free, whatever happens to those who have used it.


FENCES = pytest.mark.parametrize("pass_fence", [ring._one_round, ring._two_rounds])


@FENCES
def test_a_fence_that_was_interrupted_holds_nobody_up(pass_fence: object) -> None:
    def interrupt(_: FrameType, event: str, function: object) -> None:
        if event == "c_return" and getattr(function, "__name__", "") == "acquire":
            sys.setprofile(None)
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sys.setprofile(interrupt)
        try:
            pass_fence()  # type: ignore[operator]
        finally:
            sys.setprofile(None)
    assert not ring._lock.locked()


def test_a_fork_has_a_fence_of_its_own() -> None:
    """Another thread may have been in one."""

    def passes() -> bool:
        passing = threading.Thread(target=ring._two_rounds, daemon=True)
        passing.start()
        passing.join(LIMIT_S)
        return not passing.is_alive()

    with ring._lock:
        assert is_so_in_a_fork(passes)
