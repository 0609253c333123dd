"""Random states come back as they were; random damage and lies never get further than a format error."""

from __future__ import annotations

import contextlib
import json
import math
import struct
import zlib
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpointing.states import DTYPES, round_trip, same
from torchft_like.checkpointing.state_stream import dump_state, load_state
from torchft_like.errors import CheckpointError, CheckpointFormatError

# torch says this of every complex32 tensor, wherever it is made.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

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


@settings(max_examples=300, deadline=None)
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


@settings(max_examples=1000, deadline=None)
@given(edits)
def test_damage_anywhere_is_found_and_reported_as_a_format_error(
    operations: list[tuple[str, int, bytes]],
) -> None:
    data = edited(SAMPLE, operations)
    if data == SAMPLE:
        assert load_state(data) is not None
        return
    with pytest.raises(CheckpointFormatError):
        load_state(data)


def test_every_single_flipped_bit_of_the_prefix_and_every_truncation_is_found() -> None:
    for bit in range(20 * 8):
        data = bytearray(SAMPLE)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CheckpointFormatError):
            load_state(bytes(data))
    for length in range(0, len(SAMPLE), 7):
        with pytest.raises(CheckpointFormatError):
            load_state(SAMPLE[:length])


def forged(header: object | bytes, payload: bytes = b"") -> bytes:
    """A stream whose checksums are right, as a peer that lies would make it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<8sIII", b"TFTSTATE", 1, len(text), zlib.crc32(text))
    return prefix + text + (payload + struct.pack("<I", zlib.crc32(payload)) if payload else b"")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.sampled_from(
        ["list", "dict", "tensor", "array", "scalar", "bytes", "str", "int", "float32", "<f4", "0x1", "ff"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
        | st.tuples(
            st.sampled_from(["list", "tuple", "dict", "ordered_dict", "counter", "size"]), st.lists(inner)
        ).map(list)
        | st.tuples(st.sampled_from(["dict", "counter"]), st.lists(st.tuples(inner, inner))).map(list)
        | st.tuples(
            st.sampled_from(["tensor", "array"]),
            st.integers(-1, 2),
            st.sampled_from(["float32", "bool", "<f4", "|b1", "<f99", "|i3"]),
            st.lists(st.sampled_from([0, 1, 2, 4, 16, 2**62, 2**63, -1])),
        ).map(list)
    ),
    max_leaves=10,
)


@settings(max_examples=1000, deadline=None)
@given(json_values)
def test_a_lying_header_gives_a_state_or_a_format_error_and_nothing_else(tree: object) -> None:
    with contextlib.suppress(CheckpointFormatError):
        load_state(forged({"buffers": [16, 0], "tree": tree}, b"\x01" * 16 + b"\x00" * 48))


@settings(max_examples=300, deadline=None)
@given(json_values)
def test_a_lying_list_of_buffers_gives_a_state_or_a_format_error_and_nothing_else(sizes: object) -> None:
    for header in (sizes, {"buffers": sizes, "tree": None}, {"buffers": [sizes], "tree": None}):
        with contextlib.suppress(CheckpointFormatError):
            load_state(forged(header))


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b"\xff\xfe",
        b'{"buffers":[],"tree":NaN}',
        b'{"buffers":[],"tree":' + b"9" * 5000 + b"}",
        json.dumps({"buffers": [2**61], "tree": ["bytes", 0]}).encode(),
        json.dumps({"buffers": [True], "tree": None}).encode(),
        json.dumps({"buffers": [], "tree": ["device", "gpu of mine"]}).encode(),
        json.dumps({"buffers": [], "tree": ["dict", [["a", 1], ["a", 2]]]}).encode(),
        json.dumps({"buffers": [], "tree": ["dict", [[["list", []], 1]]]}).encode(),
        json.dumps({"buffers": [0], "tree": ["tensor", 0, "float32", [0, 2**62, 2**62]]}).encode(),
        json.dumps({"buffers": [0], "tree": ["array", 0, "<f4", [0, 2**62, 2**62]]}).encode(),
    ],
    ids=range(11),
)
def test_a_forged_header_is_refused(header: bytes) -> None:
    with pytest.raises(CheckpointFormatError):
        load_state(forged(header))


def test_a_torch_file_is_refused_as_another_format() -> None:
    with pytest.raises(CheckpointFormatError, match="this is no state stream: it begins with b'PK"):
        load_state(b"PK\x03\x04" + bytes(100))


def test_format_errors_are_checkpoint_errors_and_value_errors() -> None:
    assert issubclass(CheckpointFormatError, CheckpointError)
    assert issubclass(CheckpointFormatError, ValueError)
