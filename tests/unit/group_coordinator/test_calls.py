"""How many functions of the library one call of a coordinator or a gang goes through."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from tests.unit.group_coordinator.test_coordinator import gloo, over
from tests.unit.process_group.conftest import Party
from torchft_like.gang import ProcessGroupGang, ReduceOperation

pytestmark = pytest.mark.usefixtures("no_operator")

TRIES = 40  # a call that has to wait for the other rank takes a few more


def calls_in_library(act: Callable[[], object]) -> int:
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_globals.get("__name__", "").startswith("torchft_like.")

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("name", "calls_max"), [("reduce_scatter", 25), ("broadcast_object", 45), ("gang.all_reduce", 16)]
)
def test_a_call_takes_few_steps(party: Party, name: str, calls_max: int) -> None:
    groups = party.meet(2, gloo)
    coordinators = over(groups)
    gangs = [ProcessGroupGang(group, torch.device("cpu")) for group in groups]
    tensor = torch.ones(4, 4)

    def fewest(rank: int, _: object) -> int:
        acts: dict[str, Callable[[], object]] = {
            "reduce_scatter": lambda: coordinators[rank].reduce_scatter(tensor, 0),
            "broadcast_object": lambda: coordinators[rank].broadcast_object(None if rank else {"a": 1}),
            "gang.all_reduce": lambda: gangs[rank].all_reduce(torch.ones(4, 4), ReduceOperation.SUM),
        }
        act = acts[name]
        act()
        return min(calls_in_library(act) for _ in range(TRIES))

    found = party.together(groups, fewest)
    assert 0 < found[0] <= calls_max
