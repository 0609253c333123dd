"""PGTransport between members of one group: what arrives, and what ends a transfer."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from lighthouse.events import printable
from tests.fake_world import fake_mesh
from torchft_like.checkpointing import PGTransport
from torchft_like.checkpointing.pg_transport import _TAG, FORMAT, MESSAGE_BYTES
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.errors import CheckpointError, CheckpointFormatError, CheckpointTimeoutError
from torchft_like.process_group import ProcessGroup

from .conftest import Party, wait_until

LIMIT = timedelta(seconds=60)
State = dict[str, Any]


def transport(group: ProcessGroup) -> PGTransport[State]:
    return PGTransport(group, LIMIT, "cpu")


def state_of(megabytes: int) -> State:
    some = torch.complex(torch.randn(6), torch.randn(6)).reshape(2, 3)
    model = {"w": torch.randn(megabytes << 18), "b": torch.arange(7), "c": some.T.conj()}
    model["none"] = torch.empty(0)[::2]
    return {"model": model, "step": 3, "lr": 0.1}


@pytest.mark.parametrize(("megabytes", "default_device"), [(0, "cpu"), (4, "cpu"), (9, "cpu"), (1, "meta")])
def test_two_receivers_get_the_state_bit_for_bit_on_the_cpu(
    party: Party, megabytes: int, default_device: str
) -> None:
    state = state_of(megabytes)

    def act(rank: int, group: ProcessGroup) -> State:
        with torch.device(default_device):
            if rank == 1:
                transport(group).send_checkpoint([0, 2], 5, state, LIMIT)
                return state
            return transport(group).recv_checkpoint(1, "", 5, LIMIT)

    for received in party.together(party.meet(3), act):
        assert received["step"] == 3
        assert all(torch.equal(received["model"][name], value) for name, value in state["model"].items())


@pytest.mark.parametrize("asks", ["by its argument", "by the Manager"])
def test_a_state_arrives_in_the_tensors_of_the_receiver(party: Party, asks: str) -> None:
    state, own = state_of(9), state_of(9)
    sender, receiver = party.meet(2)
    sending = party.aside(transport(sender).send_checkpoint, [1], 5, state)
    destination: Destination[State] = Destination(own)
    if asks == "by its argument":
        into = PGTransport[State](receiver, LIMIT, "cpu", lambda: own)
        received = party.aside(into.recv_checkpoint, 0, "", 5).result(60)
    else:
        into = transport(receiver)
        received = party.aside(into.recv_checkpoint_from, [Source(0, "")], 5, LIMIT, destination).result(60)
        assert destination.is_written
    sending.result(60)
    for name, value in state["model"].items():
        assert torch.equal(received["model"][name], value)
        if value.is_contiguous() and not value.is_conj():
            assert received["model"][name].data_ptr() == own["model"][name].data_ptr()


def test_a_dtensor_comes_to_lie_on_the_receivers_mesh(party: Party) -> None:
    with fake_mesh(2, rank=1) as mesh:

        def state(value: float) -> State:
            return {"w": DTensor.from_local(torch.full((3,), value), mesh, [Shard(0)], run_check=False)}

        sender, receiver = party.meet(2)
        into = PGTransport[State](receiver, LIMIT, "cpu", lambda: state(0.0))
        sending = party.aside(transport(sender).send_checkpoint, [1], 5, state(7.0))
        received = party.aside(into.recv_checkpoint, 0, "", 5).result(60)["w"]
        sending.result(60)
        assert (received.device_mesh, received.placements) == (mesh, (Shard(0),))
        assert received.to_local().tolist() == [7.0, 7.0, 7.0]


@pytest.mark.heal_is_clean
def test_a_state_that_the_receiver_does_not_want_changes_none_of_its_tensors(party: Party) -> None:
    def refuse(state: State) -> None:
        raise CheckpointError(f"there is no {state['model']['w'].shape} here")

    sender, receiver = party.meet(2)
    own, state = state_of(4), state_of(4)
    kept = own["model"]["w"].clone()
    destination = Destination(own, refuse)
    sending = party.aside(transport(sender).send_checkpoint, [1], 5, state)
    with pytest.raises(CheckpointError, match=r"there is no torch.Size\(\[1048576\]\) here"):
        transport(receiver).recv_checkpoint_from([Source(0, "")], 5, LIMIT, destination)
    receiver.abort("it does not want that state")
    assert isinstance(sending.exception(60), CheckpointError)
    assert torch.equal(own["model"]["w"], kept)
    assert not destination.is_written


@pytest.mark.parametrize(("own_ms", "given_ms"), [(1, None), (60_000, 1)])
def test_a_transfer_has_the_given_limit_or_else_the_transports_own(
    party: Party, own_ms: int, given_ms: int | None
) -> None:
    _, receiver = party.meet(2)
    hasty = PGTransport[State](receiver, timedelta(milliseconds=own_ms), "cpu")
    with pytest.raises(CheckpointTimeoutError):
        hasty.recv_checkpoint(0, "", 5, None if given_ms is None else timedelta(milliseconds=given_ms))


def test_collectives_of_another_thread_do_not_disturb_it(party: Party) -> None:
    groups = party.meet(2)
    sums = [torch.ones(1000) for _ in groups]

    def train(rank: int, group: ProcessGroup) -> None:
        for _ in range(50):
            group.allreduce([sums[rank]]).wait()

    training = [party.aside(train, rank, group) for rank, group in enumerate(groups)]
    state = state_of(3 * MESSAGE_BYTES >> 20)
    sending = party.aside(transport(groups[0]).send_checkpoint, [1], 5, state, LIMIT)
    received = party.aside(transport(groups[1]).recv_checkpoint, 0, "", 5, LIMIT).result(60)
    sending.result(60)
    for thread in training:
        thread.result(60)
    assert torch.equal(received["model"]["w"], state["model"]["w"])
    assert [float(tensor[0]) for tensor in sums] == [2.0**50] * 2


@pytest.mark.heal_is_clean
def test_the_state_of_another_step_is_refused(party: Party) -> None:
    sender, receiver = party.meet(2)
    sending = party.aside(transport(sender).send_checkpoint, [1], 4, state_of(0), LIMIT)
    with pytest.raises(CheckpointError, match="replica 0 sent state of step 4, not of 5"):
        transport(receiver).recv_checkpoint(0, "", 5, LIMIT)
    receiver.abort("it does not want that state")
    assert sending.exception(60) is None or isinstance(sending.exception(60), CheckpointError)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [([5, 100, 60], "do not agree on the shape"), ([FORMAT + 1, 5, 100, 60], "must run the same version")],
    ids=["earlier", "later"],
)
def test_a_state_in_another_versions_format_is_refused(party: Party, numbers: list[int], reason: str) -> None:
    sender, receiver = party.meet(2)
    sending = party.aside(lambda: sender.send([torch.tensor(numbers)], 1, _TAG).wait())
    with pytest.raises(CheckpointError, match=f"replica 0.* {reason}"):
        transport(receiver).recv_checkpoint(0, "", 5, LIMIT)
    sending.exception(60)


@pytest.mark.progress
def test_an_abort_of_the_group_ends_a_transfer(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = party.meet(2)
    begun, recv = threading.Event(), groups[1].recv

    def announced(*args: Any) -> object:
        begun.set()
        return recv(*args)

    monkeypatch.setattr(groups[1], "recv", announced)
    receiving = party.aside(transport(groups[1]).recv_checkpoint, 0, "", 5, LIMIT)
    wait_until(begun)
    groups[1].abort("a member was lost")
    with pytest.raises(CheckpointError, match=r"no state to or from replica 0: .*a member was lost"):
        receiving.result(60)


def test_a_state_that_does_not_travel_is_refused_before_anything_is_sent(party: Party) -> None:
    sender, _ = party.meet(2)
    with pytest.raises(CheckpointFormatError, match="model"):
        transport(sender).send_checkpoint([1], 4, {"model": object()}, LIMIT)


@pytest.mark.parametrize("reason", ["RuntimeError: no memory for a copy", "\x1b[2J" + "x" * 1000])
def test_a_source_without_a_state_tells_all_receivers_why_and_sends_the_next_one(
    party: Party, reason: str
) -> None:
    def act(rank: int, group: ProcessGroup) -> str:
        own = transport(group)
        if rank == 1:
            own.refuse_checkpoint([0, 2], 5, reason)
            own.send_checkpoint([0, 2], 6, state_of(0), LIMIT)
            return reason
        with pytest.raises(CheckpointError, match="replica 1 refused: ") as caught:
            own.recv_checkpoint(1, "", 5, LIMIT)
        assert own.recv_checkpoint(1, "", 6, LIMIT)["step"] == 3
        return str(caught.value).partition("refused: ")[2]

    for told in party.together(party.meet(3), act):
        assert told in (reason, printable(reason[:400]))


def test_a_transfer_that_has_failed_is_not_followed_by_a_refusal(party: Party) -> None:
    """The receiver would take it for a part of the state."""
    groups = party.meet(2)
    sender, state = transport(groups[0]), state_of(9)
    sending = party.aside(sender.send_checkpoint, [1], 5, state, LIMIT)
    groups[1].recv([torch.empty(4, dtype=torch.int64)], 0, _TAG).wait()
    groups[0].abort("the step has failed")
    with pytest.raises(CheckpointError):
        sending.result(60)
    sender.refuse_checkpoint([1], 5, "it would hang, or raise")
