"""The functions that test_registration runs on its ranks: a job in torch's own words, over our backends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # functional collectives import it when first used: this way once, and not in every rank
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torchft_like  # noqa: F401 - importing it registers the backends
from tests.managers import error_of, outcome
from tests.standby import stand_by

Here = SimpleNamespace


def init(
    here: Here, rank: int, backend: str, world_size: int, where: Mapping[str, str], timeout_s: float = 60.0
) -> str:
    """Call init_process_group; `where` is an `init_method`, or the environment of `env://`."""
    prepare(here, backend)
    if "init_method" in where:
        members = {"rank": rank, "world_size": world_size}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where, **members)  # type: ignore[arg-type]
    else:
        os.environ |= {**where, "RANK": str(rank), "WORLD_SIZE": str(world_size)}
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    return dist.get_backend()


def prepare(here: Here, backend: str) -> None:
    """Have a fork server ready for the first Baby group."""
    if "baby" in backend and not hasattr(here, "is_prepared"):
        stand_by()
        here.is_prepared = True


def init_in_vain(here: Here, rank: int, *args: Any) -> str:
    """Return the error of an init that does not succeed."""
    error = error_of(lambda: init(here, rank, *args))
    return f"{type(error).__name__}: {error}"


def summed(here: Here, rank: int) -> float:
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return float(tensor)


def reduce_in_background(here: Here, rank: int) -> str:
    def reduce() -> None:
        here.outcome = outcome(lambda: dist.all_reduce(torch.ones(1))) or "done"

    here.blocked = threading.Thread(target=reduce, daemon=True)
    here.blocked.start()
    return "begun"


ENDINGS: Mapping[str, Callable[[], object]] = {
    "the owner aborts": lambda: default().abort("the owner says so"),
    "torch destroys": dist.destroy_process_group,
    "torch aborts": c10d._abort_process_group,
}


def end_and_join(here: Here, rank: int, ending: str) -> str:
    if not here.blocked.is_alive():
        return f"was not blocked: {here.outcome}"
    ENDINGS[ending]()
    here.blocked.join(60)
    return str(here.outcome)


def default() -> Any:
    return dist.group.WORLD


def configure(here: Here, rank: int, address: str, world_size: int) -> tuple[int, int, list[int]]:
    """Configure the default group, as its owner does."""
    default().configure(address, rank, world_size)
    return dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(default())


def sub_group(here: Here, rank: int, backend: str | None, ranks: list[int]) -> Any:
    """Sum over a subgroup and destroy it; return its backend, its ranks, the own rank in it, and the sum."""
    group = dist.new_group(ranks, backend=backend, timeout=timedelta(seconds=60))
    if rank not in ranks:
        return group == dist.GroupMember.NON_GROUP_MEMBER
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, group=group)
    dist.broadcast(tensor, src=ranks[-1], group=group)
    answer = dist.get_backend(group), dist.get_process_group_ranks(group), dist.get_rank(group), float(tensor)
    dist.destroy_process_group(group)
    return answer


def by_name_and_mesh(here: Here, rank: int) -> tuple[float, float]:
    """Run a functional collective by the group's name, and one over a device mesh."""
    total = functional.all_reduce(torch.ones(1), "sum", default())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    most = functional.all_reduce(torch.tensor([float(rank)]), "max", mesh["all"])
    return float(total), float(most)


def objects(here: Here, rank: int) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": rank})
    dist.barrier()
    return gathered


def destroy(here: Here, rank: int) -> str:
    dist.destroy_process_group()
    return "destroyed"


def held(here: Here, rank: int) -> tuple[int, int]:
    """Return how many threads and descriptors this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def make_ddp(here: Here, rank: int) -> str:
    torch.manual_seed(0)
    here.model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    return "made"


def gradient(here: Here, rank: int, factor: float) -> list[float] | str:
    """Return the gradient of one step whose inputs are `factor` times rank + 1; the error's name if it
    fails.
    """
    here.model.zero_grad()
    inputs = torch.full((2,), factor * (rank + 1))
    if error := error_of(lambda: here.model(inputs).sum().backward()):
        return type(error).__name__
    found = next(here.model.parameters()).grad
    return [float(value) for value in found.flatten()]


def init_to_reconfigure(
    here: Here, rank: int, backend: str, port: int, world_size: int
) -> tuple[str, int, int]:
    """Call init_process_group for a group whose user brings its members together; return its handle."""
    prepare(here, backend)
    here.store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        backend,
        store=here.store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
        enable_reconfigure=True,  # type: ignore[call-arg] # torch has it from 2.14 on
    )
    return handle(here, rank), dist.get_rank(), dist.get_world_size()


def handle(here: Here, rank: int) -> str:
    return dist._get_reconfigure_handle()  # type: ignore[attr-defined, no-any-return]


def reconfigure(here: Here, rank: int, number: int, handles: list[str]) -> tuple[int, int, list[int]]:
    dist._reconfigure(uuid=number, handles=handles).wait()  # type: ignore[attr-defined]
    return dist.get_rank(), dist.get_world_size(), dist.get_process_group_ranks(default())
