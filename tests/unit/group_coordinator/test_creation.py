"""Making the groups of a coordinator, in a job of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from torchft_like.core.agreement.statements import Statement
from torchft_like.errors import CollectiveMismatchError, CollectiveTimeoutError, GroupCoordinatorError
from torchft_like.group_coordinator import GroupCoordinator
from torchft_like.group_coordinator.creation import agree


@pytest.fixture
def job() -> Iterator[None]:
    dist.init_process_group("torchft-dummy", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    "failure", [RuntimeError("no device group"), KeyboardInterrupt()], ids=["error", "Ctrl-C"]
)
def test_a_failed_device_group_leaves_none(monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    make, known = dist.new_group, set(c10d._world.pg_map)
    made: list[Any] = []

    def new_group(*arguments: Any, **more: Any) -> Any:
        if more["group_desc"].endswith("/device"):
            raise failure
        made.append(make(*arguments, **more))
        return made[-1]

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises((GroupCoordinatorError, KeyboardInterrupt)):
        GroupCoordinator([[0]], 0, "torchft-dummy", True)
    assert len(made) == 1
    assert set(c10d._world.pg_map) == known


# Ranks that agree in a store before they make groups together: all of them go on, or none does.


PATIENT = timedelta(seconds=60)
SHORT = timedelta(seconds=0.05)


class Interrupted:
    """A store in which something happens when the time of who waits is up."""

    def __init__(self, store: Store, happens: Callable[[], object]) -> None:
        self._store = store
        self._happens = happens

    def wait(self, *_: Any) -> None:
        self._happens()
        raise RuntimeError("the time is up")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def reach(store: Any, rank: int, timeout: timedelta = PATIENT, of: int = 2) -> int:
    """Return the rank once it may go on."""
    agree(store, rank, of, timeout, Statement("making", terms=(("name", "é" * 5000),)))
    return rank


def test_ranks_that_ask_for_the_same_go_on() -> None:
    store = HashStore()
    with ThreadPoolExecutor() as threads:
        reaching = [threads.submit(reach, store, rank, of=3) for rank in range(3)]
        assert [future.result(60) for future in reaching] == [0, 1, 2]


def test_who_comes_after_the_first_has_given_up_does_not_go_on_either() -> None:
    store = HashStore()
    for rank, timeout in ((0, SHORT), (2, PATIENT), (1, PATIENT)):
        with pytest.raises(CollectiveTimeoutError) as raised:
            reach(store, rank, timeout=timeout, of=3)
        assert raised.value.missing == (1, 2)


def test_whose_time_is_up_when_the_last_has_come_goes_on_with_it() -> None:
    store = HashStore()
    last = Interrupted(store, lambda: None)  # whose own time is up at once
    gone_on: list[int] = []
    gone_on.append(reach(Interrupted(store, lambda: gone_on.append(reach(last, 1))), 0))
    assert gone_on == [1, 0]


def test_a_rank_that_refuses_has_come() -> None:
    store = HashStore()
    agree(store, 1, 2, PATIENT, Statement("making").refused(ValueError("no such device")))
    with pytest.raises(CollectiveMismatchError, match="no such device"):
        reach(store, 0)


def test_a_store_that_is_gone_is_an_error() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    del store
    with pytest.raises(GroupCoordinatorError, match="the default group's store failed"):
        reach(client, 0)
