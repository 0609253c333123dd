"""Made-up structures of a state never get further than a format error.

Damage on the way, and random structures: tests/stress/test_spoilt_transfers.py and test_fuzz_mutations.py.
"""

from __future__ import annotations

import struct

import pytest

from tests.unit.checkpointing.states import forged, load_state
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
)

pytestmark = pytest.mark.heal_is_clean


def spec(dtype: int, device: int, shape: list[int]) -> bytes:
    return struct.pack(f"<BBB{len(shape)}Q", dtype, device, len(shape), *shape)


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


def test_a_header_whose_text_has_changed_on_the_way_is_refused() -> None:
    stream = forged(EMPTY + struct.pack("<BI", STR, 4) + b"name")
    with pytest.raises(CheckpointFormatError, match="the header is corrupt"):
        load_state(stream.replace(b"name", b"nama"))


def test_format_errors_are_checkpoint_errors_and_value_errors() -> None:
    assert issubclass(CheckpointFormatError, CheckpointError)
    assert issubclass(CheckpointFormatError, ValueError)
