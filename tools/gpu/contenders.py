"""What is compared, each in a process of its own: raw NCCL, this package, torchft.

The functions below are asked of a rank (torchft_like.testing.ranks), which keeps what it made in `here`. They
use the names that both packages share. Without a GPU the same is done over Gloo.
"""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions

from tests.stores import serve_store
from torchft_like.testing.cluster import host_of_its_own
from torchft_like.testing.ranks import Ranks, running

Here = SimpleNamespace
LIMIT = timedelta(seconds=60)
ANSWER_S = 600.0  # a probe has a limit of its own
multiprocessing.get_context("forkserver").set_forkserver_preload(["torch"])
OURS, TORCHFT = "torchft_like", "torchft"
_prefixes = itertools.count()


@dataclass(frozen=True)
class Contender:
    """A way to reduce; `package` is empty for torch's own group."""

    name: str
    package: str = ""
    is_baby: bool = False
    is_managed: bool = False


RAW = Contender("raw")
IN_PROCESS = (Contender("ours", OURS), Contender("torchft's", TORCHFT))
BABIES = (Contender("our Baby", OURS, is_baby=True), Contender("torchft's Baby", TORCHFT, is_baby=True))
MANAGED = (
    Contender("ours, managed", OURS, is_managed=True),
    Contender("torchft's, managed", TORCHFT, is_managed=True),
)


@contextmanager
def ranks_of(contender: Contender, count: int, *, dry: bool) -> Iterator[Ranks]:
    """Start so many ranks with a group each; configured, unless a Manager does it."""
    with running(count, ANSWER_S) as ranks:
        ranks.ask(make, contender, dry)
        if not contender.is_managed:
            meet(ranks)
        yield ranks


def meet(ranks: Ranks) -> float:
    """Configure the group of all ranks; return the seconds of the slowest."""
    store = serve_store()
    return float(max(ranks.ask(configure, f"127.0.0.1:{store.port}/cost/{next(_prefixes)}", len(ranks))))


# ------------------------------------------------------------------------ what is asked of a rank


def make(here: Here, rank: int, contender: Contender, dry: bool) -> None:
    os.environ |= host_of_its_own(f"rank {os.getpid()}")
    os.environ |= {"TORCH_NCCL_NONBLOCKING_TIMEOUT": "20", "TORCHFT_CHECK_COLLECTIVES": "0"}
    # Whose Baby groups are processes of multiprocessing. They end with the session of the probe.
    multiprocessing.current_process()._config["daemon"] = contender.package != TORCHFT  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    here.device = torch.device("cpu" if dry else "cuda")
    here.contender, here.dry = contender, dry
    if contender.package:
        here.group = make_group(contender, dry)
    if contender.is_managed:
        here.state = {"step": 0}
        make_manager(here, lambda state: None, lambda: here.state)


def make_group(contender: Contender, dry: bool) -> Any:
    backend = "Gloo" if dry else "NCCL"
    groups = importlib.import_module(f"{contender.package}.process_group")
    return getattr(groups, f"ProcessGroup{'Baby' if contender.is_baby else ''}{backend}")(timeout=LIMIT)


def make_manager(here: Here, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
    """Make the Manager of the only replica, with the package's own lighthouse in this process."""
    coordination = importlib.import_module(f"{here.contender.package}.coordination")
    package = importlib.import_module(here.contender.package)
    here.store = serve_store()
    here.lighthouse = coordination.LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    here.manager = package.Manager(
        pg=here.group,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        timeout=LIMIT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=here.store.port,
        lighthouse_addr=here.lighthouse.address(),
        replica_id="alone",
        hostname="127.0.0.1",
    )


def configure(here: Here, rank: int, address: str, world_size: int) -> float:
    begin = perf_counter()
    if here.contender.package:
        here.group.configure(store_addr=address, replica_id=str(rank), rank=rank, world_size=world_size)
    else:
        init_raw(here)
    return perf_counter() - begin


def init_raw(here: Here) -> None:
    """Make torch's own default group, of this rank alone."""
    file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115 - torch's store keeps it
    backend = "gloo" if here.dry else "nccl"
    dist.init_process_group(backend, init_method=f"file://{file.name}", rank=0, world_size=1, timeout=LIMIT)
    here.group = dist.group.WORLD


def synchronize(here: Here) -> None:
    if here.device.type == "cuda":
        torch.cuda.synchronize()


def block(here: Here, rank: int, elements: int, count: int, fresh: bool) -> tuple[float, float]:
    """µs of an all-reduce: of the thread that issues and waits, and of the processor, all threads."""
    if here.contender.is_managed:
        here.manager.start_quorum()
        here.manager.wait_quorum()
    tensors = [torch.zeros(elements, device=here.device) for _ in range(count if fresh else 1)]
    synchronize(here)
    processor, begin = process_time(), perf_counter()
    for number in range(count):
        reduce(here, tensors[number % len(tensors)]).wait()
    thread = perf_counter() - begin
    synchronize(here)
    processor = process_time() - processor
    if here.contender.is_managed and not here.manager.should_commit():
        raise RuntimeError(f"a block was not committed: {here.manager.errored()}")
    return thread / count * 1e6, processor / count * 1e6


def reduce(here: Here, tensor: Tensor) -> Any:
    """Begin the contender's own all-reduce."""
    if here.contender.is_managed:
        return here.manager.allreduce(tensor)
    return here.group.allreduce([tensor], AllreduceOptions())


def stalls(here: Here, rank: int, count: int) -> tuple[float, float]:
    """µs of the median and of the slowest call, of so many behind a kernel that keeps the stream busy."""
    tensor = torch.zeros(1000, device=here.device)
    reduce(here, tensor).wait()
    synchronize(here)
    if here.device.type == "cuda":
        torch.cuda._sleep(3_000_000_000)  # type: ignore[no-untyped-call]
    works, times = [], []
    for _ in range(count):
        begin = perf_counter()
        works.append(reduce(here, tensor))
        times.append((perf_counter() - begin) * 1e6)
    for work in works:
        work.wait()
    synchronize(here)
    return median(times), max(times)


def abort_a_blocked_sum(here: Here, rank: int) -> float:
    """Return the seconds from the abort until a sum that no peer joins has released the thread and the
    device.
    """

    def wait() -> None:
        reduce(here, torch.ones(1000, device=here.device)).wait()
        synchronize(here)

    with ThreadPoolExecutor(1) as threads:
        blocked = threads.submit(wait)
        try:
            blocked.exception(0.5)
        except TimeoutError:
            begin = perf_counter()
            here.group.abort()
            blocked.exception(LIMIT.total_seconds())
            return perf_counter() - begin
        raise RuntimeError("nothing was blocked")
