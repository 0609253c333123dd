"""The interface of transports, which move a live peer's state to a replica that is behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, NamedTuple, TypeVar

import torch

from torchft_like.checkpointing.copy_ahead import CopyAhead
from torchft_like.plain_data import Leaf

T = TypeVar("T")


class Source(NamedTuple):
    """A replica that has the state.

    Attributes:
        rank: its replica rank.
        metadata: the value that `metadata()` returned there.
    """

    rank: int
    metadata: str


@dataclass
class Destination(Generic[T]):
    """What a receiver has of its own when a state comes, and what it expects.

    Attributes:
        own: the state in whose tensors the peer's may arrive; None if all arrive in new memory.
        check: raises an error for a state that is not to be loaded; tensors of the state that it gets may be
          without memory, on the device "meta".
        kept: the leaves of a state that should be the same; what of it has the source's checksums is taken,
          and need not come, if the transport can do that.
        is_written: whether the tensors of `own` may have been changed.
        kept_nbytes: the bytes that were taken of what was kept.
        received: the bytes that came from each source, if the transport tells.
        refused: why the rest did not come from a source that had been asked for it.
        key: what the sources ask for, "" for nothing.
    """

    own: T | None = None
    check: Callable[[T], object] = lambda _: None
    kept: Sequence[Leaf] | None = None
    is_written: bool = False
    kept_nbytes: int = 0
    received: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    key: str = field(default="", repr=False)


# Methods of torchft's, and what the Manager calls, which by default calls them.
_BESIDE = {"send_checkpoint": "send_checkpoint_with", "recv_checkpoint": "recv_checkpoint_from"}


class CheckpointTransport(ABC, Generic[T]):
    """A transport of a step's state from a rank that has it to the same rank of other replica groups.

    Attributes:
        takes_helpers: whether a state may come from several sources, which then all offer theirs.
        keeps_offers: whether a state that was sent is a snapshot, which receivers may fetch in later steps,
          until `disallow_checkpoint`, and on any thread.
    """

    takes_helpers = False
    keeps_offers = False

    def __init_subclass__(cls, **given: object) -> None:
        """Let the Manager call a method of torchft's that a class overrides, not what its base has beside."""
        super().__init_subclass__(**given)
        for name, beside in _BESIDE.items():
            nearest = next(base for base in cls.__mro__ if {name, beside} & vars(base).keys())
            if beside not in vars(nearest):
                setattr(cls, beside, getattr(CheckpointTransport, beside))

    @abstractmethod
    def metadata(self) -> str:
        """Return what a receiver must know to fetch from here; it is sent with the quorum."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Send the state of `step`, or begin to offer it; `state_dict` may change after the return.

        Args:
            dst_ranks: the replica ranks that will receive, or receive parts of it from a helper.
            timeout: the limit of the sending, if this call sends.

        Raises:
            CheckpointFormatError: the state holds a value of a type that cannot be sent.
            CheckpointError: the state could not be sent.
        """

    def begin_copy(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> CopyAhead | None:
        """Begin to copy tensors of the state that is to be sent in this step, which do not change before, if
        the transport can do that beside the training thread. The Manager calls this when a step begins.
        """
        return None

    def send_checkpoint_with(
        self, ahead: CopyAhead | None, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta
    ) -> None:
        """Do as `send_checkpoint`, with what `begin_copy` has returned. The Manager calls this."""
        self.send_checkpoint(dst_ranks, step, state_dict, timeout)

    @abstractmethod
    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> T:
        """Return the state of `step` from a peer, complete and verified.

        Args:
            metadata: the value that `metadata()` returned there.
            timeout: the limit of the whole fetch, the wait for the peer to be ready included.

        Raises:
            CheckpointError: the peer is gone, silent or too late, the received bytes are corrupt, or the
              receive was aborted; the text names the peer.
        """

    def recv_checkpoint_from(
        self, sources: Sequence[Source], step: int, timeout: timedelta, destination: Destination[T]
    ) -> T:
        """Return the state of `step` of the first source; transports that can do it fetch from the others,
        too, and into the tensors of the destination. The Manager calls this.

        Raises:
            CheckpointError: as `recv_checkpoint`; `destination.is_written` tells whether its own state is
              torn.
            Exception: an error of the destination's functions.
        """
        first = sources[0]
        state = self.recv_checkpoint(src_rank=first.rank, metadata=first.metadata, step=step, timeout=timeout)
        destination.check(state)
        return state

    def check_state(self, state_dict: T) -> None:
        """Raise CheckpointFormatError, with the path and the type, for a state that can never be sent."""

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """Tell receivers of `step` at once that its state will not come from here, if they can be told.

        The Manager calls this also after a `send_checkpoint` that has raised an error.
        """

    def check_source(self, source: Source, timeout: timedelta) -> None:
        """Try whether the source can be reached; the Manager calls this when a step begins.

        Raises:
            CheckpointError: it cannot; the text says what to set where.
        """

    def use_host(self, host: str) -> None:
        """Set the address of this machine under which peers reach it; the Manager calls this."""

    def use_key(self, key: str) -> None:
        """Give what is sent from now on to receivers that show this key, "" to all.

        The Manager calls this with each quorum, whose members have the key, before they meet, from another
        thread.
        """

    def disallow_checkpoint(self) -> None:
        """Offer the state to no new receiver: the step is over."""

    def wait_fetched(self, idle: timedelta) -> None:
        """Wait until receivers have the offered state, or none has fetched for `idle`."""

    def abort_recv(self, reason: str = "aborted") -> None:
        """End any receive in progress, from another thread; later receives are not affected."""

    def lose_source(self, rank: int, reason: str) -> None:
        """Go on without a source that is lost, from another thread, or end the receive that needs it."""
        self.abort_recv(reason)

    def shutdown(self, wait: bool = True) -> None:
        """Release everything; with `wait`, after the threads of the transport have ended."""
