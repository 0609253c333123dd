"""Members of a generation meet through a real store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.unit.process_group.conftest import LIMIT_S, Party
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupError
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.store import (
    AbortableStore,
    GroupMembers,
    meet,
    meeting_store,
    parse_store_address,
)

LONG = timedelta(seconds=LIMIT_S)


@contextlib.contextmanager
def member(
    prefix: str, rank: int, world_size: int, timeout: timedelta = LONG
) -> Iterator[tuple[AbortableStore, GroupMembers]]:
    members = GroupMembers(parse_store_address(prefix), rank, world_size, timeout)
    store = AbortableStore(members.store, LONG)
    with contextlib.closing(store):
        store.connect()
        yield store, members


def test_all_members_meet(party: Party) -> None:
    prefix = party.prefix()

    def come(rank: int) -> None:
        with member(prefix, rank, 3) as (store, members):
            meet(store, members)

    for future in [party.aside(come, rank) for rank in range(3)]:
        future.result(LIMIT_S)


def test_who_did_not_come_is_named(party: Party) -> None:
    with (
        member(party.prefix(), 0, 2, timedelta(seconds=0.05)) as (store, members),
        pytest.raises(ProcessGroupError, match=r"rank 1 of 2 did not come within 0\.05 s"),
    ):
        meet(store, members)


@pytest.mark.progress
def test_abort_of_the_store_ends_the_meeting(party: Party) -> None:
    with member(party.prefix(), 0, 2) as (store, members):
        waiting = party.aside(meet, store, members)
        assert not waiting.done()
        store.abort()
        with pytest.raises(ProcessGroupAbortedError):
            waiting.result(LIMIT_S)


@pytest.mark.no_zombie
def test_prefix_is_claimed_once_by_each_rank(party: Party) -> None:
    store = parse_store_address(party.prefix())
    for rank in range(2):
        with meeting_store(GroupMembers(store, rank, 2, LONG), AbortSignal()):
            pass
    with (
        pytest.raises(ProcessGroupError, match="rank 1 has already used the store prefix"),
        meeting_store(GroupMembers(store, 1, 2, LONG), AbortSignal()),
    ):
        pass
