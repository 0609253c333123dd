"""The readers on other machines as the writer sees them: a connection each, and how far each has read.

ZeroMQ moves the bytes and finds connections that end or fall silent. A peer that does not know the writer's
public key, which is in the handle, cannot send anything (CURVE, which also encrypts); a peer that knows it
sends the handle's token and a rank.

A message waits in the writer's process until the reader's system has it, and a reader confirms the messages
that it has read: no more than `window` messages are unconfirmed, so a slow reader holds the writer up as it
does in shared memory, and the writer's memory is bounded.
"""

from __future__ import annotations

import errno
import hmac
import logging
import struct
import time
from collections.abc import Sequence
from typing import TypeAlias

import zmq

from lighthouse.address import Address
from lighthouse.forks import disown
from torchft_like.message_queue.handle import RemoteHandle
from torchft_like.message_queue.ring import Bytes

HELLO = struct.Struct("<c32sI")
NUMBERED = struct.Struct("<cQ")
TAG_HELLO, TAG_WELCOME, TAG_REFUSED, TAG_DATA, TAG_READ, TAG_CLOSED, TAG_LEAVE, TAG_PROBE = (
    b"H", b"W", b"R", b"D", b"A", b"C", b"L", b"P",
)  # fmt: skip

SILENCE_S = 10.0  # seconds of silence after which a connection counts as ended
_SMALL_BYTES_MAX = 1024  # of a message from a reader
_PROBE_S = 1.0
_FAREWELL_MS_MAX = 1000
_NEVER_MS = 2**30  # twelve days
_NO_ADDRESS = errno.EINVAL, errno.ENODEV, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT

_logger = logging.getLogger(__name__)


Prepared: TypeAlias = "Sequence[bytes | zmq.Frame]"


class _Reader:
    """A reader that has joined."""

    def __init__(self, rank: int, read: int) -> None:
        self.rank = rank
        self.read = read


class RemoteAudience:
    """All remote readers; only the thread that holds the writer's lock uses this.

    Args:
        host: the address of this machine at which readers reach it.
        n_readers: how many will join; any rank that is not local may.
        window: how many messages a reader may be behind.
        token: the token that readers must know.

    Raises:
        ValueError: `host` is no address of this machine.
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
        self._probe_until = 0.0
        self._readers: dict[bytes, _Reader] = {}
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        public, secret = zmq.curve_keypair()
        configure(self._router)
        self._router.setsockopt(zmq.CURVE_SERVER, 1)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, _SMALL_BYTES_MAX)
        self._router.setsockopt(zmq.IPV6, ":" in host)
        try:
            port = self._router.bind_to_random_port(f"tcp://{f'[{host}]' if ':' in host else host}")
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
        self.handle = RemoteHandle(f"tcp://{f'[{host}]' if ':' in host else host}:{port}", public)

    @property
    def ranks(self) -> list[int]:
        """The ranks of the readers that are there."""
        return [reader.rank for reader in self._readers.values()]

    @property
    def n_missing(self) -> int:
        """The number of readers that have not joined yet."""
        return self.n_readers - self._joined

    @property
    def is_empty(self) -> bool:
        """Whether no reader is there, nor will come."""
        return not self._readers and not self.n_missing

    def has_room(self) -> bool:
        """Return whether every reader may be sent another message."""
        return not self.n_missing and not self.laggards()

    def laggards(self) -> list[int]:
        """Return the ranks of the readers that are `window` messages behind."""
        return [reader.rank for reader in self._readers.values() if self._sent - reader.read >= self._window]

    def descriptors(self) -> list[int]:
        """Return the descriptors that are readable when `attend` may have something to do."""
        return [int(self._router.getsockopt(zmq.FD)), int(self._monitor.getsockopt(zmq.FD))]

    def attend(self) -> None:
        """Handle what readers have sent, and find those that are gone. This waits for nothing."""
        while True:
            try:
                identity, *body = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if len(body) == 1:
                self._hear(identity, body[0])
        if has_event(self._monitor):
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

    def close(self, patience_s: float = 0.0) -> None:
        """Tell every reader that this was all, and wait up to `patience_s` seconds until they have read
        it.
        """
        try:
            for identity in list(self._readers):
                self._tell(identity, [NUMBERED.pack(TAG_CLOSED, self._sent)])
            self._await_the_last(time.monotonic() + patience_s)
        finally:
            self._router.disable_monitor()
            self._monitor.close(0)
            self._router.close(_FAREWELL_MS_MAX)  # until the system has the last messages to readers
            self._context.term()

    def _await_the_last(self, deadline: float) -> None:
        # If a reader's words are unread at the end of the connection, the system throws away what is still on
        # its way to that reader. A reader that has read all says nothing more, and the goodbye, which is
        # short, is on its way at once: such a reader need not be heard now.
        self.attend()
        while self._behind() and (left := deadline - time.monotonic()) > 0:
            self._router.poll(int(min(left, 0.1) * 1000) + 1)
            self.attend()
        for rank in self._behind():
            _logger.warning("remote reader %d had not read all when the queue was shut down", rank)

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
        if reader is not None:
            self.lost.append(reader.rank)
            _logger.warning("the message queue goes on without remote reader %d: %s", reader.rank, reason)


def configure(socket: zmq.Socket[bytes]) -> None:
    """Set the options that hold at both ends. The window bounds how many messages wait; none may be
    dropped.
    """
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    # There is no second connection. The value -1 would say so, and throw away what came before the first one
    # ended.
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(SILENCE_S * 1000 / 4))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(SILENCE_S * 1000))
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(SILENCE_S * 1000))


def has_event(monitor: zmq.Socket[bytes]) -> bool:
    """Return whether anything happened to a connection, and forget what it was."""
    found = False
    while True:
        try:
            monitor.recv_multipart(zmq.NOBLOCK)
            found = True
        except zmq.Again:
            return found
