"""ProcessGroupNCCL in the process of the test: groups of one member, or of two that never get to talk.

NCCL launches no kernel for a group of one; test_ranks has groups of several. An operation that takes too
long is here one behind a kernel that keeps the stream busy.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.gpu.device import busy
from tests.unit.process_group.conftest import LIMIT_S, Party
from tests.waiting import wait_for
from torchft_like.errors import NotSupportedError, ProcessGroupAbortedError, ProcessGroupError
from torchft_like.futures import future_timeout
from torchft_like.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroupNCCL
from torchft_like.process_group.store import AbortableStore, GroupMembers, meet, parse_store_address
from torchft_like.shared_memory import TorchCuda

SHORT = timedelta(seconds=0.3)
NCCL_THREADS = {"pt_nccl_watchdg", "pt_nccl_heartbt"}


@pytest.fixture
def group(party: Party) -> Iterator[ProcessGroupNCCL]:
    """Configured, of one member."""
    group = ProcessGroupNCCL(LIMIT_S)
    group.configure(party.prefix(), 0, 1)
    yield group
    group.shutdown()
    torch.cuda.synchronize()


def test_coalesced_collectives(group: ProcessGroupNCCL) -> None:
    tensors = [torch.full((3,), float(value), device="cuda") for value in range(3)]
    with _coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert [tensor[0].item() for tensor in tensors] == [0.0, 1.0, 2.0]


def test_wait_blocks_the_stream_and_not_the_thread(group: ProcessGroupNCCL) -> None:
    busy()
    tensor = torch.ones(4, device="cuda")
    work = group.allreduce([tensor])
    assert work.wait()
    assert not work.is_completed()
    assert tensor.tolist() == [1.0] * 4  # this does block
    assert work.is_completed()
    assert work.is_success()


def test_barrier_blocks_the_thread(group: ProcessGroupNCCL) -> None:
    busy()
    is_past = TorchCuda().mark(torch.cuda.current_stream())
    assert not is_past()
    dist.barrier(group=group, device_ids=[torch.cuda.current_device()])
    assert is_past()


def test_torch_watches_nothing_so_nothing_ends_the_process(group: ProcessGroupNCCL) -> None:
    dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    names = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    assert names & NCCL_THREADS == set()
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"


def test_operation_that_takes_too_long_aborts(group: ProcessGroupNCCL, party: Party) -> None:
    group.set_timeout(SHORT)
    busy()
    work = group.allreduce([torch.ones(4, device="cuda")])
    wait_for(lambda: group._generation is not None and group._generation.error() is not None)
    with pytest.raises(ProcessGroupAbortedError, match="allreduce was not done before the timeout"):
        work.wait()
    error = group.errored()
    assert isinstance(error, ProcessGroupError)
    assert not isinstance(error, ProcessGroupAbortedError)
    assert "allreduce" in str(error)
    group.set_timeout(timedelta(seconds=LIMIT_S))
    assert_usable_again(group, party)


def test_swallowed_error_leaves_a_future_with_tensors_of_the_device(group: ProcessGroupNCCL) -> None:
    swallowing = ErrorSwallowingProcessGroupWrapper(group)
    group.abort("a member was lost")
    tensor = torch.ones(4, device="cuda")
    assert swallowing.allreduce([tensor]).get_future().wait()[0].is_cuda
    assert swallowing.error() is not None


def test_bounded_future_carries_tensors_of_the_device(group: ProcessGroupNCCL) -> None:
    future = group.allreduce([torch.ones(4, device="cuda")]).get_future()
    assert future_timeout(future, timedelta(seconds=LIMIT_S)).wait()[0].tolist() == [1.0] * 4


def test_tensor_that_nobody_holds_is_kept_until_the_operation_is_over(group: ProcessGroupNCCL) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    busy()
    group.allreduce([torch.ones(1 << 20, device="cuda")])
    gc.collect()
    assert torch.cuda.memory_allocated() >= before + (4 << 20)
    wait_for(lambda: torch.cuda.memory_allocated() <= before)


def test_waited_operation_holds_no_memory(group: ProcessGroupNCCL) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated()
    busy()
    group.allreduce([torch.ones(1 << 20, device="cuda")]).wait()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


def test_capture_in_a_graph_is_refused(group: ProcessGroupNCCL) -> None:
    tensor = torch.ones(4, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.add_(1)
            group.allreduce([tensor])

    with pytest.raises(NotSupportedError, match="cannot be captured in a CUDA graph"):
        capture()


def test_abort_reaches_a_configure_whose_peer_is_lost_while_nccl_connects(party: Party) -> None:
    group = ProcessGroupNCCL(LIMIT_S)
    party.own(group)
    prefix = party.prefix()
    configuring = party.aside(group.configure, prefix, 0, 2)
    members = GroupMembers(parse_store_address(prefix), 1, 2, timedelta(seconds=LIMIT_S))
    with contextlib.closing(AbortableStore(members.store, members.timeout)) as peer:
        peer.connect()
        meet(peer, members)
    with pytest.raises(TimeoutError):
        configuring.result(0.5)
    group.abort("a member was lost")
    with pytest.raises(ProcessGroupAbortedError, match="a member was lost"):
        configuring.result(LIMIT_S)
    assert_usable_again(group, party)


def test_what_nccl_refuses_is_an_error_and_not_the_end(party: Party) -> None:
    """Two ranks on one device of one host."""
    prefix = party.prefix()
    peer = multiprocessing.get_context("spawn").Process(target=_fail_to_configure, args=(prefix,))
    peer.start()
    group = ProcessGroupNCCL(20)
    party.own(group)
    try:
        with pytest.raises(ProcessGroupError):
            group.configure(prefix, 0, 2)
        peer.join(LIMIT_S)
        assert peer.exitcode == 0
    finally:
        peer.kill()
        peer.join()
    assert_usable_again(group, party)


def assert_usable_again(group: ProcessGroupNCCL, party: Party) -> None:
    group.configure(party.prefix(), 0, 1)
    tensor = torch.full((4,), 3.0, device="cuda")
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [3.0] * 4
    assert group.errored() is None


def _fail_to_configure(prefix: str) -> None:
    group = ProcessGroupNCCL(20)
    try:
        group.configure(prefix, 1, 2)
    except ProcessGroupError:
        os._exit(0)
    os._exit(1)
