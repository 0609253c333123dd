"""Whether ranks start again: the decisions."""

from __future__ import annotations

from itertools import islice

import pytest

from torchft_like.core.restarts import (
    OF_THE_RUN,
    Ending,
    RestartBudget,
    Told,
    all_start_again,
    ending_of,
    pauses_s,
    why_not,
)
from torchft_like.errors import (
    ConfigError,
    DivergenceError,
    ForeignStateError,
    GroupLostError,
    MaxRetriesError,
    QuorumTimeoutError,
)

OWN, SECONDHAND, UNKNOWN, LAST = Ending.OWN, Ending.SECONDHAND, Ending.UNKNOWN, Ending.LAST
SPENT, UNFIT, GONE, REPLACED = Ending.SPENT, Ending.UNFIT, Ending.GONE, Ending.REPLACED


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (MaxRetriesError("x"), OWN),
        (DivergenceError("x"), OWN),
        (ZeroDivisionError("x"), OWN),
        (GroupLostError("x"), SECONDHAND),
        (QuorumTimeoutError("x"), SECONDHAND),
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
        ([SECONDHAND], True),
        ([UNKNOWN], False),
        ([OWN, SECONDHAND, UNKNOWN], True),  # what is not known is the consequence
        ([SECONDHAND, SECONDHAND], True),
        ([SECONDHAND, UNKNOWN], False),  # what is lost is the consequence
        ([OWN, LAST], False),
        ([REPLACED, SECONDHAND, UNKNOWN, SPENT], True),
        ([REPLACED, LAST], False),
        ([REPLACED, GONE], False),
        ([OWN, UNFIT], False),
        ([OWN, SPENT], False),
    ],
)
def test_all_ranks_decide_alike_from_how_their_tries_ended(endings: list[Ending], again: bool) -> None:
    assert all_start_again([Told(ending, "") for ending in endings]) is again


def test_the_reason_against_a_restart_is_that_of_the_rank_that_is_why() -> None:
    told = [Told(SECONDHAND, "a"), Told(UNKNOWN, "b"), Told(LAST, "c")]
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
