"""States as one stream of bytes, for the tests of checkpoints."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

from torchft_like.checkpointing.state_stream import IncomingState, Snapshot, read_header
from torchft_like.errors import CheckpointFormatError


def dump_state(state: object) -> bytes:
    return stream_of(Snapshot(state).fill())


def stream_of(snapshot: Snapshot) -> bytes:
    """Header, payload and sums, as a receiver gets them."""
    pieces = snapshot.pieces(0, snapshot.nbytes)
    return b"".join([snapshot.header, *map(bytes, pieces), *map(bytes, snapshot.sums())])


def load_state(data: bytes) -> object:
    source = io.BytesIO(data)
    incoming = IncomingState(read_header(source))
    if len(data) != incoming.stream_nbytes:
        raise CheckpointFormatError("it has another length")
    return incoming.read_all(source)


def round_trip(state: object) -> Any:
    return load_state(dump_state(state))


def forged(structure: bytes, payload: bytes = b"") -> bytes:
    """A stream whose checksums are right, as a peer that lies would make it."""
    prefix = struct.pack("<8sIII", b"TFTSTATE", 3, len(structure), zlib.crc32(structure))
    return prefix + structure + (payload + struct.pack("<I", zlib.crc32(payload)) if payload else b"")
