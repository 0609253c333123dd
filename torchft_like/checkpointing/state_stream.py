"""State as a stream of bytes with checksums.

    prefix     magic "TFTSTATE", version u32, length of the structure u32, CRC-32 of the structure u32
    structure  what `plain_data` writes of the state: how it is built, and which leaves it has
    chunks     4 MiB of the payload each (the last is shorter), followed by its CRC-32 u32

Numbers are little-endian. The payload is all leaves one after another, each padded with zeros to 64 bytes, so
that the sender keeps its snapshot as the very bytes that it serves. The receiver reads each tensor into
memory of its own, so that a tensor that it keeps does not keep the others alive.

A stream may be cut into parts, each prefix and structure and a contiguous run of the chunks, to be fetched
over several connections. CRC-32 finds every burst of up to 32 wrong bits and all but one in four billion of
other damage; it is no defence against a peer that lies. Limits are: a receiver makes memory for bytes that
have come, and takes no more of them than its own state lets it expect.

All replicas of a job must run the same version; a stream of another one is refused.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Protocol

import torch
from isal.isal_zlib import crc32  # of six times the speed of zlib's

from torchft_like.checkpointing.shards import STATE_SCHEMA
from torchft_like.errors import CheckpointFormatError, ForeignStateError, PlainDataError
from torchft_like.plain_data import Leaf, Limits, Structure, TensorLeaves, bytes_of, nbytes_of, write

CHUNK_BYTES = 4 * 1024 * 1024

# A receiver takes this many times the size of its own state, which may lack that of optimizers, plus
# GROWTH_FROM.
GROWTH_MAX = 16
GROWTH_FROM = Limits(structure_bytes=2**20, leaves=2**14, leaf_bytes=2**28)

_MAGIC = b"TFTSTATE"
_VERSION = 2
_PREFIX = struct.Struct("<8sIII")
_CRC = struct.Struct("<I")
_ALIGNMENT = 64


def flatten_state(state: object) -> tuple[bytes, list[Leaf]]:
    """Return the structure of a state, and its leaves: the state's own tensors, on their devices."""
    try:
        return write(state, STATE_SCHEMA)
    except PlainDataError as error:
        raise CheckpointFormatError(str(error)) from error


class Expectation:
    """The limits of what a rank takes from a peer: a state like its own, once that is known.

    Args:
        leaf_bytes_max: the limit of the bytes of tensors; None for GROWTH_MAX times those of its own state,
          plus GROWTH_FROM.

    Attributes:
        limits: the limits of the next state that comes.
    """

    def __init__(self, leaf_bytes_max: int | None = None) -> None:
        most = STATE_SCHEMA.limits
        self._leaf_bytes_max = leaf_bytes_max
        self.limits = most if leaf_bytes_max is None else replace(most, leaf_bytes=leaf_bytes_max)

    def learn(self, own: object) -> None:
        """Set the limits by the rank's own state.

        Raises:
            CheckpointFormatError: a value is of a type that cannot be sent; the text names its path.
        """
        structure, leaves = flatten_state(own)
        most, floor = STATE_SCHEMA.limits, GROWTH_FROM
        leaf_bytes = GROWTH_MAX * sum(map(nbytes_of, leaves)) + floor.leaf_bytes
        self.limits = Limits(
            structure_bytes=min(GROWTH_MAX * len(structure) + floor.structure_bytes, most.structure_bytes),
            values=most.values,
            leaves=min(GROWTH_MAX * len(leaves) + floor.leaves, most.leaves),
            leaf_bytes=leaf_bytes if self._leaf_bytes_max is None else self._leaf_bytes_max,
        )


class Source(Protocol):
    """A source of bytes: any binary file object, or an HTTP response."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read up to `len(buffer)` bytes into the buffer; return their number, 0 at the end."""


