"""What the Manager asks of whatever moves a live peer's state to a replica that is behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Generic, TypeVar

T = TypeVar("T")


class CheckpointTransport(ABC, Generic[T]):
    """Moves the state of a step from a rank that has it to the same rank of other replica groups."""

    @abstractmethod
    def metadata(self) -> str:
        """What a receiver must know to fetch from here; it travels with the quorum."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Send the state of `step`, or begin to offer it; `state_dict` may change after the return.

        Args:
            dst_ranks: replica ranks that will receive.
            step: the step that the state is of.
            state_dict: the state.
            timeout: for the sending, where it is part of this call.

        Raises:
            CheckpointFormatError: the state holds something that does not travel.
            CheckpointError: it could not be sent.
        """

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """The state of `step` from a peer, complete and verified.

        Args:
            src_rank: the replica rank that sends.
            metadata: what `metadata()` returned there.
            step: the step wanted.
            timeout: for all of it, the wait for the peer to be ready included.

        Raises:
            CheckpointError: the peer is gone, silent or too late, what came is corrupt, or the
                receive was aborted; the message names the peer.
        """

    def check_state(self, state_dict: T) -> None:
        """Raise CheckpointFormatError, which names the path and the type, where a state can never travel."""

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """Tell receivers of `step` at once that it will not come from here, where they can be told.

        Also after a `send_checkpoint` that has raised.
        """

    def use_host(self, host: str) -> None:
        """The Manager says under which address of this machine its peers reach it."""

    def disallow_checkpoint(self) -> None:
        """The step is over: offer its state to nobody new."""

    def wait_fetched(self, idle: timedelta) -> None:
        """Wait until receivers have what was offered to them; no longer than `idle` while nobody fetches."""

    def abort_recv(self, reason: str = "aborted") -> None:
        """End any receive in progress, from another thread; later receives are not affected."""

    def shutdown(self, wait: bool = True) -> None:
        """Release everything; with `wait`, after the threads of the transport have ended."""
