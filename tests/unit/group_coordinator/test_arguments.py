"""What the ranks must agree on about their tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.unit.group_coordinator.test_coordinator import errors, gloo, over
from tests.unit.process_group.conftest import Party
from torchft_like.communicator.tensors import device_terms
from torchft_like.errors import CollectiveMismatchError
from torchft_like.group_coordinator import GroupCoordinator

HERE, THERE = torch.ones(2), torch.ones(2, device="meta")


def test_where_tensors_move_is_told_if_there_is_a_choice() -> None:
    assert device_terms([HERE, THERE], {"cpu", "meta"}) == (("device", "cpu, meta"),)
    assert device_terms([HERE, THERE], {"cpu", "cuda"}) == (("device", "cpu, cpu"),)
    assert device_terms([HERE, THERE], {"cpu"}) == ()


@pytest.mark.parametrize(
    "act",
    [
        GroupCoordinator.all_reduce,
        GroupCoordinator.all_gather,
        GroupCoordinator.broadcast,
        GroupCoordinator.all_gatherv,
        GroupCoordinator.reduce_scatterv,
    ],
)
def test_ranks_that_would_wait_in_different_groups_are_told(
    party: Party, monkeypatch: pytest.MonkeyPatch, act: Callable[[GroupCoordinator, torch.Tensor], object]
) -> None:
    monkeypatch.setattr("torchft_like.communicator.tensors.is_dense", lambda _: True)
    coordinators = over(party.meet(2, gloo), check_collectives=True)
    for coordinator in coordinators:
        communicator = coordinator._current()
        communicator.channels["meta"] = communicator.control  # type: ignore[index] # stands for a device that has a group
    found = errors(party, coordinators, lambda rank, c: act(c, THERE if rank else HERE))
    assert [(type(error), error.aspect) for error in found] == [(CollectiveMismatchError, "device")] * 2  # type: ignore[attr-defined]


# Arguments that one rank cannot use: it says so, and the groups stay as they are.


ROWS = torch.ones(2, 3)


def works(party: Party, coordinators: list[GroupCoordinator]) -> bool:
    return party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda c, wrong: c.dispatch(ROWS, ROWS, extra_tensors=ROWS if wrong else [ROWS]), TypeError),
        (lambda c, wrong: c.dispatch(ROWS, ROWS, extra_tensors=3 if wrong else None), TypeError),
        (lambda c, wrong: c.dispatch(ROWS, ROWS, ROWS if wrong else False), CollectiveMismatchError),
        (lambda c, wrong: c.all_gatherv([ROWS, "rows"] if wrong else [ROWS, ROWS]), TypeError),
    ],
    ids=["a tensor for a list", "a number for a list", "rows for a bool", "a text for a tensor"],
)
def test_of_a_collective(party: Party, act: Callable[[Any, bool], object], expected: type) -> None:
    coordinators = over(party.meet(2, gloo))
    found = errors(party, coordinators, lambda rank, c: act(c, rank == 1))
    assert [type(error) for error in found] == [CollectiveMismatchError, expected]
    assert works(party, coordinators)


@pytest.mark.parametrize("wrong", [{"all_gather_tensors": ["x"]}, {"all_gather_group": gloo()}], ids=str)
def test_of_a_sender(party: Party, wrong: dict[str, Any]) -> None:
    coordinators = over(party.meet(2, gloo))

    def act(rank: int, c: GroupCoordinator) -> object:
        if rank:
            return c.recv_tensor_dict(0)
        c.send_tensor_dict({"x": ROWS}, 1, **wrong)
        return None

    found = errors(party, coordinators, act)
    assert [type(error) for error in found] == [TypeError, CollectiveMismatchError]
    assert works(party, coordinators)


def test_a_conjugate_is_added_like_any_tensor(party: Party) -> None:
    coordinators = over(party.meet(2, gloo))
    turned = torch.full((2, 2), 1 + 2j).conj()

    def act(_: int, c: GroupCoordinator) -> list[complex]:
        c.dispatch(ROWS[:1], ROWS[:1])
        sums = c.reduce_scatterv(turned, 0), c.reduce_scatter(turned, 0), c.combine(turned)
        return [part[0, 0].item() for part in sums]

    assert party.together(coordinators, act) == [[2 - 4j] * 3] * 2
