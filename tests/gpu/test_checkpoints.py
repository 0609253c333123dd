"""States between a GPU and the host, and from one process's GPU to another's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.equality import same
from tests.gpu.device import busy
from tests.gpu.group_job import Here, job
from tests.unit.checkpointing.states import load_state, stream_of
from torchft_like.checkpointing import HTTPTransport, PGTransport
from torchft_like.checkpointing.state_stream import IncomingState, Snapshot
from torchft_like.checkpointing.transport import Destination, Source

LIMIT = timedelta(seconds=60)
STEP = 5


def state_of(value: float, megabytes: int = 0) -> dict[str, Any]:
    """Tensors on the GPU of every kind that is copied in a way of its own, and some beside them."""
    matrix = torch.arange(900.0, device="cuda").reshape(30, 30) + value
    many = [torch.full((number,), value, device="cuda", dtype=torch.bfloat16) for number in range(200)]
    return {
        "large": torch.full((100 + (megabytes << 18),), value, device="cuda"),
        "views": [matrix.t(), matrix[:, ::2], matrix[1], torch.complex(matrix, matrix).conj()],
        "small": many,
        "step": torch.tensor(value),
        "host": torch.full((1000,), value),
    }


def on_host(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.resolve_conj().cpu()
    if isinstance(state, dict):
        return {name: on_host(part) for name, part in state.items()}
    return [on_host(part) for part in state]


def test_a_snapshot_comes_after_what_the_stream_has_to_do() -> None:
    state = state_of(1.0, megabytes=100)
    busy()
    state["large"].fill_(7.0)
    received = load_state(stream_of(Snapshot(state).fill()))
    assert same(received, on_host(state))


def test_a_state_is_copied_beside_a_capture() -> None:
    """On other threads than the one that captures a graph."""
    state, own = state_of(1.0, megabytes=20), state_of(0.0, megabytes=20)
    source, receiver = (HTTPTransport[Any](LIMIT, hostname="127.0.0.1") for _ in range(2))
    try:
        source.send_checkpoint([1], STEP, state, LIMIT)
        tensor, graph = torch.zeros(1000, device="cuda"), torch.cuda.CUDAGraph()
        address = [Source(0, source.metadata())]
        with ThreadPoolExecutor(1) as other, torch.cuda.graph(graph):
            tensor += 1
            other.submit(source.send_checkpoint, [1], STEP, state, LIMIT).result(60)
            receiving = other.submit(receiver.recv_checkpoint_from, address, STEP, LIMIT, Destination(own))
            received = receiving.result(60)
            tensor += 1
        graph.replay()
        assert float(tensor[0]) == 2.0
        assert same(on_host(received), on_host(state))
    finally:
        source.shutdown()
        receiver.shutdown()


def test_a_state_lands_in_the_receivers_tensors_over_http() -> None:
    state, own = state_of(1.0, megabytes=100), state_of(0.0, megabytes=100)
    source, receiver = (HTTPTransport[Any](LIMIT, hostname="127.0.0.1") for _ in range(2))
    destination = Destination(own)
    try:
        source.send_checkpoint([1], STEP, state, LIMIT)
        received = receiver.recv_checkpoint_from([Source(0, source.metadata())], STEP, LIMIT, destination)
    finally:
        source.shutdown()
        receiver.shutdown()
    assert destination.is_written
    assert received["large"].data_ptr() == own["large"].data_ptr()
    assert same(on_host(received), on_host(state))


@pytest.mark.parametrize("megabytes", [1, 700])
def test_a_state_goes_from_process_to_process_without_the_host(megabytes: int) -> None:
    with job("gloo", 3) as ranks:
        ranks.meet()
        assert ranks.ask(move, megabytes) == [[1.0, 2.0]] * 3


def move(here: Here, rank: int, megabytes: int) -> list[float]:
    """Send the state from rank 0 to the others, twice; return what has come or was sent on each rank."""
    moved, allocated = [], list[int]()
    transport = PGTransport[Any](here.group, LIMIT, "cpu")
    for value in (1.0, 2.0):
        moved.append(value)
        if rank == 0:
            state = state_of(value, megabytes)
            transport.send_checkpoint([1, 2], STEP, state)
            allocated.append(torch.cuda.memory_allocated())  # the first time with what is kept to hash with
            assert allocated[-1] <= allocated[0], "the block was not given back"
            continue
        own = Destination(state_of(0.0, megabytes))
        with patch.object(IncomingState, "read_all", side_effect=AssertionError("it comes over the group")):
            received = transport.recv_checkpoint_from([Source(0, "")], STEP, LIMIT, own)
        assert own.own is not None
        assert received["large"].data_ptr() == own.own["large"].data_ptr()
        assert same(on_host(received), on_host(state_of(value, megabytes)))
    return moved
