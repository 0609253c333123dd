"""Bytes that come through a message queue: plain data, a handle, the ring, a message of a remote writer."""

from __future__ import annotations

import struct

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from tests.stress.fuzzing import assert_parsed_or_refused, damaged, fuzz
from torchft_like.errors import PlainDataError, QueueCorruptError
from torchft_like.message_queue.endpoint import QueueHandle
from torchft_like.message_queue.leaves import NO_LEAVES, Source, assembled, reading_ring
from torchft_like.message_queue.ring import INLINE, PAGE_BYTES, Geometry, RingReader, RingWriter
from torchft_like.plain_data import LIST, MAGIC, MESSAGES, Structure, assemble, disassemble

MESSAGE = disassemble(
    {
        "plain": [1, 2**70, 2.5, None, True, "text", b"bytes", ("tuple", {1: [], (1, "x"): {}})],
        "tensor": torch.ones(3, 2),
        "array": np.ones((2, 2), np.float32),
        "long": b"x" * 5000,
    }
)
HEAD = disassemble(None).structure[:-1]
GEOMETRY = Geometry(4, 256)


@fuzz
@given(
    st.one_of(st.binary(max_size=60), st.binary(max_size=60).map(HEAD.__add__), damaged(MESSAGE.structure))
)
@example(HEAD + struct.pack("<BI", LIST, 1) * 200_000)  # lists in lists
@example(HEAD + struct.pack("<BI", LIST, 4_000_000) + b"\x00" * 4_000_000)
@example(struct.pack("<II", MAGIC, 65_536) + b"\x00" * 3 * 65_536 + b"\x00")
def test_plain_data_is_read_or_refused(structure: bytes) -> None:
    assert_parsed_or_refused(lambda data: Structure(data, MESSAGES), structure, refusals=PlainDataError)
    assert_parsed_or_refused(assemble, structure, MESSAGE.tensors, refusals=PlainDataError)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)
KEYS = st.sampled_from(
    ["version", "name", "token", "slots", "slot_bytes", "local_ranks", "n_remote", "address", "server_key"]
)
HANDLE = QueueHandle("name", bytes(32), *GEOMETRY, (0, 1), 0).to_plain()


@fuzz
@given(st.one_of(plain, st.dictionaries(KEYS, plain).map(lambda changes: {**HANDLE, **changes})))
def test_a_handle_is_read_or_refused(value: object) -> None:
    assert_parsed_or_refused(QueueHandle.from_plain, value, refusals=ValueError)


def _ring() -> bytes:
    memory = bytearray(GEOMETRY.memory_bytes)
    writer = RingWriter(memoryview(memory), GEOMETRY)
    for value, leaves in ((torch.ones(30), [b"\x00" * 120]), ({"a": [1]}, [])):
        parts = [disassemble(value).structure, *leaves]
        nbytes = sum(map(len, parts))
        writer.write(INLINE, parts, nbytes, GEOMETRY.slots_for(nbytes))
    return bytes(memory)


RING = _ring()


@fuzz
@given(damaged(RING[:24]), damaged(RING[PAGE_BYTES:]))
def test_a_ring_is_read_or_refused(words: bytes, slots: bytes) -> None:
    memory = bytearray(GEOMETRY.memory_bytes)
    memory[:24] = words.ljust(24, b"\x00")[:24]
    memory[PAGE_BYTES:] = slots.ljust(len(RING) - PAGE_BYTES, b"\x00")[: len(RING) - PAGE_BYTES]
    reader = RingReader(memoryview(memory), GEOMETRY)
    assert_parsed_or_refused(_read, reader, refusals=(QueueCorruptError, PlainDataError))


def _read(reader: RingReader) -> object:
    place, nbytes, structure_bytes, *_ = reader.next_record()
    structure = reader.read(place, structure_bytes)
    left = nbytes - structure_bytes
    leaves = reading_ring(reader, place + structure_bytes)
    return assembled(structure, Source(left, leaves) if left else NO_LEAVES)
