"""The store through which the members of a group find each other, and how they meet there.

It is a store of ours (`store_server.py`), which the Manager or a member serves, or a TCPStore of the user's;
`host:port/prefix` names a part of it, `tls://host:port/prefix` a part of one of ours in a job with
certificates. Here are its address, torch's client and server, and a client whose every wait can be ended from
another thread.

torch's own client blocks in C++ for as long as its server is stopped or its host silent, nothing can end that
from outside, and it reports a lost connection with pages of native stack. While a group is being configured,
it would keep an abort from taking effect. `AbortableStore` owns its socket: `abort` shuts it down, and
touches no other socket of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import re
import socket
import ssl
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Concatenate, ParamSpec, TypeVar, cast

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistNetworkError, DistStoreError

from lighthouse.address import Address, parse_address
from lighthouse.forks import Turn, disown, left_to_parent, replace_sockets
from lighthouse.listening import listen_tcp
from torchft_like.core.quorum_secret import shared_key
from torchft_like.core.store import READY, VALIDATION_MAGIC, Query
from torchft_like.errors import AddressError, PlainDataError, ProcessGroupAbortedError, ProcessGroupError
from torchft_like.futures import in_background
from torchft_like.plain_data import decode, encode
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.runtime.connecting import RECONNECT_S, REFUSED, connect_tcp, shut
from torchft_like.runtime.durations import as_timedelta

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="AbortableStore")

DEFAULT_TIMEOUT = timedelta(seconds=60)
ANSWER_S = 5.0  # for the answer of a store's host beyond the limit of a wait
AGAIN_S, HANGS_UP_S = 0.05, 5.0
WHO_IS_MISSING = timedelta(seconds=1)  # the limit of this question, after a wait in vain
VALUE_BYTES_MAX = 64 * 1024 * 1024
RECEIVE_BYTES = 64 * 1024
WAIT_S_MIN, WAIT_S_MAX = 0.001, (2**31 - 1) / 1000  # what sockets take: 0 is no wait, and the rest a C int

_served: list[Address] = []

_TLS = "tls://"
_SECRET = re.compile(r"\bsecret=([^/]*)")


@dataclass(frozen=True, repr=False)
class StoreAddress:
    """The address at which the store listens, the prefix that all keys get, and whether it speaks TLS.

    A part `secret=...` of the prefix keeps out processes that do not know it. No log or error shows it.
    """

    server: Address
    prefix: str = ""
    is_tls: bool = False

    def __str__(self) -> str:
        return f"{_TLS if self.is_tls else ''}{self.server}" + (f"/{self.prefix}" if self.prefix else "")

    def __repr__(self) -> str:
        return without_secret(str(self))

    @property
    def name(self) -> str:
        """The prefix without its secret."""
        return without_secret(self.prefix)

    @property
    def shared(self) -> StoreAddress:
        """The part that users share. torch's errors show its prefix, which does not tell the secret."""
        key = _SECRET.search(self.prefix)
        own = f"/{shared_key(key[1])}" if key else ""
        return replace(self, prefix=f"{without_secret(self.prefix)}{own}/shared")


def without_secret(text: str) -> str:
    """Return a text in which no prefix has its secret."""
    return _SECRET.sub("secret", text)


def parse_store_address(text: str) -> StoreAddress:
    """Read `host:port/prefix` or `tls://host:port/prefix`; the prefix may contain slashes and may be empty.

    Raises:
        AddressError: the text has another form; the message shows it.
    """
    if not isinstance(text, str):
        raise AddressError(f"store address {text!r:.200} is not host:port/prefix")
    shown = repr(without_secret(text))
    is_tls = text.startswith(_TLS)
    scheme, separator, rest = text.removeprefix(_TLS).rpartition("://")
    server, _, prefix = rest.partition("/")
    try:
        return StoreAddress(parse_address(scheme + separator + server), prefix, is_tls)
    except AddressError as error:
        raise AddressError(
            f"store address {shown:.200} is not host:port/prefix (example: 127.0.0.1:29500/job)"
        ) from error


@dataclass(frozen=True)
class GroupMembers:
    """The members that meet in a store, of which the caller is one, and the limit of their operations."""

    store: StoreAddress
    rank: int
    world_size: int
    timeout: timedelta

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not within a world of {self.world_size}")

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} at {self.store!r}"


