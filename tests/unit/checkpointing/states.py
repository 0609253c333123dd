"""Every dtype, states as one stream of bytes, and a comparison of states, for the tests of checkpoints."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import torch

from torchft_like.checkpointing.state_stream import EncodedState, IncomingState, read_header

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
    *(torch.bool, torch.complex64, torch.complex128, torch.complex32),
]


def dump_state(state: object) -> bytes:
    return b"".join(EncodedState(state).part())


def load_state(data: bytes) -> object:
    source = io.BytesIO(data)
    incoming = IncomingState(read_header(source))
    incoming.check_length(len(data) - incoming.header_nbytes)
    incoming.read_part(source)
    return incoming.state()


def round_trip(state: object) -> Any:
    return load_state(dump_state(state))


def forged(structure: bytes, payload: bytes = b"") -> bytes:
    """A stream whose checksums are right, as a peer that lies would make it."""
    prefix = struct.pack("<8sIII", b"TFTSTATE", 2, len(structure), zlib.crc32(structure))
    return prefix + structure + (payload + struct.pack("<I", zlib.crc32(payload)) if payload else b"")
