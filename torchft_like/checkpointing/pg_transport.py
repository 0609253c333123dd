"""State over the process group of the training, for scripts of torchft that ask for it.

The bytes are those of `state_stream`, cut into messages: first one of four numbers (format, step, bytes that
follow, how many of them are the header), then messages of 4 MiB, of which the last of the header, of the
payload and of the sums are shorter. After the header comes the offer of a block on the sender's device
(`DeviceBlock`), or zeros: if all receivers can map it, the payload comes through the block, and a hash of
each part of it instead of the sums. Where there is no state to send, the third number is negative, and so
many bytes of the reason follow. The first number says what the others are, so every other format has to begin
with a message of that length. The sender sends from its own tensors, to all receivers at the same time, and a
receiver may have the state arrive in its own: neither makes a copy of the state. A group that is aborted,
because a member is lost or the step has failed, ends the transfer with it; the receiver heals in a later
quorum.
"""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from itertools import cycle
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from lighthouse.events import printable
from torchft_like.checkpointing.copy_ahead import aligned
from torchft_like.checkpointing.shards import place
from torchft_like.checkpointing.state_stream import (
    CHUNK_BYTES,
    CORRUPT,
    Expectation,
    IncomingState,
    LiveState,
    Parts,
    read_exactly,
    read_header,
    sums_nbytes,
)
from torchft_like.checkpointing.transport import CheckpointTransport, Destination, Source
from torchft_like.devices import beside_captures
from torchft_like.divergence.words import word_sum
from torchft_like.errors import (
    CheckpointError,
    CheckpointFormatError,
    CheckpointTimeoutError,
    NotSupportedError,
)
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.hosts import own_place
from torchft_like.shared_memory import Export, cuda

T = TypeVar("T")
MESSAGE_BYTES = CHUNK_BYTES
REASON_BYTES_MAX = 400
FORMAT = int.from_bytes(b"TFT-PG-3")
_TAG = 0x7F7

_logger = logging.getLogger(__name__)


