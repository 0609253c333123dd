"""State over the process group of the training, for scripts of torchft that ask for it.

The bytes are those of `state_stream`, cut into messages: first one of two numbers (step, bytes that
follow), then messages of 4 MiB, the last shorter. Where there is no state to send, the second number is
negative, and so many bytes of the reason follow. A group that is aborted, because a member is lost or the
step has failed, ends the transfer with it; the receiver heals in a later quorum.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import chain
from typing import TypeVar, cast

import torch
from torch.distributed import ProcessGroup, Work

from lighthouse.events import printable
from torchft_like.checkpointing.state_stream import Expectation, IncomingState, Snapshot, read_header
from torchft_like.checkpointing.transport import CheckpointTransport
from torchft_like.errors import CheckpointError, CheckpointFormatError, CheckpointTimeoutError
from torchft_like.plain_data import Buffer

T = TypeVar("T")
MESSAGE_BYTES = 4 * 1024 * 1024
REASON_BYTES_MAX = 400
_TAG = 0x7F7

_logger = logging.getLogger(__name__)


class PGTransport(CheckpointTransport[T]):
    """A transport that sends this rank's state through the group's `send`, and receives that of others
    through `recv`.

    `HTTPTransport`, the Manager's own, shares no time limit with the collectives and needs no room on a
    device: prefer it unless the group reaches peers that sockets do not.

    Args:
        pg: the group that the Manager configures; replica ranks are its ranks.
        timeout: the limit of all messages of one transfer; a shorter one of the Manager's counts.
        device: the device on which messages are staged: the one that `pg` transfers from.
        state_dict: accepted from scripts of torchft, without effect: the state arrives in memory of its own.
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
        self._timeout_s = timeout.total_seconds()
        self._device = torch.device(device)
        self._expected = Expectation(state_bytes_max)
        self._is_announced = False  # whether a transfer has begun, which may have failed
        if state_dict is not None:
            _logger.warning("PGTransport receives into new memory, not in place: state_dict is not called")

    def metadata(self) -> str:
        """Return an empty text: a receiver has the same group."""
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Send a snapshot to all of `dst_ranks`; return when they have it.

        Raises:
            CheckpointFormatError: the state holds a value of a type that cannot be sent.
            CheckpointError: the group could not transfer it, or not in time.
        """
        snapshot = Snapshot(state_dict).fill()
        self._is_announced = True
        self._send(dst_ranks, timeout.total_seconds(), (step, snapshot.stream_nbytes), snapshot.stream())
        self._is_announced = False

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """Send the reason instead of the state, unless the group failed in the middle of the state."""
        is_under_way, self._is_announced = self._is_announced, False
        if not is_under_way:
            told = reason.encode()[:REASON_BYTES_MAX]
            self._send(dst_ranks, self._timeout_s, (step, -len(told)), [told])

    def check_state(self, state_dict: T) -> None:
        """Describe the state without copying a tensor, and expect a peer's state to be like it."""
        self._expected.learn(state_dict)

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Receive the state of `step` from replica `src_rank`; tensors arrive on the CPU.

        Raises:
            CheckpointFormatError: the received bytes are corrupt.
            CheckpointTimeoutError: the state did not come in time.
            CheckpointError: the group could not transfer the state, or it is of another step.
        """
        line = _Line(self._pg, min(self._timeout_s, timeout.total_seconds()), f"replica {src_rank}")
        announcement = torch.empty(2, dtype=torch.int64, device=self._device)
        line.move(self._pg.recv, announcement, [src_rank])
        sent, length = announcement.tolist()
        if length < 0:
            told = bytearray(min(-length, REASON_BYTES_MAX))
            _Arriving(line, src_rank, len(told), self._device).readinto(memoryview(told))
            raise CheckpointError(f"replica {src_rank} refused: {printable(told.decode(errors='replace'))}")
        if sent != step:
            raise CheckpointError(f"replica {src_rank} sent state of step {sent}, not of {step}")
        source = _Arriving(line, src_rank, length, self._device)
        limits = self._expected.limits
        incoming = IncomingState(read_header(source, limits), limits)
        if length != incoming.stream_nbytes:
            raise CheckpointFormatError(
                f"{length} bytes come; by its own account {incoming.stream_nbytes} do"
            )
        return cast(T, incoming.read_all(source))

    def _send(
        self, ranks: list[int], timeout_s: float, head: tuple[int, int], body: Iterable[Buffer]
    ) -> None:
        line = _Line(self._pg, min(self._timeout_s, timeout_s), f"replicas {ranks}")
        for message in chain([torch.tensor(head, dtype=torch.int64)], _messages(body)):
            line.move(self._pg.send, message.to(self._device), ranks)


class _Line:
    """Messages over the group until a common deadline."""

    def __init__(self, pg: ProcessGroup, timeout_s: float, peer: str) -> None:
        self.pg = pg
        self._deadline = time.monotonic() + timeout_s
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
    """The bytes of a stream as its messages bring them: a source for `state_stream`."""

    def __init__(self, line: _Line, rank: int, length: int, device: torch.device) -> None:
        self._line, self._rank, self._left, self._device = line, rank, length, device
        self._message = memoryview(b"")

    def readinto(self, buffer: memoryview, /) -> int:
        if not self._message and self._left > 0:
            size = min(self._left, MESSAGE_BYTES)
            message = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._line.move(self._line.pg.recv, message, [self._rank])
            self._left -= size
            self._message = message.cpu().numpy().data
        count = min(len(buffer), len(self._message))
        buffer[:count] = self._message[:count]
        self._message = self._message[count:]
        return count


def _messages(pieces: Iterable[Buffer]) -> Iterator[torch.Tensor]:
    """Yield the same bytes in tensors of MESSAGE_BYTES; the last may be shorter."""
    gathered = bytearray()
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            room = MESSAGE_BYTES - len(gathered)
            gathered += rest[:room]
            rest = rest[room:]
            if len(gathered) == MESSAGE_BYTES:
                yield torch.frombuffer(gathered, dtype=torch.uint8)
                gathered = bytearray()
    if gathered:
        yield torch.frombuffer(gathered, dtype=torch.uint8)
