"""The end of a queue for a reader on another machine than the writer's.

Messages come whole and in order over one connection, each with its number: a missing one is an error, never a
gap. There is no second connection: when the first ends, so does the queue.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time

import zmq

from lighthouse.address import parse_address
from lighthouse.forks import disown
from torchft_like.errors import (
    PlainDataError,
    QueueClosedError,
    QueueCorruptError,
    QueueError,
    QueueTimeoutError,
    QueueWriterLostError,
)
from torchft_like.message_queue.end import ReadingEnd
from torchft_like.message_queue.handle import QueueHandle, RemoteHandle
from torchft_like.message_queue.leaves import Source, assembled
from torchft_like.message_queue.remote_audience import (
    HELLO,
    NUMBERED,
    TAG_CLOSED,
    TAG_DATA,
    TAG_HELLO,
    TAG_LEAVE,
    TAG_PROBE,
    TAG_READ,
    TAG_REFUSED,
    TAG_WELCOME,
    configure,
    has_event,
)
from torchft_like.runtime.long_waits import LongWait

PART_BYTES_MAX = 2**34  # a frame that claims more ends the connection
_LEAVE_MS_MAX = 1000
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class RemoteReader(ReadingEnd):
    """The reader's end of a `MessageQueue`, over a socket."""

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        if handle.remote is None:
            raise ValueError(
                f"rank {rank} is no local reader ({list(handle.local_ranks)} are), and no remote one is due"
            )
        self._rank = rank
        self._writer_is_gone = False
        self._has_left = False
        self._number: int | None = None  # of the next message
        self._came: list[zmq.Frame] = []  # the parts of that message, until it was read
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.destroy, 0)
            self._dealer = self._context.socket(zmq.DEALER)
            self._monitor = self._dealer.get_monitor_socket(_ENDS)
            self._connect(handle.remote)
            super().__init__(f"reader {rank} has left the queue, or the writer has shut it down")
            undo.pop_all()
        self._tell(HELLO.pack(TAG_HELLO, handle.token, rank))
        self._events = zmq.Poller()
        for watched in (self._dealer, self._monitor, self._stop):
            self._events.register(watched, zmq.POLLIN)

    def wait_until_ready(self, deadline: float, seconds: float) -> None:
        """Wait until the writer has let this reader in."""
        with self._lock:
            self._require_open()
            self._join(deadline, seconds)

    def dequeue(self, deadline: float, seconds: float, is_expected: bool = False) -> object:
        """Return the next message."""
        with self._lock:
            self._require_open()
            if self._number is None:
                self._join(deadline, seconds)
            if not self._came:
                self._came = self._receive(deadline, seconds, "the writer wrote nothing", is_expected)
            try:
                return self._read(self._came)
            except (PlainDataError, QueueCorruptError) as error:
                self._leave()
                raise QueueCorruptError(f"{error}; reader {self._rank} has left the queue") from error

    def _connect(self, remote: RemoteHandle) -> None:
        public, secret = zmq.curve_keypair()
        configure(self._dealer)
        self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, PART_BYTES_MAX)
        self._dealer.setsockopt(zmq.IPV6, "[" in remote.address)
        try:
            self._dealer.setsockopt(zmq.CURVE_SERVERKEY, remote.server_key)
            self._dealer.connect(remote.address)
        except zmq.ZMQError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise ValueError(f"the address or the key in a queue's handle is none: {error}") from error
        disown(parse_address(remote.address.removeprefix("tcp://")))

    def _join(self, deadline: float, seconds: float) -> None:
        if self._number is not None:
            return
        what = "the writer did not let this reader in: it has to call wait_until_ready"
        answer = self._receive(deadline, seconds, what)[0].bytes
        if answer[:1] == TAG_REFUSED:
            self._is_closing = self._has_left = True  # there is no second answer
            raise QueueError(f"the writer refuses this reader: {answer[1:].decode(errors='replace')}")
        if answer[:1] != TAG_WELCOME or len(answer) != NUMBERED.size:
            self._leave()
            raise QueueCorruptError("the writer's welcome is none: do all run the same version?")
        self._number = NUMBERED.unpack(answer)[1]

    def _receive(
        self, deadline: float, seconds: float, what: str, is_expected: bool = False
    ) -> list[zmq.Frame]:
        wait = LongWait(is_expected=is_expected)
        while True:
            try:  # a copy of the parts might find no memory when some of them were taken
                parts = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
                if parts[0].bytes != TAG_PROBE:
                    return parts
                continue
            except zmq.Again:
                pass
            if self._writer_is_gone:
                raise QueueWriterLostError("the connection to the writer ended, and all that came was read")
            if has_event(self._monitor):
                self._writer_is_gone = True  # messages that came before that can still be read
                continue
            if (now := time.monotonic()) >= deadline:
                raise QueueTimeoutError(seconds, what)
            wait.look(now, lambda: f"a message queue: {what}")
            self._events.poll(int((min(deadline, wait.next_line) - now) * 1000) + 1)
            self._require_open()

    def _read(self, parts: list[zmq.Frame]) -> object:
        if len(parts[0]) != NUMBERED.size:
            raise QueueCorruptError("a message has no number")
        tag, number = NUMBERED.unpack(parts[0].bytes)
        if number != self._number:
            raise QueueCorruptError(f"message {number} came where {self._number} was due")
        if tag == TAG_CLOSED:
            self._is_closing = self._has_left = True  # the writer hears nothing any more
            raise QueueClosedError("the writer has shut the queue down, and everything was read")
        if tag != TAG_DATA or len(parts) < 2:
            raise QueueCorruptError("what came is no message")
        leaves = parts[2:]
        value = assembled(parts[1].bytes, Source(sum(map(len, leaves)), _Parts(leaves).fill))
        self._number, self._came = number + 1, []
        self._tell(NUMBERED.pack(TAG_READ, self._number))
        return value

    def _tell(self, data: bytes) -> None:
        with contextlib.suppress(
            zmq.Again
        ):  # there is no connection any more, or none was made: the next wait sees it
            self._dealer.send(data, zmq.NOBLOCK)

    def _say_goodbye(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._tell(TAG_LEAVE)

    def _release(self, patience_s: float = 0.0) -> None:
        self._writer_is_gone |= has_event(self._monitor)
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0 if self._writer_is_gone else _LEAVE_MS_MAX)
        self._context.term()
        os.close(self._stop)

    def _abandon(self) -> None:
        """Do nothing: ZeroMQ's threads do not exist in a fork, and closing what they serve would wait for
        them.
        """


class _Parts:
    """The leaves of a message that came one by one."""

    def __init__(self, leaves: list[zmq.Frame]) -> None:
        self._leaves = iter([leaf.buffer for leaf in leaves])

    def fill(self, memory: memoryview) -> None:
        leaf = next((leaf for leaf in self._leaves if leaf), b"")  # an empty leaf is never asked for
        if len(leaf) != len(memory):
            raise QueueCorruptError("a leaf of a message has another length than the message says")
        memory[:] = leaf
