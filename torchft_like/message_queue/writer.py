"""The writing end of a queue.

It writes one message at a time: it waits until every reader has room for the message, and only then touches
the ring, so that a call that times out has written nothing. A waiting thread sleeps in one place, where a
reader's message, a reader's death, a newcomer and `shutdown` all end the sleep.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torchft_like.errors import QueueReadersLostError
from torchft_like.message_queue.endpoint import RECHECK_S, Endpoint, Limit
from torchft_like.message_queue.fence import full_fence
from torchft_like.message_queue.leaves import FILE_RECORD, file_of
from torchft_like.message_queue.local import LocalReaders
from torchft_like.message_queue.memory import descriptors_for, map_to_write, reserve, seal
from torchft_like.message_queue.ring import (
    CLOSED,
    IN_FILE,
    INLINE,
    PUBLISHED,
    SLEEPING,
    Bytes,
    Geometry,
    RingWriter,
)
from torchft_like.plain_data import bytes_of, dissect

if TYPE_CHECKING:  # queues without remote readers need no ZeroMQ
    from torchft_like.message_queue.remote import Prepared, RemoteReaders


class Writer(Endpoint):
    """The writer's end of a `MessageQueue`. It takes over `remote`."""

    def __init__(
        self, geometry: Geometry, local_ranks: Sequence[int], token: bytes, remote: RemoteReaders | None
    ) -> None:
        self._geometry = geometry
        self._is_broken = False  # an exception interrupted it while it wrote
        self._is_ready = False
        self._sleeps = 0
        self._attempts = 0  # to send a file: a reader that has one from before an interrupt must not read it
        self._n_readers = len(local_ranks) + (remote.n_readers if remote else 0)
        purpose = f"a ring of {geometry.slots} x {geometry.slot_bytes} bytes"
        self._remote = remote
        with contextlib.ExitStack() as undo:
            self._descriptor = reserve(geometry.memory_bytes, purpose)
            undo.callback(os.close, self._descriptor)
            self._memory = map_to_write(self._descriptor, geometry.memory_bytes)
            undo.callback(self._memory.close)
            seal(self._descriptor)
            self._ring = RingWriter(memoryview(self._memory), geometry)
            undo.callback(self._ring.release)
            self._local = LocalReaders(geometry, self._descriptor, local_ranks, token)
            undo.callback(self._local.close)
            self._readers: list[LocalReaders | RemoteReaders] = [self._local, *([remote] if remote else [])]
            super().__init__("this queue was shut down")
            undo.callback(os.close, self._stop)
            self._undo = undo.pop_all()

    @property
    def name(self) -> str:
        """The name to which local readers connect."""
        return self._local.listener.name

    def readers(self) -> list[int]:
        """Return the ranks of the readers that are there now."""
        with self._lock:
            self._require_open()
            self._attend()
            return sorted(rank for readers in self._readers for rank in readers.ranks)

    def lost_readers(self) -> list[int]:
        """Return the ranks of the readers that died, in the order in which that was noticed."""
        with self._lock:
            self._attend_if_open()
            return [rank for readers in self._readers for rank in readers.lost]

    def left_readers(self) -> list[int]:
        """Return the ranks of the readers that left in good order."""
        with self._lock:
            self._attend_if_open()
            return [rank for readers in self._readers for rank in readers.left]

    def wait_until_ready(self, limit: Limit) -> None:
        with self._lock:
            self._require_open()
            self._attend()
            self._wait(self._all_joined, limit, self._describe_missing)

    def enqueue(self, value: object, limit: Limit) -> None:
        with self._lock:
            if self._is_closing:
                raise self._too_late()
            structure, leaves = dissect(value)
            parts = [structure, *map(bytes_of, leaves)] if leaves else [structure]
            nbytes = sum(map(len, parts)) if leaves else len(structure)
            if not self._is_ready:
                self._attend()
                self._is_ready = self._all_joined()
            prepared = self._remote.prepare(parts) if self._remote else []
            slots = self._geometry.slots_for(nbytes)
            if slots <= self._geometry.slots:
                if self._remote or self._ring.words[PUBLISHED] + slots > self._local.free_until:
                    self._await_room(slots, False, limit)
                self._write(INLINE, parts, nbytes, slots, prepared)
            else:
                self._write_file(parts, nbytes, limit, prepared)

    def _say_goodbye(self) -> None:
        self._ring.words[CLOSED] = not self._is_broken

    def _abandon(self) -> None:
        self._remote = None
        self._release()

    def _release(self, linger_s: float = 0.0) -> None:
        # First, so that a waiting local reader need not wait for the goodbye to remote ones.
        self._local.close()
        with self._undo:  # whatever interrupts the goodbye
            if self._remote:
                self._remote.close(linger_s)

    def _attend(self) -> None:
        for readers in self._readers:
            readers.attend()

    def _attend_if_open(self) -> None:
        if not self._is_closing:  # nor did an exception interrupt it while it wrote
            self._attend()

    def _all_joined(self) -> bool:
        return not any(readers.describe_missing() for readers in self._readers)

    def _describe_missing(self) -> tuple[str, Sequence[int]]:
        parts = filter(None, (readers.describe_missing() for readers in self._readers))
        return f"{' and '.join(parts)} did not join: each has to call wait_until_ready", self._local.missing

    def _write_file(self, parts: Sequence[Bytes], nbytes: int, limit: Limit, prepared: Prepared) -> None:
        """Send a message that is longer than the ring as a file in memory; its slot only says so."""
        slots = self._geometry.slots_for(FILE_RECORD.size)
        self._await_room(slots, True, limit)
        number = self._ring.published
        descriptor = file_of(parts, nbytes)
        try:
            self._attempts += 1
            self._local.send_file(descriptor, number, self._attempts, number + slots)
        finally:
            os.close(descriptor)
        record = FILE_RECORD.pack(number, self._attempts, len(parts[0]), nbytes)
        self._write(IN_FILE, [record], len(record), slots, prepared)

    def _write(self, kind: int, parts: Sequence[Bytes], nbytes: int, slots: int, prepared: Prepared) -> None:
        try:
            self._ring.write(kind, parts, nbytes, slots)
            self._local.wake()
            if self._remote:
                self._remote.send(prepared)
        except BaseException:  # also for Ctrl-C: it is unknown which readers have the message
            self._is_closing = self._is_broken = True
            self._local.close()
            raise

    def _await_room(self, slots: int, is_file: bool, limit: Limit) -> None:
        local, remote, published = self._local, self._remote, self._ring.published
        until = published + slots
        if local.has_room(until, published) and not is_file and remote is None:
            if local.is_empty and self._n_readers:
                raise self._nobody()
            return

        def reached() -> bool:
            return (
                local.has_room(until, published)
                and (not is_file or local.may_send_file(published))
                and (remote is None or remote.has_room())
            )

        def describe() -> tuple[str, Sequence[int]]:
            if (is_file or remote) and not self._all_joined():
                return self._describe_missing()
            ranks = local.laggards(until) + (remote.laggards() if remote else [])
            return f"no room: readers {ranks} have not read what was written long ago", ranks

        self._attend()
        self._wait(reached, limit, describe)
        if self._n_readers and all(readers.is_empty for readers in self._readers):
            raise self._nobody()

    def _nobody(self) -> QueueReadersLostError:
        return QueueReadersLostError(f"all {self._n_readers} readers of the queue are gone")

    def _require_possible(self, reached: Callable[[], bool]) -> None:
        """Raise an error if no reader can be let in for want of descriptors: a wait would be no sleep."""
        if (shortage := self._local.listener.shortage) is not None:
            with descriptors_for("a reader that wants to join the message queue"):
                raise shortage

    def _sleep(self, reached: Callable[[], bool], seconds: float) -> None:
        events = select.poll()
        events.register(self._stop, select.POLLIN)
        for readers in self._readers:
            for descriptor in readers.descriptors():
                events.register(descriptor, select.POLLIN)
        self._sleeps += 1
        self._ring.words[SLEEPING] = self._sleeps
        full_fence()
        try:
            if not reached():
                events.poll(min(seconds, RECHECK_S) * 1000)
        finally:
            self._ring.words[SLEEPING] = 0
        self._attend()
