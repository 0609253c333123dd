"""The part that both ends of a queue have in common: their life, which any thread may end.

INVARIANT: what an end holds is released once, by the thread that has the lock, and so never under a call that
uses it. `shutdown` first ends the call that has the lock: every wait is also a wait for `_stop`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from abc import ABC, abstractmethod

from torchft_like.errors import NotSupportedError, QueueClosedError

RECHECK_S = 0.1  # the cost of a wake-up, should one ever be lost
LINGER_S = 5.0


class End(ABC):
    """One end of a queue. A subclass calls `__init__` after everything that it acquires has been acquired.

    Args:
        closed: the message of the error of a call that comes too late.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        self._is_closing = False
        self._is_closed = False
        self._make_locks()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @abstractmethod
    def wait_until_ready(self, deadline: float, seconds: float) -> None:
        """Wait until this end has joined; the writer's end, until all readers have.

        Args:
            deadline: the end of the wait, on the monotonic clock.
            seconds: the caller's limit, for the text of an error.
        """

    def enqueue(self, value: object, deadline: float, seconds: float) -> None:
        """Write a message."""
        raise NotSupportedError("this is a reader's end of the queue: the writer enqueues, readers dequeue")

    def dequeue(self, deadline: float, seconds: float, is_expected: bool = False) -> object:
        """Return the next message. A long wait is logged, unless it `is_expected`."""
        raise NotSupportedError("this is the writer's end of the queue: it enqueues, readers dequeue")

    @property
    def is_closing(self) -> bool:
        """Whether every further call is refused; the resources of this end may not be released yet."""
        return self._is_closing

    def shutdown(self, patience_s: float = LINGER_S) -> None:
        """Say goodbye and release everything; any thread may call this, any number of times.

        Args:
            patience_s: seconds for which remote readers are given time to read the rest.
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
        """Release, in a fork, everything that was inherited, without a word to the peers: it is the
        parent's.
        """
        self._make_locks()  # the thread that held them does not exist here
        self._is_closing = self._is_closed = True
        with contextlib.suppress(BufferError):  # another thread was in the middle of a message
            self._abandon()

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the other side that this end goes."""

    @abstractmethod
    def _release(self, patience_s: float = 0.0) -> None:
        """Release everything."""

    def _abandon(self) -> None:
        """Do what `_release` does, in a fork."""
        self._release()

    def _require_open(self) -> None:
        if self._is_closing:
            raise self._too_late()

    def _too_late(self) -> QueueClosedError:
        return QueueClosedError(self._closed)

    def _make_locks(self) -> None:
        self._lock, self._ending = threading.Lock(), threading.Lock()


class ReadingEnd(End):
    """A reader's end."""

    def _leave(self) -> None:
        """Leave the queue; the caller has the lock."""
        self._is_closing = True
        self._say_goodbye()
