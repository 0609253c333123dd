"""The functions that test_gang runs on its ranks."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from tests.managers import error_of
from tests.managers import outcome as outcome_of
from torchft_like import ProcessGroupGloo
from torchft_like.gang import (
    Gang,
    ProcessGroupGang,
    ReduceOperation,
    all_sum,
    create_fsdp_gangs,
    create_parallel_gangs,
)

Here = SimpleNamespace
CPU = torch.device("cpu")

# ------------------------------------------------------------------------- fixed members


def be_started(rank: int, port: int, world_size: int) -> None:
    """Set the environment that torchrun would set."""
    torch.set_num_threads(1)
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the test serves it
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }


def start_default_gang(here: Here, rank: int, port: int, world_size: int, backend: str | None) -> int:
    be_started(rank, port, world_size)
    here.gang = ProcessGroupGang.create_default_process_group(CPU, backend=backend)
    return int(here.gang.size)


def start_again(here: Here, rank: int) -> str:
    return str(outcome_of(lambda: ProcessGroupGang.create_default_process_group(CPU)))


def use_everything(here: Here, rank: int) -> dict[str, Any]:
    """Use every function of the gang and of gangs made of it."""
    gang: Gang = here.gang
    gangs = create_fsdp_gangs(create_parallel_gangs(gang, tp_size=2))
    turned = gang.create_gang(list(reversed(range(gang.size))))
    assert turned is not None
    gathered = torch.zeros(turned.size, dtype=torch.int64)
    turned.all_gather(gathered, torch.tensor([rank]))
    objects: list[Any] = [{"rank": rank, "values": torch.arange(rank)}]
    gangs.dp.broadcast_objects(objects, source_rank=1)
    rows = torch.full((2, 3), float(rank))
    gang.all_reduce(rows[:, 1], ReduceOperation.MEAN)  # with gaps, which the gang must leave alone
    gang.barrier()
    return {
        "tp": all_sum(gangs.tp, 10**rank).item(),
        "dp": all_sum(gangs.dp, 10**rank).item(),
        "turned": gathered.tolist(),
        "object": objects[0]["rank"],
        "rows": rows.tolist(),
    }


def train_over_a_part(here: Here, rank: int) -> list[float]:
    """Return the gradient that DDP over a part of the gang leaves."""
    gangs = create_parallel_gangs(here.gang, tp_size=2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False), process_group=gangs.dp.as_process_group())
    ddp(torch.full((1, 2), float(rank))).sum().backward()
    gangs.tp.close()
    gangs.dp.close()
    gradient: list[float] = ddp.module.weight.grad[0].tolist()
    return gradient


def shard_over_a_part(here: Here, rank: int) -> list[float]:
    """Return the gradient that FSDP over a part of the gang leaves."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - the other tests need not load it

    part = here.gang.create_gang([1, 0])
    mesh = DeviceMesh.from_group(part.as_process_group(), "cpu")
    sharded = nn.Linear(2, 4, bias=False)
    fully_shard(sharded, mesh=mesh)
    sharded(torch.full((1, 2), float(rank))).sum().backward()
    whole = sharded.weight.grad.full_tensor()  # type: ignore[union-attr]
    part.close()
    gradient: list[float] = whole[0].tolist()
    return gradient


def run_example(here: Here, rank: int, port: int, world_size: int) -> str:
    """Run examples/parallel_gangs.py in this process, and return what it prints."""
    be_started(rank, port, world_size)
    sys.argv[1:] = []  # a rank has some, and the example takes none
    with contextlib.redirect_stdout(io.StringIO()) as output:
        runpy.run_path("examples/parallel_gangs.py", run_name="__main__")
    return output.getvalue()


def close(here: Here, rank: int) -> bool:
    here.gang.close()
    return dist.is_initialized()


# --------------------------------------------------------------------- a member is killed

CALLS: dict[str, Callable[[Gang], object]] = {
    "barrier": lambda gang: gang.barrier(),
    "all_reduce": lambda gang: gang.all_reduce(torch.ones(1 << 16), ReduceOperation.SUM),
    "all_gather": lambda gang: gang.all_gather(torch.empty(gang.size, 4), torch.ones(4)),
    "all_gather_to_list": lambda gang: gang.all_gather_to_list(
        [torch.empty(4) for _ in range(gang.size)], torch.ones(4)
    ),
    "broadcast": lambda gang: gang.broadcast(torch.ones(1 << 16), source_rank=1),
    "broadcast_objects": lambda gang: gang.broadcast_objects([None], source_rank=1),
    "create_gang": lambda gang: gang.create_gang(range(gang.size)),
    "all_sum": lambda gang: all_sum(gang, 1.0),
}


def configure(here: Here, rank: int, address: str, world_size: int) -> None:
    torch.set_num_threads(1)
    group = ProcessGroupGloo(300)
    group.configure(address, rank, world_size)
    here.group = group
    here.gang = ProcessGroupGang(group, CPU)
    all_sum(here.gang, 1)


def call(here: Here, rank: int, name: str) -> tuple[str | None, bool]:
    """Call a function of the gang, or of its part; return the error's class, and whether it has a cause."""
    error = error_of(lambda: CALLS[name](getattr(here, "part", None) or here.gang))
    if error is None:
        return None, False
    return type(error).__name__, error.__cause__ is not None
