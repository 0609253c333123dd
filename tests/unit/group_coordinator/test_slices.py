"""Slices that never come, or do not fit: the counterparts that would gather them do not wait."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from tests.unit.group_coordinator.test_coordinator import LIMIT_S, gloo, over
from tests.unit.process_group.conftest import Party, party, store
from torchft_like.errors import CollectiveMismatchError, GroupCoordinatorError
from torchft_like.group_coordinator import GroupCoordinator
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

pytestmark = pytest.mark.usefixtures("no_operator")

__all__ = ["party", "store"]
WHOLE = torch.arange(6.0)
Receive = Callable[[GroupCoordinator, GroupCoordinator], object]
RECEIVE: dict[str, Receive] = {
    "recv": lambda pair, gathering: pair.recv_tensor_dict(0, gathering),
    "irecv": lambda pair, gathering: pair.irecv_tensor_dict(0, gathering)[1][0].wait(LIMIT_S),
}


def patient() -> ProcessGroup:
    """Its timeout ends nobody's wait before the test does."""
    return ProcessGroupGloo(10 * LIMIT_S, check_collectives=False)


@pytest.mark.parametrize("how", RECEIVE)
def test_a_sender_that_dies_leaves_no_counterpart_of_its_receiver_waiting(party: Party, how: str) -> None:
    """Two stages of two ranks: a pair for each slice, and a group for each stage. One of the senders dies."""
    doomed, healthy, *stages = (party.meet(2, patient) for _ in range(4))
    pairs = [over(doomed), over(healthy)]
    first_stage, second_stage = map(over, stages)

    def receive(place: int) -> object:
        return RECEIVE[how](pairs[place][1], second_stage[place])

    def send(place: int) -> None:
        pairs[place][0].send_tensor_dict({"w": WHOLE}, 1, first_stage[place], {"w": True})

    receiving = [party.aside(receive, place) for place in range(2)]
    party.aside(send, 1).result(LIMIT_S)
    doomed[0].abort("it died")
    for place in range(2):
        with pytest.raises(GroupCoordinatorError):
            receiving[place].result(LIMIT_S)
    party.together(first_stage, lambda _, c: c.barrier())  # type: ignore[arg-type]


def test_a_dict_that_nobody_waits_for_costs_the_counterparts_nothing(party: Party) -> None:
    """Its group comes to an end, and who gathers the slices goes on, until somebody wants the dict."""
    ending, gathering = (party.meet(2, patient) for _ in range(2))
    second_stage = over(gathering)
    _, [handle], _ = over(ending)[1].irecv_tensor_dict(0, second_stage[0])
    ending[1].shutdown()
    while not handle.is_completed():
        threading.Event().wait(0.005)
    party.together(second_stage, lambda _, c: c.barrier())  # type: ignore[arg-type]
    with pytest.raises(GroupCoordinatorError):
        handle.wait(LIMIT_S)
    with pytest.raises(GroupCoordinatorError):
        second_stage[1].barrier(LIMIT_S)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.float64])
def test_zeros_of_another_dtype_are_another_tensor(party: Party, dtype: torch.dtype) -> None:
    """Their digest is the same, whatever their size."""
    pairs, stages = ([over(party.meet(2, gloo)) for _ in range(2)] for _ in range(2))

    def act(place: int, _: object) -> str:
        whole = torch.zeros(6, dtype=dtype if place else torch.float32)
        [sending] = pairs[place][0].isend_tensor_dict({"w": whole}, 1, stages[0][place], {"w": True})
        with pytest.raises(CollectiveMismatchError) as caught:
            pairs[place][1].recv_tensor_dict(0, stages[1][place])
        sending.wait(LIMIT_S)
        return str(caught.value)

    told = party.together(stages[0], act)  # type: ignore[arg-type]
    assert all(str(dtype) in text and "torch.float32" in text for text in told)
