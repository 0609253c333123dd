"""The check as it is by default: calls that all ranks predict start at once, the others are compared."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from torchft_like.core.agreement import referee
from torchft_like.errors import CollectiveMismatchError, ProcessGroupError
from torchft_like.process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo
from torchft_like.process_group.checking import CALL, CheckedBackend, Link, Request

from .checking_calls import assert_goes_on, error_of
from .conftest import LIMIT_S, Party

pytestmark = pytest.mark.usefixtures("no_operator")

STEPS = 5
BUCKETS = (4, 4, 8)


def usual() -> ProcessGroup:
    return ProcessGroupGloo(60)


def step(group: ProcessGroup, *sizes: int) -> None:
    """Reduce a bucket of each size, all at once, as DDP does."""
    tensors = [torch.ones(size) for size in sizes]
    for work in [group.allreduce([tensor]) for tensor in tensors]:
        work.wait()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, group.size()))


def step_of(size: int, _: int, group: ProcessGroup) -> None:
    step(group, size)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What ranks tell their referees."""
    requests: list[Request] = []
    send = Link.send

    def remember(self: Link, request: Request) -> None:
        requests.append(request)
        send(self, request)

    monkeypatch.setattr(Link, "send", remember)
    return requests


def test_the_first_step_is_compared_and_the_others_cost_no_message(party: Party, said: list[Request]) -> None:
    groups = party.meet(3, usual)
    party.together(groups, lambda _, group: step(group, *BUCKETS))
    assert len(said) >= 3 * len(BUCKETS)
    party.together(groups, lambda _, group: step(group, *BUCKETS))
    said.clear()
    for _ in range(STEPS):
        party.together(groups, lambda _, group: step(group, *BUCKETS))
    assert said == []


def test_every_configuration_is_compared_anew(party: Party, said: list[Request]) -> None:
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        assert_goes_on(party, groups)
    said.clear()
    party.configure(groups)
    assert_goes_on(party, groups)
    assert [request.kind for request in said] == [CALL, CALL]


def test_another_shape_in_the_first_step_is_refused_and_the_group_stays_usable(party: Party) -> None:
    groups = party.meet(3, usual)
    errors = party.together(
        groups, lambda rank, group: error_of(group.allreduce([torch.ones(4 + rank // 2)]).wait)
    )
    assert {str(error) for error in errors} == {
        "the ranks do not agree on the shape: "
        "ranks 0, 1: allreduce #1 float32[4]; rank 2: allreduce #1 float32[5]"
    }
    assert all(group.errored() is None for group in groups)
    assert_goes_on(party, groups)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("other", [8, 16, 2], ids=["a known shape", "a larger shape", "a smaller shape"])
def test_another_shape_later_reaches_no_backend_and_ends_the_configuration_on_all_ranks(
    party: Party, odd: int, other: int
) -> None:
    """Two ranks are in the backend already, as predicted; it would end their process."""
    groups = party.meet(3, usual)
    for _ in range(STEPS):
        party.together(groups, lambda _, group: step(group, *BUCKETS))

    def act(rank: int, group: ProcessGroup) -> Exception:
        tensor = torch.full((other if rank == odd else BUCKETS[0],), float(rank))
        error = error_of(group.allreduce([tensor]).wait)
        assert rank != odd or torch.equal(tensor, torch.full_like(tensor, rank))
        return error

    errors = party.together(groups, act)
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    assert len({str(error) for error in errors}) == 1
    assert f"rank {odd}: allreduce #16 float32[{other}]" in str(errors[0])
    for group in groups:
        assert isinstance(group.errored(), CollectiveMismatchError)
    party.configure(groups)
    party.together(groups, lambda _, group: step(group, *BUCKETS))


def test_a_future_of_a_call_under_way_gets_the_mismatch(party: Party) -> None:
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        assert_goes_on(party, groups)
    future = groups[0].allreduce([torch.ones(1)]).get_future()
    error_of(groups[1].allreduce([torch.ones(3)]).wait)
    with pytest.raises(CollectiveMismatchError):
        party.aside(future.wait).result(LIMIT_S)


def test_ranks_that_run_ahead_and_ranks_that_wait_agree(party: Party) -> None:
    """Rank 0 begins everything at once, so it cannot predict; rank 1 waits for each, so it can."""
    groups = party.meet(2, usual)

    def act(rank: int, group: ProcessGroup) -> list[float]:
        tensors = [torch.full((1 + number % 2,), float(number)) for number in range(40)]
        works = []
        for tensor in tensors:
            works.append(group.allreduce([tensor]))
            if rank == 1:
                works[-1].wait()
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in tensors]

    for _ in range(STEPS):
        assert party.together(groups, act) == [[2.0 * number for number in range(40)]] * 2


def test_an_operation_of_its_own_on_one_rank_is_found_whatever_came_before(party: Party) -> None:
    """A rank gives a step up in its middle and begins the next one: all its calls are known ones."""
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        party.together(groups, lambda _, group: step(group, *BUCKETS))
    party.together(groups, lambda _, group: step(group, *BUCKETS[:2]))
    errors = party.together(
        groups, lambda rank, group: error_of(lambda: step(group, BUCKETS[2] if rank else BUCKETS[0]))
    )
    assert {type(error) for error in errors} == {CollectiveMismatchError}


def test_messages_between_two_ranks_are_not_compared(party: Party, said: list[Request]) -> None:
    groups = party.meet(2, usual)

    def act(rank: int, group: ProcessGroup) -> float:
        tensor = torch.full((2,), float(rank))
        (group.recv([tensor], 0, 7) if rank else group.send([tensor], 1, 7)).wait()
        return float(tensor[0])

    assert party.together(groups, act) == [0.0, 0.0]
    assert said == []


def test_after_enough_comparisons_nothing_is_compared(
    party: Party, said: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(referee, "COMPARED_MAX", 10)
    groups = party.meet(2, usual)
    for size in range(1, 13):
        party.together(groups, partial(step_of, size))
    said.clear()
    for size in range(20, 30):
        party.together(groups, partial(step_of, size))
    assert said == []


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_a_baby_group_is_checked_in_front_of_its_subprocess(party: Party, later: bool) -> None:
    groups = party.meet(2, lambda: ProcessGroupBabyGloo(60))
    for _ in range(STEPS if later else 0):
        assert_goes_on(party, groups)
    errors = party.together(
        groups, lambda rank, group: error_of(lambda: group.allreduce([torch.ones(1 + rank)]).wait())
    )
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    party.configure(groups)
    assert_goes_on(party, groups)


@pytest.mark.parametrize("whole", [0, 1])
def test_ranks_that_check_in_different_ways_are_told(party: Party, whole: int) -> None:
    ways: list[Callable[[], Any]] = [usual, lambda: ProcessGroupGloo(60, check_collectives=True)]
    groups = [party.own(ways[rank == whole]()) for rank in range(2)]
    prefix = party.prefix()
    attempts = [party.aside(lambda r=rank: groups[r].configure(prefix, r, 2)) for rank in range(2)]
    for attempt in attempts:
        with pytest.raises(ProcessGroupError, match="ranks 0 and 1 check collectives differently"):
            attempt.result(LIMIT_S)


def test_the_referee_is_not_needed_for_calls_that_are_predicted(party: Party) -> None:
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        assert_goes_on(party, groups)
    for group in groups:
        backend = group._generation._backend  # type: ignore[attr-defined]
        assert isinstance(backend, CheckedBackend)
        backend._link.cut()
        backend._link.join()
    assert_goes_on(party, groups)
