"""How long a rank waits for others that live and do not come; tests/simulation has those that die."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from itertools import islice, repeat
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch._C._distributed_c10d import PrefixStore

from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.core.config import LighthouseConfig
from lighthouse.server import Lighthouse
from tests.conftest import WAIT_LIMIT_S
from tests.faults import raising
from tests.ports import free_ports
from tests.waiting import soon
from torchft_like.core.restarts import (
    OF_THE_RUN,
    RETURNED,
    Ending,
    MeetingProtocol,
    Open,
    RankProcess,
    Read,
    Record,
    RestartBudget,
    Steps,
    Told,
    all_start_again,
    ending_of,
    pauses_s,
    why_not,
)
from torchft_like.errors import (
    AddressError,
    ConfigError,
    ConnectError,
    DivergenceError,
    ForeignStateError,
    GroupLostError,
    HealthCheckError,
    MaxRetriesError,
    QuorumTimeoutError,
)
from torchft_like.in_process import health, meeting, spare
from torchft_like.in_process.meeting import Meeting, RestartGroup
from torchft_like.in_process.spare import Place, SpareDesk, take_place
from torchft_like.manager import group_store
from torchft_like.manager.config import (
    AGENT_STORE_ENV,
    LIGHTHOUSE_ENV,
    GroupPlace,
    ManagerArguments,
    resolve,
)
from torchft_like.manager.group_store import is_listening, open_group_store
from torchft_like.process_group.store import AbortableStore, StoreAddress, serve_store, wait_for_ranks
from torchft_like.runtime.event_loop import coordination_loop

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
    with pytest.raises(GroupLostError, match=rf"rank {1 - own} did not come within 1 s"):
        outcome_of(lambda: waits.run(wait(waits.protocol))).result(LIMIT.total_seconds())


def test_a_rank_that_waits_for_another_hears_of_the_end_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = [serve_store("127.0.0.1", LIMIT) for _ in range(2)]
    ranks, waits_now = [RankProcess(rank, str(at)) for rank, (_, at) in enumerate(served)], threading.Event()
    no_spare = Future[str]()
    no_spare.set_result("there is no spare")

    def wait(*args: Any) -> None:
        waits_now.set()
        wait_for_ranks(*args)

    monkeypatch.setattr(meeting, "wait_for_ranks", wait)
    protocol = MeetingProtocol(ranks[0], ranks)
    waits = Meeting(GROUP, protocol, LIMIT, lambda *_: no_spare, dead_after_s=2 * LIMIT.total_seconds())
    outcome = outcome_of(lambda: waits.run(protocol.agree(0, SECONDHAND)))
    assert waits_now.wait(LIMIT.total_seconds())
    served.pop()
    said: Any = outcome.result(2 * LIMIT.total_seconds())
    assert said[1][1].reason == "rank 1: its process has ended, and there is no spare"


def three_ranks() -> tuple[list[RankProcess], list[PrefixStore]]:
    stores, addresses = zip(*(serve_store("127.0.0.1", LIMIT) for _ in range(3)), strict=True)
    ranks = [RankProcess(rank, str(address)) for rank, address in enumerate(addresses)]
    return ranks, [PrefixStore(GROUP, store) for store in stores]


@pytest.mark.parametrize(
    ("own", "said_in", "attempt", "match"),
    [
        (1, 0, 0, "another process by now"),
        (0, 1, 0, "have gone on without"),
        (0, 1, 1, "have gone on without"),  # it has left a meeting that they have begun anew
    ],
)
def test_a_rank_that_was_passed_over_leaves_no_word_for_the_process_that_has_its_place(
    own: int, said_in: int, attempt: int, match: str
) -> None:
    """In the next meeting, in another store than that of this one, it would be taken for that process's."""
    ranks, stores = three_ranks()
    stores[said_in].set(f"0/ended/{own}", Record(Ending.GONE.value, "it has answered nothing").text())
    passed_over = Meeting(GROUP, MeetingProtocol(ranks[own], ranks), LIMIT, lambda *_: Future())
    with pytest.raises(GroupLostError, match=match):
        passed_over.run(passed_over.protocol.agree(attempt, SECONDHAND))
    passed_over.run(passed_over.protocol.say(attempt + 1, Told(Ending.LAST, "the others have gone on")))
    assert not stores[2].check([f"{attempt + 1}/ended/{own}"])


