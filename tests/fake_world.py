"""Torch's fake world: a default group of several ranks in one process, whose collectives move nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[None]:
    """Be rank `rank` of the default group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_mesh(size: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """Be rank `rank` of a mesh with the dimension "shard"."""
    with fake_world(size, rank):
        yield DeviceMesh("cpu", list(range(size)), mesh_dim_names=("shard",))
