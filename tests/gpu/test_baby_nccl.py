"""ProcessGroupBabyNCCL in a group of one, NCCL in the subprocess; test_ranks has groups of several."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from datetime import timedelta

import psutil
import pytest
import torch

from tests.gpu.device import busy
from tests.unit.process_group.conftest import LIMIT_S, Party
from tests.waiting import soon, wait_for
from torchft_like.errors import NotSupportedError, ProcessGroupAbortedError, SubprocessLostError
from torchft_like.process_group import ProcessGroupBabyNCCL
from torchft_like.process_group.baby.group import RemoteBackend

pytestmark = pytest.mark.usefixtures("no_operator")


@pytest.fixture
def group(party: Party) -> Iterator[ProcessGroupBabyNCCL]:
    """Configured, of one member, without the check, which would wait for the others before each operation."""
    group = ProcessGroupBabyNCCL(LIMIT_S, check_collectives=False)
    group.configure(party.prefix(), 0, 1)
    yield group
    group.shutdown()
    torch.cuda.synchronize()


def subprocess_of(group: ProcessGroupBabyNCCL) -> psutil.Process:
    remote: RemoteBackend = group.parent
    return psutil.Process(remote.pid)


def test_no_thread_waits_for_the_device(group: ProcessGroupBabyNCCL) -> None:
    tensor = torch.ones(1000, device="cuda")
    group.allreduce([tensor]).wait()
    torch.cuda.synchronize()
    busy()
    tensor.fill_(2.0)
    work = group.allreduce([tensor])
    work.wait()
    assert not torch.cuda.current_stream().query()  # it is still busy with what came before
    assert not work.is_completed()
    doubled = tensor * 2
    torch.cuda.synchronize()
    assert work.is_completed()
    assert doubled.eq(4).all()


def test_the_order_of_streams_holds_both_ways(group: ProcessGroupBabyNCCL) -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    tensor = torch.zeros(1_000_000, device="cuda")
    torch.cuda.synchronize()
    for number in range(20):
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]
            tensor.fill_(float(number))
            work = group.allreduce([tensor])
        work.wait()  # on the default stream
        assert tensor.eq(number).all()
        side.wait_stream(torch.cuda.current_stream())


def test_capture_in_a_graph_is_refused_and_the_group_goes_on(group: ProcessGroupBabyNCCL) -> None:
    tensor = torch.ones(4, device="cuda")

    def capture() -> None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            tensor.add_(1)
            group.allreduce([tensor])

    with pytest.raises(NotSupportedError, match="cannot be captured in a CUDA graph"):
        capture()
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [1.0] * 4


def test_the_memory_that_tensors_are_staged_in_does_not_grow(group: ProcessGroupBabyNCCL) -> None:
    def drop_some() -> None:
        for _ in range(10):
            group.allreduce([torch.ones(25_000_000, device="cuda")]).wait()
        torch.cuda.synchronize()

    def settle() -> None:
        gc.collect()
        for _ in range(3):  # each finds what is over by then
            group.allreduce([torch.ones(1, device="cuda")]).wait()
            torch.cuda.synchronize()
        torch.cuda.empty_cache()

    drop_some()
    settle()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        drop_some()
        settle()
    assert torch.cuda.memory_reserved() <= before + 4 * 1024 * 1024


def test_nothing_leaks_when_the_subprocess_is_killed_in_an_operation(
    party: Party, group: ProcessGroupBabyNCCL
) -> None:
    def one_life() -> None:
        tensor = torch.ones(25_000_000, device="cuda")
        busy()
        work = group.allreduce([tensor])
        work.wait()
        subprocess_of(group).send_signal(signal.SIGKILL)
        wait_for(lambda: group.parent.lost() is not None)
        torch.cuda.synchronize()
        assert isinstance(group.errored(), SubprocessLostError)
        group.configure(party.prefix(), 0, 1)

    def measure() -> tuple[int, int]:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    one_life()
    before = measure()
    for _ in range(3):
        one_life()
    after = measure()
    assert after[0] <= before[0]
    assert after[1] <= before[1] + 4 * 1024 * 1024


def test_an_abort_ends_the_subprocess_and_the_stream_goes_on(group: ProcessGroupBabyNCCL) -> None:
    victim = subprocess_of(group)
    work = group.allreduce([torch.ones(4, device="cuda")])
    group.abort("enough")
    with pytest.raises(ProcessGroupAbortedError, match="enough"):
        group.allreduce([torch.ones(4, device="cuda")])
    torch.cuda.synchronize()
    wait_for(lambda: not victim.is_running())
    del work


def test_an_operation_that_takes_too_long_ends_the_subprocess_not_the_trainer(
    group: ProcessGroupBabyNCCL,
) -> None:
    group.set_timeout(timedelta(seconds=0.3))
    busy()
    group.allreduce([torch.ones(4, device="cuda")])
    wait_for(lambda: group.parent.lost() is not None)
    assert isinstance(group.errored(), SubprocessLostError)


def test_the_contexts_of_ended_subprocesses_are_given_back(party: Party, group: ProcessGroupBabyNCCL) -> None:
    free = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        group.configure(party.prefix(), 0, 1)
        group.allreduce([torch.ones(4, device="cuda")]).wait()
        torch.cuda.synchronize()
    # The ones before are gone, with their contexts; a spare is there or on its way.
    assert soon(lambda: torch.cuda.mem_get_info()[0] > free - 3 * 1024**3)
