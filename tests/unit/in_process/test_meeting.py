"""The ranks of a group meet although any of them may die before any of its steps."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import pytest

from lighthouse.address import Address, parse_address
from tests.waiting import soon
from torchft_like.core.meeting import MeetingProtocol
from torchft_like.core.restarts import Ending, RankProcess, Told, all_start_again
from torchft_like.errors import GroupLostError
from torchft_like.in_process.meeting import Meeting, Place
from torchft_like.process_group.store import AbortableStore, serve_store

LIMIT = timedelta(seconds=60)
GROUP = "group"
RANKS = 4
SPARES = 3
STEPS_MAX = 24  # of a process that dies: queries to stores
SECONDHAND = Told(Ending.SECONDHAND, "another one has died")


class DeadError(BaseException):
    """The process has died."""


class Process:
    """A process, as far as it meets others: its store, and how many steps it takes until it dies."""

    def __init__(self, job: Job, lives_for: int | None) -> None:
        self.job = job
        self.store: object
        self.store, self.address = serve_store("127.0.0.1", LIMIT)
        self.lives_for = lives_for
        self.meeting: Any = None
        self.rank = -1
        self.began: dict[int, tuple[str, ...]] = {}  # by try: where the processes of all ranks are
        self.thread: threading.Thread | None = None

    def step(self) -> None:
        if self.lives_for is not None:
            self.lives_for -= 1
            if self.lives_for < 0:
                self.die()

    def die(self) -> None:
        self.store = None
        self.job.dead.add(str(self.address))
        raise DeadError

    def run(self, rank: int, attempt: int) -> None:
        """Meet after each try; a spare has met before its first one."""
        self.rank = rank
        try:
            while attempt < self.job.tries:
                with contextlib.suppress(GroupLostError):  # another one has died between two meetings
                    self.begin(attempt)
                attempt, told = self.meeting.agree(attempt, SECONDHAND)
                if not all_start_again(told):
                    self.job.refused.append([each.reason for each in told])
                    self.meeting.say(attempt, Told(Ending.LAST, "its group does not go on"))
                    return
            self.began[attempt] = self.where()
            self.meeting.say(attempt, Told(Ending.LAST, "done"))
        except (DeadError, GroupLostError) as error:
            self.job.ended[str(self.address)] = error

    def begin(self, attempt: int) -> None:
        self.began[attempt] = self.where()
        if self.rank == 0:
            self.meeting.publish(attempt, str(self.address))
        else:
            self.meeting.find(attempt)

    def where(self) -> tuple[str, ...]:
        return tuple(each.address for each in self.meeting._protocol.processes.values())


class Job:
    """Ranks that die at random, and the spares that take their places."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.tries = 3
        self.dead: set[str] = set()
        self.refused: list[list[str]] = []
        self.ended: dict[str, BaseException] = {}
        self.lock = threading.Lock()
        self.left = SPARES
        self.processes = [Process(self, self.lifetime()) for _ in range(RANKS)]
        members = [RankProcess(rank, str(each.address)) for rank, each in enumerate(self.processes)]
        for each, own in zip(self.processes, members, strict=True):
            meeting = Meeting(GROUP, MeetingProtocol(own, members), LIMIT, self.ask)
            each.meeting = mortal(each, meeting)

    def lifetime(self) -> int | None:
        return self.random.randrange(STEPS_MAX) if self.random.random() < 0.4 else None

    def start(self, process: Process, rank: int, attempt: int) -> None:
        process.thread = threading.Thread(target=process.run, args=(rank, attempt), daemon=True)
        process.thread.start()

    def ask(self, lost: RankProcess, meets_in: RankProcess, attempt: int) -> Future[str]:
        """Give a spare to each who asks: several come for one place."""
        answer: Future[str] = Future()
        with self.lock:
            self.left -= 1
            if self.left < 0:
                answer.set_result("no spare is free")
                return answer
            spare = Process(self, self.lifetime())
            self.processes.append(spare)
        place = Place(GROUP, lost.rank, RANKS, parse_address(meets_in.address), attempt, {})
        threading.Thread(target=self.take, args=(spare, place, answer), daemon=True).start()
        return answer

    def take(self, spare: Process, place: Place, answer: Future[str]) -> None:
        time.sleep(self.random.random() * 0.05)
        try:
            own = RankProcess(place.rank, str(spare.address), "", place.attempt + 1)
            meeting = Meeting(GROUP, MeetingProtocol(own, [own]), LIMIT, self.ask)
            spare.meeting = mortal(spare, meeting)
            attempt = meeting.enter(place.store, place.world_size)
        except (DeadError, GroupLostError) as error:
            self.ended[str(spare.address)] = error
            with contextlib.suppress(DeadError):
                spare.die()
            if isinstance(error, GroupLostError):
                with self.lock:
                    self.left += 1
            tell(answer, "the spare has not come")
            return
        tell(answer, "")
        self.start(spare, place.rank, attempt)


