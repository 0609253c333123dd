"""Both ends of a queue between machines: remote readers as the writer sees them, and a remote reader's end.

ZeroMQ moves the bytes and finds connections that end or fall silent. A peer that does not know the writer's
public key, which is in the handle, cannot send anything (CURVE, which also encrypts); a peer that knows it
sends the handle's token and a rank.

A message waits in the writer's process until the reader's system has it, and a reader confirms the messages
that it has read: no more than `window` messages are unconfirmed, so a slow reader holds the writer up as it
does in shared memory, and the writer's memory is bounded.

Messages come whole and in order over one connection, each with its number: a missing one is an error, never a
gap. There is no second connection: when the first ends, so does the reader's end of the queue.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import zmq

from lighthouse.address import Address, parse_address
from lighthouse.forks import disown
from torchft_like.errors import (
    PlainDataError,
    QueueClosedError,
    QueueCorruptError,
    QueueError,
    QueueWriterLostError,
)
from torchft_like.message_queue.endpoint import (
    TOKEN_BYTES,
    Endpoint,
    Limit,
    QueueHandle,
    nothing_written,
)
from torchft_like.message_queue.leaves import assembled
from torchft_like.message_queue.ring import Bytes

HELLO = struct.Struct(f"<c{TOKEN_BYTES}sI")
NUMBERED = struct.Struct("<cQ")
TAG_HELLO, TAG_WELCOME, TAG_REFUSED, TAG_DATA, TAG_READ, TAG_CLOSED, TAG_LEAVE, TAG_PROBE = (
    b"H", b"W", b"R", b"D", b"A", b"C", b"L", b"P",
)  # fmt: skip

SILENCE_S = 10.0  # seconds of silence after which a connection counts as ended
PART_BYTES_MAX = 2**34  # a frame that claims more ends the connection
_SMALL_BYTES_MAX = 1024  # of a message from a reader
_PROBE_S = 1.0
_FAREWELL_MS_MAX = 1000  # until the system has the last messages
_NEVER_MS = 2**30  # twelve days
_ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENT = struct.Struct("=H")  # with which a monitor's message begins
_NO_ADDRESS = errno.EINVAL, errno.ENODEV, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT

_logger = logging.getLogger(__name__)
Prepared: TypeAlias = "Sequence[bytes | zmq.Frame]"


@dataclass
class _Reader:
    """A reader that has joined."""

    rank: int
    read: int  # how many messages


class RemoteReaders:
    """All remote readers, each of which may be `window` messages behind; only the thread that holds the
    writer's lock uses this. A ValueError says that `host` is no address of this machine.
    """

    def __init__(
        self, host: str, n_readers: int, window: int, token: bytes, local_ranks: Sequence[int]
    ) -> None:
        self.n_readers = n_readers
        self.lost: list[int] = []
        self.left: list[int] = []
        self._window = window
        self._token = token
        self._taken = set(local_ranks)
        self._joined = 0
        self._sent = 0
        self._is_closing = False
        self._probe_until = 0.0
        self._readers: dict[bytes, _Reader] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        _configure(self._router)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, _SMALL_BYTES_MAX)
        self._router.setsockopt(zmq.IPV6, ":" in host)
        place = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        try:
            port = self._router.bind_to_random_port(place)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            if error.errno not in _NO_ADDRESS:
                raise
            raise ValueError(
                f"connect_ip={host!r} is no address of this machine ({error}): pass the one at which remote "
                "readers reach it, or the name of its network interface"
            ) from error
        disown(Address(host, port))
        self._monitor = self._router.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.address: str = f"{place}:{port}"
        self.server_key: bytes = public

    @property
    def ranks(self) -> list[int]:
        return [reader.rank for reader in self._readers.values()]

    @property
    def n_missing(self) -> int:
        return self.n_readers - self._joined

    @property
    def is_empty(self) -> bool:
        return not self._readers and not self.n_missing

    def describe_missing(self) -> str:
        return f"{self.n_missing} remote readers" if self.n_missing else ""

    def has_room(self) -> bool:
        """Return whether every reader may be sent another message."""
        return not self.n_missing and not self.laggards()

    def laggards(self) -> list[int]:
        """Return the ranks of the readers that are `window` messages behind."""
        return [reader.rank for reader in self._readers.values() if self._sent - reader.read >= self._window]

    def descriptors(self) -> list[int]:
        return [int(self._router.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))]

    def attend(self) -> None:
        while True:
            try:
                identity, *body = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(body) == 1:
                self._hear(identity, body[0])
        if _events(self._monitor):
            # The event comes before the end of the connection is felt.
            self._probe_until = time.monotonic() + _PROBE_S
        if time.monotonic() < self._probe_until:
            for identity in list(self._readers):
                self._tell(identity, [TAG_PROBE])

    def prepare(self, parts: Sequence[Bytes]) -> Prepared:
        """Return a copy of the next message, which all readers share; after it `send` cannot fail."""
        return [NUMBERED.pack(TAG_DATA, self._sent), *(zmq.Frame(part, copy=True) for part in parts)]

    def send(self, message: Prepared) -> None:
        """Send the message prepared last to every reader; the caller knows that there is room."""
        self._sent += 1
        for identity in list(self._readers):
            self._tell(identity, message)

    def close(self, linger_s: float = 0.0) -> None:
        """Tell every reader that this was all, and wait up to so many seconds until they have read it."""
        self._is_closing = True
        try:
            for identity in list(self._readers):
                self._tell(identity, [NUMBERED.pack(TAG_CLOSED, self._sent)])
            # If a reader's words are unread at the end of the connection, the system throws away what is
            # still on its way to that reader. A reader that has read all says nothing more, and the goodbye,
            # which is short, is on its way at once: such a reader need not be heard now.
            deadline = time.monotonic() + linger_s
            self.attend()
            while self._behind() and (left := deadline - time.monotonic()) > 0:
                self._router.poll(int(min(left, 0.1) * 1000) + 1)
                self.attend()
            for rank in self._behind():
                _logger.warning("remote reader %d had not read all when the queue was shut down", rank)
        finally:
            self._router.disable_monitor()
            self._monitor.close(0)
            self._router.close(_FAREWELL_MS_MAX)
            self._context.term()

    def _behind(self) -> list[int]:
        return [reader.rank for reader in self._readers.values() if reader.read < self._sent]

    def _hear(self, identity: bytes, body: bytes) -> None:
        reader = self._readers.get(identity)
        tag = body[:1]
        if reader is None:
            if tag == TAG_HELLO and len(body) == HELLO.size:
                self._welcome(identity, body)
        elif tag == TAG_READ and len(body) == NUMBERED.size:
            _, read = NUMBERED.unpack(body)
            if reader.read <= read <= self._sent:
                reader.read = read
            else:
                self._evict(identity, "it has read what was never written")
        elif tag == TAG_LEAVE:
            del self._readers[identity]
            self.left.append(reader.rank)

    def _welcome(self, identity: bytes, hello: bytes) -> None:
        _, token, rank = HELLO.unpack(hello)
        if not hmac.compare_digest(token, self._token):
            return
        if rank in self._taken or not self.n_missing:
            problem = f"rank {rank} has joined already, or is no remote reader"
            self._tell(identity, [TAG_REFUSED + problem.encode()])
            return
        self._taken.add(rank)
        self._joined += 1
        self._readers[identity] = _Reader(rank, self._sent)
        self._tell(identity, [NUMBERED.pack(TAG_WELCOME, self._sent)])

    def _tell(self, identity: bytes, message: Prepared) -> None:
        try:
            self._router.send_multipart([identity, *message], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            self._evict(identity, str(error))

    def _evict(self, identity: bytes, reason: str) -> None:
        reader = self._readers.pop(identity, None)
        if reader is not None and not (self._is_closing and reader.read == self._sent):
            self.lost.append(reader.rank)
            _logger.warning("the message queue goes on without remote reader %d: %s", reader.rank, reason)


def _configure(socket: zmq.Socket[bytes]) -> None:
    """Set the options of both ends: the window bounds how many messages wait; none may be dropped."""
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    # There is no second connection. The value -1 would say so, and throw away what came before the first one
    # ended.
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(SILENCE_S * 1000 / 4))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(SILENCE_S * 1000))
    # ZeroMQ asks a peer only between two messages: not while a long one does not get on.
    socket.setsockopt(zmq.TCP_MAXRT, int(SILENCE_S * 1000))


def _events(monitor: zmq.Socket[bytes]) -> int:
    """Return what has happened to a connection since the last call, the bits of ZeroMQ's events together."""
    found = 0
    while True:
        try:
            found |= _EVENT.unpack_from(monitor.recv_multipart(zmq.NOBLOCK)[0])[0]
        except zmq.Again:
            return found