class EncodedState:
    """A snapshot of a state, in the layout in which it is sent.

    The constructor copies every tensor to the CPU once; it keeps nothing of the original. Any thread may read
    it.

    Raises:
        CheckpointFormatError: a value is of a type that cannot be sent; the text names its path.
    """

    def __init__(self, state: object) -> None:
        structure, leaves = flatten_state(state)
        self._header = _PREFIX.pack(_MAGIC, _VERSION, len(structure), crc32(structure)) + structure
        payload = _copy_payload(leaves)
        self._payload = payload.numpy().data

    def part(self, index: int = 0, count: int = 1) -> Iterator[bytes | memoryview]:
        """Yield part `index` of `count`, in pieces of at most 4 MiB."""
        for start in range(0, len(self._header), CHUNK_BYTES):
            yield memoryview(self._header)[start : start + CHUNK_BYTES]
        for start, stop in _chunks(len(self._payload), index, count):
            chunk = self._payload[start:stop]
            yield chunk
            yield _CRC.pack(crc32(chunk))

    def part_nbytes(self, index: int = 0, count: int = 1) -> int:
        """Return the length of that part in bytes."""
        return len(self._header) + _chunks_nbytes(len(self._payload), index, count)


def read_header(source: Source, limits: Limits = STATE_SCHEMA.limits) -> bytes:
    """Read and check the structure of a state, in pieces: memory is made for bytes that have come."""
    magic, version, length, crc = _PREFIX.unpack(_read(source, _PREFIX.size))
    if magic != _MAGIC:
        raise CheckpointFormatError(f"this is no state stream: it begins with {magic!r}")
    if version != _VERSION:
        raise CheckpointFormatError(
            f"the state stream has version {version}, this is {_VERSION}: all replicas of a job must run the "
            "same version of torchft_like"
        )
    if length > limits.structure_bytes:
        raise CheckpointFormatError(
            f"the header claims {length} bytes; the limit is {limits.structure_bytes} beside this rank's own "
            "state"
        )
    header = bytearray()
    while len(header) < length:
        header += _read(source, min(length - len(header), CHUNK_BYTES))
    if crc32(header) != crc:
        raise CheckpointFormatError("the header is corrupt: its checksum does not match")
    return bytes(header)


