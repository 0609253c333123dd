"""`configure` in the order of its own documentation, and in torchft 0.2.0's."""

from __future__ import annotations

from typing import Any

import pytest

from torchft_like.process_group import ProcessGroupDummy
from torchft_like.process_group.configuration import AbortSignal


class _Told(ProcessGroupDummy):
    """Keeps what it is configured with."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.told: dict[str, Any] = {}

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Any) -> None:
        self.told = {"store_addr": store_addr, "rank": rank, "world_size": world_size, **about}


class _OfTorchft(ProcessGroupDummy):
    """A subclass that somebody wrote for torchft 0.2.0."""

    told: tuple[Any, ...] = ()

    def configure(  # type: ignore[override] # the other order is the point
        self, store_addr: str, replica_id: str, rank: int, world_size: int, quorum_id: int | None = None
    ) -> None:
        self.told = (store_addr, replica_id, rank, world_size, quorum_id)


def test_both_orders_mean_the_same() -> None:
    group: Any = _Told()
    also: Any = _Told()
    group.configure("host:1/x", 1, 2, replica_id="me", quorum_id=7, group_rank=0)
    also.configure("host:1/x", "me", 1, 2, 7, 0)
    assert group.told == also.told
    assert (also.told["rank"], also.told["replica_id"], also.told["quorum_id"]) == (1, "me", 7)


def test_a_subclass_in_torchfts_order_is_called_by_name_and_by_place() -> None:
    group: Any = _OfTorchft(0, 1)
    group.configure("host:1/x", "me", 1, 2)
    assert group.told == ("host:1/x", "me", 1, 2, None)
    group.configure("host:1/x", rank=1, world_size=2, replica_id="me", quorum_id=7)
    assert group.told == ("host:1/x", "me", 1, 2, 7)


def test_an_argument_that_comes_twice_or_is_one_too_many_is_refused() -> None:
    group: Any = _Told()
    with pytest.raises(TypeError, match="replica_id"):
        group.configure("host:1/x", "me", 1, 2, replica_id="you")
    with pytest.raises(TypeError):
        group.configure("host:1/x", "me", 1, 2, 3, 4, 5, [6], 7)


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_subclass_that_knows_no_signal_is_aborted_when_it_is_set(when: str) -> None:
    class Waiting(_OfTorchft):
        aborts: tuple[str, ...] = ()

        def configure(self, store_addr: str, replica_id: str, rank: int, world_size: int) -> None:  # type: ignore[override]
            if when == "during":
                signal.set("the caller has enough")

        def abort(self, reason: str = "") -> None:
            self.aborts += (reason,)

    group: Any = Waiting(0, 1)
    signal = AbortSignal()
    if when == "before":
        signal.set("the caller has enough")
    group.configure("host:1/x", "me", 1, 2, ends_with=signal)
    assert group.aborts == ("the caller has enough",)


def test_a_subclass_that_says_nothing_of_configurations_begins_one_with_each_configure() -> None:
    group: Any = _OfTorchft(0, 1)
    seen = [group.configuration]
    for _ in range(2):
        group.configure("host:1/x", "me", 1, 2)
        seen.append(group.configuration)
    assert [each.number for each in seen] == [0, 1, 2]
    assert [each.reason is None for each in seen] == [False, False, True]
