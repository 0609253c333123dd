"""A state from device to device through a block that the receivers map, without a GPU.

A `PlayedDevice` says which tensors are on one, and shared memory is in the place of CUDA's, so the receivers
see the block at other addresses. Whether CUDA behaves so is what tests/gpu is for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.equality import same
from tests.unit.checkpointing.devices import PlayedDevice, played
from tests.unit.process_group.conftest import Party
from torchft_like.checkpointing import PGTransport, pg_transport
from torchft_like.checkpointing.state_stream import LiveState
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.errors import CheckpointError, CheckpointFormatError
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo
from torchft_like.process_group.baby.tensor_sharing import open_segment
from torchft_like.shared_memory import TorchCuda

LIMIT = timedelta(seconds=60)
State = dict[str, Any]


class SharedMemory(TorchCuda):
    """Shared memory of the CPU in the place of a device's.

    Attributes:
        opened: how often memory was mapped.
        counter: who may still map what was shared.
        refusal: an error of CUDA's, and the call that has it.
    """

    def __init__(self) -> None:
        self.opened = self.counter = 0
        self.refusal: tuple[str, RuntimeError] = ("", RuntimeError())
        self.spoils = False

    def share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        self._refuse("share")
        self.counter += 1
        descriptor, nbytes = storage._share_fd_cpu_()
        return 0, str(descriptor).encode(), nbytes, 0, b"/torch_1_1", 0, b"", True

    def open(self, device: int, handle: bytes, nbytes: int, offset: int) -> torch.UntypedStorage:
        self._refuse("open")
        self.opened += 1
        storage = open_segment(os.dup(int(handle)), nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8).untyped_storage() if self.spoils else storage

    def decrement(self, counter: bytes, offset: int) -> None:
        self.counter -= 1

    def _refuse(self, call: str) -> None:
        if call == self.refusal[0]:
            raise self.refusal[1]


@pytest.fixture
def device() -> Iterator[PlayedDevice]:
    with played(PlayedDevice()) as device:
        yield device


@pytest.fixture
def cuda() -> Iterator[SharedMemory]:
    cuda = SharedMemory()
    with ExitStack() as patches:
        for module in ("torchft_like.shared_memory", "torchft_like.checkpointing.pg_transport"):
            patches.enter_context(patch(f"{module}.cuda", cuda))
        patches.enter_context(patch.object(pg_transport, "BLOCK_BYTES", 4096))
        yield cuda


def state_on(device: PlayedDevice, value: float = 0.0) -> State:
    """Several blocks of tensors on the device, and others beside them."""
    weights = torch.arange(5000.0) + 1 if value else torch.zeros(5000)
    return {
        "w": device.put(weights),
        "b": device.put(torch.full((7,), value, dtype=torch.bfloat16)),
        "t": device.put(torch.full((5, 9), value).t()),
        "step": torch.tensor(value),
        "name": ["x", 3],
    }


def exchange(
    party: Party, state: State, owns: list[State | None]
) -> tuple[list[Any], list[Destination[Any]]]:
    groups = party.meet(1 + len(owns))
    ranks = list(range(1, len(groups)))
    destinations = [Destination[Any](own) for own in owns]

    def act(rank: int, group: ProcessGroup) -> Any:
        transport = PGTransport[Any](group, LIMIT, "cpu")
        if rank == 0:
            transport.send_checkpoint(ranks, 5, state)
            return transport._block
        return transport.recv_checkpoint_from([Source(0, "")], 5, LIMIT, destinations[rank - 1])

    kept, *received = party.together(groups, act)
    assert kept is None
    return received, destinations


def test_two_receivers_get_the_state_through_the_block(
    party: Party, device: PlayedDevice, cuda: SharedMemory
) -> None:
    state, owns = state_on(device, 3.0), [state_on(device) for _ in range(2)]
    received, destinations = exchange(party, state, [*owns])
    assert cuda.opened == 2
    assert cuda.counter == 0
    for one, own, destination in zip(received, owns, destinations, strict=True):
        assert same(one, state)
        assert one["w"].data_ptr() == own["w"].data_ptr()
        assert destination.is_written
    assert device.buffers == 0  # the host's memory had no part in it


@pytest.mark.parametrize("why", ["share", "open", "elsewhere", "on the host"])
def test_where_the_block_cannot_be_mapped_the_state_goes_through_the_host(
    party: Party,
    device: PlayedDevice,
    cuda: SharedMemory,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    state, owns = state_on(device, 3.0), [state_on(device) for _ in range(2)]
    cuda.refusal = why, RuntimeError("peer access is not supported")
    if why == "elsewhere":
        places = iter([b"here", b"there", b"here", b"here"])
        monkeypatch.setattr(pg_transport, "own_place", lambda: next(places))
    if why == "on the host":
        owns[1]["w"], owns[1]["b"] = torch.zeros(5000), torch.zeros(7, dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING):
        received, _ = exchange(party, state, [*owns])
    assert all(same(one, state) for one in received)
    assert cuda.counter == 0
    told = [record.getMessage() for record in caplog.records if "host's memory" in record.getMessage()]
    assert len(told) == {"share": 1, "open": 2}.get(why, 0)
    assert all("peer access is not supported" in one for one in told)


def test_a_state_that_is_on_the_host_is_offered_no_block(
    party: Party, device: PlayedDevice, cuda: SharedMemory
) -> None:
    state, own = {"w": torch.ones(5000)}, {"w": device.put(torch.zeros(5000))}
    (received,), _ = exchange(party, state, [own])
    assert same(received, state)
    assert cuda.opened == cuda.counter == 0


@pytest.mark.heal_is_clean
def test_bytes_that_are_not_the_senders_are_refused_and_the_block_is_kept(
    party: Party, device: PlayedDevice, cuda: SharedMemory
) -> None:
    """The receiver sees what was in the block when it mapped it."""
    cuda.spoils = True
    groups = party.meet(2)
    sender = PGTransport[Any](groups[0], LIMIT, "cpu")
    destination = Destination[Any](state_on(device))
    sending = party.aside(sender.send_checkpoint, [1], 5, state_on(device, 3.0))
    with pytest.raises(CheckpointFormatError, match="bytes 0 to 2048 of it are corrupt"):
        PGTransport[Any](groups[1], LIMIT, "cpu").recv_checkpoint_from([Source(0, "")], 5, LIMIT, destination)
    groups[1].abort("it has another state")
    with pytest.raises(CheckpointError):
        sending.result(60)
    assert destination.is_written
    kept = sender._block
    assert kept is not None
    assert cuda.counter == 1

    cuda.spoils = False
    party.configure(groups)
    sending = party.aside(sender.send_checkpoint, [1], 6, state := state_on(device, 4.0))
    receiver = PGTransport[Any](groups[1], LIMIT, "cpu", lambda: destination.own)
    assert same(receiver.recv_checkpoint(0, "", 6), state)
    sending.result(60)
    assert cuda.opened == 2
    assert cuda.counter == 0


def test_a_half_is_filled_again_when_all_receivers_have_taken_it(
    device: PlayedDevice, cuda: SharedMemory
) -> None:
    """The receivers see in the block what they were told of until they say that they have it."""
    state = LiveState(state_on(device, 3.0))
    told: list[int] = []
    taken: list[int] = []

    class Line:
        def receive_numbers(self) -> list[int]:
            if told:
                block = transport._block
                assert block is not None
                taken.append(pg_transport.hash_of(block.halves[len(taken) % 2]))
            return [True, True]

        def send_numbers(self, *numbers: int) -> None:
            told.extend(numbers)

        def send(self, data: bytearray) -> None:
            assert len(data) == pg_transport.OFFER_BYTES

    transport = PGTransport[Any](ProcessGroupGloo(30), LIMIT, "cpu")
    assert transport._send_through_block(state, Line())  # type: ignore[arg-type]
    rounds = len(told) - 1
    assert rounds > 5
    assert taken[: rounds - 1] == told[1:rounds]  # the last is shorter