class IncomingState:
    """A state that is being received, in one part or in several, each of which may have its own thread.

    Memory is made for a leaf when its first byte is about to be read.

    Args:
        header: the structure that `read_header` returned.
        limits: the limits of the receiver.

    Raises:
        CheckpointFormatError: the header is malformed, or describes more than the limits allow.
    """

    def __init__(self, header: bytes, limits: Limits = STATE_SCHEMA.limits) -> None:
        self.header = header
        try:
            # The bytes of tensors are checked below, with a more helpful error.
            unbound = replace(limits, leaf_bytes=STATE_SCHEMA.limits.leaf_bytes)
            self._structure = Structure(header, STATE_SCHEMA, unbound)
        except PlainDataError as error:
            raise _malformed(error) from error
        self._sizes = [spec.nbytes for spec in self._structure.specs]
        self._offsets = list(accumulate(map(_padded, self._sizes), initial=0))
        self._leaves: list[torch.Tensor | None] = [None] * len(self._sizes)
        self._making = threading.Lock()
        if (nbytes := sum(self._sizes)) > limits.leaf_bytes:
            raise ForeignStateError(
                f"the state has {nbytes} bytes of tensors, and {limits.leaf_bytes} are the most that this "
                "rank takes beside its own: if a state may grow so, give the transport state_bytes_max"
            )

    @property
    def header_nbytes(self) -> int:
        """The length in bytes of prefix and structure, with which every part begins."""
        return _PREFIX.size + len(self.header)

    @property
    def payload_nbytes(self) -> int:
        """The length in bytes of all leaves with their padding."""
        return self._offsets[-1]

    def check_length(self, length: int, index: int = 0, count: int = 1) -> None:
        """Check, before anything is allocated, that the length that the source announces fits the header.

        Args:
            length: how many bytes of the part follow the header.
            index, count: the number of the part, and the number of parts.
        """
        expected = _chunks_nbytes(self.payload_nbytes, index, count)
        if length != expected:
            raise CheckpointFormatError(f"{length} bytes follow the header; by its own account {expected} do")

    def read_part(self, source: Source, index: int = 0, count: int = 1) -> None:
        """Read the chunks of a part into place; `source` is positioned after the header.

        Raises:
            CheckpointFormatError: the part ends early, a checksum is wrong, or there is no memory for it.
        """
        for start, stop in _chunks(self.payload_nbytes, index, count):
            self._read_chunk(source, start, stop)

    def state(self) -> object:
        """Return the state, once every part has been read.

        Raises:
            CheckpointFormatError: the header does not describe the leaves that were sent.
        """
        try:
            return self._structure.value(TensorLeaves(map(self._leaf, range(len(self._sizes)))))
        except PlainDataError as error:
            raise _malformed(error) from error

    def _read_chunk(self, source: Source, start: int, stop: int) -> None:
        crc = 0
        for window in self._windows(start, stop):
            _fill(source, window)
            crc = crc32(window, crc)
        if _CRC.pack(crc) != _read(source, _CRC.size):
            raise CheckpointFormatError(
                f"bytes {start} to {stop} of {self.payload_nbytes} are corrupt: their checksum does not match"
            )

    def _windows(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the memory to which bytes [start, stop) of the payload belong, piece by piece."""
        padding = memoryview(bytearray(_ALIGNMENT))
        index = bisect_right(self._offsets, start) - 1
        while start < stop:
            begin, size = self._offsets[index], self._sizes[index]
            if start < begin + size:
                end = min(begin + size, stop)
                leaf = self._leaf(index).reshape(-1).view(torch.uint8)
                yield leaf.numpy().data[start - begin : end - begin]
                start = end
            if start < (end := min(self._offsets[index + 1], stop)):
                yield padding[: end - start]
                start = end
            index += 1

    def _leaf(self, index: int) -> torch.Tensor:
        with self._making:
            if (tensor := self._leaves[index]) is None:
                spec = self._structure.specs[index]
                try:
                    tensor = self._leaves[index] = torch.empty(spec.shape, dtype=spec.dtype)
                except (RuntimeError, MemoryError) as error:
                    raise CheckpointFormatError(f"no memory for {spec.nbytes} bytes of the state") from error
            return tensor


def _malformed(error: PlainDataError) -> CheckpointFormatError:
    return CheckpointFormatError(f"the description of the state is malformed: {error}")


def _copy_payload(leaves: Sequence[Leaf]) -> torch.Tensor:
    offsets = list(accumulate(map(_padded, map(nbytes_of, leaves)), initial=0))
    payload = torch.empty(offsets[-1], dtype=torch.uint8)
    window = payload.numpy().data
    for leaf, offset in zip(leaves, offsets, strict=False):
        size = nbytes_of(leaf)
        if size and isinstance(leaf, torch.Tensor):
            payload[offset : offset + size].view(leaf.dtype).view(leaf.shape).copy_(leaf)
        elif size:
            window[offset : offset + size] = bytes_of(leaf)
        window[offset + size : offset + _padded(size)] = bytes(_padded(size) - size)
    return payload


def _chunk_range(payload_nbytes: int, index: int, count: int) -> range:
    """Return the numbers of the chunks that belong to a part."""
    total = -(-payload_nbytes // CHUNK_BYTES)
    return range(total * index // count, total * (index + 1) // count)


def _chunks(payload_nbytes: int, index: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each chunk of a part in the payload."""
    for chunk in _chunk_range(payload_nbytes, index, count):
        yield chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, payload_nbytes)


def _chunks_nbytes(payload_nbytes: int, index: int, count: int) -> int:
    """Compute the bytes of a part's chunks without a loop, because a header may claim any length."""
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