class PGTransport(CheckpointTransport[T]):
    """A transport that sends this rank's state through the group's `send`, and receives that of others
    through `recv`.

    `HTTPTransport`, the Manager's own, shares no time limit with the collectives and needs no room on a
    device: prefer it unless the group reaches peers that sockets do not.

    Args:
        pg: the group that the Manager configures; replica ranks are its ranks.
        timeout: the limit of all messages of a transfer to which no other one is given.
        device: the device on which messages are staged: the one that `pg` transfers from.
        state_dict: returns the state in whose tensors `recv_checkpoint` lets a peer's arrive, where they are
          alike. A Manager does not need it: it knows its own state.
        state_bytes_max: the limit of the bytes of tensors to receive, as in `HTTPTransport`.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta | float,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
        *,
        state_bytes_max: int | None = None,
    ) -> None:
        self._pg = pg
        self._timeout_s = seconds_of(timeout)
        self._state_dict = state_dict
        self._device = torch.device(device)
        self._expected = Expectation(state_bytes_max)
        self._block: DeviceBlock | None = None  # of a transfer that has failed
        self._is_announced = False  # whether a transfer has begun, which may have failed

    def metadata(self) -> str:
        """Return an empty text: a receiver has the same group."""
        return ""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | float | None = None
    ) -> None:
        """Send the state to all of `dst_ranks`; return when they have it. `timeout` is this transport's own
        unless given.

        Raises:
            CheckpointFormatError: the state holds a value of a type that cannot be sent.
            CheckpointError: the group could not transfer it, or not in time.
        """
        state = LiveState(state_dict)
        line = self._line(dst_ranks, timeout)
        self._is_announced = True
        line.send_numbers(FORMAT, step, state.stream_nbytes, len(state.header))
        line.send(bytearray(state.header))
        if not self._send_through_block(state, line):
            for section in state.sections():
                line.send(section)
        self._is_announced = False

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """Send the reason instead of the state, unless the group failed in the middle of the state."""
        is_under_way, self._is_announced = self._is_announced, False
        if not is_under_way:
            told = reason.encode()[:REASON_BYTES_MAX]
            line = self._line(dst_ranks, None)
            line.send_numbers(FORMAT, step, -len(told), 0)
            line.send(bytearray(told))

    def check_state(self, state_dict: T) -> None:
        """Describe the state without copying a tensor, and expect a peer's state to be like it."""
        self._expected.learn(state_dict)

    def recv_checkpoint(
        self, src_rank: int, metadata: str, step: int, timeout: timedelta | float | None = None
    ) -> T:
        """Receive the state of `step` from replica `src_rank`; tensors arrive on the CPU. `timeout` is this
        transport's own unless given. A DTensor comes to lie on a mesh of the state that `state_dict` returns;
        without that it is the rank's `plain_data.Shard`.

        Raises:
            CheckpointFormatError: the received bytes are corrupt, or a DTensor lies otherwise here.
            CheckpointTimeoutError: the state did not come in time.
            CheckpointError: the group could not transfer the state, or it is of another step.
        """
        own = None if self._state_dict is None else self._state_dict()
        destination = cast("Destination[T]", Destination(own))
        source = Source(src_rank, metadata)
        state = PGTransport.recv_checkpoint_from(self, [source], step, timeout, destination)
        return state if own is None else cast(T, place(state, own))

    def recv_checkpoint_from(
        self,
        sources: Sequence[Source],
        step: int,
        timeout: timedelta | float | None,
        destination: Destination[T],
    ) -> T:
        """Receive the state of `step` from the first source, into the receiver's own tensors."""
        src_rank = sources[0].rank
        line = self._line([src_rank], timeout)
        form, sent, length, header_length = line.receive_numbers(4)
        if form != FORMAT:
            raise CheckpointFormatError(
                f"replica {src_rank} sends no state in this version's format: all replicas of a job must run "
                "the same version of torchft_like"
            )
        if length < 0:
            told = line.receive_exactly(min(-length, REASON_BYTES_MAX)).decode(errors="replace")
            raise CheckpointError(f"replica {src_rank} refused: {printable(told)}")
        if sent != step:
            raise CheckpointError(f"replica {src_rank} sent state of step {sent}, not of {step}")
        limits = self._expected.limits
        incoming = IncomingState(read_header(Parts(line.receive_all(header_length)), limits), limits)
        if length != incoming.stream_nbytes:
            raise CheckpointFormatError(
                f"{length} bytes come; by its own account {incoming.stream_nbytes} do"
            )
        destination.check(incoming.outline)
        if destination.own is not None and incoming.land_in(destination.own):
            destination.is_written = True
        if self._receive_through_block(line.receive_exactly(OFFER_BYTES), incoming, line):
            return cast(T, incoming.state())
        sections = incoming.nbytes, sums_nbytes(incoming.nbytes)
        return cast(T, incoming.read_all(Parts(line.receive_all(*sections))))

    def shutdown(self, wait: bool = True) -> None:
        """Give back the memory of a transfer between devices that has failed."""
        block, self._block = self._block, None
        if block is not None:
            block.release()

    def _line(self, ranks: list[int], timeout: timedelta | float | None) -> _Line:
        timeout_s = self._timeout_s if timeout is None else seconds_of(timeout)
        return _Line(self._pg, self._device, ranks, timeout_s)

    # -- from device to device

    def _send_through_block(self, state: LiveState, line: _Line) -> bool:
        """Send the payload through a block of the state's device, if all receivers are on this host and have
        theirs on a device; return whether it was sent.
        """
        block = self._block_for(state)
        if block is None:
            line.send(bytearray(NO_OFFER))
            return False
        self._block = block  # until all goes well
        line.send(bytearray(block.offer))
        is_taken = all(line.receive_numbers())
        line.send_numbers(is_taken)
        if is_taken:
            with beside_captures(block.device):
                for number, half in enumerate(state.fill(cycle(block.halves))):
                    expected = hash_of(half)
                    if number:
                        line.receive_numbers()  # the receivers have the other half, which is filled next
                    line.send_numbers(expected)
            line.receive_numbers()
        line.receive_numbers()  # they do not map the block any more
        self._block = None
        block.release()
        return is_taken

    def _block_for(self, state: LiveState) -> DeviceBlock | None:
        device = state.device
        if device is None or self._device.type != "cpu":  # the group itself moves what is on a device
            return None
        try:
            return self._block or DeviceBlock(device, state.nbytes)
        except RuntimeError as error:  # memory that cannot be shared, or none left
            _logger.warning("a state goes through the host's memory: %s", error)
            return None

    def _receive_through_block(self, offer: bytes, incoming: IncomingState, line: _Line) -> bool:
        """Take the payload out of the sender's block, if all receivers can; return whether it was taken."""
        if offer == NO_OFFER:
            return False
        device, halves = incoming.device, None
        if device is not None:
            try:
                halves = mapped(offer, device)
            except RuntimeError as error:
                _logger.warning("a state comes through the host's memory: %s", error)
        line.send_numbers(halves is not None)
        (is_taken,) = line.receive_numbers()
        if is_taken and halves is not None:
            with beside_captures(device):
                _take(incoming, halves, line)
        del halves
        line.send_numbers(True)
        return bool(is_taken)


def _take(incoming: IncomingState, halves: Sequence[torch.Tensor], line: _Line) -> None:
    at = 0
    for half in cycle(halves):
        if at == incoming.nbytes:
            return
        (expected,) = line.receive_numbers()
        part = half[: incoming.nbytes - at]
        incoming.copy_from(part, at)
        if hash_of(part) != expected:
            raise CheckpointFormatError(f"bytes {at} to {at + len(part)} {CORRUPT}")
        at += len(part)
        line.send_numbers(True)