@pytest.mark.parametrize(("told", "has_returned"), [(RETURNED, True), (Told(Ending.LAST, "Ctrl-C"), False)])
def test_a_process_that_ends_after_its_function_has_returned_is_no_loss(
    told: Told, has_returned: bool
) -> None:
    ranks, stores = three_ranks()
    stores[2].set("0/ended/1", Record(told.ending.value, told.reason).text())
    looks = Meeting(GROUP, MeetingProtocol(ranks[0], ranks), LIMIT, lambda *_: Future())
    assert looks.run(looks.protocol.has_returned(0, ranks[1]), watches=False) is has_returned


def test_ranks_that_answer_one_after_the_other_when_a_cut_is_over_are_not_passed_over() -> None:
    ranks = [RankProcess(rank, f"host:{rank + 1}") for rank in range(3)]
    cut_off = MeetingProtocol(ranks[0], ranks)
    found = [(1, "silent"), (2, "silent"), (1, ""), (2, ""), (2, "silent"), (1, "")]
    passed_over = [cut_off.silent(ranks[rank], why) for rank, why in found]
    assert passed_over == [False] * 5 + [True], "only the one that is silent again"


@pytest.mark.one_process_per_place
@pytest.mark.parametrize("answers", [False, True])
def test_one_that_was_silent_before_it_ended_may_have_gone_on_with_the_other(answers: bool) -> None:
    """Ranks 0 and 2 were more than half, and have passed rank 1 over: then rank 0 ended."""
    ranks = [RankProcess(rank, f"host:{rank + 1}") for rank in range(3)]
    cut_off = MeetingProtocol(ranks[1], ranks)
    assert not any(cut_off.silent(ranks[other], "silent") for other in (0, 2))
    if answers:
        assert not cut_off.silent(ranks[0], "")
    assert cut_off.ended(ranks[0])
    assert not cut_off.silent(ranks[2], "")
    assert cut_off.silent(ranks[2], "silent") is answers, "half, and first, of those that it has heard of"


def test_a_spare_that_finds_nobody_left_on_its_way_gives_up() -> None:
    """Another spare on its way may be as alone, and they do not know each other."""
    last, own = RankProcess(0, "host:1"), RankProcess(1, "spare:1", since=1)
    protocol = MeetingProtocol(own, [own])
    said = [
        Record(Ending.SECONDHAND.value, "", last.address),
        Record(Ending.GONE.value, "its process has ended"),
    ]
    visit = protocol.visit(last.address, 2)
    assert [next(visit), next(visit)] == [
        Open(last.address, briefly=True),
        Read({0: "0/ended/0", 1: "0/ended/1"}),
    ]
    with pytest.raises(StopIteration):
        visit.send([record.text().encode() for record in said])
    assert protocol.ended(last)
    with pytest.raises(GroupLostError, match="all ranks that were there have ended"):
        next(protocol.enter())


def test_a_spare_that_has_taken_its_place_is_one_in_whose_store_the_ranks_may_meet() -> None:
    ranks, stores = three_ranks()
    stores[0].set("0/ended/0", Record(SECONDHAND.ending.value, "", ranks[0].address).text())
    stores[0].set("0/ended/1", Record(Ending.GONE.value, "its process has ended").text())
    place = Place(GROUP, 1, 2, parse_address(ranks[0].address), 0, {})
    group, attempt = RestartGroup.as_spare(place, LIMIT.total_seconds(), SpareDesk())
    assert attempt == 1
    with group:
        assert group._meeting is not None
        protocol = group._meeting.protocol
        assert protocol.ended(protocol.processes[0])
        assert next(protocol.agree(1, SECONDHAND)) == Open(protocol.own.address)


def test_a_rank_that_has_not_answered_yet_is_not_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    async def unheard(*_: object) -> bool:
        return False

    monkeypatch.setattr(meeting, "answers", unheard)
    monkeypatch.setattr(meeting, "HEAR_EVERY_S", 0.01)
    waits, _, _stores = pair_of_ranks(1, lambda *_: Future(), timedelta(seconds=1))
    said: list[str] = []
    monkeypatch.setattr(waits.protocol, "silent", lambda _, why: said.append(why))
    with pytest.raises(GroupLostError):
        waits.run(waits.protocol.find(1))
    assert said
    assert all(said)


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


# Whether ranks start again: the decisions.


OWN, OTHERS, UNKNOWN, LAST = Ending.OWN, Ending.SECONDHAND, Ending.UNKNOWN, Ending.LAST
SPENT, UNFIT, GONE, REPLACED = Ending.SPENT, Ending.UNFIT, Ending.GONE, Ending.REPLACED


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (MaxRetriesError("x"), OWN),
        (DivergenceError("x"), OWN),
        (ZeroDivisionError("x"), OWN),
        (GroupLostError("x"), OTHERS),
        (QuorumTimeoutError("x"), OTHERS),
        (RuntimeError("x"), UNKNOWN),
        (ForeignStateError("x"), LAST),
        (ConfigError("x"), LAST),
        (KeyboardInterrupt(), LAST),
        (SystemExit(0), LAST),
    ],
)
def test_an_error_ends_a_try_in_one_of_four_ways(error: BaseException, ending: Ending) -> None:
    assert ending_of(error, (ArithmeticError, *OF_THE_RUN)) is ending


