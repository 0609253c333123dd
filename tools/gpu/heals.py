"""A state on one rank's device comes to another rank's device, over each package's HTTPTransport, and through
a block of the device, as our PGTransport moves it between processes of one host.

The ceiling is a copy from device memory to device memory. Through the block each byte is copied twice and
read twice more, which is all done by one device here.
"""

from __future__ import annotations

import importlib
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import Tensor

from tests.stores import serve_store
from tools.gpu.contenders import ANSWER_S, LIMIT, OURS, TORCHFT, Here, synchronize
from tools.gpu.figures import attempted, figure, run_probe
from torchft_like.checkpointing import HTTPTransport, PGTransport
from torchft_like.checkpointing.state_stream import IncomingState
from torchft_like.checkpointing.transport import Destination, Source
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.testing.ranks import Ranks, running

TENSOR_BYTES = 64 << 20
OVER_COPY_BAR = 2.0
OVER_TORCHFT_BAR = 0.5
ROUNDS = 3


def main(*, dry: bool) -> None:
    sizes = (64 << 20,) if dry else (1 << 30, 4 << 30, 16 << 30)
    with running(2, ANSWER_S) as ours, running(2, ANSWER_S) as theirs:
        for size in sizes:
            gigabytes = f"{size / 1e9:.3g} GB"
            seconds: dict[str, float] = {}
            for package, ranks in ((OURS, ours), (TORCHFT, theirs)):
                name = f"{gigabytes}, {package}"
                found = attempted(lambda: _heal(ranks, package, size, dry=dry), name)  # noqa: B023 - called at once
                if found is not None:
                    seconds[package], copy = found
                    figure(name, seconds[package], "s")
                    figure(f"{name}, over a copy on the device", seconds[package] / copy, "x")
            if len(seconds) == 2:
                ratio = seconds[OURS] / seconds[TORCHFT]
                figure(f"{gigabytes}, ours over torchft's", ratio, "x", bar=OVER_TORCHFT_BAR)
            name = f"{gigabytes}, through the device"
            found = attempted(lambda: _heal_through_device(ours, size, dry=dry), name)  # noqa: B023
            if found is not None:
                figure(name, found[0], "s")
                figure(f"{name}, over a copy there", found[0] / found[1], "x", bar=OVER_COPY_BAR)


def _heal(ranks: Ranks, package: str, size: int, *, dry: bool) -> tuple[float, float]:
    """Return the seconds of the heal, and of a copy of the same state; the memory of both ranks is free after
    it.
    """
    ranks.ask(make, package, size, dry)
    try:
        metadata, seconds = ranks[0].ask(offer, 0)
        fetched = ranks[1].ask(fetch, 1, metadata)
        return seconds + fetched, ranks[0].ask(copy_seconds, 0)
    finally:
        ranks.ask(drop)


def _heal_through_device(ranks: Ranks, size: int, *, dry: bool) -> tuple[float, float]:
    """Return the same of a heal through a block of the device."""
    ranks.ask(make, OURS, size, dry)
    store = serve_store()
    try:
        return max(ranks.ask(move, f"127.0.0.1:{store.port}/heal")), ranks[0].ask(copy_seconds, 0)
    finally:
        ranks.ask(drop)


def move(here: Here, rank: int, address: str) -> float:
    """Return the seconds of the second of two transfers from rank 0 to rank 1."""
    group = ProcessGroupGloo(timeout=LIMIT)
    group.configure(address, rank, 2)
    transport = PGTransport[Any](group, LIMIT, "cpu", lambda: here.state)
    for _ in range(2):
        synchronize(here)
        begin = perf_counter()
        if rank == 0:
            transport.send_checkpoint([1], 1, here.state)
        else:
            _receive(here, transport)
        synchronize(here)
        seconds = perf_counter() - begin
    group.shutdown()
    _compare(here)
    return seconds


def _receive(here: Here, transport: PGTransport[Any]) -> None:
    """Receive the state; on a device it is an error where it comes through the host instead of the block."""
    through_host = IncomingState.read_all
    if here.device.type == "cuda":
        through_host = Mock(side_effect=RuntimeError("no block of the device: the log says why"))
    with patch.object(IncomingState, "read_all", through_host):
        transport.recv_checkpoint(0, "", 1)


def make(here: Here, rank: int, package: str, size: int, dry: bool) -> None:
    """Return the state, random at its source and zeros at its destination."""
    here.device = torch.device("cpu" if dry else "cuda")
    if not hasattr(here, "transport"):
        transport = importlib.import_module(f"{package}.checkpointing.http_transport").HTTPTransport
        here.transport = transport(timeout=LIMIT, num_chunks=0)
    here.state = {
        f"layer{number}": torch.full((TENSOR_BYTES // 4,), float(number + 1) * (1 - rank), device=here.device)
        for number in range(size // TENSOR_BYTES)
    }
    synchronize(here)


def offer(here: Here, rank: int) -> tuple[str, float]:
    begin = perf_counter()
    here.transport.send_checkpoint(dst_ranks=[1], step=1, state_dict=here.state, timeout=LIMIT)
    return here.transport.metadata(), perf_counter() - begin


def fetch(here: Here, rank: int, metadata: str) -> float:
    """Return the seconds until the bytes are on this rank's device, where they are compared."""
    begin = perf_counter()
    if isinstance(here.transport, HTTPTransport):  # as a Manager has it
        sources = [Source(0, metadata)]
        here.transport.recv_checkpoint_from(sources, 1, LIMIT, Destination(here.state))
    else:
        state = here.transport.recv_checkpoint(src_rank=0, metadata=metadata, step=1, timeout=LIMIT)
        for name, tensor in here.state.items():
            tensor.copy_(state[name])
    synchronize(here)
    seconds = perf_counter() - begin
    _compare(here)
    return seconds


def _compare(here: Here) -> None:
    for number, tensor in enumerate(here.state.values()):
        if not bool((tensor == number + 1).all()):
            raise ArithmeticError(f"layer {number} did not arrive as it was")


def drop(here: Here, rank: int) -> None:
    here.transport.disallow_checkpoint()
    here.state.clear()
    if here.device.type == "cuda":
        torch.cuda.empty_cache()


def copy_seconds(here: Here, rank: int) -> float:
    """Return the seconds of a copy of the whole state on the device."""
    tensors: list[Tensor] = list(here.state.values())
    target, times = torch.empty_like(tensors[0]), []
    for _ in range(ROUNDS + 1):
        synchronize(here)
        begin = perf_counter()
        for tensor in tensors:
            target.copy_(tensor)
        synchronize(here)
        times.append(perf_counter() - begin)
    return median(times[1:])


if __name__ == "__main__":
    run_probe(main)
