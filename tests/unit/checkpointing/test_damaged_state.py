"""Random states come back as they were; random damage and lies never get further than a format error."""

from __future__ import annotations

import contextlib
import io
import math
import struct
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.equality import same
from tests.unit.checkpointing.states import DTYPES, dump_state, forged, load_state, round_trip
from torchft_like.checkpointing.state_stream import IncomingState, read_header
from torchft_like.errors import CheckpointError, CheckpointFormatError
from torchft_like.plain_data import (
    DEVICE,
    DICT,
    DTYPE,
    LEAF_BYTES,
    LEAF_TENSOR,
    LIST,
    MAGIC,
    SAME_TENSOR,
    SCALAR,
    SHARD,
    SIZE,
    STR,
    TAGS_END,
)

# torch says this of every complex32 tensor, wherever it is made.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.heal_is_clean,
]

keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=3,
)
tensors = st.builds(
    lambda data, dtype: torch.frombuffer(bytearray(data * dtype.itemsize), dtype=dtype),
    st.binary(min_size=1, max_size=9),
    st.sampled_from([dtype for dtype in DTYPES if dtype is not torch.bool]),
)
states = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=150)
@given(states)
def test_every_state_comes_back_as_it_was(state: object) -> None:
    assert same(round_trip(state), state)


SAMPLE = dump_state(
    OrderedDict(
        model={"w": torch.arange(300.0), "b": torch.ones(3, dtype=torch.bfloat16)},
        optim={
            0: {"step": 2**70, "nan": math.nan},
            (1, "x"): [None, True, 1j, "t", b"bytes", np.arange(4), np.int8(1)],
        },
        rest=(torch.Size([2]), torch.float16, torch.device("cpu"), Counter("ab"), torch.empty(0)),
    )
)

edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "insert", "drop"]),
        st.integers(0, len(SAMPLE)),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, operations: list[tuple[str, int, bytes]]) -> bytes:
    for operation, place, junk in operations:
        at = place % (len(data) + 1)
        match operation:
            case "flip":
                old = data[at : at + len(junk)]
                data = (
                    data[:at] + bytes(a ^ b for a, b in zip(old, junk, strict=False)) + data[at + len(old) :]
                )
            case "cut":
                data = data[:at]
            case "insert":
                data = data[:at] + junk + data[at:]
            case _:
                data = data[:at] + data[at + len(junk) :]
    return data


@settings(max_examples=300)
@given(edits)
def test_damage_anywhere_is_reported_as_a_format_error(operations: list[tuple[str, int, bytes]]) -> None:
    data = edited(SAMPLE, operations)
    if data == SAMPLE:
        assert load_state(data) is not None
        return
    with pytest.raises(CheckpointFormatError):
        load_state(data)


HONEST = read_header(io.BytesIO(SAMPLE))
PAYLOAD = bytes(IncomingState(HONEST).nbytes)

# What a value may begin with, and lengths that are right, wrong and absurd.
fragments = st.lists(
    st.one_of(
        st.integers(0, TAGS_END + 1).map(lambda tag: bytes([tag])),
        st.tuples(st.integers(0, TAGS_END + 1), st.sampled_from([0, 1, 2, 3, 6, 64, 2**31, 2**32 - 1])).map(
            lambda pair: struct.pack("<BI", *pair)
        ),
        st.sampled_from([b"<f4", b"\x03|i3", b"\x04<f99", b"cuda:99999999999999", b"\xff" * 8]),
        st.binary(max_size=9),
    ),
    max_size=12,
).map(b"".join)
specs = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.integers(0, 3),
        st.lists(st.sampled_from([0, 1, 2, 4, 16, 2**40, 2**62, 2**64 - 1]), max_size=3),
    ),
    max_size=3,
).map(lambda found: struct.pack("<II", MAGIC, len(found)) + b"".join(spec(*each) for each in found))


def spec(dtype: int, device: int, shape: list[int]) -> bytes:
    return struct.pack(f"<BBB{len(shape)}Q", dtype, device, len(shape), *shape)


@settings(max_examples=300)
@given(specs, fragments, st.sampled_from([0, 64, 128]))
def test_a_made_up_structure_is_a_state_or_a_format_error(head: bytes, value: bytes, payload: int) -> None:
    with contextlib.suppress(CheckpointFormatError):
        load_state(forged(head + value, bytes(payload)))


EMPTY = struct.pack("<II", MAGIC, 0)
ONE = struct.pack("<II", MAGIC, 1)


@pytest.mark.parametrize(
    "structure",
    [
        b"",
        EMPTY,
        EMPTY + struct.pack("<BI", LIST, 1) * 200_000,
        EMPTY + struct.pack("<BI", LIST, 4_000_001) + bytes(4_000_001),
        EMPTY + struct.pack("<BI", DICT, 2) + 2 * (struct.pack("<BI", STR, 1) + b"a" + b"\x00"),
        EMPTY + struct.pack("<BI", DICT, 1) + struct.pack("<BI", LIST, 0) + b"\x00",
        EMPTY + struct.pack("<BI", DEVICE, 11) + b"gpu of mine",
        EMPTY + struct.pack("<BI", SHARD, 2) + b"\x00\x00",
        EMPTY + struct.pack("<BI", SHARD, 6) + bytes(6),
        EMPTY + struct.pack("<BB", SCALAR, 3) + b"|O8" + bytes(8),
        EMPTY + struct.pack("<BB", SIZE, 1) + b"\xff" * 8,
        EMPTY + struct.pack("<BB", DTYPE, 200),
        EMPTY + bytes([LEAF_TENSOR]),
        EMPTY + struct.pack("<BI", SAME_TENSOR, 0),
        ONE + spec(16, 0, [0]) + struct.pack("<BBI", LEAF_BYTES, SAME_TENSOR, 0),
        ONE + spec(16, 0, [0]) + b"\x00",
        ONE + spec(1, 0, [0, 2**62, 2**62]) + bytes([LEAF_TENSOR]),
        ONE + spec(1, 0, [2**61]) + bytes([LEAF_TENSOR]),
        ONE + spec(1, 0, 65 * [1]) + bytes([LEAF_TENSOR]),
        struct.pack("<II", MAGIC, 2**32 - 1) + bytes(100),
    ],
    ids=range(20),
)
def test_a_forged_structure_is_refused(structure: bytes) -> None:
    with pytest.raises(CheckpointFormatError):
        load_state(forged(structure))


def test_format_errors_are_checkpoint_errors_and_value_errors() -> None:
    assert issubclass(CheckpointFormatError, CheckpointError)
    assert issubclass(CheckpointFormatError, ValueError)
