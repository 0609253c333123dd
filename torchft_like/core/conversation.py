"""A conversation between two processes that outlives the connections that carry it.

Each side counts the messages that it receives, and says the count with every message, and first of all on a
new connection. It keeps what it sends until the other side has counted it, and repeats the rest on the next
connection. So every message arrives once and in its order for as long as both processes live (TCP's
acknowledgements, one layer higher). This module knows nothing of connections, clocks or what is said.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

M = TypeVar("M")

KEPT_MAX = 64  # messages that the other side may not have
UNCOUNTED_MAX = 16  # messages after which the other side is told the count at the latest


class Conversation(Generic[M]):
    """One side's memory of it. It is over when too many messages have not arrived.

    Attributes:
        received: how many messages of the other side have come.
        is_over: whether it cannot go on, as a message was not kept.
    """

    def __init__(self) -> None:
        self.received: int = 0
        self.is_over: bool = False
        self._told = 0  # the count that the other side knows of
        self._arrived = 0  # how many messages of this side the other one has counted
        self._kept: deque[M] = deque()

    def say(self, message: M) -> bool:
        """Keep a message until it has arrived; return False if the conversation is over."""
        self.is_over = self.is_over or len(self._kept) == KEPT_MAX
        if not self.is_over:
            self._kept.append(message)
        return not self.is_over

    def hear(self) -> None:
        """Count a message of the other side."""
        self.received += 1

    def arrived(self, count: int) -> bool:
        """Forget the messages that the other side has counted; return False if so many were never said, or
        the conversation is over.
        """
        news = count - self._arrived
        if self.is_over or news > len(self._kept):
            return False
        for _ in range(news):
            self._kept.popleft()
        self._arrived += max(0, news)
        return True

    @property
    def to_repeat(self) -> tuple[M, ...]:
        """The messages that may not have arrived, the oldest first."""
        return tuple(self._kept)

    def tell_count(self) -> int:
        """Return the count, which the other side is told now."""
        self._told = self.received
        return self.received

    @property
    def owes_count(self) -> bool:
        """Whether the other side has to be told the count although there is nothing else to say."""
        return self.received - self._told >= UNCOUNTED_MAX
