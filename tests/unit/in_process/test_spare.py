"""Spares and the ranks that ask for them, at a lighthouse in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest

from lighthouse.address import LOOPBACK, Address
from lighthouse.core.config import LighthouseConfig
from lighthouse.server import Lighthouse
from tests.conftest import WAIT_LIMIT_S
from tests.waiting import soon
from torchft_like.core.restarts import RankProcess
from torchft_like.errors import AddressError
from torchft_like.in_process import spare
from torchft_like.in_process.spare import Place, SpareDesk, take_place
from torchft_like.runtime.event_loop import coordination_loop

T = TypeVar("T")


def started(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(coroutine, coordination_loop().loop)


def start(bind: Address) -> Lighthouse:
    return started(Lighthouse.start(LighthouseConfig(min_replicas=1), bind)).result(WAIT_LIMIT_S)


@pytest.fixture
def lighthouse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lighthouse]:
    server = start(Address(LOOPBACK, 0))
    monkeypatch.setenv("TORCHFT_LIGHTHOUSE", str(server.address))
    yield server
    started(server.stop()).result(WAIT_LIMIT_S)


def ask(group: str = "g") -> Future[str]:
    """Ask for a spare, as a rank does that would not wait for one; the answer is why none comes."""
    return SpareDesk().asks_for(group, 2, {})(RankProcess(1, ""), RankProcess(0, "127.0.0.1:1"), 0)


def waiting(server: Lighthouse, number: int) -> bool:
    return soon(lambda: len(server.spare_ranks.names()) == number)


def waiting_spare(address: Address, take: Callable[[Place], T]) -> Future[T]:
    outcome: Future[T] = Future()

    def wait() -> None:
        try:
            outcome.set_result(take_place(address, WAIT_LIMIT_S, take))
        except BaseException as error:  # noqa: BLE001 - the outcome has it
            outcome.set_exception(error)

    threading.Thread(target=wait, daemon=True, name="a spare").start()
    return outcome


def test_a_spare_that_ends_on_its_way_has_not_taken_the_place(lighthouse: Lighthouse) -> None:
    def take(_: Place) -> None:
        raise KeyboardInterrupt

    spare = waiting_spare(lighthouse.address, take)
    assert waiting(lighthouse, 1)
    assert ask().result(WAIT_LIMIT_S).startswith("no spare rank is free")
    with pytest.raises(KeyboardInterrupt):
        spare.result(WAIT_LIMIT_S)


def test_a_place_to_which_there_is_no_way_harms_no_spare(lighthouse: Lighthouse) -> None:
    def take(place: Place) -> str:
        assert threading.current_thread().name == "a spare", "a signal that ends the wait ends this, too"
        if place.group_id == "afar":
            raise AddressError("no route")
        return place.group_id

    spare = waiting_spare(lighthouse.address, take)
    assert waiting(lighthouse, 1)
    assert ask(group="afar").result(WAIT_LIMIT_S).startswith("no spare rank is free")
    assert ask(group="near").result(WAIT_LIMIT_S) == ""
    assert spare.result(WAIT_LIMIT_S) == "near"


def test_a_rank_that_has_missed_the_lighthouse_waits_for_its_spares_too(
    lighthouse: Lighthouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come back one after the other, as it happens."""
    monkeypatch.setattr(spare, "AWAY_S", WAIT_LIMIT_S)
    at = lighthouse.address
    started(lighthouse.stop()).result(WAIT_LIMIT_S)
    answer = ask()
    with pytest.raises(TimeoutError):  # it asks again and again
        answer.result(2 * spare.RETRY_S)
    again = start(at)
    try:
        with pytest.raises(TimeoutError):
            answer.result(4 * spare.RETRY_S)
        waits = waiting_spare(at, lambda place: place.rank)
        assert (answer.result(WAIT_LIMIT_S), waits.result(WAIT_LIMIT_S)) == ("", 1)
    finally:
        started(again.stop()).result(WAIT_LIMIT_S)