def test_an_error_that_is_never_restarted_is_not_if_it_is_named_either() -> None:
    assert ending_of(ConfigError("x"), (Exception,)) is LAST


@pytest.mark.parametrize(
    ("endings", "again"),
    [
        ([OWN], True),
        ([OTHERS], True),
        ([UNKNOWN], False),
        ([OWN, OTHERS, UNKNOWN], True),  # what is not known is the consequence
        ([OTHERS, OTHERS], True),
        ([OTHERS, UNKNOWN], False),  # what is lost is the consequence
        ([OWN, LAST], False),
        ([REPLACED, OTHERS, UNKNOWN, SPENT], True),
        ([REPLACED, LAST], False),
        ([REPLACED, GONE], False),
        ([OWN, UNFIT], False),
        ([OWN, SPENT], False),
    ],
)
def test_all_ranks_decide_alike_from_how_their_tries_ended(endings: list[Ending], again: bool) -> None:
    assert all_start_again([Told(ending, "") for ending in endings]) is again


def test_the_reason_against_a_restart_is_that_of_the_rank_that_is_why() -> None:
    told = [Told(OTHERS, "a"), Told(UNKNOWN, "b"), Told(LAST, "c")]
    assert (why_not(told), why_not(told[:2])) == ("c", "b")


def test_restarts_count_within_the_window_only() -> None:
    budget, in_all = RestartBudget(2, window_s=10.0), RestartBudget(2, None)
    taken = [take(budget, now) for now in (0.0, 1.0, 9.0, 10.0, 10.5, 11.0)]
    assert taken == [True, True, False, True, False, True]
    assert [take(in_all, now) for now in (0.0, 1e6, 1e9)] == [True, True, False]


def take(budget: RestartBudget, now: float) -> bool:
    """Count a restart, if it is allowed; return whether it is."""
    if budget.is_spent(now):
        return False
    budget.count(now)
    return True


def test_pauses_grow_up_to_a_limit() -> None:
    assert list(islice(pauses_s(), 7)) == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


# Health checks between two tries.


