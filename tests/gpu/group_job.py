"""The functions that the tests with several ranks run on each rank; over NCCL the ranks share a GPU."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.managers import error_of
from tests.stores import serve_store
from torchft_like import collectives
from torchft_like.collectives import allreduce_quantized
from torchft_like.gang import ProcessGroupGang, all_sum
from torchft_like.group_coordinator import GroupCoordinator
from torchft_like.process_group import (
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
    ProcessGroupGloo,
    ProcessGroupNCCL,
)
from torchft_like.process_group.baby.fork_pool import fork_pool
from torchft_like.process_group.nccl import PERIOD_S
from torchft_like.testing.cluster import host_of_its_own
from torchft_like.testing.ranks import Ranks, running

Here = SimpleNamespace
LIMIT_S = 60.0
OPERATION_S = 300.0  # above every limit of the tests, so that a test fails that recovers by it
FELT_S = 0.5  # a call that has not returned for so long is blocked
POLL_S = 0.01
QUEUED = 3000  # operations
GROUPS: dict[str, Callable[[float], ProcessGroup]] = {
    "gloo": ProcessGroupGloo,
    "baby-gloo": ProcessGroupBabyGloo,
    "nccl": ProcessGroupNCCL,
    "baby-nccl": ProcessGroupBabyNCCL,
}
each_backend = pytest.mark.parametrize(
    "backend", [name if "gloo" in name else pytest.param(name, marks=pytest.mark.gpu) for name in GROUPS]
)


class Job(Ranks):
    """Ranks, each of which has a group of one backend, and the store in which they meet."""

    def __init__(self, ranks: Ranks, backend: str) -> None:
        super().__init__(ranks)
        self._store = serve_store()
        self._epoch = 0
        self.ask(join, backend)

    def prefix(self) -> str:
        self._epoch += 1
        return f"127.0.0.1:{self._store.port}/job/{self._epoch}"

    def meet(self, *members: int, group: str = "group") -> Ranks:
        """Configure a group of these ranks, in this order; all ranks if none are given."""
        part = Ranks(self[member] for member in members or range(len(self)))
        part.ask(configure, self.prefix(), len(part), group)
        return part


@contextmanager
def job(backend: str, count: int) -> Iterator[Job]:
    """Yield ranks that are killed at the end of the block."""
    with running(count) as ranks:
        yield Job(ranks, backend)


# ------------------------------------------------------------------------ run on a rank


def join(here: Here, rank: int, backend: str) -> None:
    os.environ |= host_of_its_own(f"rank {os.getpid()}")
    os.environ |= {"TORCHFT_CHECK_COLLECTIVES": "0", "TORCH_NCCL_NONBLOCKING_TIMEOUT": "5"}
    torch.set_num_threads(1)
    here.device = torch.device("cuda" if backend.endswith("nccl") else "cpu")
    here.group, here.other = (GROUPS[backend](OPERATION_S) for _ in range(2))


def configure(here: Here, rank: int, prefix: str, world_size: int, group: str) -> None:
    here.world_size = world_size
    getattr(here, group).configure(prefix, rank, world_size)


def summed(here: Here, rank: int, group: str = "group", count: int = 1000) -> float:
    """Return the sum of rank + 1 over all ranks, after checking that each of `count` elements has it."""
    tensor = torch.full((count,), rank + 1.0, device=here.device)
    getattr(here, group).allreduce([tensor]).wait()
    assert bool((tensor == tensor[0]).all())
    return float(tensor[0])


def exchange(here: Here, rank: int, dtype: torch.dtype, count: int) -> list[str]:
    """Run every collective; return the results that are wrong."""
    group, size, wrong = here.group, here.world_size, list[str]()

    def full(*values: float) -> torch.Tensor:
        return torch.cat([torch.full((count,), value, dtype=dtype, device=here.device) for value in values])

    def expect(found: torch.Tensor, *values: float) -> None:
        if not torch.equal(found, full(*values)):
            wrong.append(f"{found} is not {values}")

    own, everybody = full(rank + 1), [other + 1.0 for other in range(size)]
    for operation, expected in ((dist.ReduceOp.SUM, sum(everybody)), (dist.ReduceOp.MAX, float(size))):
        reduced = own.clone()
        dist.all_reduce(reduced, operation, group=group)
        expect(reduced, expected)
    if dtype.is_floating_point:
        reduced = own.clone()
        dist.all_reduce(reduced, dist.ReduceOp.AVG, group=group)
        expect(reduced, sum(everybody) / size)
    gathered = full(*[0.0] * size)
    dist.all_gather_into_tensor(gathered, own, group=group)
    expect(gathered, *everybody)
    scattered = full(0)
    dist.reduce_scatter_tensor(scattered, gathered, group=group)
    expect(scattered, (rank + 1) * size)
    received = own.clone()
    group.broadcast_one(received, size - 1).wait()
    expect(received, size)
    exchanged = full(*[0.0] * size)
    dist.all_to_all_single(exchanged, full(*[rank + 1.0] * size), group=group)
    expect(exchanged, *everybody)
    send, receive = group.send([own], (rank + 1) % size, 0), group.recv([received], (rank - 1) % size, 0)
    for work in (send, receive):
        work.wait()
    expect(received, (rank - 1) % size + 1)
    group.barrier().wait()
    return wrong


def average_quantized(here: Here, rank: int, count: int) -> tuple[float, list[float]]:
    """Average over the ranks in bytes, in many chunks, twice; return the greatest error, in parts of the
    greatest number, and some results, which must be the same on all ranks.
    """
    collectives.CHUNK_ROWS = 16
    base = torch.linspace(-9, 9, count, device=here.device)
    exact = base * ((here.world_size + 1) / 2)
    errors, found = [], list[float]()
    for _ in range(2):
        tensor = base * (rank + 1)
        allreduce_quantized([tensor], dist.ReduceOp.AVG, here.group).wait()
        errors.append(float((tensor - exact).abs().amax() / exact.amax()))
        found += tensor[:: count // 100].tolist()
    return max(errors), found


def reduce_until_lost(here: Here, rank: int, count: int, rounds: Path, told: Path) -> tuple[str, float]:
    """Repeat an all-reduce until it fails; return the error's class, and the time (of the machine's monotonic
    clock).

    Each round is noted in the file `rounds`. Once there is a file `told` the group is aborted, as a Manager
    does when it hears of a loss.
    """
    is_over = threading.Event()

    def listen() -> None:
        while not is_over.wait(POLL_S):
            if told.exists():
                here.group.abort("a member was lost")
                return

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        tensor = torch.zeros(count, device=here.device)
        while (
            error := error_of(lambda: here.group.allreduce([tensor]).wait()) or here.group.errored()
        ) is None:
            with rounds.open("a") as file:
                file.write(".")
        return type(error).__name__, time.monotonic()
    finally:
        is_over.set()
        listener.join()


def abort_what_blocks(here: Here, rank: int, place: str, prefix: str) -> tuple[str, float]:
    """Block in `place` because a peer is missing, abort, and return the error's class and the seconds until
    it came.
    """
    acts = {
        "wait": _wait,
        "synchronize": _synchronize,
        "queue": _fill_the_queue,
        "configure": _configure_for_nobody,
    }
    with ThreadPoolExecutor(1) as threads:
        blocked: Future[Any] = threads.submit(acts[place], here, prefix)
        with contextlib.suppress(TimeoutError):
            raise AssertionError(f"{place} did not block: {blocked.exception(FELT_S)}")
        begin = time.monotonic()
        here.group.abort("the test says so")
        error = blocked.exception(LIMIT_S) or here.group.errored()
        return type(error).__name__, time.monotonic() - begin


def _wait(here: Here, prefix: str) -> None:
    here.group.allreduce([torch.ones(1000, device=here.device)]).wait(timedelta(seconds=OPERATION_S))


def _synchronize(here: Here, prefix: str) -> None:
    here.group.allreduce([torch.ones(1000, device=here.device)]).wait()
    synchronize(here)


def _fill_the_queue(here: Here, prefix: str) -> None:
    """Queue more than a stream of the device has room for, so that a call blocks that has to do with a stream
    only; one that holds the interpreter's lock would keep the abort from the thread that makes it.
    """
    works = [here.group.allreduce([torch.ones(1000, device=here.device)]) for _ in range(QUEUED)]
    for work in works[::2]:
        work.wait()
    synchronize(here)


def _configure_for_nobody(here: Here, prefix: str) -> None:
    here.group.configure(prefix, 0, here.world_size)


def synchronize(here: Here) -> None:
    if here.device.type == "cuda":
        torch.cuda.synchronize()


def capture_in_step(here: Here, rank: int, count: int) -> int:
    """Capture graphs of this rank's own kernels while collectives are under way; return how many were
    right.
    """
    value = torch.zeros(1000, device=here.device)
    for turn in range(count):
        works = [here.group.allreduce([torch.ones(1000, device=here.device)]) for _ in range(20)]
        time.sleep(PERIOD_S / 2)  # the watch looks sooner or later in some turn's capture
        captured(here, lambda: value.add_(1))()
        for work in works:
            work.wait()
        assert here.group.errored() is None
        assert float(value[0]) == turn + 1
    return count


def make_cpu_group(here: Here, rank: int) -> None:
    here.other = ProcessGroupGloo(OPERATION_S)


def captured(here: Here, act: Callable[[], object]) -> Callable[[], object]:
    """Return a function that replays `act`, which is captured but not run; without a device `act` itself."""
    if here.device.type == "cpu":
        return act
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    return graph.replay


def talk(here: Here, rank: int) -> list[Any]:
    """Communicate over a gang and a coordinator whose device group is this rank's; return the sum of all
    rank + 1 by either, and each of these by the coordinator.
    """
    gang = ProcessGroupGang(here.group, here.device)
    total = all_sum(gang, rank + 1).item()
    gang.barrier()
    coordinator = GroupCoordinator.from_groups(here.other, here.group, device=gang.device)
    ones = torch.full((2, 3), rank + 1.0, device=here.device)
    reduced, gathered = coordinator.all_reduce(ones), coordinator.all_gather(ones, 0)
    coordinator.barrier()
    return [total, float(reduced[0, 0]), [float(row[0]) for row in gathered[::2]]]


def footprint(here: Here, rank: int) -> dict[str, float]:
    """Return counts of threads, descriptors and segments of shared memory, and MB in use by the process and
    on the device.
    """
    gc.collect()
    process, used = psutil.Process(), 0.0
    if here.device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used = (total - free) / 1e6
    return {
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
        "shared memory": len(os.listdir("/dev/shm")),
        "MB": process.memory_info().rss / 1e6,
        "MB of the device": used,
    }


def opens_no_device(here: Here, rank: int) -> dict[str, bool]:
    """Return by the role of a Baby group's process whether it has no GPU open."""
    found = {}
    for role, pid in fork_pool.pids().items():
        files = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()]
        found[role] = not any(file.startswith("/dev/nvidia") for file in files)
    return found