def tell(answer: Future[str], reason: str) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits for it any more
        answer.set_result(reason)


def mortal(process: Process, meeting: Meeting) -> Meeting:
    """Let the process die before a query to a store."""
    store_at = meeting._store_at

    def mortal_store(address: Address, limit: timedelta) -> AbortableStore:
        store: Any = store_at(address, limit)
        ask = store._ask

        def step(*args: Any) -> float:
            process.step()
            return float(ask(*args))

        store._ask = step
        return store  # type: ignore[no-any-return]

    meeting._store_at = mortal_store  # type: ignore[method-assign]
    return meeting


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_begin_a_try_know_the_same_processes_whoever_has_died(seed: int) -> None:
    job = Job(seed)
    for rank, process in enumerate(list(job.processes)):
        job.start(process, rank, 0)
    assert soon(lambda: not any(p.thread is not None and p.thread.is_alive() for p in list(job.processes)))
    for attempt in range(job.tries + 1):
        began = [p for p in job.processes if attempt in p.began and str(p.address) not in job.dead]
        assert len({p.began[attempt] for p in began}) <= 1, f"try {attempt}"
        assert len({p.rank for p in began}) == len(began), f"two processes are the same rank in try {attempt}"
    if not job.dead:
        assert all(job.tries in p.began for p in job.processes[:RANKS])


def test_who_leaves_tells_those_that_are_there_and_does_not_wait_for_one_that_has_ended() -> None:
    job = Job(seed=0)
    ended, lives = job.processes[:2]
    with contextlib.suppress(DeadError):
        ended.die()
    told: list[str] = []
    store_at = lives.meeting._store_at

    def note(address: Address, limit: timedelta) -> AbortableStore:
        told.append(str(address))
        return store_at(address, limit)  # type: ignore[no-any-return]

    lives.lives_for = None
    lives.meeting._store_at = note
    lives.meeting.say(1, Told(Ending.LAST, "done"))
    assert told == [str(lives.address), str(job.processes[2].address)]


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
        (0, lambda meeting: meeting.agree(0, SECONDHAND)),
        (1, lambda meeting: meeting.agree(0, SECONDHAND)),
        (1, lambda meeting: meeting.find(1)),
    ],
    ids=["agree as the first", "agree", "find"],
)
def test_one_that_lives_and_does_not_come_is_not_waited_for_for_ever(
    own: int, wait: Callable[[Meeting], object]
) -> None:
    meeting, _, _stores = pair_of_ranks(own, lambda *_: Future(), timedelta(seconds=2))
    with pytest.raises(GroupLostError, match="did not answer in time"):
        outcome_of(lambda: wait(meeting)).result(LIMIT.total_seconds())


def test_a_spare_may_take_longer_than_ranks_wait_for_each_other() -> None:
    limit = timedelta(seconds=2)
    asked, answer = threading.Event(), Future[str]()

    def ask(*_: object) -> Future[str]:
        asked.set()
        return answer

    meeting, ranks, _stores = pair_of_ranks(0, ask, limit)
    meeting._spare_wait_s = LIMIT.total_seconds()
    meeting._protocol.ended(ranks[1])
    outcome = outcome_of(lambda: meeting.agree(0, SECONDHAND))
    assert asked.wait(LIMIT.total_seconds())
    time.sleep(2 * limit.total_seconds())
    answer.set_result("no spare has come")
    said: Any = outcome.result(LIMIT.total_seconds())
    assert said[1][1].reason.endswith("no spare has come")