class RemoteReader(Endpoint):
    """The reader's end of a `MessageQueue`, over a socket."""

    def __init__(self, handle: QueueHandle, rank: int) -> None:
        if handle.address is None or handle.server_key is None:
            raise ValueError(
                f"rank {rank} is no local reader ({list(handle.local_ranks)} are), and no remote one is due"
            )
        self._rank = rank
        self._address = handle.address
        self._is_connected = False  # it has been
        self._writer_is_gone = False
        self._has_left = False
        self._number: int | None = None  # of the next message
        self._came: list[zmq.Frame] = []  # the parts of what came last, until it was read
        with contextlib.ExitStack() as undo:
            self._context = zmq.Context()
            undo.callback(self._context.destroy, 0)
            self._dealer = self._context.socket(zmq.DEALER)
            self._monitor = self._dealer.get_monitor_socket(_ENDS | zmq.EVENT_HANDSHAKE_SUCCEEDED)
            self._connect(handle.address, handle.server_key)
            super().__init__(f"reader {rank} has left the queue, or the writer has shut it down")
            undo.pop_all()
        self._tell(HELLO.pack(TAG_HELLO, handle.token, rank))
        self._events = zmq.Poller()
        for watched in (self._dealer, self._monitor, self._stop):
            self._events.register(watched, zmq.POLLIN)

    def wait_until_ready(self, limit: Limit) -> None:
        with self._lock:
            self._require_open()
            self._join(limit)

    def dequeue(self, limit: Limit, is_expected: bool = False) -> object:
        with self._lock:
            self._require_open()
            if self._number is None:
                self._join(limit)
            self._wait(self._receive, limit, nothing_written, False, is_expected)
            try:
                return self._read(self._came)
            except (PlainDataError, QueueCorruptError) as error:
                self._leave()
                raise QueueCorruptError(f"{error}; reader {self._rank} has left the queue") from error

    def _connect(self, address: str, server_key: bytes) -> None:
        public, secret = zmq.curve_keypair()
        _configure(self._dealer)
        self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
        self._dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, PART_BYTES_MAX)
        self._dealer.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._dealer.setsockopt(zmq.CURVE_SERVERKEY, server_key)
            self._dealer.connect(address)
        except zmq.ZMQError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            raise ValueError(f"the address or the key in a queue's handle is none: {error}") from error
        disown(parse_address(address.removeprefix("tcp://")))

    def _join(self, limit: Limit) -> None:
        if self._number is not None:
            return
        self._wait(self._receive, limit, lambda: (self._missing(), ()), spins=False)
        answer, self._came = self._came[0].bytes, []
        if answer[:1] == TAG_REFUSED:
            self.is_closing = self._has_left = True  # there is no second answer
            raise QueueError(f"the writer refuses this reader: {answer[1:].decode(errors='replace')}")
        if answer[:1] != TAG_WELCOME or len(answer) != NUMBERED.size:
            self._leave()
            raise QueueCorruptError("the writer's welcome is none: do all run the same version?")
        self._number = NUMBERED.unpack(answer)[1]

    def _missing(self) -> str:
        """Return what this reader, which has not joined yet, waits for."""
        if self._is_connected:
            return "the writer did not let this reader in: it has to call wait_until_ready"
        return f"there is no connection to the writer yet: {self._hint()}"

    def _hint(self) -> str:
        return f"check that its process runs, and that {self._address} (connect_ip) is reached from here"

    def _receive(self) -> bool:
        """Return whether something has come, which is in `_came`."""
        while not self._came:
            try:  # a copy of the parts might find no memory when some of them were taken
                parts = self._dealer.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return False
            if parts[0].bytes != TAG_PROBE:
                self._came = parts
        return True

    def _require_possible(self, reached: Callable[[], bool]) -> None:
        self._note_events()
        if self._writer_is_gone and not reached():  # messages that came before that can still be read
            if not self._is_connected:
                raise QueueWriterLostError(f"there is no connection to the writer: {self._hint()}")
            raise QueueWriterLostError("the connection to the writer ended, and all that came was read")

    def _note_events(self) -> None:
        found = _events(self._monitor)
        self._is_connected |= bool(found & zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._writer_is_gone |= bool(found & _ENDS)

    def _sleep(self, reached: Callable[[], bool], seconds: float) -> None:
        self._events.poll(int(seconds * 1000) + 1)

    def _read(self, parts: list[zmq.Frame]) -> object:
        if len(parts[0]) != NUMBERED.size:
            raise QueueCorruptError("a message has no number")
        tag, number = NUMBERED.unpack(parts[0].bytes)
        if number != self._number:
            raise QueueCorruptError(f"message {number} came where {self._number} was due")
        if tag == TAG_CLOSED:
            self.is_closing = self._has_left = True  # the writer hears nothing any more
            raise QueueClosedError("the writer has shut the queue down, and everything was read")
        if tag != TAG_DATA or len(parts) < 2:
            raise QueueCorruptError("what came is no message")
        leaves = parts[2:]
        value = assembled(parts[1].bytes, sum(map(len, leaves)), _reading_parts(leaves))
        self._number, self._came = number + 1, []
        self._tell(NUMBERED.pack(TAG_READ, self._number))
        return value

    def _tell(self, data: bytes) -> None:
        # There is no connection any more, or none was made: the next wait sees it.
        with contextlib.suppress(zmq.Again):
            self._dealer.send(data, zmq.NOBLOCK)

    def _say_goodbye(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._tell(TAG_LEAVE)

    def _release(self, linger_s: float = 0.0) -> None:
        self._note_events()
        self._dealer.disable_monitor()
        self._monitor.close(0)
        self._dealer.close(0 if self._writer_is_gone else _FAREWELL_MS_MAX)
        self._context.term()
        os.close(self._stop)

    def _abandon(self) -> None:
        """Do nothing: ZeroMQ's threads do not exist in a fork, and closing would wait for them."""


def _reading_parts(parts: list[zmq.Frame]) -> Callable[[memoryview], None]:
    """Return a function that fills memory with the leaves of a message, which came one by one."""
    leaves = iter([part.buffer for part in parts])

    def fill(memory: memoryview) -> None:
        leaf = next((leaf for leaf in leaves if leaf), b"")  # an empty leaf is never asked for
        if len(leaf) != len(memory):
            raise QueueCorruptError("a leaf of a message has another length than the message says")
        memory[:] = leaf

    return fill
