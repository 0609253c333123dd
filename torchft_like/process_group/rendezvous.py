"""How the members of a new generation meet in the store, and what they tell each other there.

This module knows the store and the members, and nothing of the backend that they are about to make.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import Store

from torchft_like.errors import PlainDataError, ProcessGroupError
from torchft_like.plain_data import decode, encode
from torchft_like.process_group.abortable_store import AbortableStore
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import GroupMembers


@contextlib.contextmanager
def meeting_store(members: GroupMembers, abort: AbortSignal) -> Iterator[AbortableStore]:
    """Yield a client of the store in which the members meet; an abort ends its every wait.

    Raises:
        ProcessGroupError: the store is gone, or this rank has used the prefix before.
    """
    store = AbortableStore(members.store, members.timeout)
    with contextlib.closing(store), abort.ends(store.abort):
        store.connect()
        claim_prefix(store, members)
        yield store


def claim_prefix(store: AbortableStore, members: GroupMembers) -> None:
    """Make sure that this rank has not used the prefix before.

    Otherwise the addresses that an earlier group left in the store would be taken for those of this one.

    Raises:
        ProcessGroupError: this rank has used the prefix before.
    """
    if store.add(f"configured/{members.rank}", 1) > 1:
        raise ProcessGroupError(
            f"rank {members.rank} has already used the store prefix {members.store.prefix!r}; "
            "every configure needs a fresh one"
        )


def meet(store: AbortableStore, members: GroupMembers) -> None:
    """Wait until every member has come here.

    This is for a backend whose own wait for a member that never comes is hard to end: this wait ends at once
    when the store is aborted.

    Raises:
        ProcessGroupError: a member did not come within the group's timeout; the text says which.
    """
    deadline = time.monotonic() + members.timeout.total_seconds()
    store.set(f"arrived/{members.rank}", "1")
    for rank in range(members.world_size):
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"arrived/{rank}"], timedelta(seconds=left_s))
        except TimeoutError as error:
            raise ProcessGroupError(
                f"rank {rank} of {members.world_size} did not come within "
                f"{members.timeout.total_seconds():g} s"
            ) from error


class ExchangeStore(Store):
    """A store through which a backend and all its peers exchange their values in one step.

    Gloo queries the store for every peer's addresses one after the other, three times each, so the members of
    a group of n send 3n² queries together, which one thread of the store answers. Here a member keeps the
    values that it sets to itself until it first asks for one. Then it publishes all of them under one key,
    waits for the keys of all members in one query, and fetches them in another; from then on it answers Gloo
    from memory. Values that are set, or asked for, later go to the store itself.

    It relies on every member setting its values before it asks for one, as in a full mesh.

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
        return self._known[key] if self._has([key]) else self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._has(keys) or self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if not self._has(keys):
            self._store.wait([key for key in keys if key not in self._known], timeout)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter of the store itself, and return the sum."""
        return self._store.add(key, amount)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def _has(self, keys: list[str]) -> bool:
        if not self._is_gathered:
            self._gather()
        return all(key in self._known for key in keys)

    def _gather(self) -> None:
        self._store.set(f"member/{self._rank}", encode([self._known]))
        everyone = [f"member/{rank}" for rank in range(self._world_size)]
        self._store.wait(everyone)
        for said in self._store.multi_get(everyone):
            self._known.update(_values_in(said))
        self._is_gathered = True


def _values_in(said: bytes) -> dict[str, bytes]:
    """Read what a member has published.

    Raises:
        ProcessGroupError: the bytes are no values under names.
    """
    problem = "a member wrote something else into the store: do all run the same version?"
    try:
        (values,) = decode(said)
    except PlainDataError as error:
        raise ProcessGroupError(problem) from error
    if type(values) is not dict or any((type(k), type(v)) != (str, bytes) for k, v in values.items()):
        raise ProcessGroupError(problem)
    return cast("dict[str, bytes]", values)
