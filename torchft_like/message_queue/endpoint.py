"""The common part of both ends of a queue: the handle by which they find each other, their life, which any
thread may end, and how they wait.

INVARIANT: what an endpoint holds is released once, by the thread that has the lock, and so never under a call
that uses it. `shutdown` first ends the call that has the lock: every wait is also a wait for `_stop`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from torchft_like.errors import NotSupportedError, QueueClosedError, QueueTimeoutError
from torchft_like.message_queue.ring import SLOT_BYTES_MIN, Geometry
from torchft_like.runtime.long_waits import LongWait
from torchft_like.runtime.spin_wait import AdaptiveSpin

VERSION = 1
TOKEN_BYTES = 32
SLOTS_MAX = 2**20
SLOT_BYTES_MAX = 2**40
READERS_MAX = 4096
RANK_MAX = 2**31 - 1


@dataclass(frozen=True)
class QueueHandle:
    """The description of one queue: its ring and its readers.

    `local_ranks` read shared memory, `n_remote` others connect to `address`, where `server_key` encrypts.
    """

    name: str
    token: bytes = field(repr=False)
    slots: int
    slot_bytes: int
    local_ranks: tuple[int, ...]
    n_remote: int
    address: str | None = None
    server_key: bytes | None = field(default=None, repr=False)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.slots, self.slot_bytes)

    def to_plain(self) -> dict[str, object]:
        return {"version": VERSION, **vars(self), "local_ranks": list(self.local_ranks)}

    @classmethod
    def from_plain(cls, value: object) -> QueueHandle:
        """Return the handle from which `to_plain` made the value."""
        match value:
            case {
                "version": int(version),
                "name": str(name),
                "token": bytes(token),
                "slots": int(slots),
                "slot_bytes": int(slot_bytes),
                "local_ranks": list(ranks),
                "n_remote": int(n_remote),
                "address": str() | None as address,
                "server_key": bytes() | None as server_key,
            } if (
                version == VERSION
                and bool not in map(type, (slots, slot_bytes, n_remote))
                and 1 <= slots <= SLOTS_MAX
                and SLOT_BYTES_MIN <= slot_bytes <= SLOT_BYTES_MAX
                and len(ranks) <= READERS_MAX
                and all(map(is_rank, ranks))
                and len({*ranks}) == len(ranks)
                and 0 <= n_remote <= READERS_MAX
                and (address is None) == (server_key is None)
            ):
                return cls(name, token, slots, slot_bytes, tuple(ranks), n_remote, address, server_key)
        raise ValueError(
            f"this {type(value).__name__} is no handle of a message queue, or one of another version: pass "
            "what the writer's export_handle() returns"
        )


def is_rank(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value <= RANK_MAX


RECHECK_S = 0.1  # the cost of a wake-up, should one ever be lost
LINGER_S = 5.0

# The end of a wait on the monotonic clock, and the seconds that its caller gave it, for the text of an error.
Limit = tuple[float, float]


def nothing_written() -> tuple[str, Sequence[int]]:
    """Describe what a reader waits for."""
    return "the writer wrote nothing", ()


class Endpoint(ABC):
    """The writer's end of a queue, or a reader's. A subclass calls `__init__`, with the text of the error of
    a call that comes too late, after everything that it acquires has been acquired.

    Attributes:
        is_closing: whether every further call is refused; what this holds may not be released yet.
    """

    def __init__(self, closed: str) -> None:
        self._closed = closed
        self.is_closing = False
        self._is_closed = False
        self._spin = AdaptiveSpin()
        self._make_locks()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @abstractmethod
    def wait_until_ready(self, limit: Limit) -> None:
        """Wait until this reader has joined; at the writer's end, until all readers have."""

    def enqueue(self, value: object, limit: Limit) -> None:
        raise NotSupportedError("this is a reader's end of the queue: the writer enqueues, readers dequeue")

    def dequeue(self, limit: Limit, is_expected: bool = False) -> object:
        """Return the next message. A long wait is logged, unless it `is_expected`."""
        raise NotSupportedError("this is the writer's end of the queue: it enqueues, readers dequeue")

    def shutdown(self, linger_s: float = LINGER_S) -> None:
        """Say goodbye, give remote readers some time to read the rest, and release everything; any thread may
        call this, any number of times.
        """
        with self._ending:
            if self._is_closed:
                return
            self.is_closing = True
            os.eventfd_write(self._stop, 1)
            with self._lock:
                self._is_closed = True
                self._say_goodbye()
                self._release(linger_s)

    def forget(self) -> None:
        """Release, in a fork, what was inherited, without a word to the peers: it is the parent's."""
        self._make_locks()  # the thread that held them does not exist here
        self.is_closing = self._is_closed = True
        # Another thread was in the middle of a message; and even if one fails, the others are forgotten.
        with contextlib.suppress(BufferError, OSError):
            self._abandon()

    @abstractmethod
    def _say_goodbye(self) -> None:
        """Tell the other side that this end goes."""

    @abstractmethod
    def _release(self, linger_s: float = 0.0) -> None: ...

    def _abandon(self) -> None:
        """Do what `_release` does, in a fork."""
        self._release()

    def _leave(self) -> None:
        """Leave the queue; the caller has the lock."""
        self.is_closing = True
        self._say_goodbye()

    def _require_open(self) -> None:
        if self.is_closing:
            raise QueueClosedError(self._closed)

    def _make_locks(self) -> None:
        self._lock, self._ending = threading.Lock(), threading.Lock()

    # ------------------------------------------------------------------------------- waiting

    def _wait(
        self,
        reached: Callable[[], bool],
        limit: Limit,
        describe: Callable[[], tuple[str, Sequence[int]]],
        spins: bool = True,
        is_expected: bool = False,
    ) -> None:
        """Wait until `reached()`, which the caller has the lock for; look once, however little time there is.

        Args:
            describe: returns what is awaited, and from which readers.
            spins: watch for a moment before sleeping.
        """
        wait, (deadline, seconds) = LongWait(is_expected=is_expected), limit
        if not (spins and self._spin.watch(reached, deadline)):
            while not reached():
                self._require_possible(reached)
                if (now := time.monotonic()) >= deadline:
                    if reached():
                        break
                    raise QueueTimeoutError(seconds, *describe())
                wait.look(now, lambda: f"a message queue: {describe()[0]}")
                self._sleep(reached, min(deadline, wait.next_line) - now)
                self._require_open()
        if spins:
            self._spin.learn(wait.seconds)

    @abstractmethod
    def _require_possible(self, reached: Callable[[], bool]) -> None:
        """Raise an error if what is awaited will never come; messages of the other side may say so."""

    @abstractmethod
    def _sleep(self, reached: Callable[[], bool], seconds: float) -> None:
        """Sleep until the other side or `_stop` says something; at most so many seconds."""
