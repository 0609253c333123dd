"""State as a stream of checked bytes: what travels, and in which frames.

    prefix   magic "TFTSTATE", version u32, header length u32, CRC-32 of the header u32
    header   JSON: {"buffers": [length in bytes, ...], "tree": what `state_tree` makes}
    chunks   4 MiB of the payload each (the last is shorter), followed by its CRC-32 u32

Numbers are little-endian. The payload is all buffers one after another, each padded with zeros to
64 bytes, so that the sender keeps its snapshot as the very bytes that it serves. The receiver reads
into memory of one buffer per tensor: what it keeps does not hold the rest alive.

A stream may be cut into parts, each the whole header and a contiguous run of the chunks, to be
fetched over several connections. CRC-32 finds every burst of up to 32 wrong bits and all but one in
four billion of other damage; it is no defence against a peer that lies.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

import torch

from torchft_like.checkpointing.state_tree import Json, flatten_state, unflatten_state
from torchft_like.errors import CheckpointFormatError

CHUNK_BYTES = 4 * 1024 * 1024
HEADER_BYTES_MAX = 64 * 1024 * 1024
BUFFERS_MAX = 1_000_000

_MAGIC = b"TFTSTATE"
_VERSION = 1
_PREFIX = struct.Struct("<8sIII")
_CRC = struct.Struct("<I")
_ALIGNMENT = 64


class Source(Protocol):
    """Where bytes come from: any binary file object, an HTTP response among them."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read up to `len(buffer)` bytes into it; the count, 0 at the end."""


def dump_state(state: object) -> bytes:
    """The whole stream in memory. For small states: see `EncodedState` for large ones.

    Raises:
        CheckpointFormatError: a value is of a type that does not travel; names its path.
    """
    return b"".join(EncodedState(state).part())


def load_state(data: bytes) -> object:
    """What `dump_state` was given.

    Raises:
        CheckpointFormatError: the bytes are truncated, corrupt, or not of this format.
    """
    source = io.BytesIO(data)
    incoming = IncomingState(read_header(source))
    incoming.check_length(len(data) - incoming.header_nbytes)
    incoming.allocate()
    incoming.read_part(source)
    return incoming.state()


class EncodedState:
    """A snapshot of a state, laid out as it will be sent.

    Making it copies every tensor to the CPU once; it holds nothing of the original afterwards.
    Reading it is thread-safe.

    Raises:
        CheckpointFormatError: a value is of a type that does not travel; names its path.
    """

    def __init__(self, state: object) -> None:
        tree, buffers = flatten_state(state)
        sizes = [buffer.numel() * buffer.element_size() for buffer in buffers]
        self._header = _frame_header(tree, sizes)
        payload = _copy_payload(buffers, sizes)
        self._payload = payload.numpy().data

    def part(self, index: int = 0, count: int = 1) -> Iterator[bytes | memoryview]:
        """Part `index` of `count`, in pieces of at most 4 MiB (a header may be larger)."""
        yield self._header
        for start, stop in _chunks(len(self._payload), index, count):
            chunk = self._payload[start:stop]
            yield chunk
            yield _CRC.pack(zlib.crc32(chunk))

    def part_nbytes(self, index: int = 0, count: int = 1) -> int:
        """How long that part is, in bytes."""
        return len(self._header) + _chunks_nbytes(len(self._payload), index, count)

    @property
    def nbytes(self) -> int:
        """The size of the snapshot in memory."""
        return len(self._header) + len(self._payload)


def read_header(source: Source) -> bytes:
    """The checked header of a stream, still as JSON.

    Raises:
        CheckpointFormatError: it is truncated, corrupt, too large, or not of this format.
    """
    prefix = _read(source, _PREFIX.size)
    magic, version, length, crc = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise CheckpointFormatError(f"this is no state stream: it begins with {magic!r}")
    if version != _VERSION:
        raise CheckpointFormatError(f"the state stream has version {version}, this is {_VERSION}")
    if length > HEADER_BYTES_MAX:
        raise CheckpointFormatError(f"the header claims {length} bytes; the limit is {HEADER_BYTES_MAX}")
    header = _read(source, length)
    if zlib.crc32(header) != crc:
        raise CheckpointFormatError("the header is corrupt: its checksum does not match")
    return header


