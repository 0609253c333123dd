"""A store through which a backend and all its peers exchange their values in one step.

Gloo queries the store for every peer's addresses one after the other, three times each, so the members of a
group of n send 3n² queries together, which one thread of the store answers. Here a member keeps the values
that it sets to itself until it first asks for one. Then it publishes all of them under one key, waits for the
keys of all members in one query, and fetches them in another; from then on it answers Gloo from memory.

It relies on every member setting its values before it asks for one, as in a full mesh, and knows nothing
about the values. Values that are set, or asked for, later go to the store itself.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.abortable_store import AbortableStore

_LENGTH = struct.Struct("=I")


class ExchangeStore(Store):
    """The store in the form in which a backend sees it while it is made.

    Args:
        store: the store through which the members exchange their values.
        rank, world_size: the caller's rank among the members, and their number.
    """

    def __init__(self, store: AbortableStore, rank: int, world_size: int) -> None:
        super().__init__()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._known: dict[str, bytes] = {}
        self._is_gathered = False

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value, which is published once the caller first asks for one."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self._is_gathered:
            self._store.set(key, data)
        else:
            self._known[key] = data

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it has one."""
        return self._known[key] if self._has([key]) else self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        """Return whether every key has a value."""
        return self._has(keys) or self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until every key has a value."""
        if not self._has(keys):
            self._store.wait([key for key in keys if key not in self._known], timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter of the store itself, and return the sum."""
        return self._store.add(key, amount)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each query."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """The limit of each query."""
        return self._store.timeout

    def _has(self, keys: list[str]) -> bool:
        if not self._is_gathered:
            self._gather()
        return all(key in self._known for key in keys)

    def _gather(self) -> None:
        self._store.set(f"member/{self._rank}", _encode(self._known))
        everyone = [f"member/{rank}" for rank in range(self._world_size)]
        self._store.wait(everyone)
        for said in self._store.multi_get(everyone):
            self._known.update(_decode(said))
        self._is_gathered = True


def _encode(said: Mapping[str, bytes]) -> bytes:
    parts = [part for key, value in said.items() for part in (key.encode(), value)]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _decode(data: bytes) -> dict[str, bytes]:
    parts, start = [], 0
    while start + _LENGTH.size <= len(data):
        begin = start + _LENGTH.size
        end = begin + _LENGTH.unpack_from(data, start)[0]
        if end > len(data):
            break
        parts.append(data[begin:end])
        start = end
    try:
        if start == len(data) and len(parts) % 2 == 0:
            return {key.decode(): value for key, value in zip(parts[::2], parts[1::2], strict=True)}
    except UnicodeDecodeError as error:
        raise _foreign() from error
    raise _foreign()


def _foreign() -> ProcessGroupError:
    return ProcessGroupError("a member wrote something else into the store: do all run the same version?")
