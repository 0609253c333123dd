"""A store of keys and values, in which the members of groups meet. Pure: bytes in, answers out.

It reads the requests of torch's TCPStore, as its client makes them, without those that list or count keys.
One byte names the request, strings are preceded by their length, integers are in the machine's byte order.

Keys belong to *rooms*, and what has to make room for others is the oldest room, as a whole. Either a room is
a quorum that was announced (`/torchft/7/...` is of quorum 7), and a key of a quorum that has a secret shows
that its user knows the secret; or any two first parts of a key name one.
"""

from __future__ import annotations

import hmac
import re
import struct
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from torchft_like.core.quorum_secret import QuorumSecret, meeting_keys

VALIDATION_MAGIC = 0x3C85F7CE
MESSAGE_BYTES_MAX = 16 * 1024 * 1024
FIRST_BYTES_MAX = 64 * 1024  # of a client that has shown no valid key yet
KEY_BYTES_MAX = 4096
REQUEST_KEYS_MAX = 16_384
STORE_BYTES_MAX = 1024 * 1024 * 1024
QUORUMS_MAX = 16  # whose keys are kept
ROOMS_MAX = 1024  # where no quorums are announced
ENTRY_BYTES, AWAITED_BYTES = 256, 64  # what a key costs beside its bytes and its value's
COUNTER_CHARACTERS_MAX = 20

# The quorum of a key, and what may be the key of a quorum's secret in it.
_QUORUM = re.compile(rb"/[a-z]+/([0-9]{1,19})/")
_SHOWN = re.compile(rb"(?<=/)(?:secret=)?([0-9a-f]{32})(?=/)")
_ROOM = re.compile(rb"(?:/[^/]*){1,2}")


class StoreRequestError(ValueError):
    """A client asks for what the store does not do, or has no room for."""


