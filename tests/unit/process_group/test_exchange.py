"""What the members of a group say to each other while a backend is made."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.process_group.store import AbortableStore, ExchangeStore, parse_store_address

from .conftest import LIMIT_S, Party

pytestmark = pytest.mark.usefixtures("no_operator")

WORLD = 3


@pytest.fixture
def stores(party: Party) -> Iterator[list[AbortableStore]]:
    address = parse_store_address(party.prefix())
    stores = [AbortableStore(address, timedelta(seconds=LIMIT_S)) for _ in range(WORLD)]
    for store in stores:
        store.connect()
    yield stores
    for store in stores:
        store.close()


def test_a_member_asks_the_store_as_often_in_a_large_group(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ask = AbortableStore._ask
    monkeypatch.setattr(AbortableStore, "_ask", lambda *args: asked.append(1) or ask(*args))  # type: ignore[func-returns-value]
    counts = []
    for world_size in (2, 5):
        asked.clear()
        party.meet(world_size, lambda: ProcessGroupGloo(30, check_collectives=False))
        counts.append(len(asked) / world_size)
    assert counts[0] == counts[1] > 0


def test_what_is_said_after_the_first_question_is_heard_too(
    party: Party, stores: list[AbortableStore]
) -> None:
    def speak_late(rank: int, store: AbortableStore) -> bytes:
        exchange = ExchangeStore(store, rank, WORLD)
        assert not exchange.check([f"late/{rank}"])
        exchange.set(f"late/{rank}", f"by {rank}")
        exchange.wait([f"late/{peer}" for peer in range(WORLD)])
        return exchange.get(f"late/{(rank + 1) % WORLD}")

    members = [party.aside(speak_late, rank, store) for rank, store in enumerate(stores)]
    assert [member.result(LIMIT_S) for member in members] == [b"by 1", b"by 2", b"by 0"]


@pytest.mark.parametrize(
    "nonsense", [b"\x01", b"\xff\xff\xff\xff", b"\x01\x00\x00\x00a", b"\x03\x00\x00\x00a"]
)
def test_what_no_member_of_ours_said_is_an_error(stores: list[AbortableStore], nonsense: bytes) -> None:
    stores[1].set("member/1", nonsense)
    stores[2].set("member/2", b"")
    with pytest.raises(ProcessGroupError, match="something else"):
        ExchangeStore(stores[0], 0, WORLD).wait(["address/1"])
