"""How long a rank waits for others that live and do not come; tests/simulation has those that die."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest

from lighthouse.address import Address, parse_address
from torchft_like.core.meeting import MeetingProtocol, Steps
from torchft_like.core.restarts import Ending, RankProcess, Told
from torchft_like.errors import GroupLostError
from torchft_like.in_process import meeting
from torchft_like.in_process.meeting import Meeting, RestartGroup
from torchft_like.in_process.spare import Place, SpareDesk
from torchft_like.manager.group_store import is_listening
from torchft_like.process_group.store import serve_store

LIMIT = timedelta(seconds=60)
GROUP = "group"
SECONDHAND = Told(Ending.SECONDHAND, "another one has died")


@pytest.fixture(autouse=True)
def _looks_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a rank see soon that a process which is silent has not ended."""
    monkeypatch.setattr(meeting, "BRIEFLY", timedelta(seconds=1))


def pair_of_ranks(
    own: int, ask: Callable[..., Any], limit: timedelta
) -> tuple[Meeting, list[RankProcess], Any]:
    """Return the meeting of one of two ranks, of which the other does nothing, but serves its store.

    It looks again several times before the limit has passed.
    """
    stores, addresses = zip(*(serve_store("127.0.0.1", LIMIT) for _ in range(2)), strict=True)
    ranks = [RankProcess(rank, str(address)) for rank, address in enumerate(addresses)]
    return (
        Meeting(GROUP, MeetingProtocol(ranks[own], ranks), limit, ask, limit / timedelta(seconds=4)),
        ranks,
        stores,
    )


def outcome_of(call: Callable[[], object]) -> Future[object]:
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except GroupLostError as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize(
    ("own", "wait"),
    [
        (0, lambda protocol: protocol.agree(0, SECONDHAND)),
        (1, lambda protocol: protocol.agree(0, SECONDHAND)),
        (1, lambda protocol: protocol.find(1)),
    ],
    ids=["agree as the first", "agree", "find"],
)
def test_one_that_lives_and_does_not_come_is_not_waited_for_for_ever(
    own: int, wait: Callable[[MeetingProtocol], Steps[object]]
) -> None:
    waits, _, _stores = pair_of_ranks(own, lambda *_: Future(), timedelta(seconds=1))
    with pytest.raises(GroupLostError, match="did not answer in time"):
        outcome_of(lambda: waits.run(wait(waits.protocol))).result(LIMIT.total_seconds())


def test_a_spare_may_take_longer_than_ranks_wait_for_each_other() -> None:
    limit = timedelta(seconds=1)
    asked, answer = threading.Event(), Future[str]()

    def ask(*_: object) -> Future[str]:
        asked.set()
        return answer

    waits, ranks, _stores = pair_of_ranks(0, ask, limit)
    waits._spare_wait_s = LIMIT.total_seconds()
    waits.protocol.ended(ranks[1])
    outcome = outcome_of(lambda: waits.run(waits.protocol.agree(0, SECONDHAND)))
    assert asked.wait(LIMIT.total_seconds())
    time.sleep(2 * limit.total_seconds())
    answer.set_result("no spare has come")
    said: Any = outcome.result(LIMIT.total_seconds())
    assert said[1][1].reason.endswith("no spare has come")


def test_a_spare_on_its_way_asks_for_another_one_in_the_name_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of three ranks have died, and their spares come one after the other."""
    monkeypatch.delenv("REPLICA_GROUP_ID", raising=False)
    stores, addresses = zip(*(serve_store("127.0.0.1", LIMIT) for _ in range(3)), strict=True)
    ranks = [RankProcess(rank, str(address)) for rank, address in enumerate(addresses)]
    protocol = MeetingProtocol(ranks[2], ranks)
    lives = Meeting(GROUP, protocol, LIMIT, lambda *_: Future())
    for lost in ranks[:2]:
        protocol.ended(lost)
    outcomes = [outcome_of(lambda: lives.run(protocol.agree(0, SECONDHAND)))]
    vacancies: list[Any] = []

    async def ask(_: SpareDesk, vacancy: Any) -> str:
        vacancies.append(vacancy)
        return "there is no other"

    monkeypatch.setattr(SpareDesk, "_ask", ask)
    place = Place(
        GROUP, 0, 3, parse_address(ranks[2].address), 0, {"REPLICA_GROUP_ID": "a", "HOME": "theirs"}
    )
    outcomes.append(outcome_of(lambda: RestartGroup.as_spare(place, LIMIT.total_seconds(), SpareDesk())))
    with pytest.raises(GroupLostError, match="there is no other"):
        outcomes[1].result(LIMIT.total_seconds())
    outcomes[0].result(LIMIT.total_seconds())
    assert [(v.group_rank, dict(v.environment)) for v in vacancies] == [(1, {"REPLICA_GROUP_ID": "a"})]
    del stores


def test_a_spare_that_declines_a_place_serves_nothing_there_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have read that it has the place, and see that it is gone by its store."""
    served: list[Address] = []

    def serve(*args: Any) -> tuple[object, Address]:
        store, address = serve_store(*args)
        served.append(address)
        return store, address

    monkeypatch.setattr(meeting, "serve_store", serve)
    nobody, address = serve_store("127.0.0.1", LIMIT)
    del nobody
    with pytest.raises(GroupLostError, match="nobody meets there") as _error_is_kept:
        RestartGroup.as_spare(Place(GROUP, 0, 2, address, 0, {}), LIMIT.total_seconds(), SpareDesk())
    assert not is_listening(served[0])
