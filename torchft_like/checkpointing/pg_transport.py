"""State over the process group of the training, for scripts of torchft that ask for it.

The bytes are those of `state_stream`, cut into messages: first one of four numbers (format, step, bytes that
follow, how many of them are the header), then messages of 4 MiB, of which the last of the header, of the
payload and of the sums are shorter. Where there is no state to send, the third number is negative, and so
many bytes of the reason follow. The first number says what the others are, so every other format has to begin
with a message of that length. The sender sends from its own tensors, to all receivers at the same time, and a
receiver may have the state arrive in its own: neither makes a copy of the state. A group that is aborted,
because a member is lost or the step has failed, ends the transfer with it; the receiver heals in a later
quorum.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import TypeVar, cast

import torch
from torch.distributed import ProcessGroup, Work

from lighthouse.events import printable
from torchft_like.checkpointing.state_stream import (
    CHUNK_BYTES,
    Expectation,
    IncomingState,
    LiveState,
    read_header,
    sums_nbytes,
)
from torchft_like.checkpointing.transport import CheckpointTransport, Destination, Source
from torchft_like.errors import CheckpointError, CheckpointFormatError, CheckpointTimeoutError

T = TypeVar("T")
MESSAGE_BYTES = CHUNK_BYTES
REASON_BYTES_MAX = 400
FORMAT = int.from_bytes(b"TFT-PG-2")
_TAG = 0x7F7


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
          on the CPU and alike. A Manager does not need it: it knows its own state.
        state_bytes_max: the limit of the bytes of tensors to receive, as in `HTTPTransport`.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        timeout: timedelta,
        device: torch.device | str,
        state_dict: Callable[[], object] | None = None,
        *,
        state_bytes_max: int | None = None,
    ) -> None:
        if timeout <= timedelta(0):
            raise ValueError(f"timeout {timeout} must be above 0")
        self._pg = pg
        self._timeout = timeout
        self._state_dict = state_dict
        self._device = torch.device(device)
        self._expected = Expectation(state_bytes_max)
        self._is_announced = False  # whether a transfer has begun, which may have failed

    def metadata(self) -> str:
        """Return an empty text: a receiver has the same group."""
        return ""

    def send_checkpoint(
        self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta | None = None
    ) -> None:
        """Send the state to all of `dst_ranks`; return when they have it. `timeout` is this transport's own
        unless given.

        Raises:
            CheckpointFormatError: the state holds a value of a type that cannot be sent.
            CheckpointError: the group could not transfer it, or not in time.
        """
        state = LiveState(state_dict)
        self._is_announced = True
        self._send(dst_ranks, timeout, (step, state.stream_nbytes, len(state.header)), state.sections())
        self._is_announced = False

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """Send the reason instead of the state, unless the group failed in the middle of the state."""
        is_under_way, self._is_announced = self._is_announced, False
        if not is_under_way:
            told = reason.encode()[:REASON_BYTES_MAX]
            self._send(dst_ranks, None, (step, -len(told), 0), [memoryview(bytearray(told))])

    def check_state(self, state_dict: T) -> None:
        """Describe the state without copying a tensor, and expect a peer's state to be like it."""
        self._expected.learn(state_dict)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta | None = None) -> T:
        """Receive the state of `step` from replica `src_rank`; tensors arrive on the CPU. `timeout` is this
        transport's own unless given.

        Raises:
            CheckpointFormatError: the received bytes are corrupt.
            CheckpointTimeoutError: the state did not come in time.
            CheckpointError: the group could not transfer the state, or it is of another step.
        """
        own = None if self._state_dict is None else self._state_dict()
        destination = cast("Destination[T]", Destination(own))
        return self.recv_checkpoint_from([Source(src_rank, metadata)], step, timeout, destination)

    def recv_checkpoint_from(
        self, sources: Sequence[Source], step: int, timeout: timedelta | None, destination: Destination[T]
    ) -> T:
        """Receive the state of `step` from the first source, into the receiver's own tensors."""
        src_rank = sources[0].rank
        line = _Line(self._pg, timeout or self._timeout, f"replica {src_rank}")
        announcement = torch.zeros(4, dtype=torch.int64, device=self._device)
        line.move(self._pg.recv, announcement, [src_rank])
        form, sent, length, header_length = announcement.tolist()
        if form != FORMAT:
            raise CheckpointFormatError(
                f"replica {src_rank} sends no state in this version's format: all replicas of a job must run "
                "the same version of torchft_like"
            )
        if length < 0:
            told = bytearray(min(-length, REASON_BYTES_MAX))
            _Arriving(line, src_rank, self._device, len(told)).readinto(memoryview(told))
            raise CheckpointError(f"replica {src_rank} refused: {printable(told.decode(errors='replace'))}")
        if sent != step:
            raise CheckpointError(f"replica {src_rank} sent state of step {sent}, not of {step}")
        source = _Arriving(line, src_rank, self._device, header_length)
        limits = self._expected.limits
        incoming = IncomingState(read_header(source, limits), limits)
        if length != incoming.stream_nbytes:
            raise CheckpointFormatError(
                f"{length} bytes come; by its own account {incoming.stream_nbytes} do"
            )
        destination.check(incoming.outline())
        if destination.own is not None and incoming.land_in(destination.own):
            destination.is_written = True
        source.expect(incoming.nbytes, sums_nbytes(incoming.nbytes))
        return cast(T, incoming.read_all(source))

    def _send(
        self,
        ranks: list[int],
        timeout: timedelta | None,
        head: tuple[int, int, int],
        sections: Iterable[memoryview],
    ) -> None:
        line = _Line(self._pg, timeout or self._timeout, f"replicas {ranks}")
        announcement = torch.tensor((FORMAT, *head), dtype=torch.int64, device=self._device)
        line.move(self._pg.send, announcement, ranks)
        for section in sections:
            for at in range(0, len(section), MESSAGE_BYTES):
                message = torch.frombuffer(section[at : at + MESSAGE_BYTES], dtype=torch.uint8)
                line.move(self._pg.send, message.to(self._device), ranks)