def create_store_client(store_addr: str, timeout: timedelta | float = DEFAULT_TIMEOUT) -> Store:
    """Make a client for the part of a store that `host:port/prefix` names: torch's, or ours where the store
    speaks TLS. Ours ends with the last reference to it; torch's PrefixStore around it holds none.

    Raises:
        AddressError, ConfigError: the address is malformed, or the timeout is no positive duration.
        torch.distributed.DistNetworkError, ProcessGroupError: no store answers there within `timeout`.
    """
    address, limit = parse_store_address(store_addr), as_timedelta(timeout)
    if address.is_tls:
        shared = SharedStore(address, limit)
        shared.connect()
        return shared
    return PrefixStore(address.prefix, store_client(address.server, limit))


def store_client(server: Address, timeout: timedelta) -> TCPStore:
    """Make torch's client of a TCPStore, or of a store of ours without TLS.

    torch's hears no Ctrl-C while it connects, and waits for ever for a silent server: so ours asks first. Who
    hangs up may be another process that has the port for a moment, or the store of an earlier start.

    Raises:
        torch.distributed.DistNetworkError: no store answers there within `timeout`, or who does hangs up for
            HANGS_UP_S.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    until = min(time.monotonic() + HANGS_UP_S, deadline)
    while True:
        left = timedelta(seconds=deadline - time.monotonic())
        try:
            with contextlib.closing(AbortableStore(StoreAddress(server), left)) as store:
                store.connect()
            break
        except (ProcessGroupError, TimeoutError) as error:
            if time.monotonic() + AGAIN_S > until or is_known_to_be_served(server):
                raise DistNetworkError(str(error)) from error
        time.sleep(AGAIN_S)
    disown(server)
    return TCPStore(server.host, server.port, is_master=False, wait_for_workers=False, timeout=timeout)


@contextlib.contextmanager
def known_to_be_served(server: Address) -> Iterator[None]:
    """Take this store, for the time of a block, for one that was served before: it is gone where it refuses
    connections, and no client waits for it to begin.
    """
    _served.append(server)
    try:
        yield
    finally:
        _served.remove(server)


def is_known_to_be_served(server: Address) -> bool:
    """Return whether this store was served before."""
    return server in _served


def serve_store(host: str, timeout: timedelta, port: int = 0) -> tuple[TCPStore, Address]:
    """Serve a TCPStore of torch's at a port of `host`, 0 for a free one, until the last reference to it is
    gone.

    Raises:
        BindError: `host` is not of this machine.
    """
    # This listener sees the addresses of one family; torch's own listener would ask the name server about
    # others.
    listener = listen_tcp(Address(host, port))
    port = listener.getsockname()[1]
    server = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
    return server, Address(host, port)


def server_of(store: Store) -> Address | None:
    """Return the address of a TCPStore, under any number of prefixes; None for a store of another kind."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return Address(store.host, store.port) if isinstance(store, TCPStore) else None


def ask_within(limit: timedelta, store: Store, question: Callable[[], T]) -> T:
    """Return the answer to a question to a user's store, within the limit of its waits and ANSWER_S.

    Another thread asks: torch's client waits for a silent host until the kernel gives the connection up,
    which takes a quarter of an hour.

    Raises:
        ProcessGroupError: the store does not answer.
    """
    asked = in_background("torchft-store", question)
    limit_s = limit.total_seconds() + ANSWER_S
    if not wait_for_futures([asked], limit_s).done:
        raise ProcessGroupError(f"the store at {server_of(store)} did not answer within {limit_s:g} s")
    return asked.result()


async def answers(server: Address, within_s: float) -> bool:
    """Return whether a TCPStore answers in time. A thread in C++ does: its process may be busy in Python."""
    hello = bytes([Query.VALIDATE]) + struct.pack("=I", VALIDATION_MAGIC)
    with contextlib.suppress(OSError, EOFError):  # a TimeoutError is an OSError
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(server.host, server.port)
            with contextlib.closing(writer):
                writer.write(hello + bytes([Query.PING]) + struct.pack("=I", os.getpid()))
                await reader.readexactly(4)
                return True
    return False


