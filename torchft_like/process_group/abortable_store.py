"""A client of torch's TCPStore whose every wait can be ended from another thread.

torch's own client blocks in C++ for as long as its server is stopped or its host silent, nothing can end that
from outside, and it reports a lost connection with pages of native stack. While a group is being configured,
it would keep an abort from taking effect. This client owns its socket: `abort` shuts it down, and touches no
other socket of the process.

It speaks the TCPStore's wire protocol as torch 2.11 to 2.13 do: one byte names the query, strings are
preceded by their length, integers are 64 bits in the machine's byte order. It implements the few queries that
process groups make, and does not know what they are for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from enum import IntEnum

from torch._C._distributed_c10d import Store

from lighthouse.address import Address
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupError
from torchft_like.process_group.store import StoreAddress

VALUE_BYTES_MAX = 64 * 1024 * 1024
RECONNECT_SECONDS = 0.02
RECEIVE_BYTES = 64 * 1024
POLL_MS_MAX = 2**31 - 1  # the system call takes a C int

# The store does not listen yet, or this host has no such addresses: another address, or a later attempt, may
# work.
_NOT_THERE = (errno.ECONNREFUSED, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.ENETUNREACH)

_VALIDATION_MAGIC = 0x3C85F7CE
_READY = 0


class _Query(IntEnum):
    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE_KEY = 8
    MULTI_GET = 10
    PING = 13


class AbortableStore(Store):
    """A store client that one thread uses and any thread may abort.

    Its methods raise ProcessGroupAbortedError once the client was aborted, TimeoutError when `timeout`
    has passed without an answer, ProcessGroupError when the store is gone.

    Args:
        address: the store and the prefix of all keys.
        timeout: the limit of connecting, and of each operation.
    """

    def __init__(self, address: StoreAddress, timeout: timedelta) -> None:
        super().__init__()
        self._prefix = address.prefix
        self._limit = timeout
        self._wire = _Wire(address.server)

    def connect(self) -> None:
        """Connect to the store; try again while it refuses, since it may be about to start."""
        self._wire.connect(self._deadline())
        self._wire.send(_Query.VALIDATE, struct.pack("=I", _VALIDATION_MAGIC), self._deadline())
        deadline = self._ask(_Query.PING, struct.pack("=I", os.getpid()))
        if struct.unpack("=I", self._wire.receive(4, deadline))[0] != os.getpid():
            raise ProcessGroupError(f"what answers at {self._wire.server} is not a TCPStore")

    def abort(self) -> None:
        """End every wait, now and later. Any thread may call this at any time; it returns at once."""
        self._wire.abort()

    def close(self) -> None:
        """Close the connection; only the thread that uses the client may call this."""
        self._wire.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Store a value under a key."""
        self._ask(_Query.SET, self._key(key) + _with_length(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it has one."""
        self.wait([key])
        return self._wire.receive_bytes(self._ask(_Query.GET, self._key(key)))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that all have one, in one query."""
        deadline = self._ask(_Query.MULTI_GET, self._keys(keys))
        return [self._wire.receive_bytes(deadline) for _ in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, and return the sum."""
        return self._integer(self._ask(_Query.ADD, self._key(key) + struct.pack("=q", amount)))

    def check(self, keys: list[str]) -> bool:
        """Return whether every key has a value."""
        return self._wire.receive(1, self._ask(_Query.CHECK, self._keys(keys)))[0] == _READY

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until every key has a value."""
        self._wire.receive(1, self._ask(_Query.WAIT, self._keys(keys), timeout))

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it had a value."""
        return self._integer(self._ask(_Query.DELETE_KEY, self._key(key))) == 1

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Replace a value if it is the expected one; return the value that the key has afterwards."""
        values = _with_length(expected_value) + _with_length(desired_value)
        return self._wire.receive_bytes(self._ask(_Query.COMPARE_SET, self._key(key) + values))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each later operation."""
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        """The limit of each operation."""
        return self._limit

    def _ask(self, query: _Query, body: bytes, timeout: timedelta | None = None) -> float:
        deadline = self._deadline(timeout)
        self._wire.send(query, body, deadline)
        return deadline

    def _integer(self, deadline: float) -> int:
        return int(struct.unpack("=q", self._wire.receive(8, deadline))[0])

    def _deadline(self, timeout: timedelta | None = None) -> float:
        return time.monotonic() + (timeout or self._limit).total_seconds()

    def _key(self, key: str) -> bytes:
        return _with_length(f"/{self._prefix}/{key}")

    def _keys(self, keys: list[str]) -> bytes:
        return struct.pack("=Q", len(keys)) + b"".join(map(self._key, keys))


def _with_length(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return struct.pack("=Q", len(data)) + data


class _Wire:
    """One TCP connection, with deadlines, that can be shut down from outside.

    Only the thread that uses the connection closes its descriptor: if another thread closed it, its number
    could belong to another file by the time of the next call.
    """

    def __init__(self, server: Address) -> None:
        self.server = server
        self._lock = threading.Lock()  # no shutdown comes while a connection is made
        self._aborted = False
        self._socket: socket.socket | None = None
        self._unread = bytearray()  # one answer may hold many values

    def connect(self, deadline: float) -> None:
        """Connect to the first address that accepts.

        A name may stand for several addresses, as `localhost` does for one of each family, and the store
        listens on one.
        """
        found = self._resolve()
        while True:
            for family, target in found:
                try:
                    self._connect_once(family, target, deadline)
                    return
                except OSError as error:
                    if error.errno not in _NOT_THERE:
                        raise
                    failure = error
            if time.monotonic() + RECONNECT_SECONDS > deadline:
                raise ProcessGroupError(f"the store at {self.server} refuses connections") from failure
            time.sleep(RECONNECT_SECONDS)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    def send(self, query: _Query, body: bytes, deadline: float) -> None:
        data = memoryview(bytes([query]) + body)
        while data:
            self._await(select.POLLOUT, deadline)
            with self._translated():
                data = data[self._open_socket().send(data) :]

    def receive(self, count: int, deadline: float) -> bytes:
        while len(self._unread) < count:
            self._await(select.POLLIN, deadline)
            with self._translated():
                part = self._open_socket().recv(RECEIVE_BYTES)
            if not part:
                raise self._lost(None)
            self._unread += part
        received = bytes(self._unread[:count])
        del self._unread[:count]
        return received

    def receive_bytes(self, deadline: float) -> bytes:
        (count,) = struct.unpack("=Q", self.receive(8, deadline))
        if count > VALUE_BYTES_MAX:
            raise ProcessGroupError(f"the store at {self.server} announces a value of {count} bytes")
        return self.receive(count, deadline)

    def _resolve(self) -> list[tuple[int, tuple[object, ...]]]:
        try:
            found = socket.getaddrinfo(self.server.host, self.server.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise ProcessGroupError(f"the store's host {self.server.host!r} is unknown: {error}") from error
        return [(family, target) for family, _, _, _, target in found]

    def _connect_once(self, family: int, target: tuple[object, ...], deadline: float) -> None:
        with self._lock:
            self._check()
            if self._socket is not None:
                self._socket.close()
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self._socket.connect_ex(target)
        if code == errno.EINPROGRESS:
            self._await(select.POLLOUT, deadline)
            code = self._open_socket().getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code in _NOT_THERE:
            self._check()
            raise OSError(code, os.strerror(code))
        with self._translated():
            if code:
                raise OSError(code, os.strerror(code))

    def _await(self, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._open_socket(), event)
        ready = poll.poll(min(max(0.0, deadline - time.monotonic()) * 1000, POLL_MS_MAX))
        self._check()
        if not ready:
            raise TimeoutError(f"the store at {self.server} did not answer in time")

    def _open_socket(self) -> socket.socket:
        if self._socket is None:
            raise ProcessGroupError(f"not connected to the store at {self.server}")
        return self._socket

    def _check(self) -> None:
        if self._aborted:
            raise ProcessGroupAbortedError(f"aborted while talking to the store at {self.server}")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (BlockingIOError, ConnectionRefusedError):
            raise
        except OSError as error:
            self._check()
            raise self._lost(error) from error

    def _lost(self, error: OSError | None) -> ProcessGroupError:
        self._check()
        reason = error.strerror if error else "it closed the connection"
        return ProcessGroupError(f"lost the store at {self.server}: {reason}")