class _Line:
    """Messages over the group until a common deadline."""

    def __init__(self, pg: ProcessGroup, timeout: timedelta, peer: str) -> None:
        self.pg = pg
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._peer = peer

    def move(self, begin: Callable[..., Work], message: torch.Tensor, ranks: Iterable[int]) -> None:
        """Send a message to the ranks, or receive it from them."""
        try:
            for work in [begin([message], rank, _TAG) for rank in ranks]:
                work.wait(timedelta(seconds=max(self._deadline - time.monotonic(), 0.001)))
        except RuntimeError as error:  # errors of torch, and those of this package's groups
            kind = CheckpointTimeoutError if time.monotonic() >= self._deadline else CheckpointError
            raise kind(f"the group moved no state to or from {self._peer}: {error}") from error


class _Arriving:
    """The bytes of a stream as its messages bring them: a source for `state_stream`.

    Args:
        length: the bytes of the first section; each section begins with a message of its own.
    """

    def __init__(self, line: _Line, rank: int, device: torch.device, length: int) -> None:
        self._line, self._rank, self._device = line, rank, device
        self._sections = deque([length])
        self._room = torch.empty(0, dtype=torch.uint8, device=device)
        self._message = memoryview(b"")

    def expect(self, *lengths: int) -> None:
        """Take further sections of so many bytes."""
        self._sections.extend(lengths)

    def readinto(self, buffer: memoryview, /) -> int:
        while not self._message and self._sections:
            self._receive(min(self._sections[0], MESSAGE_BYTES))
        count = min(len(buffer), len(self._message))
        buffer[:count] = self._message[:count]
        self._message = self._message[count:]
        return count

    def _receive(self, size: int) -> None:
        if size <= 0:
            self._sections.popleft()
            return
        if len(self._room) < size:
            self._room = torch.empty(size, dtype=torch.uint8, device=self._device)
        message = self._room[:size]
        self._line.move(self._line.pg.recv, message, [self._rank])
        self._sections[0] -= size
        self._message = message.cpu().numpy().data
