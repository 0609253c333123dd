"""State as bytes with checksums.

    header   prefix: magic "TFTSTATE", version u32, length of the structure u32, CRC-32 of the structure u32;
             structure: what `plain_data` writes of the state: how it is built, and which leaves it has
    payload  all leaves one after another, each padded with zeros to 64 bytes
    sums     the CRC-32 u32 of each chunk of 4 MiB of the payload (the last is shorter)

Numbers are little-endian. The sender sends from its tensors, until there is a copy of them, and keeps that as
the very bytes that it serves. The receiver reads
each tensor into a tensor of its own state if there is one like it at that place, or else into memory of its
own, so that a tensor that it keeps does not keep the others alive. Both take the checksum of a piece while
that is in the processor's cache.

Any ranges of whole chunks may be fetched, in any order, from any source whose payload is laid out alike: the
sums, which are those of one source, tell whether the bytes are that one's. CRC-32 finds every burst of up to
32 wrong bits and all but one in four billion of other damage; it is no defence against a peer that lies.
Limits are: a receiver makes memory for bytes that have come, and takes no more of them than its own state
lets it expect.

All replicas of a job must run the same version; a stream of another one is refused.
"""

from __future__ import annotations

import mmap
import struct
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain, pairwise, repeat
from typing import Any, Protocol

import numpy as np
import torch
from isal.isal_zlib import crc32  # of six times the speed of zlib's

from torchft_like.checkpointing.copy_ahead import (
    ALIGNMENT,
    COPY_BYTES,
    CopyAhead,
    Copying,
    Piece,
    aligned,
    pieces_of,
    plain_part,
)
from torchft_like.checkpointing.host_memory import (
    HUGE_FROM,
    KeptMemory,
    ToDevice,
    ToHost,
    devices,
    fresh_memory,
)
from torchft_like.checkpointing.shards import STATE_SCHEMA, is_dtensor, layout_of
from torchft_like.dtypes import as_bytes
from torchft_like.errors import CheckpointError, CheckpointFormatError, ForeignStateError, PlainDataError
from torchft_like.instances import TensorInstance, name_of_class, parts_of
from torchft_like.plain_data import (
    Buffer,
    Leaf,
    LeafSource,
    Limits,
    Shard,
    Structure,
    TensorLeaves,
    TensorSpec,
    as_tensor,
    bytes_of,
    nbytes_of,
    settled,
    write,
)
from torchft_like.writing import is_dense, writing_to

CHUNK_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 1024 * 1024  # of a chunk, moved and summed at a time

# A receiver takes this many times the size of its own state, which may lack that of optimizers, plus
# GROWTH_FROM.
GROWTH_MAX = 16
GROWTH_FROM = Limits(structure_bytes=2**20, leaves=2**14, leaf_bytes=2**28)

_MAGIC = b"TFTSTATE"
_VERSION = 3
_PREFIX = struct.Struct("<8sIII")
HEADER_BYTES = _PREFIX.size  # before the structure
CORRUPT = "of it are corrupt: their checksum does not match"
_CRC = struct.Struct("<I")
_SUMS_BYTES = 256  # sent at a time


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
        self.limits: Limits = most if leaf_bytes_max is None else replace(most, leaf_bytes=leaf_bytes_max)

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
    """A source of bytes: any binary file object, or a connection."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Read up to `len(buffer)` bytes into the buffer; return their number, 0 at the end."""


class _OutgoingState:
    """A state that is to be sent.

    Attributes:
        header: what goes before the payload.
        nbytes, stream_nbytes: the bytes of the payload; and of header, payload and sums.
    """

    def __init__(self, state: object) -> None:
        structure, self._leaves = flatten_state(state)
        self.header: bytes = _PREFIX.pack(_MAGIC, _VERSION, len(structure), crc32(structure)) + structure
        self._offsets = _offsets(map(nbytes_of, self._leaves))
        self.nbytes: int = self._offsets[-1]
        self.stream_nbytes: int = len(self.header) + self.nbytes + sums_nbytes(self.nbytes)


