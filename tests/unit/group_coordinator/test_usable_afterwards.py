"""What leaves a coordinator as usable as before: a barrier that nobody came to, a refusal to send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lighthouse.address import Address
from tests.faults import raising
from tests.unit.group_coordinator.test_coordinator import LIMIT_S, errors, gloo, over
from tests.unit.process_group.conftest import Party
from tests.waiting import wait_for
from torchft_like.core.agreement.statements import Statement
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupCoordinatorError,
    PlainDataError,
    ProcessGroupNotConfiguredError,
)
from torchft_like.group_coordinator import GroupCoordinator, Handle, coordinator
from torchft_like.group_coordinator.creation import agree
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo
from torchft_like.process_group import store as process_group_store
from torchft_like.process_group.registration import _meeting_place
from torchft_like.process_group.store import SharedStore, store_client
from torchft_like.testing.relay import Relay

pytestmark = pytest.mark.usefixtures("no_operator")


def test_a_barrier_without_a_store_names_nobody(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedStore, "connect", raising(RuntimeError("the store is gone")))
    early, late = over(party.meet(2, gloo))
    with pytest.raises(CollectiveTimeoutError, match="who did not come is not known"):
        early.barrier(0.05)
    late.barrier()
    early.barrier()


def relay_to(store: TCPStore, flows: threading.Event) -> Relay:
    """Return a relay that is silent while the event is clear."""

    def carry(data: bytes) -> bytes:
        flows.wait()
        return data

    flows.set()
    return Relay(("127.0.0.1", store.port), lambda: carry)


def test_nobody_waits_for_a_silent_host_of_the_default_groups_store(
    party: Party, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group_store, "ANSWER_S", 1.0)
    flows, limit, statement = threading.Event(), timedelta(seconds=0.1), Statement("GroupCoordinator")
    relay = relay_to(store, flows)
    client = store_client(Address("127.0.0.1", relay.port), timedelta(seconds=LIMIT_S))
    client.set("a key", "of a client that is connected")
    flows.clear()
    try:
        making = party.aside(agree, client, 0, 2, limit, statement)
        with pytest.raises(GroupCoordinatorError, match=rf"{relay.port} did not answer within"):
            making.result(LIMIT_S)
        meeting = party.aside(_meeting_place(client, (1, 2), limit).__enter__)
        with pytest.raises(ProcessGroupNotConfiguredError, match=rf"{relay.port} did not answer within"):
            meeting.result(LIMIT_S)
    finally:
        flows.set()


class BusyStore(Store):
    """A user's store that takes nothing while the event is clear."""

    def __init__(self, flows: threading.Event) -> None:
        super().__init__()
        self._flows = flows

    def add(self, _: str, amount: int) -> int:
        return amount

    def set(self, _: str, __: str) -> None:
        self._flows.wait()


def test_nobody_waits_for_a_store_that_does_not_take_where_a_group_meets(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group_store, "ANSWER_S", 1.0)
    flows = threading.Event()
    try:
        meeting = party.aside(_meeting_place(BusyStore(flows), (0, 2), timedelta(seconds=0.1)).__enter__)
        with pytest.raises(ProcessGroupNotConfiguredError, match="did not answer within"):
            meeting.result(LIMIT_S)
    finally:
        flows.set()


def test_a_barrier_does_not_wait_for_a_store_whose_host_is_silent(
    party: Party, store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator, "ANSWER", timedelta(seconds=1))
    flows = threading.Event()
    relay = relay_to(store, flows)
    groups = [party.own(ProcessGroupGloo(LIMIT_S)) for _ in range(2)]
    prefix = party.prefix().partition("/")[2]
    party.together(groups, lambda rank, g: g.configure(f"127.0.0.1:{relay.port}/{prefix}", rank, 2))
    early, late = over(groups)
    party.together([early, late], lambda _, c: c.barrier())
    flows.clear()
    try:
        waiting = party.aside(early.barrier, 0.05)
        with pytest.raises(CollectiveTimeoutError, match="who did not come is not known"):
            waiting.result(LIMIT_S)
    finally:
        flows.set()
    party.together([early, late], lambda _, c: c.barrier())


def test_an_interrupted_barrier_is_waited_for_again(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted, other = coordinators = over(party.meet(2, gloo))
    with monkeypatch.context() as fault:
        fault.setattr(Handle, "wait", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            interrupted.barrier()
    other.barrier()
    interrupted.barrier()
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]


def test_a_barrier_that_was_refused_is_none(party: Party) -> None:
    one, other = coordinators = over(party.meet(2, lambda: ProcessGroupGloo(LIMIT_S, check_collectives=True)))

    found = errors(party, coordinators, lambda rank, c: c.all_reduce(torch.ones(1)) if rank else c.barrier())
    assert [type(error) for error in found] == [CollectiveMismatchError] * 2
    with pytest.raises(CollectiveTimeoutError, match="rank 0 did not come"):
        other.barrier(0.05)
    one.barrier()
    other.barrier()
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
        one.barrier(0.05)
    other.barrier()


def test_a_refusal_that_nobody_has_received_within_the_timeout_leaves_the_group_alone(party: Party) -> None:
    groups = party.meet(2, lambda: ProcessGroupGloo(3, check_collectives=False))
    refusing, other = coordinators = over(groups)
    with pytest.raises(PlainDataError):
        refusing.send_object({1, 2}, 1)
    with pytest.raises(CollectiveTimeoutError, match="rank 1 did not come"):
        refusing.barrier(4)  # the timeout passes
    party.together(coordinators, lambda _, c: c.barrier())
    assert party.together(coordinators, lambda _, c: c.all_reduce(torch.ones(1)).item()) == [2, 2]
    with pytest.raises(CollectiveMismatchError, match="does not travel"):
        other.recv_object(0)


def test_a_refusal_that_nobody_receives_ends_with_its_group(party: Party) -> None:
    groups = party.meet(2, gloo)
    known = set(threading.enumerate())
    with pytest.raises(PlainDataError):
        over(groups)[0].send_object(object(), 1)
    (waiting,) = [thread for thread in threading.enumerate() if thread not in known]
    groups[0].abort("enough")
    waiting.join(LIMIT_S)
    assert not waiting.is_alive()


# Slices that never come, or do not fit: the counterparts that would gather them do not wait.


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
    party.together(first_stage, lambda _, c: c.barrier())


def test_a_dict_that_nobody_waits_for_costs_the_counterparts_nothing(party: Party) -> None:
    """Its group comes to an end, and who gathers the slices goes on, until somebody wants the dict."""
    ending, gathering = (party.meet(2, patient) for _ in range(2))
    second_stage = over(gathering)
    _, [handle], _ = over(ending)[1].irecv_tensor_dict(0, second_stage[0])
    ending[1].shutdown()
    wait_for(handle.is_completed)
    party.together(second_stage, lambda _, c: c.barrier())
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

    told = party.together(stages[0], act)
    assert all(str(dtype) in text and "torch.float32" in text for text in told)
