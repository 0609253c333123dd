"""Whoever waits reads the answers, for everybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchft_like.process_group.baby import requests
from torchft_like.process_group.baby.heartbeat import LOOK_EVERY_S
from torchft_like.process_group.baby.messages import Channel, Outcome
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.work import FOREVER

LIMIT_S = 60.0


class Correspondence:
    """Requests, and the end of the channel from which they are answered."""

    def __init__(self) -> None:
        near, far = Channel.pair()
        self.far = Channel(far)
        self.near = Channel(near)
        self.silences = threading.Semaphore(0)
        self.pauses = threading.Semaphore(0)
        self.requests = Requests(self.near, self.pauses.release, self.silences.release, lambda: None)

    def answer(self, request: Request, *parts: object) -> None:
        self.far.send((request.number, Outcome.DONE.value, *parts))

    def end(self) -> None:
        self.far.close()
        self.requests.end()
        self.near.close()


@pytest.fixture
def talk() -> Iterator[Correspondence]:
    correspondence = Correspondence()
    yield correspondence
    correspondence.end()


def limit() -> float:
    return time.monotonic() + LIMIT_S


def test_the_end_waits_for_the_one_who_reads_and_not_for_ever(talk: Correspondence) -> None:
    request = talk.requests.add(FOREVER)
    reader = threading.Thread(target=talk.requests.wait, args=(request, limit()))
    reader.start()
    while not talk.requests._is_being_read:
        assert reader.is_alive()
    end = threading.Thread(target=talk.requests.end, daemon=True)
    end.start()
    end.join(LIMIT_S)
    assert not end.is_alive()
    reader.join(LIMIT_S)
    assert request.outcome is None


def test_one_who_waits_long_does_not_keep_others_from_their_answers(talk: Correspondence) -> None:
    late, early = talk.requests.add(FOREVER), talk.requests.add(FOREVER)
    with ThreadPoolExecutor(2) as pool:
        long_wait = pool.submit(talk.requests.wait, late, limit())
        short_wait = pool.submit(talk.requests.wait, early, limit())
        talk.answer(early)
        assert short_wait.result(LIMIT_S)
        assert not long_wait.done()
        talk.answer(late)
        assert long_wait.result(LIMIT_S)


def test_a_wait_ends_at_its_deadline_and_the_request_goes_on(talk: Correspondence) -> None:
    request = talk.requests.add(FOREVER)
    assert not talk.requests.wait(request, time.monotonic() + 0.01)
    talk.answer(request)
    assert talk.requests.wait(request, limit())
    assert talk.silences.acquire(blocking=False) is False


def test_the_end_of_the_subprocess_settles_everything_once(talk: Correspondence) -> None:
    settled: list[Request] = []
    requests = [talk.requests.add(FOREVER, settled.append) for _ in range(3)]
    talk.far.close()
    assert all(talk.requests.wait(request, limit()) for request in requests)
    assert sorted(r.number for r in settled) == sorted(r.number for r in requests)
    assert {request.outcome for request in requests} == {None}


def test_a_request_after_the_end_is_settled_at_once(talk: Correspondence) -> None:
    talk.requests.end()
    request = talk.requests.add(FOREVER)
    assert talk.requests.wait(request, limit())
    assert request.outcome is None


def test_a_request_that_is_not_answered_in_time_is_reported_once(
    talk: Correspondence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "LAST_CHANCE_S", 0.01)
    request = talk.requests.add(patience_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(talk.requests.wait, request, limit())
        assert talk.silences.acquire(timeout=LIMIT_S)
        assert not talk.silences.acquire(blocking=False)
        talk.answer(request)


@pytest.mark.parametrize("how", ["waits", "looks"])
def test_whether_the_subprocess_runs_is_asked_while_somebody_waits(talk: Correspondence, how: str) -> None:
    request = talk.requests.add(FOREVER)
    assert not talk.pauses.acquire(timeout=2 * LOOK_EVERY_S), "nobody waits"
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(talk.requests.wait, request, limit()) if how == "waits" else None
        paused, end = 0, limit()
        while paused < 2 and time.monotonic() < end:
            paused += talk.pauses.acquire(timeout=0.01)
            if how == "looks":
                talk.requests.look()
        talk.answer(request)
        assert talk.requests.wait(request, limit())
        assert paused == 2
        assert wait is None or wait.result(LIMIT_S)


def test_who_asks_late_finds_the_answer_not_silence(talk: Correspondence) -> None:
    first, second = talk.requests.add(patience_s=0.01), talk.requests.add(patience_s=0.01)
    talk.answer(first)
    talk.answer(second)
    threading.Event().wait(0.05)  # the limit of both passes
    assert talk.requests.wait(second, limit())
    assert not talk.silences.acquire(blocking=False)


def test_every_answer_is_a_sign_of_life(talk: Correspondence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "LAST_CHANCE_S", 5.0)
    open_requests = [talk.requests.add(patience_s=0.2) for _ in range(10)]
    with ThreadPoolExecutor(1) as pool:
        wait = pool.submit(talk.requests.wait, open_requests[-1], limit())
        for request in open_requests:
            threading.Event().wait(0.05)
            talk.answer(request)
        assert wait.result(LIMIT_S)
    assert not talk.silences.acquire(blocking=False)


def test_an_error_in_what_settles_a_request_frees_who_waits(talk: Correspondence) -> None:
    def fail(_: Request) -> None:
        raise ValueError("no room for the copy")

    request = talk.requests.add(FOREVER, fail)
    talk.answer(request)
    assert talk.requests.wait(request, limit())
    assert request.outcome is Outcome.FAILED
    assert request.answer == ("ValueError", "no room for the copy")
