"""What the ends of a queue have in common: a life, which any thread may end.

INVARIANT: what an end holds is released once, by whoever has the lock, and so never under a call that uses
it. `shutdown` first ends the call that has the lock: whoever waits, waits for `_stop` as well.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod

from torchft_like.errors import NotSupportedError, QueueClosedError

RECHECK_S = 0.1  # should a wake-up ever be lost, this is what it costs
LINGER_S = 5.0


class End(ABC):
    """One end of a queue. A subclass calls `__init__` when nothing that it takes can fail any more.

    Args:
        closed: what a call says that comes too late.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        self._is_closing = False
        self._is_closed = False
        self._make_locks()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @abstractmethod
    def wait_until_ready(self, deadline: float, seconds: float) -> None:
        """Until this end, and for a writer all others, have joined."""

    def enqueue(self, value: object, deadline: float, seconds: float) -> None:
        """Write a message."""
        raise NotSupportedError("this is a reader's end of the queue: the writer enqueues, readers dequeue")

    def dequeue(self, deadline: float, seconds: float, is_expected: bool = False) -> object:
        """The next message; nothing is logged about a long wait that is expected."""
        raise NotSupportedError("this is the writer's end of the queue: it enqueues, readers dequeue")

    @property
    def is_closing(self) -> bool:
        """Whether every further call is refused; what this end holds may not be given back yet."""
        return self._is_closing

    def shutdown(self, patience_s: float = LINGER_S) -> None:
        """Say goodbye and let go of everything; from any thread, and as often as one likes.

        Args:
            patience_s: with those on other machines who have not read all.
        """
        with self._ending:
            if self._is_closed:
                return
            self._is_closing = True
            os.eventfd_write(self._stop, 1)
            with self._lock:
                self._is_closed = True
                self._say_goodbye()
                self._release(patience_s)

    def forget(self) -> None:
        """In a fork: let go of what was inherited, and say nothing, for all of it is the parent's."""
        self._make_locks()  # who held them does not exist here
        self._is_closing = self._is_closed = True
        with contextlib.suppress(BufferError):  # another thread was in the middle of a message
            self._abandon()

    @abstractmethod
    def _say_goodbye(self) -> None:
        """To the other side."""

    @abstractmethod
    def _release(self, patience_s: float = 0.0) -> None:
        """Give everything back."""

    def _abandon(self) -> None:
        """`_release` in a fork."""
        self._release()

    def _require_open(self) -> None:
        if self._is_closing:
            raise self._too_late()

    def _too_late(self) -> QueueClosedError:
        return QueueClosedError(self._closed)

    def _make_locks(self) -> None:
        self._lock, self._ending = threading.Lock(), threading.Lock()


class ReadingEnd(End):
    """A reader's."""

    def _leave(self) -> None:
        """While the caller has the lock."""
        self._is_closing = True
        self._say_goodbye()