class _Line:
    """Messages between this rank and others of the group, until a common deadline."""

    def __init__(self, pg: ProcessGroup, device: torch.device, ranks: list[int], timeout_s: float) -> None:
        self._pg = pg
        self.device = device
        self._ranks = ranks
        self._deadline = time.monotonic() + timeout_s

    def send(self, data: memoryview | bytearray) -> None:
        """Send bytes to all others, in as many messages as it takes."""
        for at in range(0, len(data), MESSAGE_BYTES):
            message = torch.frombuffer(data[at : at + MESSAGE_BYTES], dtype=torch.uint8)
            self._move(self._pg.send, message.to(self.device), self._ranks)

    def send_numbers(self, *numbers: int) -> None:
        """Send a message of numbers to all others."""
        self._move(self._pg.send, torch.tensor(numbers, dtype=torch.int64, device=self.device), self._ranks)

    def receive_all(self, *lengths: int) -> Iterator[memoryview]:
        """Receive what the only other rank sends with calls of `send`, of so many bytes each; yield the
        messages, each of which is good until the next one.
        """
        room = torch.empty(min(max(0, *lengths), MESSAGE_BYTES), dtype=torch.uint8, device=self.device)
        for length in lengths:
            for at in range(0, length, MESSAGE_BYTES):
                message = room[: length - at]
                self._move(self._pg.recv, message, self._ranks)
                yield message.cpu().numpy().data

    def receive_exactly(self, length: int) -> bytes:
        """Receive what one call of `send` sends, if that is so many bytes, which are few."""
        return read_exactly(Parts(self.receive_all(length)), length)

    def receive_numbers(self, count: int = 1) -> list[int]:
        """Receive a message of so many numbers of each other rank; return all of them."""
        messages = torch.zeros(len(self._ranks), count, dtype=torch.int64, device=self.device)
        for message, rank in zip(messages, self._ranks, strict=True):
            self._move(self._pg.recv, message, [rank])
        return [int(number) for number in messages.flatten().tolist()]

    def _move(self, begin: Callable[..., Work], message: torch.Tensor, ranks: Iterable[int]) -> None:
        try:
            for work in [begin([message], rank, _TAG) for rank in ranks]:
                work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:  # errors of torch, and those of this package's groups
            kind = CheckpointTimeoutError if time.monotonic() >= self._deadline else CheckpointError
            peer = f"replica {self._ranks[0]}" if len(self._ranks) == 1 else f"replicas {self._ranks}"
            raise kind(f"the group moved no state to or from {peer}: {error}") from error


# -- a block of a device's memory

BLOCK_BYTES = 256 * 1024 * 1024
OFFER_BYTES = 512
NO_OFFER = bytes(OFFER_BYTES)
# Bytes of the block, its offset in the device's allocation; lengths of the place and of the handle, which
# follow.
_OFFER = struct.Struct("<QQII")


class DeviceBlock:
    """A block of a device's memory, through which a state goes from that device to those of other processes
    of the host, and never through the host's memory.

    The sender makes and exports it for a transfer, and each receiver maps it once. It has two halves, which
    are filled in turn: one when all receivers have taken what was in it before, so that it is filled while
    they take the other. What is in a half is hashed on both sides, where it lies. Receivers only read.

    INVARIANT: the block is given back to torch when no receiver maps it. After a transfer that has failed
    that is not known: the block is kept for the next one.

    Args:
        nbytes: the bytes of the state; the block is no larger than is of use for them.

    Attributes:
        offer: what the receivers need to map it, in OFFER_BYTES.

    Raises:
        NotSupportedError: the memory cannot be shared.
        torch.OutOfMemoryError: the device has none left.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.device = device
        half = min(aligned(nbytes), BLOCK_BYTES // 2)
        memory = torch.empty(2 * half, dtype=torch.uint8, device=device)
        self.halves: tuple[Tensor, Tensor] = memory[:half], memory[half:]
        self._export = Export(memory.untyped_storage())
        _, handle, size, offset = self._export.details
        place = own_place()
        offer: bytes = _OFFER.pack(size, offset, len(place), len(handle)) + place + handle
        if len(offer) > OFFER_BYTES:
            self.release()
            raise NotSupportedError(f"the handle of the device's memory has {len(handle)} bytes")
        self.offer: bytes = offer.ljust(OFFER_BYTES, b"\0")

    def release(self) -> None:
        """Give the memory back: no receiver maps it any more."""
        self._export.release()


def mapped(offer: bytes, device: torch.device) -> tuple[Tensor, ...] | None:
    """Return the halves of a block of another process, mapped for a device of this one; None if that process
    is on another host.

    Raises:
        CheckpointFormatError: the offer is malformed.
        RuntimeError: CUDA or torch cannot map it.
    """
    nbytes, offset, place_bytes, handle_bytes = _OFFER.unpack_from(offer)
    end = _OFFER.size + place_bytes
    if nbytes > BLOCK_BYTES or nbytes % 2 or end + handle_bytes > OFFER_BYTES:
        raise CheckpointFormatError("the offer of a device's memory is malformed")
    if offer[_OFFER.size : end] != own_place():
        return None
    # CUDA reaches the sender's device from this one; that has a number of its own in each process.
    storage = cuda.open(device.index, offer[end : end + handle_bytes], nbytes, offset)
    memory = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return memory[: nbytes // 2], memory[nbytes // 2 :]


def hash_of(half: Tensor) -> int:
    """Return a hash of the bytes, once the current stream has come to it."""
    return int(word_sum(half).item())
