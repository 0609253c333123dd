"""Small decisions of the lighthouse: which spare takes which place, which states one job can train."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from lighthouse.core.state_form import StateForm, bounded, first_difference, form_of_rows
from lighthouse.core.vacancies import Decision, Filled, NoSpare, Told, Vacancies, Vacancy
from lighthouse.starvation import SilenceClock
from tests.waiting import await_fact


def vacancy(
    rank: int = 1, group: str = "g", host: str = "h", meeting: str = "here", message: bytes = b"there"
) -> Vacancy:
    return Vacancy(group, rank, host, meeting, message)


def desk(*hosts: str) -> Vacancies:
    """Return a desk with spares on these hosts; their sessions are 0, 1, ..."""
    made = Vacancies()
    for session, host in enumerate(hosts):
        assert made.register(session, f"spare{session}", host) == []
    return made


def told(decisions: list[Decision]) -> list[int]:
    """The sessions that were told of a place; nothing else was decided."""
    assert all(isinstance(decision, Told) for decision in decisions)
    return [decision.session for decision in decisions if isinstance(decision, Told)]


def test_a_spare_on_the_same_host_goes_first_and_then_one_of_the_host_that_has_given_the_fewest() -> None:
    made = desk("x", "x", "y", "h")
    assert told(made.ask(10, vacancy(0), waits=False)) == [3]
    assert told(made.ask(11, vacancy(1), waits=False)) == [0]
    made.taken(0)
    assert told(made.ask(12, vacancy(2), waits=False)) == [2]


def test_who_does_not_wait_is_told_that_there_is_no_spare_and_others_wait_for_one() -> None:
    made = desk()
    assert made.ask(10, vacancy(), waits=False) == [NoSpare((10,))]
    assert made.ask(11, vacancy(), waits=True) == []
    assert told(made.register(0, "spare0", "x")) == [0]
    assert made.taken(0) == [Filled((11,), "spare0", vacancy())]


def test_a_spare_that_has_declined_a_place_is_told_of_it_again_only_if_the_others_meet_elsewhere() -> None:
    made = desk("x", "x")
    assert told(made.ask(10, vacancy(), waits=True)) == [0]
    assert told(made.declined(0)) == [1]
    assert made.declined(1) == made.declined(1) == []
    assert told(made.ask(10, vacancy(meeting="elsewhere"), waits=True)) == [0]


def test_a_place_that_nobody_asks_for_any_more_is_told_to_nobody() -> None:
    made = desk()
    made.ask(10, vacancy(), waits=True)
    made.withdraw(10)
    assert made.register(0, "spare0", "x") == []


def test_a_place_is_told_to_another_spare_only_when_the_first_one_is_gone() -> None:
    made = desk("x", "x")
    assert told(made.ask(10, vacancy(), waits=True)) == [0]
    made.withdraw(10)
    assert made.ask(11, vacancy(), waits=True) == []  # the first is on its way
    assert told(made.lost(0)) == [1]
    assert made.taken(1) == [Filled((11,), "spare1", vacancy())]


@pytest.mark.parametrize("asks_again", [False, True])
def test_a_place_that_was_taken_may_be_vacant_again_or_no_more(asks_again: bool) -> None:
    made = desk("x", "x")
    made.ask(10, vacancy(), waits=True)
    later = vacancy(meeting="later")
    made.ask(10, later, waits=True) if asks_again else made.withdraw(10)
    then = [Told(1, "spare1", later)] if asks_again else []
    assert made.taken(0) == [Filled((), "spare0", vacancy()), *then]


def test_a_spare_that_was_told_of_no_place_ends_without_a_decision() -> None:
    made = desk("x", "x")
    for _ in ("waits", "is gone"):
        assert made.declined(0) == made.taken(0) == made.lost(1) == []


# Which states one job can train, and how the first difference of two others is told_first.


WEIGHT, BIAS = ("model.a.weight", "float32 [128, 64]"), ("model.a.bias", "float32 [128]")
MOMENT = ("optim.state[0].exp_avg", "float32 [128, 64]")
SECOND = ("optim.state[1].exp_avg", "float32 [128]")


def told_first(own: StateForm, other: StateForm) -> str:
    difference = first_difference(own, other)
    if difference is None:
        return ""
    sentence, _, cure = difference.sentence("b", "a").partition(": ")
    assert ("before the first step" in cure) == ("missing" in sentence)
    return sentence


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            (("model.a.weight", "float32 [256, 64]"), BIAS),
            "model.a.weight is float32 [256, 64] in b and float32 [128, 64] in a",
        ),
        (
            (("model.a.weight", "bfloat16 [128, 64]"), BIAS),
            "model.a.weight is bfloat16 [128, 64] in b and float32 [128, 64] in a",
        ),
        ((WEIGHT,), "model.a.bias is missing in b and float32 [128] in a"),
        ((WEIGHT, BIAS, ("ema.w", "float32 [1]")), "ema.w is float32 [1] in b and missing in a"),
        ((), "model.a.weight is missing in b and float32 [128, 64] in a"),
    ],
)
def test_the_first_difference_of_two_models_is_told(own: tuple[tuple[str, str], ...], sentence: str) -> None:
    assert told_first(form_of_rows(own), form_of_rows((WEIGHT, BIAS, MOMENT))) == sentence


def test_entries_of_a_list_that_both_have_are_compared() -> None:
    own, other = [("[0]", "float32 [4]"), ("[1]", "float32 [4]")], [("[0]", "float32 [8]")]
    assert (
        told_first(form_of_rows(own), form_of_rows(other)) == "[0] is float32 [4] in b and float32 [8] in a"
    )
    assert told_first(form_of_rows(own[:1]), form_of_rows(own)) == ""


def test_a_bounded_form_keeps_the_tensors_with_names_and_the_hash_of_all() -> None:
    form = form_of_rows((MOMENT, WEIGHT, BIAS, SECOND))
    cut = bounded(form, len("".join(WEIGHT)) + 5)
    assert list(cut.rows) == ["model.a.weight"]
    assert (cut.digest, cut.left_out) == (form.digest, 3)
    assert bounded(form, 10_000) is form
    assert bounded(cut, 10_000) == cut


def test_states_that_differ_in_what_was_left_out_differ_by_their_hash() -> None:
    cut = [bounded(form_of_rows((WEIGHT, row)), len("".join(WEIGHT))) for row in (BIAS, ("c", "float32 [1]"))]
    text = "the state is of one form beyond its first 1 tensors in b and of another one in a"
    assert told_first(*cut) == text
    assert told_first(cut[0], cut[0]) == ""


def test_a_tensor_that_may_have_been_left_out_is_not_missing() -> None:
    whole = form_of_rows((WEIGHT, BIAS))
    cut = bounded(whole, len("".join(WEIGHT)))
    assert told_first(whole, cut) == told_first(cut, whole) == ""


# A loop that was kept from running is known to have been.


def test_time_in_which_a_loop_was_blocked_is_not_silence_of_others() -> None:
    async def measure() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        clock = SilenceClock(loop, late_s=0.2, look_every_s=0.01)
        try:
            began, silent_since = loop.time(), clock.now()
            loop.call_later(0.01, time.sleep, 1.0)
            await clock.sleep(0.5)
            return loop.time() - began, clock.now() - silent_since
        finally:
            clock.stop()

    lasted_s, silent_s = asyncio.run(measure())
    assert silent_s >= 0.5
    assert lasted_s >= 1.0 + 0.4


def test_a_loop_that_was_blocked_was_starved_and_recovers() -> None:
    async def watch() -> None:
        watch = SilenceClock(asyncio.get_running_loop(), late_s=0.2, look_every_s=0.01)
        try:
            before = asyncio.get_running_loop().time()
            time.sleep(0.5)
            assert watch.is_starved()  # before its own look, too
            await asyncio.sleep(0)
            assert before < watch.last_starved < math.inf
            await await_fact(lambda: not watch.is_starved())
        finally:
            watch.stop()

    asyncio.run(watch())
