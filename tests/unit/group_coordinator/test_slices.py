"""Slices that never come: the counterparts that would gather them do not wait."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.unit.group_coordinator.test_coordinator import LIMIT_S, over
from tests.unit.process_group.conftest import Party, party, store
from torchft_like.errors import GroupCoordinatorError
from torchft_like.group_coordinator import GroupCoordinator
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

__all__ = ["party", "store"]
WHOLE = torch.arange(6.0)
Receive = Callable[[GroupCoordinator, GroupCoordinator], object]
RECEIVE: dict[str, Receive] = {
    "recv": lambda pair, gathering: pair.recv_tensor_dict(0, gathering),
    "irecv": lambda pair, gathering: pair.irecv_tensor_dict(0, gathering).wait(LIMIT_S),
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