class IncomingState:
    """A state that is being received, in one part or in several, each perhaps by its own thread.

    Args:
        header: what `read_header` returned.

    Raises:
        CheckpointFormatError: the header is not one that a sender makes.
    """

    def __init__(self, header: bytes) -> None:
        self.header = header
        self._tree, self._sizes = _parse_header(header)
        self._offsets = list(accumulate(map(_padded, self._sizes), initial=0))
        self._buffers: list[torch.Tensor] = []

    @property
    def header_nbytes(self) -> int:
        """The length of prefix and header, which every part begins with."""
        return _PREFIX.size + len(self.header)

    @property
    def payload_nbytes(self) -> int:
        """The length of all buffers with their padding."""
        return self._offsets[-1]

    def check_length(self, length: int, index: int = 0, count: int = 1) -> None:
        """Before anything is allocated: does the length that the source announces fit the header?

        Args:
            length: how many bytes of the part follow the header.
            index, count: which part of how many.

        Raises:
            CheckpointFormatError: it does not.
        """
        expected = _chunks_nbytes(self.payload_nbytes, index, count)
        if length != expected:
            raise CheckpointFormatError(f"{length} bytes follow the header; by its own account {expected} do")

    def allocate(self) -> None:
        """Make the memory that parts are read into; once, before the first part.

        Raises:
            CheckpointFormatError: there is not that much memory.
        """
        try:
            self._buffers = [torch.empty(size, dtype=torch.uint8) for size in self._sizes]
        except (RuntimeError, MemoryError) as error:
            raise CheckpointFormatError(f"no memory for a state of {self.payload_nbytes} bytes") from error

    def read_part(self, source: Source, index: int = 0, count: int = 1) -> None:
        """Read the chunks of a part into place; `source` is positioned behind the header.

        Raises:
            CheckpointFormatError: the part ends early, or a checksum is wrong.
        """
        for start, stop in _chunks(self.payload_nbytes, index, count):
            self._read_chunk(source, start, stop)

    def state(self) -> object:
        """The state, once every part has been read.

        Raises:
            CheckpointFormatError: the header describes something else than what was sent.
        """
        return unflatten_state(self._tree, self._buffers)

    def _read_chunk(self, source: Source, start: int, stop: int) -> None:
        crc = 0
        for window in self._windows(start, stop):
            _fill(source, window)
            crc = zlib.crc32(window, crc)
        if _CRC.pack(crc) != _read(source, _CRC.size):
            raise CheckpointFormatError(
                f"bytes {start} to {stop} of {self.payload_nbytes} are corrupt: their checksum does not match"
            )

    def _windows(self, start: int, stop: int) -> Iterator[memoryview]:
        """The memory where bytes [start, stop) of the payload belong, piece by piece."""
        padding = memoryview(bytearray(_ALIGNMENT))
        index = bisect_right(self._offsets, start) - 1
        while start < stop:
            offset, size = self._offsets[index], self._sizes[index]
            for begin, end, memory in (
                (offset, offset + size, self._buffers[index].numpy().data),
                (offset + size, self._offsets[index + 1], padding),
            ):
                if start < min(end, stop):
                    yield memory[start - begin : min(end, stop) - begin]
                    start = min(end, stop)
            index += 1


def _frame_header(tree: Json, sizes: list[int]) -> bytes:
    try:
        header = json.dumps({"buffers": sizes, "tree": tree}, separators=(",", ":"), allow_nan=False).encode()
    except RecursionError as error:
        raise CheckpointFormatError("the state is nested too deeply") from error
    if len(header) > HEADER_BYTES_MAX or len(sizes) > BUFFERS_MAX:
        raise CheckpointFormatError(
            f"the state has {len(sizes)} buffers and its description {len(header)} bytes; the limits are "
            f"{BUFFERS_MAX} and {HEADER_BYTES_MAX}: keep large lists of numbers in tensors"
        )
    return _PREFIX.pack(_MAGIC, _VERSION, len(header), zlib.crc32(header)) + header


def _parse_header(header: bytes) -> tuple[object, list[int]]:
    try:
        document = json.loads(header, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"the header is not JSON: {error}") from error
    if not isinstance(document, dict) or set(document) != {"buffers", "tree"}:
        raise CheckpointFormatError("the header is not an object of buffers and tree")
    sizes = document["buffers"]
    if not isinstance(sizes, list) or len(sizes) > BUFFERS_MAX:
        raise CheckpointFormatError(f"the header's buffers are not a list of at most {BUFFERS_MAX}")
    if not all(type(size) is int and 0 <= size < 2**62 for size in sizes):
        raise CheckpointFormatError("a buffer's length is not a number of bytes")
    return document["tree"], sizes


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number in JSON")


def _copy_payload(buffers: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    offsets = list(accumulate(map(_padded, sizes), initial=0))
    payload = torch.empty(offsets[-1], dtype=torch.uint8)
    for buffer, size, offset in zip(buffers, sizes, offsets, strict=False):
        region = payload[offset : offset + size]
        if size:
            region.view(buffer.dtype).view(buffer.shape).copy_(buffer)
        payload[offset + size : offset + _padded(size)] = 0
    return payload


def _chunk_range(payload_nbytes: int, index: int, count: int) -> range:
    """Which chunks belong to a part."""
    total = -(-payload_nbytes // CHUNK_BYTES)
    return range(total * index // count, total * (index + 1) // count)


def _chunks(payload_nbytes: int, index: int, count: int) -> Iterator[tuple[int, int]]:
    """Where the chunks of a part begin and end in the payload."""
    for chunk in _chunk_range(payload_nbytes, index, count):
        yield chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, payload_nbytes)


def _chunks_nbytes(payload_nbytes: int, index: int, count: int) -> int:
    """Computed, not counted: a header may claim any length."""
    chunks = _chunk_range(payload_nbytes, index, count)
    stop = min(chunks.stop * CHUNK_BYTES, payload_nbytes)
    return max(0, stop - chunks.start * CHUNK_BYTES) + (chunks.stop - chunks.start) * _CRC.size


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _read(source: Source, length: int) -> bytes:
    data = bytearray(length)
    _fill(source, memoryview(data))
    return bytes(data)


def _fill(source: Source, window: memoryview) -> None:
    done = 0
    while done < len(window):
        count = source.readinto(window[done:])
        if not count:
            raise CheckpointFormatError(f"the stream is truncated: {len(window) - done} more bytes expected")
        done += count
