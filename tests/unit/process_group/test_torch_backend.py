"""A group under torch's functions has a backend where torch's C++ looks for one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend, HashStore, TCPStore

from torchft_like.process_group import ProcessGroup, ProcessGroupGloo
from torchft_like.process_group.torch_interface import attach_backend

NEEDS_A_PYTHON_BACKEND = pytest.mark.skipif(
    not hasattr(Backend, "get_error"), reason="before torch 2.14 no Python class can be a backend"
)


@pytest.fixture(params=["torchft-gloo", "torchft-baby-gloo", "torchft-dummy"])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    dist.init_process_group(
        request.param, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_torch_makes_a_group_of_each_registered_backend_and_finds_its_devices(group: Any) -> None:
    assert isinstance(group, ProcessGroup)
    assert dist.get_pg_count() == 1
    assert group._device_types == [torch.device("cpu")]
    if hasattr(dist, "get_backend_impl"):
        assert dist.get_backend_impl() is group
    assert not group._has_hooks()  # torch's C++ asks the default backend


@NEEDS_A_PYTHON_BACKEND
def test_an_operator_of_torch_leads_to_the_group(group: Any) -> None:
    received: list[tuple[int, ...]] = []
    run = group._run
    group._run = lambda row, args, kwargs: (
        received.append(tuple(args[0][0].shape)) or run(row, args, kwargs)  # type: ignore[func-returns-value]
    )
    dispatch(group, torch.ones(3)).wait()
    assert received == [(3,)]


@NEEDS_A_PYTHON_BACKEND
def test_an_operator_of_torch_on_an_aborted_group_raises() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=60)
    group.configure(f"127.0.0.1:{store.port}/first", 0, 1)
    group.register("aborted")
    try:
        group.abort("the test says so")
        with pytest.raises(RuntimeError, match="the test says so"):
            dispatch(group, torch.ones(1)).wait()
        group.configure(f"127.0.0.1:{store.port}/second", 0, 1)
        dispatch(group, torch.ones(1)).wait()
    finally:
        group.unregister()
        group.shutdown()


def test_the_backend_does_not_keep_the_group_alive() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=60)
    group.configure(f"127.0.0.1:{store.port}/group", 0, 1)
    attach_backend(group)
    attach_backend(group)
    group.shutdown()
    seen = weakref.ref(group)
    del group
    gc.collect()
    assert seen() is None


def dispatch(group: Any, tensor: torch.Tensor) -> Any:
    """An allreduce as torch's C++ dispatches it, without a look at the methods of the Python class."""
    return dist.ProcessGroup.allreduce(group, [tensor])
