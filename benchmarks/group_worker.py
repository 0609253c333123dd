"""One rank of a pair whose process groups are measured, in either package's environment.

It carries out commands:

* {"do": "make", "group": name, "prefix": p}: make a group and configure it; its seconds;
* {"do": "configure", "group": name, "prefix": p}: configure it once more; its seconds;
* {"do": "allreduce", "group": name, "bytes": n, "shared": bool, "repeats": r}: the seconds of each;
* {"do": "bind", "is_bound": bool}: keep every thread of the process on a core of its own, or let it go;
* {"do": "roles", "group": name}: the processes that a Baby group has started.

Both ranks get the same commands. Nothing but the package's own calls is inside the times.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, TCPStore
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo

from benchmarks.commands import serve
from benchmarks.group_store import serve_store

LIMIT = timedelta(seconds=60)
WORLD_SIZE = 2


class Subject(Protocol):
    """One kind of group."""

    group: Any

    def configure(self, prefix: str) -> None:
        """Meet the other rank."""
        ...

    def begin(self) -> None:
        """Begin a block of operations."""

    def end(self) -> None:
        """End the block of operations."""


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    serve(Worker(options))


class Worker:
    """Carries out the commands of the parent."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._subjects: dict[str, Subject] = {}
        self._cores = sorted(os.sched_getaffinity(0))

    def make(self, group: str, prefix: str) -> dict[str, Any]:
        self._subjects[group] = make_subject(group, self._options)
        return self.configure(group, prefix)

    def configure(self, group: str, prefix: str) -> dict[str, Any]:
        start = time.perf_counter()
        self._subjects[group].configure(prefix)
        return {"seconds": time.perf_counter() - start}

    def allreduce(self, group: str, bytes: int, shared: bool, repeats: int) -> dict[str, Any]:  # noqa: A002
        subject, tensor = self._subjects[group], tensor_of(bytes, shared)
        tensor.fill_(1.0)
        subject.begin()
        time_allreduces(subject.group, tensor, 1)
        if not bool((tensor == WORLD_SIZE).all()):
            raise ArithmeticError(f"{group}: the sum of {WORLD_SIZE} ones is {tensor}")
        tensor.zero_()  # whose sums stay what they are
        seconds = time_allreduces(subject.group, tensor, repeats)
        subject.end()
        return {"seconds": seconds}

    def bind(self, is_bound: bool) -> dict[str, Any]:
        own = self._cores[self._options.rank % len(self._cores)]
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread), {own} if is_bound else self._cores)
        return {}

    def roles(self, group: str) -> dict[str, Any]:
        return {"roles": roles_of(self._subjects[group].group)}


@functools.cache
def tensor_of(nbytes: int, shared: bool) -> torch.Tensor:
    """Return one tensor for all blocks of a size, as a training script reuses its gradients."""
    tensor = torch.ones(nbytes // 4)
    return tensor.share_memory_() if shared else tensor  # type: ignore[no-untyped-call]


def time_allreduces(group: Any, tensor: torch.Tensor, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` sums, from the call to the end of the wait."""
    options, tensors, seconds = AllreduceOptions(), [tensor], []
    for _ in range(repeats):
        start = time.perf_counter()
        group.allreduce(tensors, options).wait()
        seconds.append(time.perf_counter() - start)
    return seconds


def roles_of(group: Any) -> dict[str, int]:
    """Return the process ids of what a Baby group has started, as far as it tells."""
    if (process := getattr(group, "_p", None)) is not None:  # torchft's
        return {"child": process.pid}
    fork_pool = importlib.import_module("torchft_like.process_group.baby.fork_pool").fork_pool
    return {"child": group.parent.pid, **fork_pool.pids()}


def make_subject(name: str, options: argparse.Namespace) -> Subject:
    """Make the group whose class has this name after `ProcessGroup`."""
    if name == "raw":
        return Raw(options)
    if name == "Managed":
        return Managed(options)
    return Reconfigurable(name, options)


class _Unmanaged:
    def begin(self) -> None: ...

    def end(self) -> None: ...


class Raw(_Unmanaged):
    """torch's own ProcessGroupGloo, made anew after the one before it is gone."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.group: Any = None

    def configure(self, prefix: str) -> None:
        self.group = make_raw(self._options.store, prefix, self._options.rank, WORLD_SIZE)


def make_raw(port: int, prefix: str, rank: int, world_size: int) -> Any:
    """Make the group as `torch.distributed.new_group` does: a client of the store, a device, the group."""
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=LIMIT)
    gloo: Any = TorchGloo
    settings = gloo._Options()
    settings._timeout = LIMIT
    settings._devices = [gloo.create_device(hostname="127.0.0.1", lazy_init=False)]
    return gloo(PrefixStore(prefix, store), rank, world_size, settings)


class Reconfigurable(_Unmanaged):
    """A group that its user configures."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        groups = importlib.import_module(f"{options.package}.process_group")
        if name == "ErrorSwallowing":
            self.group = groups.ErrorSwallowingProcessGroupWrapper(groups.ProcessGroupGloo(timeout=LIMIT))
        else:
            self.group = getattr(groups, f"ProcessGroup{name}")(timeout=LIMIT)
        self._options = options

    def configure(self, prefix: str) -> None:
        configure(self.group, self._options.store, prefix, self._options.rank, WORLD_SIZE)


def configure(group: Any, port: int, prefix: str, rank: int, world_size: int) -> None:
    """Configure by keyword: torchft has `replica_id` in another place. Its nightly has a function instead."""
    store_addr = f"127.0.0.1:{port}/{prefix}"
    if hasattr(group, "configure"):
        group.configure(store_addr=store_addr, replica_id=str(rank), rank=rank, world_size=world_size)
        return
    groups = importlib.import_module("torchft.process_group")
    groups.reconfigure_with_store(group, store_addr, rank, world_size, timeout=LIMIT)


class Managed:
    """A ManagedProcessGroup over Gloo, whose Manager is its replica group's only rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        package = importlib.import_module(options.package)
        groups = importlib.import_module(f"{options.package}.process_group")
        # Its own: in one store two replica groups would overwrite each other's address of the ManagerServer.
        self._store = serve_store()
        self._manager = package.Manager(
            pg=groups.ProcessGroupGloo(timeout=LIMIT),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=WORLD_SIZE,
            timeout=LIMIT,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=options.lighthouse,
            replica_id=f"pair_{options.rank}",
            hostname="127.0.0.1",
            init_sync=False,
        )
        self.group = groups.ManagedProcessGroup(self._manager)

    def configure(self, prefix: str) -> None:
        self.begin()
        self.end()

    def begin(self) -> None:
        self._manager.start_quorum()
        self._manager.wait_quorum()

    def end(self) -> None:
        if not self._manager.should_commit():
            raise RuntimeError(f"a block of operations was not committed: {self._manager.errored()}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", choices=["torchft", "torchft_like"], required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=int, required=True, help="port of the TCPStore")
    parser.add_argument("--lighthouse", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