def _in_turn(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Let threads ask one after the other; a question without its whole answer is the last one."""

    @functools.wraps(method)
    def ask(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            try:
                answer = method(self, *args, **kwargs)
            except BaseException:
                if self._is_asking:  # an answer that came late would be taken for that to another question
                    self.close()
                raise
            self._is_asking = False
            return answer

    return ask


def _leave_connection(client: AbortableStore) -> None:
    """Keep no connection to a store in a fork; others to its server may be a script's own, and stay there."""
    if (own := client._socket) is not None and own.fileno() >= 0:
        replace_sockets([own.fileno()])


_clients = left_to_parent(Turn.SOCKETS, _leave_connection)


class AbortableStore(Store):
    """A store client that any thread may abort; threads that share it take turns.

    It speaks the TCPStore's protocol (`core/store.py`). Its methods raise ProcessGroupAbortedError once the
    client was aborted, TimeoutError when `timeout` has passed without an answer, which ends the connection,
    ProcessGroupError when the store is gone.

    Only a thread that uses the client closes its descriptor: if another thread closed it, its number could
    belong to another file by the time of the next call.
    """

    _late_error: type[Exception] = TimeoutError

    def __init__(self, address: StoreAddress, timeout: timedelta) -> None:
        super().__init__()
        self._server = address.server
        self._prefix = address.prefix
        self._is_tls = address.is_tls
        self._limit = timeout
        self._turn = threading.RLock()
        self._lock = threading.Lock()  # no shutdown comes while a connection is made
        self._aborted = False
        self._socket: socket.socket | None = None
        self._unread = bytearray()  # one answer may hold many values
        self._is_asking = False
        _clients.add(self)

    @_in_turn
    def connect(self, *, insists: bool = True) -> None:
        """Connect to the store; if this insists, try again while it refuses: it may be about to start."""
        limit_s = self._left_s(self._deadline())
        insists = insists and not is_known_to_be_served(self._server)
        try:
            connection = connect_tcp(
                self._server,
                limit_s,
                self._use,
                is_plain=not self._is_tls,
                refused_s=limit_s if insists else 0.0,
                disowns=False,
            )
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException as error:
            self.close()
            self._explain(error)
            raise
        if self._is_tls and not isinstance(connection, ssl.SSLSocket):
            raise ProcessGroupError(
                f"the store at {self._server} speaks TLS, and this process has no certificate: set "
                "TORCHFT_TLS"
            )
        self._send(Query.VALIDATE, struct.pack("=I", VALIDATION_MAGIC), self._deadline())
        deadline = self._ask(Query.PING, struct.pack("=I", os.getpid()))
        if struct.unpack("=I", self._receive(4, deadline))[0] != os.getpid():
            raise ProcessGroupError(f"what answers at {self._server} is not a store")

    def abort(self) -> None:
        """End every wait, now and later. Any thread may call this at any time; it returns at once."""
        with self._lock:
            self._aborted = True
            if self._socket is not None:
                shut(self._socket)

    def close(self) -> None:
        """Close the connection; only the thread that uses the client may call this."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None

    @_in_turn
    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Query.SET, self._key(key) + _with_length(value))

    @_in_turn
    def get(self, key: str) -> bytes:
        """Return the value of a key, once it has one."""
        self.wait([key])
        return self._receive_bytes(self._ask(Query.GET, self._key(key)))

    @_in_turn
    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Return the values of keys that all have one, in one query."""
        deadline = self._ask(Query.MULTI_GET, self._keys(keys))
        return [self._receive_bytes(deadline) for _ in keys]

    @_in_turn
    def add(self, key: str, amount: int) -> int:
        """Add to a counter that starts at 0, and return the sum."""
        return self._receive_integer(self._ask(Query.ADD, self._key(key) + struct.pack("=q", amount)))

    @_in_turn
    def check(self, keys: list[str]) -> bool:
        return self._receive(1, self._ask(Query.CHECK, self._keys(keys))) == READY

    @_in_turn
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._receive(1, self._ask(Query.WAIT, self._keys(keys), timeout))

    @_in_turn
    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it had a value."""
        return self._receive_integer(self._ask(Query.DELETE_KEY, self._key(key))) == 1

    deleteKey = delete_key  # noqa: N815 - torch's PrefixStore calls it so

    @_in_turn
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Replace a value if it is the expected one; return the value that the key has afterwards."""
        values = _with_length(expected_value) + _with_length(desired_value)
        return self._receive_bytes(self._ask(Query.COMPARE_SET, self._key(key) + values))

    def set_timeout(self, timeout: timedelta) -> None:
        self._limit = timeout

    @property
    def timeout(self) -> timedelta:
        return self._limit

    def _deadline(self, timeout: timedelta | None = None) -> float:
        return time.monotonic() + (timeout or self._limit).total_seconds()

    def _key(self, key: str) -> bytes:
        return _with_length(f"/{self._prefix}/{key}")

    def _keys(self, keys: list[str]) -> bytes:
        return struct.pack("=Q", len(keys)) + b"".join(map(self._key, keys))

    def _left_s(self, deadline: float) -> float:
        return min(max(deadline - time.monotonic(), WAIT_S_MIN), WAIT_S_MAX)

    def _use(self, connection: socket.socket) -> None:
        """Use a socket that is about to connect, which an abort ends from now on."""
        with self._lock:
            self._check()
            if self._socket is not None:
                self._socket.close()
            self._unread.clear()
            self._socket = connection

    def _ask(self, query: Query, body: bytes, timeout: timedelta | None = None) -> float:
        """Send a query; return the deadline of the answer."""
        deadline, self._is_asking = self._deadline(timeout), True
        self._send(query, body, deadline)
        return deadline

    def _send(self, query: Query, body: bytes, deadline: float) -> None:
        data = memoryview(bytes([query]) + body)
        while data:
            data = data[self._act(lambda to: to.send(data), deadline) :]  # noqa: B023

    def _receive(self, count: int, deadline: float) -> bytes:
        while len(self._unread) < count:
            part = self._act(lambda of: of.recv(RECEIVE_BYTES), deadline)
            if not part:
                self._check()
                raise ProcessGroupError(f"lost the store at {self._server}: it closed the connection")
            self._unread += part
        received = bytes(self._unread[:count])
        del self._unread[:count]
        return received

    def _receive_integer(self, deadline: float) -> int:
        return int(struct.unpack("=q", self._receive(8, deadline))[0])

    def _receive_bytes(self, deadline: float) -> bytes:
        (count,) = struct.unpack("=Q", self._receive(8, deadline))
        if count > VALUE_BYTES_MAX:
            raise ProcessGroupError(f"the store at {self._server} announces a value of {count} bytes")
        return self._receive(count, deadline)

    def _act(self, act: Callable[[socket.socket], T], deadline: float) -> T:
        """Do something with the connection, until the deadline at most."""
        self._check()
        if (connection := self._socket) is None:
            raise ProcessGroupError(f"not connected to the store at {self._server}")
        try:
            connection.settimeout(self._left_s(deadline))
            return act(connection)
        except OSError as error:
            self._explain(error)
            raise

    def _explain(self, error: BaseException) -> None:
        """Raise the error for the caller, if the connection has failed with this one."""
        self._check()
        if isinstance(error, socket.gaierror):
            text = f"the store's host {self._server.host!r} is unknown: {error}"
        elif isinstance(error, TimeoutError):
            raise self._late_error(f"the store at {self._server} did not answer in time") from error
        elif isinstance(error, OSError) and error.errno in REFUSED:
            text = f"the store at {self._server} refuses connections: {error.strerror}"
        elif isinstance(error, OSError):
            text = f"lost the store at {self._server}: {error.strerror or error}"
        else:
            return
        raise ProcessGroupError(text) from error

    def _check(self) -> None:
        if self._aborted:
            raise ProcessGroupAbortedError(f"aborted while talking to the store at {self._server}")


class SharedStore(AbortableStore):
    """A client that goes on after a wait in vain. It raises torch's DistStoreError instead of a TimeoutError,
    connects again if its connection has ended, and closes with the last reference to it.
    """

    _late_error = DistStoreError

    def __del__(self) -> None:
        self.close()

    def _ask(self, query: Query, body: bytes, timeout: timedelta | None = None) -> float:
        if self._socket is None:  # an earlier question had no answer in time
            self.connect(insists=False)
        return super()._ask(query, body, timeout)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        try:
            super().wait(keys, timeout)
        except DistStoreError as error:
            raise DistStoreError(f"nobody has set all of the keys {keys} in time") from error


def _with_length(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return struct.pack("=Q", len(data)) + data


@contextlib.contextmanager
def meeting_store(members: GroupMembers, abort: AbortSignal) -> Iterator[AbortableStore]:
    """Yield a client of the store in which the members meet; an abort ends its every wait.

    Raises:
        ProcessGroupError: the store is gone, or this rank has used the prefix before: the addresses that an
          earlier group left there would be taken for those of this one.
    """
    store = AbortableStore(members.store, members.timeout)
    with contextlib.closing(store), abort.ends(store.abort):
        store.connect()
        if not _is_first(store, f"configured/{members.rank}"):
            raise ProcessGroupError(
                f"rank {members.rank} has already used the store prefix {members.store.name!r}; "
                "every configure needs a fresh one"
            )
        yield store


def _is_first(store: AbortableStore, key: str) -> bool:
    """Return whether this caller is the first to take the key. A store that does not know the quorum yet
    admits no key, and drops the clients that have waited longest; they come again.
    """
    deadline, token = time.monotonic() + store.timeout.total_seconds(), uuid.uuid4().hex
    while True:
        try:
            return store.compare_set(key, "", token) == token.encode()
        except ProcessGroupAbortedError:
            raise
        except ProcessGroupError:
            if time.monotonic() + RECONNECT_S > deadline:
                raise
        time.sleep(RECONNECT_S)
        store.connect(insists=False)


def meet(store: AbortableStore, members: GroupMembers) -> None:
    """Wait until every member has come here.

    This is for a backend whose own wait for a member that never comes is hard to end: this wait ends at once
    when the store is aborted.

    Raises:
        ProcessGroupError, TimeoutError: as from `wait_for_ranks`.
    """
    store.set(f"arrived/{members.rank}", "1")
    wait_for_ranks(store, {rank: f"arrived/{rank}" for rank in range(members.world_size)})


def wait_for_ranks(store: AbortableStore, keys: Mapping[int, str], limit: timedelta | None = None) -> None:
    """Wait until every rank has set its key.

    Args:
        keys: by rank.
        limit: that of the whole wait, for the error, where the store's timeout is what is left of it.

    Raises:
        ProcessGroupError: some did not within the store's timeout; the text says which.
        TimeoutError: the store itself does not answer.
    """
    try:
        store.wait(list(keys.values()))
    except TimeoutError as error:
        timeout = store.timeout
        store.set_timeout(min(timeout, WHO_IS_MISSING))
        store.connect(insists=False)
        missing = [rank for rank, key in keys.items() if not store.check([key])]
        store.set_timeout(timeout)
        if missing:
            who = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {missing}"
            late = f"{who} did not come within {(limit or timeout).total_seconds():g} s"
            raise ProcessGroupError(late) from error


class ExchangeStore(Store):
    """A store through which a backend and all its peers exchange their values in one step.

    Gloo queries the store for every peer's addresses one after the other, three times each, so the members of
    a group of n send 3n² queries together, which one thread of the store answers. Here a member keeps the
    values that it sets to itself until it first asks for one. Then it publishes all of them under one key,
    waits for the keys of all members in one query, and fetches them in another; from then on it answers Gloo
    from memory. Values that are set, or asked for, later go to the store itself.

    It relies on every member setting its values before it asks for one, as in a full mesh.

    Attributes:
        inner: the store in which they do.
        is_gathered: whether all members' values are known.
    """

    def __init__(self, store: AbortableStore, rank: int, world_size: int) -> None:
        super().__init__()
        self.inner = store
        self._rank = rank
        self._world_size = world_size
        self._known: dict[str, bytes] = {}
        self.is_gathered = False

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value, which is published once the caller first asks for one."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self.is_gathered:
            self.inner.set(key, data)
        else:
            self._known[key] = data

    def get(self, key: str) -> bytes:
        return self._known[key] if self._has([key]) else self.inner.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._has(keys) or self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self._has(keys):
            self.inner.wait([key for key in keys if key not in self._known], timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter of the store itself, and return the sum."""
        return self.inner.add(key, amount)

    def set_timeout(self, timeout: timedelta) -> None:
        self.inner.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self.inner.timeout

    def _has(self, keys: list[str]) -> bool:
        if not self.is_gathered:
            self._gather()
        return all(key in self._known for key in keys)

    def _gather(self) -> None:
        self.inner.set(f"member/{self._rank}", encode([self._known]))
        everyone = {rank: f"member/{rank}" for rank in range(self._world_size)}
        wait_for_ranks(self.inner, everyone)
        for said in self.inner.multi_get(list(everyone.values())):
            self._known.update(_values_in(said))
        self.is_gathered = True


def _values_in(said: bytes) -> dict[str, bytes]:
    problem = "a member wrote something else into the store: do all run the same version?"
    try:
        (values,) = decode(said)
    except PlainDataError as error:
        raise ProcessGroupError(problem) from error
    if type(values) is not dict or any((type(k), type(v)) != (str, bytes) for k, v in values.items()):
        raise ProcessGroupError(problem)
    return cast("dict[str, bytes]", values)
