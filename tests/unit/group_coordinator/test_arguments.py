"""What the ranks must agree on about their tensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.group_coordinator.test_coordinator import errors, gloo, over
from tests.unit.process_group.conftest import Party, party, store
from torchft_like.communicator.tensors import device_terms
from torchft_like.errors import CollectiveMismatchError
from torchft_like.group_coordinator import GroupCoordinator

__all__ = ["party", "store"]
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
