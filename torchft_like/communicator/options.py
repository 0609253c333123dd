"""The options of a coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torchft_like.process_group.store import DEFAULT_TIMEOUT
from torchft_like.process_group.wrapper import as_timedelta


@dataclass(frozen=True)
class CoordinatorOptions:
    """The options of a coordinator, the same on every rank.

    Attributes:
        timeout: the limit of each operation of the groups that the coordinator makes, seconds or timedelta;
            given groups keep theirs. A barrier without a timeout of its own ends after it, too.
        check_collectives: whether to compare what the ranks pass to all_reduce, all_gather, reduce_scatter,
            gather and broadcast before data moves, so that a mistake of one rank is an error on all of them;
            the other calls always compare. The environment variable TORCHFT_CHECK_COLLECTIVES=1 or =0
            overrides it.
        message_bytes_max: the limit of the bytes of one message's tensors; a larger message is refused before
            it is allocated.
        max_chunk_bytes, max_chunks: the size of the message queues that the coordinator makes: the bytes of a
            slot, and how many slots there are.
    """

    timeout: timedelta | float = DEFAULT_TIMEOUT
    check_collectives: bool | None = None
    message_bytes_max: int = 2**36
    max_chunk_bytes: int = 1024 * 1024
    max_chunks: int = 16

    def __post_init__(self) -> None:
        object.__setattr__(self, "timeout", as_timedelta(self.timeout))
        if self.message_bytes_max <= 0:
            raise ValueError(f"message_bytes_max is {self.message_bytes_max}: it must be positive")