class LiveState(_OutgoingState):
    """A state that is sent from its own tensors, which must not change meanwhile: there is no copy of it.

    Raises:
        CheckpointFormatError: a value is of a type that cannot be sent; the text names its path.
    """

    def sections(self) -> Iterator[memoryview]:
        """Yield each chunk of the payload, and the sums; a chunk is valid until the next one."""
        sums, nbytes = bytearray(), min(CHUNK_BYTES, self.nbytes)
        if self.device is None:
            block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")  # not the script's default device
        else:
            block = devices.buffer(nbytes)
        for filled in self.fill(repeat(block)):
            chunk = filled.numpy().data
            sums += _CRC.pack(crc32(chunk))
            yield chunk
        yield memoryview(sums)

    @property
    def device(self) -> torch.device | None:
        """A device on which a part of the state is; None if there is none."""
        tensors = (leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor))
        return next((tensor.device for tensor in tensors if tensor.numel() and devices.has(tensor)), None)

    def fill(self, blocks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Copy the payload into one block of bytes after the other, on any device; yield the filled part.

        The current stream copies between devices. A block is taken when its first byte is copied.
        """
        turns, used = iter(blocks), 0
        block = torch.empty(0, dtype=torch.uint8, device="cpu")
        for leaf, (start, end) in zip(self._leaves, pairwise(self._offsets), strict=True):
            data = as_bytes(settled(as_tensor(leaf).detach()))
            for part in (data, data.new_zeros(end - start - len(data))):
                at = 0
                while at < len(part):
                    if used == len(block):
                        block, used = next(turns), 0
                    count = min(len(part) - at, len(block) - used)
                    block[used : used + count].copy_(part[at : at + count])
                    at, used = at + count, used + count
                    if used == len(block):
                        yield block
        if used < len(block):
            yield block[:used]


class Snapshot(Copying, _OutgoingState):
    """A state, or a copy of it, in the layout in which it is sent.

    The constructor describes the state. Then it must not change until `settle`, or `fill`, has returned, on
    the thread that may change it afterwards. Any thread may read meanwhile. It reads the larger tensors that
    lie contiguous on the CPU where they are, until there is a copy of them. Everything else is copied first,
    some leaves to a piece, and is waited for.

    INVARIANT: who reads from a tensor's own memory has a pin while it does, which is never for longer than a
    chunk takes without a wait for anybody, and `settle` waits for the pins.

    Args:
        memory: lends the memory of the copy.
        ahead: copies of some of its tensors, which were begun before.

    Attributes:
        live_nbytes: how many bytes of it can be read from where they are.
        chunk_sums: the checksums of its chunks that are known: those that were sent, or asked for.

    Raises:
        CheckpointFormatError: a value is of a type that cannot be sent; the text names its path.
    """

    def __init__(
        self, state: object, memory: KeptMemory | None = None, ahead: CopyAhead | None = None
    ) -> None:
        Copying.__init__(self)
        _OutgoingState.__init__(self, state)
        taken = {} if ahead is None else ahead.take(self._leaves)
        self._ahead = ahead if taken else None  # whose memory this snapshot keeps
        sizes = [end - start for start, end in pairwise(self._offsets)]
        window = (memory or KeptMemory()).lend(self.nbytes - sum(sizes[index] for index in taken), self)
        self._pieces: list[Piece] = []
        self._left: list[tuple[Piece, list[Leaf]]] = []  # to be copied first
        used = 0
        for index, (leaf, size) in enumerate(zip(self._leaves, sizes, strict=True)):
            if index in taken:
                self._pieces += taken[index]
                continue
            place, used = window[used : used + size], used + size
            # What can be read from where it is; all else is copied first.
            plain = plain_part(leaf) if isinstance(leaf, torch.Tensor) and not devices.has(leaf) else None
            if plain is not None:
                self._open.extend(made := pieces_of(as_bytes(plain), place))
                self._pieces += made
            elif (
                self._left
                and (last := self._left[-1])[0] is self._pieces[-1]
                and (len(last[0].place) + size <= COPY_BYTES)
            ):
                last[0].place = window[used - size - len(last[0].place) : used]
                last[1].append(leaf)
            elif size:
                self._pieces.append(Piece(place))
                self._left.append((self._pieces[-1], [leaf]))
        self._starts = list(accumulate((len(piece.place) for piece in self._pieces), initial=0))
        self.live_nbytes: int = sum(len(piece.place) for piece in self._open)
        self._open.reverse()  # from the end, as readers begin at the front
        self._leaves = []
        self.chunk_sums: list[int | None] = [None] * _chunk_count(self.nbytes)
        self._pins = 0
        self._is_settled = False

    def fill(self) -> Snapshot:
        """Copy the state, of which nothing is kept afterwards; return this snapshot."""
        try:
            self.copy_first()
            self.finish()
        finally:
            self.settle()
        return self

    def copy_first(self) -> None:
        """Copy what cannot be read from where it is; `copy_next` copies the rest."""
        left, self._left = self._left, []
        if self._ahead is not None:
            self._ahead.finish()
        with ToHost(sum(len(piece.place) for piece, _ in left)) as copies:
            for piece, leaves in left:
                at = 0
                for leaf in leaves:
                    self._copy(leaf, piece.place[at : (at := at + aligned(nbytes_of(leaf)))], copies)
                copies.then(partial(self._note_copied, piece))

    def settle(self) -> None:
        """Read nothing but copies from now on: the state may change when this has returned."""
        with self.changed:
            self._is_settled = True
            self._open.clear()
            for piece in self._pieces:
                piece.source = None
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self._pins)

    def _note_copied(self, piece: Piece) -> None:
        with self.changed:
            piece.is_copied = True
            self.changed.notify_all()

    def _copy(self, leaf: Leaf, place: memoryview, copies: ToHost) -> None:
        size = nbytes_of(leaf)
        if size and isinstance(leaf, torch.Tensor) and devices.has(leaf):
            copies.copy(leaf, place[:size])
        elif size:
            copies.then(partial(_copy_on_host, leaf, place[:size]))
        place[size:] = bytes(len(place) - size)

    @contextmanager
    def reading(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        """Yield some of bytes [start, stop) of the payload, at most a chunk, in pieces of at most 1 MiB; in
        the block the caller does not wait for a client.

        Raises:
            CheckpointError: the state could not be copied, or was not, as no receiver needed it any more.
        """
        pieces: list[memoryview] = []
        number, stop, is_live = bisect_right(self._starts, start) - 1, min(stop, start + CHUNK_BYTES), False
        with self.changed:
            while start < stop:
                piece, at = self._pieces[number], start - self._starts[number]
                if not piece.is_there and not self._is_settled:
                    if pieces:
                        break
                    self.changed.wait_for(lambda: piece.is_copied or self._is_settled)  # noqa: B023 - now
                if not piece.is_there:
                    raise CheckpointError(
                        "the state was not kept: it could not be copied, or all had it for whom it was"
                    )
                is_live |= not piece.is_copied  # which it may be from now on
                pieces.append(piece.read(at)[: min(PIECE_BYTES, stop - start)])
                start += len(pieces[-1])
                number += start == self._starts[number + 1]
            self._pins += is_live
        try:
            yield pieces
        finally:
            if is_live:
                with self.changed:
                    self._pins -= 1
                    self.changed.notify_all()

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield bytes [start, stop) of the payload in pieces, each of which is good until the next one."""
        while start < stop:
            with self.reading(start, stop) as pieces:
                yield from pieces
            start += sum(map(len, pieces))

    def sums(self) -> Iterator[bytes]:
        """Yield the checksums of all chunks, some at a time."""
        some = bytearray()
        for chunk, (start, stop) in enumerate(_chunks(0, self.nbytes)):
            if (crc := self.chunk_sums[chunk]) is None:
                crc = 0
                for piece in self.pieces(start, stop):
                    crc = crc32(piece, crc)
                self.chunk_sums[chunk] = crc
            some += _CRC.pack(crc)
            if len(some) == _SUMS_BYTES:
                yield bytes(some)
                some.clear()
        yield bytes(some)


def _copy_on_host(leaf: Leaf, place: memoryview) -> None:
    if isinstance(leaf, torch.Tensor):
        torch.frombuffer(place, dtype=leaf.dtype).view(leaf.shape).copy_(leaf)
    else:
        place[:] = bytes_of(leaf)


def read_header(source: Source, limits: Limits = STATE_SCHEMA.limits) -> bytes:
    """Read and check the structure of a state, in pieces: memory is made for bytes that have come."""
    magic, version, length, crc = _PREFIX.unpack(read_exactly(source, HEADER_BYTES))
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
        header += read_exactly(source, min(length - len(header), PIECE_BYTES))
    if crc32(header) != crc:
        raise CheckpointFormatError("the header is corrupt: its checksum does not match")
    return bytes(header)


class IncomingState:
    """A state that is being received, by any number of threads.

    Memory is made for a leaf when its first byte is about to be read.

    Args:
        header: the structure that `read_header` returned.

    Attributes:
        nbytes, stream_nbytes: the bytes of the payload; and of header, payload and sums.
        outline: the state as it will be, with tensors without memory, on the device "meta".

    Raises:
        CheckpointFormatError: the header is malformed, or describes more than the limits allow.
    """

    def __init__(self, header: bytes, limits: Limits = STATE_SCHEMA.limits) -> None:
        self._header = header
        # The bytes of tensors are checked below, with a more helpful error.
        self._limits = replace(limits, leaf_bytes=STATE_SCHEMA.limits.leaf_bytes)
        structure = self._structure_of(header)
        self.specs: Sequence[TensorSpec] = structure.specs
        self._offsets = _offsets(spec.nbytes for spec in self.specs)
        self.nbytes: int = self._offsets[-1]
        self.stream_nbytes: int = HEADER_BYTES + len(header) + self.nbytes + sums_nbytes(self.nbytes)
        self._leaves: list[torch.Tensor | None] = [None] * len(self.specs)
        self._lands_on_device = False
        self._making = threading.Lock()
        self._sums = np.zeros(_chunk_count(self.nbytes), dtype="<u4")
        if (nbytes := sum(spec.nbytes for spec in self.specs)) > limits.leaf_bytes:
            raise ForeignStateError(
                f"the state has {nbytes} bytes of tensors, and {limits.leaf_bytes} are the most that this "
                "rank takes beside its own: if a state may grow so, give the transport state_bytes_max"
            )
        structure.puts_together, self._outlines = False, _Outlines()
        self.outline: Any = _value(structure, self._outlines)

    def land_in(self, own: object) -> bool:
        """Let the bytes of a tensor land in the tensor at the same place of `own`, where they lie alike.

        That is one without gaps on the CPU or on a CUDA device, of the same dtype, shape and order of
        dimensions, that shares its memory with no other one of them. Return whether there is any. What the
        current stream has begun with them is over then.
        """
        found = sorted(_alike(self.outline, own, self._outlines.places))
        reach = 0
        for number, (at, index, tensor) in enumerate(found):
            end = at + tensor.nbytes
            if reach <= at and end <= (found[number + 1][0] if number + 1 < len(found) else end):
                self._leaves[index] = tensor
            reach = max(reach, end)
        landing = [leaf for leaf in self._leaves if leaf is not None]
        for device in (on := {leaf.device for leaf in landing if devices.has(leaf)}):
            devices.synchronize(device)  # the threads that read have streams of their own
        self._lands_on_device = bool(on)
        return bool(landing)

    def read(self, source: Source, start: int, stop: int) -> None:
        """Read bytes [start, stop) of the payload into place; both are ends of chunks. After the return, also
        by an error, nothing writes to a tensor any more.

        Raises:
            CheckpointFormatError: the bytes end early, or there is no memory for them.
        """
        with ToDevice(PIECE_BYTES) as landing:
            for begin, end in _chunks(start, stop):
                crc, windows = 0, self._windows(begin, end, landing)
                # All at once where possible: what is done between two MiB finds nothing in the cache.
                for window in windows if self._lands_on_device else list(windows):
                    _fill(source, window)
                    crc = crc32(window, crc)
                self._sums[begin // CHUNK_BYTES] = crc

    def copy_from(self, block: torch.Tensor, start: int) -> None:
        """Copy the bytes of the payload from `start` on, which are in a block on any device, into place; the
        current stream does it.

        Raises:
            CheckpointFormatError: there is no memory for them.
        """
        at = 0
        for part, nbytes in self._parts(start, start + len(block)):
            if part is not None:
                with writing_to(part):
                    part.copy_(block[at : at + nbytes])
            at += nbytes

    @property
    def device(self) -> torch.device | None:
        """A device on which a part of the state lands in the receiver's tensors; None if there is none."""
        return next((leaf.device for leaf in self._leaves if leaf is not None and devices.has(leaf)), None)

    def is_laid_out_as(self, leaves: Sequence[Leaf]) -> bool:
        """Return whether the leaves may be those of the state."""
        return [nbytes_of(leaf) for leaf in leaves] == [spec.nbytes for spec in self.specs]

    def take(self, kept: Sequence[Leaf]) -> None:
        """Copy leaves into place that are laid out alike, as if they had been read; `matches` tells which are
        those of the state.
        """
        padded = ((bytes_of(leaf), bytes(-nbytes_of(leaf) % ALIGNMENT)) for leaf in kept)
        self.read(Parts(map(memoryview, chain.from_iterable(padded))), 0, self.nbytes)

    def matches(self, sums: bytes, start: int, stop: int) -> bool:
        """Return whether all chunks in bytes [start, stop), which have been read, have those checksums."""
        chunks = slice(start // CHUNK_BYTES, _chunk_count(stop))
        return bool((self._sums[chunks] == np.frombuffer(sums, dtype="<u4")[chunks]).all())

    def read_all(self, source: Source) -> object:
        """Read payload and sums in a row; return the state.

        Raises:
            CheckpointFormatError: as `read` and `state`, or a checksum is wrong.
        """
        self.read(source, 0, self.nbytes)
        sums = read_exactly(source, sums_nbytes(self.nbytes))
        for start, stop in _chunks(0, self.nbytes):
            if not self.matches(sums, start, stop):
                raise CheckpointFormatError(f"bytes {start} to {stop} {CORRUPT}")
        return self.state()

    def check_layout(self, header: bytes) -> None:
        """Check that the payload of another source's state is laid out as this one's.

        Raises:
            CheckpointFormatError: it has other leaves.
        """
        if header != self._header and self._structure_of(header).specs != self.specs:
            raise CheckpointFormatError("its state has other tensors than that of the first source")

    def state(self) -> object:
        """Return the state, once all of it has been read."""
        return _value(self._structure_of(self._header), TensorLeaves(map(self._leaf, range(len(self.specs)))))

    def _structure_of(self, header: bytes) -> Structure:
        try:
            return Structure(header, STATE_SCHEMA, self._limits)
        except PlainDataError as error:
            raise _malformed(error) from error

    def _windows(self, start: int, stop: int, landing: ToDevice) -> Iterator[memoryview]:
        """Yield memory for bytes [start, stop) of the payload, at most 1 MiB at a time: that of the leaves,
        or some from which they go on to a device.
        """
        padding = memoryview(bytearray(ALIGNMENT))
        for part, nbytes in self._parts(start, stop):
            if part is None:
                yield padding[:nbytes]
            elif devices.has(part):
                for at in range(0, nbytes, PIECE_BYTES):
                    yield from landing.window(part[at : at + PIECE_BYTES])
            else:
                window = part.numpy().data
                for at in range(0, nbytes, PIECE_BYTES):
                    yield window[at : at + PIECE_BYTES]

    def _parts(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor | None, int]]:
        """Yield the places of bytes [start, stop) of the payload, tensors of uint8, and their lengths; None
        is the place of what lies between two leaves.
        """
        index = bisect_right(self._offsets, start) - 1
        while start < stop:
            begin, size = self._offsets[index], self.specs[index].nbytes
            if start < (end := min(begin + size, stop)):
                whole = as_bytes(self._leaf(index))
                yield whole[start - begin : end - begin], end - start
                start = end
            if start < (end := min(self._offsets[index + 1], stop)):
                yield None, end - start
                start = end
            index += 1

    def _leaf(self, index: int) -> torch.Tensor:
        with self._making:
            if (tensor := self._leaves[index]) is None:
                spec = self.specs[index]
                try:
                    tensor = _empty(spec)
                except (RuntimeError, MemoryError, OSError) as error:
                    raise CheckpointFormatError(f"no memory for {spec.nbytes} bytes of the state") from error
                self._leaves[index] = tensor
            return tensor


def _empty(spec: TensorSpec) -> torch.Tensor:
    """Make a tensor for what comes; a large one of huge pages, whose faults and return take no time."""
    if spec.nbytes < HUGE_FROM:
        return torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
    return torch.frombuffer(fresh_memory(spec.nbytes), dtype=spec.dtype).view(spec.shape)


class _Outlines:
    """Leaves without memory, to look at a state before it comes.

    Attributes:
        places: the numbers of the leaves that are tensors, by the identity of the tensor.
    """

    def __init__(self) -> None:
        self.places: dict[int, int] = {}
        self._made: list[torch.Tensor | None] = []

    def tensor(self, spec: TensorSpec) -> torch.Tensor:
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        self.places[id(tensor)] = len(self._made)
        self._made.append(tensor)  # so that no other one gets its identity
        return tensor

    def memory(self, nbytes: int) -> Buffer:
        self._made.append(None)
        return memoryview(mmap.mmap(-1, max(nbytes, 1)))[:nbytes]  # it takes memory when it is written to

    def data(self, _: int) -> bytes:
        self._made.append(None)
        return b""


def _alike(outline: Any, own: Any, places: dict[int, int]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the tensors of `own` in which one of the outline's may land: address, number and tensor."""
    if isinstance(outline, Shard):
        if is_dtensor(own) and layout_of(own) == outline.layout:
            with torch.no_grad():
                yield from _alike(outline.local, own.to_local(), places)
    elif isinstance(outline, TensorInstance):
        if isinstance(own, torch.Tensor) and name_of_class(type(own)) == outline.class_name:
            inner, *_ = parts_of(own) or ({},)
            yield from _alike(outline.inner, inner, places)
    elif isinstance(outline, torch.Tensor):
        lying = outline if outline._base is None else outline._base  # as the leaf does
        index = places.get(id(lying))  # another tensor on the memory of one has none
        if index is not None and type(own) in (torch.Tensor, torch.nn.Parameter) and _fits(outline, own):
            yield own.data_ptr(), index, own.detach().as_strided(lying.shape, lying.stride())
    elif isinstance(outline, dict) and isinstance(own, dict):
        for key in outline.keys() & own.keys():
            yield from _alike(outline[key], own[key], places)
    elif isinstance(outline, list | tuple) and isinstance(own, list | tuple) and len(outline) == len(own):
        for one, other in zip(outline, own, strict=True):
            yield from _alike(one, other, places)


def _fits(outline: torch.Tensor, own: torch.Tensor) -> bool:
    if not is_dense(own) or own.is_conj() or own.is_neg() or not own.numel():
        return False
    is_reached = own.device.type == "cpu" or devices.has(own)
    lies_alike = own.is_contiguous() if outline.is_contiguous() else own.stride() == outline.stride()
    return is_reached and own.dtype is outline.dtype and own.shape == outline.shape and lies_alike


def _value(structure: Structure, leaves: LeafSource) -> object:
    try:
        return structure.value(leaves)
    except PlainDataError as error:
        raise _malformed(error) from error


def _malformed(error: PlainDataError) -> CheckpointFormatError:
    return CheckpointFormatError(f"the description of the state is malformed: {error}")


def _offsets(sizes: Iterable[int]) -> list[int]:
    """Return where each leaf begins in the payload, and where the payload ends."""
    return list(accumulate(map(aligned, sizes), initial=0))


def sums_nbytes(nbytes: int) -> int:
    """Return the length of the checksums of so many bytes."""
    return _chunk_count(nbytes) * _CRC.size


def _chunk_count(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


def _chunks(start: int, stop: int) -> Iterator[tuple[int, int]]:
    for at in range(start, stop, CHUNK_BYTES):
        yield at, min(at + CHUNK_BYTES, stop)


class Parts:
    """Bytes that come in parts, as a source; each part is read before the next one comes."""

    def __init__(self, parts: Iterable[memoryview]) -> None:
        self._parts = iter(parts)
        self._rest = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        while not self._rest and (part := next(self._parts, None)) is not None:
            self._rest = part
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def read_exactly(source: Source, length: int) -> bytes:
    """Read so many bytes, which are few; a CheckpointFormatError says that there are fewer."""
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