MORE_THAN_THERE_IS = 1 << 60


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which a rank pauses; none of them passes."""
    taken: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        taken.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return taken


def test_a_failing_check_is_tried_again_after_longer_and_longer_pauses(pauses: list[float]) -> None:
    failures = [OSError("the disk"), OSError("the disk"), OSError("the disk")]

    def check() -> None:
        if failures:
            raise failures.pop()

    health.wait_until_healthy([check], 60.0)
    assert pauses == [1.0, 2.0, 4.0]


def test_a_rank_gives_up_with_the_reason(pauses: list[float]) -> None:
    with pytest.raises(HealthCheckError, match=r"for 10 s.*OSError: the disk is gone") as raised:
        health.wait_until_healthy([lambda: None, raising(OSError("the disk is gone"))], 10.0)
    assert pauses == [1.0, 2.0, 4.0, 3.0], "it is tried a last time at the limit"
    assert isinstance(raised.value.__cause__, OSError)


def test_memory_and_device() -> None:
    health.device()
    health.memory(1)()
    with pytest.raises(RuntimeError, match=f"bytes of memory are available, {MORE_THAN_THERE_IS} are needed"):
        health.memory(MORE_THAN_THERE_IS)()


def test_a_disk_has_to_take_a_file_and_to_have_room(tmp_path: Path) -> None:
    health.disk(tmp_path, 1)()
    assert os.listdir(tmp_path) == []
    with pytest.raises(RuntimeError, match=f"bytes are free at {tmp_path}"):
        health.disk(tmp_path, MORE_THAN_THERE_IS)()
    with pytest.raises(FileNotFoundError):
        health.disk(tmp_path / "missing", 1)()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            health.disk(tmp_path, 1)()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


def test_a_lighthouse_has_to_take_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        health.lighthouse(address)()
        monkeypatch.setenv(LIGHTHOUSE_ENV, address)
        health.lighthouse()()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        health.lighthouse()()
    monkeypatch.delenv(LIGHTHOUSE_ENV)
    with pytest.raises(AddressError):
        health.lighthouse()()


# Spares and the ranks that ask for them, at a lighthouse in this process.


def test_a_spare_that_finds_no_lighthouse_ends_with_where_it_has_looked() -> None:
    (port,) = free_ports()
    with pytest.raises(
        ConnectError, match=rf"no lighthouse has answered at 127\.0\.0\.1:{port} within 0\.1 s"
    ):
        take_place(Address("127.0.0.1", port), 0.1, raising(AssertionError("it has no place")))


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
    spare = waiting_spare(lighthouse.address, raising(KeyboardInterrupt))
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


def test_what_has_the_port_of_a_rank_0_that_has_ended_does_not_pass_for_it() -> None:
    """Who is started again would be refused each time, for as long as that other process serves there."""
    agents, at = serve_store("127.0.0.1", LIMIT)
    earlier, later = (GroupPlace(0, 2, at, store_is_agents=True, run="job", start=count) for count in "01")
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        closing(AbortableStore(StoreAddress(at, "starts"), LIMIT)) as store,
    ):
        store.connect()
        port = Address("127.0.0.1", other.getsockname()[1])
        first = meeting._begin_start(store, earlier, port)
        assert meeting._begin_start(store, later, Address("127.0.0.1", 1)) != first
    del agents


def meet(at: Address, rank: int, start: str = "0") -> RestartGroup:
    place = GroupPlace(rank, 2, at, store_is_agents=True, run="job", start=start)
    return RestartGroup.meet(place, LIMIT.total_seconds(), SpareDesk())


def test_ranks_meet_though_their_agents_count_other_restarts() -> None:
    """An agent of torchrun that starts its ranks again because of another's does not count that."""
    agents, at = serve_store("127.0.0.1", LIMIT)

    with ThreadPoolExecutor(2) as threads, pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting, "_runs", repeat(0))  # each of these threads stands for a process
        for starts in ("00", "01", "12"):
            groups = list(threads.map(meet, (at, at), range(2), starts))
            for rank in range(2):
                with pytest.raises(ConfigError, match=f"rank {rank}.*start each rank once"):
                    meet(at, rank, starts[rank])  # a second process with that rank
            for group in groups:
                group.__exit__(None, None, None)
    del agents


@pytest.mark.progress
def test_a_rank_that_waits_long_for_the_others_says_so_and_goes_on_when_they_come(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    agents, at = serve_store("127.0.0.1", LIMIT)
    monkeypatch.setattr(meeting, "_runs", repeat(0))  # each of these threads stands for a process

    def meet(rank: int) -> RestartGroup:
        place = GroupPlace(rank, 2, at, store_is_agents=True, run="job", start="0")
        return RestartGroup.meet(place, LIMIT.total_seconds(), SpareDesk())

    with ThreadPoolExecutor(1) as threads, ExitStack() as stack:
        with monkeypatch.context() as patch:
            patch.setattr(group_store, "LATE_S", 0.1)
            first = threads.submit(meet, 0)
            assert soon(lambda: len(caplog.records) == 1)
        stack.enter_context(meet(1))
        stack.enter_context(first.result(WAIT_LIMIT_S))
    assert f"rank 0 waits for the others of this replica group, in the store at {at}" in caplog.text
    assert len(caplog.records) == 1
    del agents


def test_a_rank_whose_store_nobody_serves_ends_as_the_others_did_not_come() -> None:
    (port,) = free_ports()
    at = Address("127.0.0.1", port)
    place = GroupPlace(1, 2, at, store_is_agents=False, run="job", start="0")
    with pytest.raises(GroupLostError, match=f"a rank of this group did not come: .*{at}"):
        RestartGroup.meet(place, 0.3, SpareDesk())


@pytest.mark.progress
def test_a_rank_that_comes_to_a_try_whose_rank_0_has_ended_does_not_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agents, at = serve_store("127.0.0.1", LIMIT)
    for name in ("MASTER_ADDR", "MASTER_PORT", AGENT_STORE_ENV):
        monkeypatch.setenv(name, "put back at the end")

    monkeypatch.setattr(meeting, "_runs", repeat(0))  # each of these threads stands for a process
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(meet, (at, at), range(2))
    with first, second, ExitStack() as of_first, ExitStack() as of_second:
        of_first.enter_context(first.begin(0))
        of_second.enter_context(second.begin(0))
        given = ManagerArguments(rank=1, world_size=2, connect_timeout=1)
        config = resolve(given, {**os.environ, LIGHTHOUSE_ENV: "http://127.0.0.1:1"})
        of_first.close()
        with pytest.raises(GroupLostError, match="this try is over"):
            open_group_store(config)
    del agents