class Query(IntEnum):
    """The requests; those that are missing list or count keys, or make queues of values."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13


READY, NOT_READY = b"\0", b"\1"
STOP_WAITING, WAIT_CANCELED = b"\0", b"\1"

# How many values follow a key, where there is one; those of the others say how many keys come.
_VALUES = {Query.SET: 1, Query.COMPARE_SET: 2, Query.GET: 0, Query.DELETE_KEY: 0, Query.APPEND: 1}
_MANY = {Query.CHECK: 0, Query.WAIT: 0, Query.MULTI_GET: 0, Query.MULTI_SET: 1}


class Request(NamedTuple):
    """A request; `number` is that of PING and ADD."""

    query: Query
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0


class RequestReader:
    """Reads a client's requests out of its bytes, however they are cut.

    Attributes:
        first_key: the first key that came, known before the rest of its request has.
        bytes_max: the length of the longest request that is taken.
    """

    def __init__(self) -> None:
        self.first_key: bytes | None = None
        self.bytes_max = FIRST_BYTES_MAX
        self._unread = bytearray()
        self._taken = 0  # bytes of the request that is being read
        self._requests = self._read()

    def __len__(self) -> int:
        """The number of bytes that are kept."""
        return len(self._unread) + self._taken

    def feed(self, data: bytes) -> None:
        """Add what has come."""
        self._unread += data

    def next(self) -> Request | None:
        """Return the next request; None if it is incomplete, and once when the very first key is known.

        Raises:
            StoreRequestError: what came is no request, or too long.
        """
        return next(self._requests)

    def _read(self) -> Iterator[Request | None]:
        while True:
            code = (yield from self._exactly(1))[0]
            try:
                query = Query(code)
            except ValueError:
                raise StoreRequestError(f"it knows no request {code}") from None
            yield (yield from self._request(query))
            self._taken = 0

    def _request(self, query: Query) -> Generator[None, None, Request]:
        if query is Query.VALIDATE:
            if (yield from self._integer("=I")) != VALIDATION_MAGIC:
                raise StoreRequestError("this is no client of a store")
            return Request(query)
        if query is Query.PING:
            return Request(query, number=(yield from self._integer("=I")))
        if query is Query.CANCEL_WAIT:
            return Request(query)
        if query is Query.ADD:
            return Request(query, ((yield from self._key()),), number=(yield from self._integer("=q")))
        count = (yield from self._integer("=Q")) if query in _MANY else 1
        if count > REQUEST_KEYS_MAX:
            raise StoreRequestError(f"a request has {count} keys, {REQUEST_KEYS_MAX} are the most")
        keys, values = [], []
        for _ in range(count):
            keys.append((yield from self._key()))
            for _ in range(_MANY[query] if query in _MANY else _VALUES[query]):
                values.append((yield from self._text(MESSAGE_BYTES_MAX)))  # noqa: PERF401 - it waits in between
        return Request(query, tuple(keys), tuple(values))

    def _key(self) -> Generator[None, None, bytes]:
        key = yield from self._text(KEY_BYTES_MAX)
        if self.first_key is None:
            self.first_key = key
            yield
        return key

    def _text(self, bytes_max: int) -> Generator[None, None, bytes]:
        if (size := (yield from self._integer("=Q"))) > bytes_max:
            raise StoreRequestError(f"a text has {size} bytes, {bytes_max} are the most")
        return (yield from self._exactly(size))

    def _integer(self, form: str) -> Generator[None, None, int]:
        return int(struct.unpack(form, (yield from self._exactly(struct.calcsize(form))))[0])

    def _exactly(self, count: int) -> Generator[None, None, bytes]:
        if self._taken + count > self.bytes_max:
            raise StoreRequestError(f"a request is longer than {self.bytes_max} bytes")
        while len(self._unread) < count:
            yield
        part = bytes(memoryview(self._unread)[:count])
        del self._unread[:count]
        self._taken += count
        return part


@dataclass(eq=False, repr=False)  # a key may hold a secret
class Client:
    """What the store knows of a connection.

    Attributes:
        prefix: how keys begin that are known to be of its room.
        awaits: the keys that it waits for, the next one last, in the room of that one.
    """

    prefix: bytes = b""
    room: Room | None = None
    awaits: list[bytes] = field(default_factory=list)
    waits_in: Room | None = None
    waits_size: int = 0


@dataclass(eq=False, repr=False)  # a key may hold a secret
class Room:
    """Keys that go together: of a quorum, or with the same beginning.

    Attributes:
        shown: what a key has to have in it, one of these; nothing if that is empty.
    """

    shown: tuple[bytes, ...] = ()
    values: dict[bytes, bytes] = field(default_factory=dict)
    waiting: dict[bytes, set[Client]] = field(default_factory=dict)
    clients: set[Client] = field(default_factory=set)
    size: int = 0


class Answer(NamedTuple):
    """What a client is sent, in parts; None ends its connection."""

    client: Client
    parts: Sequence[bytes] | None


class KeyValueStore:
    """The keys and values of a store.

    Args:
        awaits_quorums: whether keys are those of quorums that are announced.
    """

    def __init__(self, *, awaits_quorums: bool, bytes_max: int = STORE_BYTES_MAX) -> None:
        self._awaits_quorums = awaits_quorums
        self._bytes_max = bytes_max
        self._rooms: dict[bytes, Room] = {}  # the oldest first
        self._size = 0
        self._answers: list[Answer] = []

    def take_answers(self) -> list[Answer]:
        """Return what clients are to be told since this was called last."""
        answers, self._answers = self._answers, []
        return answers

    def announce(self, quorum_id: int, secret: QuorumSecret) -> None:
        """Admit the keys of a quorum: those that show its secret, or all, if it has none."""
        name, shown = str(quorum_id).encode(), tuple(key.encode() for key in meeting_keys(secret))
        if (known := self._rooms.get(name)) is None or known.shown != shown:
            self._drop(name)
            self._open(name, Room(shown), QUORUMS_MAX)

    def admits(self, client: Client, key: bytes) -> bool:
        """Return whether a client may use a key now; where quorums are awaited, it perhaps may later."""
        if client.room is not None and key.startswith(client.prefix):
            return True
        room, prefix = self._room(key)
        if room is None:
            return False
        self._leave(client)
        client.room, client.prefix = room, prefix
        room.clients.add(client)
        return True

    def perform(self, client: Client, request: Request) -> None:
        """Do what a client asks for, whose keys are admitted.

        Raises:
            StoreRequestError: it cannot be done.
        """
        query, keys, values = request.query, request.keys, request.values
        places = [(self._room_of(client, key), key) for key in keys]
        match query:
            case Query.SET | Query.MULTI_SET:
                for key, value in zip(keys, values, strict=True):
                    self._put(self._room_of(client, key), key, value)  # one may have dropped another's room
            case Query.APPEND:
                self._put(*places[0], self._value(places[0]) + values[0])
            case Query.ADD:
                total = _counted(self._value(places[0])) + request.number
                self._answer(client, _integer(total))
                self._put(*places[0], str(total).encode())
            case Query.COMPARE_SET:
                (room, key), (expected, desired) = places[0], values
                before = room.values.get(key)
                is_expected = not expected if before is None else before == expected
                after = desired if is_expected else expected if before is None else before
                self._answer(client, *_with_length(after))
                if is_expected:
                    self._put(room, key, after)
            case Query.GET | Query.MULTI_GET:
                found = map(self._value, places)
                self._answer(client, *(part for value in found for part in _with_length(value)))
            case Query.CHECK:
                self._answer(client, READY if all(key in room.values for room, key in places) else NOT_READY)
            case Query.DELETE_KEY:
                self._answer(client, _integer(self._delete(*places[0])))
            case Query.WAIT:
                self._begin_wait(client, keys)
            case Query.CANCEL_WAIT:
                self._end_wait(client)
                self._answer(client, WAIT_CANCELED)
            case Query.PING:
                self._answer(client, struct.pack("=I", request.number))

    def forget(self, client: Client) -> None:
        """Forget a connection that has ended."""
        self._end_wait(client)
        self._leave(client)

    def drop_room(self, prefix: str) -> None:
        """Delete the keys under a prefix of two parts, and end the connections that use them."""
        self._drop(f"/{prefix}".encode())

    # ------------------------------------------------------------------------ rooms

    def _room(self, key: bytes) -> tuple[Room | None, bytes]:
        """Return the room of a key, and the part of the key that shows it; None if it is of none."""
        if not self._awaits_quorums:
            name = found[0] if (found := _ROOM.match(key)) is not None else b""
            if name not in self._rooms:
                self._open(name, Room(), ROOMS_MAX)
            return self._rooms[name], name + b"/"
        if (found := _QUORUM.match(key)) is None or (room := self._rooms.get(found[1])) is None:
            return None, b""
        if not room.shown:
            return room, found[0]
        for shown in _SHOWN.finditer(key):
            if any(hmac.compare_digest(shown[1], known) for known in room.shown):
                return room, key[: shown.end() + 1]
        return None, b""

    def _room_of(self, client: Client, key: bytes) -> Room:
        if client.room is not None and key.startswith(client.prefix):
            return client.room
        room, _ = self._room(key)
        if room is None:
            raise StoreRequestError("a key is of no quorum that is known")
        return room

    def _open(self, name: bytes, room: Room, rooms_max: int) -> None:
        self._rooms[name] = room
        for oldest in list(self._rooms)[:-rooms_max]:
            self._drop(oldest)

    def _drop(self, name: bytes) -> None:
        if (room := self._rooms.pop(name, None)) is not None:
            self._size -= room.size
            for client in room.clients.union(*room.waiting.values()):
                self.forget(client)
                self._answers.append(Answer(client, None))

    def _leave(self, client: Client) -> None:
        if client.room is not None:
            client.room.clients.discard(client)
            client.room = None

    # ----------------------------------------------------------------------- values

    def _value(self, place: tuple[Room, bytes]) -> bytes:
        room, key = place
        return room.values.get(key, b"")

    def _put(self, room: Room, key: bytes, value: bytes) -> None:
        before = room.values.get(key)
        growth = len(value) - len(before) if before is not None else ENTRY_BYTES + len(key) + len(value)
        self._make_space(room, growth)
        room.values[key] = value
        room.size += growth
        self._size += growth
        for waiting in room.waiting.pop(key, ()):
            self._advance(waiting)

    def _delete(self, room: Room, key: bytes) -> int:
        if (value := room.values.pop(key, None)) is None:
            return 0
        freed = ENTRY_BYTES + len(key) + len(value)
        room.size -= freed
        self._size -= freed
        return 1

    def _make_space(self, room: Room | None, growth: int) -> None:
        """Drop the rooms that are older than this one, as far as it needs their space."""
        for name, other in list(self._rooms.items()):
            if self._size + growth <= self._bytes_max or other is room:
                break
            self._drop(name)
        if self._size + growth > self._bytes_max:
            raise StoreRequestError(f"the store is full: it takes {self._bytes_max} bytes")

    # ------------------------------------------------------------------------ waits

    def _begin_wait(self, client: Client, keys: Sequence[bytes]) -> None:
        self._end_wait(client)
        size = sum(map(len, keys)) + AWAITED_BYTES * len(keys)
        self._make_space(client.room, size)
        client.awaits, client.waits_size = list(reversed(keys)), size
        self._size += size
        self._advance(client)

    def _advance(self, client: Client) -> None:
        """Let a client wait for the next of its keys that has no value; answer it if there is none."""
        client.waits_in = None
        while client.awaits:
            key = client.awaits[-1]
            try:
                room = self._room_of(client, key)
            except StoreRequestError:  # dropped meanwhile
                self._answers.append(Answer(client, None))
                return
            if key not in room.values:
                room.waiting.setdefault(key, set()).add(client)
                client.waits_in = room
                return
            client.awaits.pop()
        self._end_wait(client)
        self._answer(client, STOP_WAITING)

    def _end_wait(self, client: Client) -> None:
        if client.waits_in is not None:
            waiting = client.waits_in.waiting[client.awaits[-1]]
            waiting.discard(client)
            if not waiting:
                del client.waits_in.waiting[client.awaits[-1]]
            client.waits_in = None
        self._size -= client.waits_size
        client.awaits, client.waits_size = [], 0

    def _answer(self, client: Client, *parts: bytes) -> None:
        self._answers.append(Answer(client, parts))


def _integer(value: int) -> bytes:
    if not -(2**63) <= value < 2**63:
        raise StoreRequestError("a counter has come to a sum of more than 64 bits")
    return struct.pack("=q", value)


def _with_length(value: bytes) -> tuple[bytes, bytes]:
    return struct.pack("=Q", len(value)), value


def _counted(value: bytes) -> int:
    """Return what a counter has come to, which is kept as text."""
    try:
        return int(value[:COUNTER_CHARACTERS_MAX] or b"0")
    except ValueError:
        raise StoreRequestError("what is to be added to is no counter") from None
