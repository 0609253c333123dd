"""What ProcessGroupNCCL decides, without a GPU: torch.cuda and NCCL itself are stand-ins here.

Whether the real ones behave as these do is what tests/gpu is for.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import AllreduceOptions

from tests.unit.process_group.conftest import LIMIT_S, Party, wait_until
from tests.unit.process_group.fake_nccl import FakeDevice, FakeEvent, FakeWork, install
from tests.waiting import wait_for
from torchft_like.errors import (
    CollectiveMismatchError,
    NotSupportedError,
    ProcessGroupAbortedError,
    ProcessGroupError,
)
from torchft_like.process_group import (
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR,
    nccl,
    trigger_nccl_fr_trace_through_pipe,
)
from torchft_like.process_group.checking import Check
from torchft_like.process_group.nccl import (
    TORCH_FR_DUMP_TEMP_FILE_ENV,
    ProcessGroupNCCL,
    naming_even_splits,
    send_traces_to,
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install(monkeypatch)


@pytest.fixture
def group(device: FakeDevice, party: Party) -> ProcessGroupNCCL:
    """Configured, of one member."""
    group = ProcessGroupNCCL(LIMIT_S)
    party.own(group)
    group.configure(party.prefix(), 0, 1)
    return group


@pytest.mark.skipif(dist.is_nccl_available(), reason="this torch has NCCL")
def test_torch_without_nccl_is_refused_with_the_cure() -> None:
    with pytest.raises(NotSupportedError, match="install a CUDA build of torch, or use ProcessGroupGloo"):
        ProcessGroupNCCL()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_machine_without_gpu_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with pytest.raises(NotSupportedError, match="check the driver and CUDA_VISIBLE_DEVICES"):
        ProcessGroupNCCL()


def test_group_is_one_of_cuda(group: ProcessGroupNCCL) -> None:
    assert group._device_types == [torch.device("cuda")]
    assert group.getBackendName() == "torchft-nccl"


def test_nonblocking_calls_give_up_after_the_groups_timeout(device: FakeDevice) -> None:
    ProcessGroupNCCL(timedelta(seconds=7.5))
    ProcessGroupNCCL(100)
    assert os.environ["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "8"


def test_environment_holds_for_the_constructor(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    blocking, warning, _ = nccl._CONSTRUCTOR_ENVIRONMENT
    monkeypatch.delenv(blocking, raising=False)
    monkeypatch.setenv(warning, "false")
    ProcessGroupNCCL()
    assert (os.environ[blocking], os.environ[warning]) == ("0", "false")
    with nccl._constructor_environment():
        assert (os.environ[blocking], os.environ[warning]) == ("1", "0")
    assert (os.environ[blocking], os.environ[warning]) == ("0", "false")


def test_synchronous_call_gets_a_handle_too(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    options = AllreduceOptions()
    options.asyncOp = False
    work = group.allreduce([torch.zeros(1)], options)
    assert work is not None
    assert device.communicators[0].seen_async[-1]
    assert not options.asyncOp


def test_wait_orders_the_stream_and_not_the_thread(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    work = group.allreduce([torch.zeros(1)])
    assert work.wait()
    assert device.stream_waits_for[-1] is device.works[-1]
    assert not work.is_completed()
    device.works[-1].finish()
    assert work.is_completed()
    assert work.is_success()


def test_waited_operation_holds_no_tensor(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    work = group.allreduce([torch.zeros(1)])
    held = weakref.ref(device.works.pop())
    assert held() is not None
    work.wait()
    device.stream_waits_for.clear()
    del work
    gc.collect()
    assert held() is None


def test_unwaited_operation_holds_its_tensors(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    group.allreduce([torch.zeros(1)])
    held = weakref.ref(device.works.pop())
    gc.collect()
    assert held() is not None


def test_future_is_torchs_own(group: ProcessGroupNCCL) -> None:
    tensor = torch.zeros(1)
    assert group.allreduce([tensor]).get_future().wait() == [tensor]


@pytest.mark.progress
def test_operation_that_takes_too_long_aborts(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    options = AllreduceOptions()
    options.timeout = timedelta(seconds=0.02)
    work = group.allreduce([torch.zeros(1)], options)
    wait_until(device.communicators[0].aborted)
    with pytest.raises(ProcessGroupAbortedError, match=r"allreduce was not done within 0\.02 s"):
        work.wait()
    error = group.errored()
    assert isinstance(error, ProcessGroupError)
    assert not isinstance(error, ProcessGroupAbortedError)
    assert "allreduce (1 operations) of rank 0 of 1" in str(error)


def test_group_timeout_holds_where_a_call_names_none(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    group.set_timeout(timedelta(seconds=0.02))
    group.allreduce([torch.zeros(1)])
    wait_until(device.communicators[0].aborted)
    assert "0.02 s" in str(group.errored())


def test_wait_with_a_timeout_blocks_and_aborts(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    work = group.allreduce([torch.zeros(1)])
    with pytest.raises(ProcessGroupAbortedError, match="allreduce was not done before the timeout"):
        work.wait(timedelta(seconds=0.01))
    wait_until(device.communicators[0].aborted)


def test_barrier_blocks_the_thread(group: ProcessGroupNCCL, device: FakeDevice, party: Party) -> None:
    before = len(device.works)
    waiting = party.aside(lambda: group.barrier().wait())
    wait_for(lambda: len(device.works) > before)
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    device.works[-1].finish()
    assert waiting.result(LIMIT_S)


@pytest.mark.progress
def test_abort_ends_a_blocked_wait(group: ProcessGroupNCCL, device: FakeDevice, party: Party) -> None:
    work = group.barrier()
    waiting = party.aside(work.wait)
    group.abort("a member was lost")
    with pytest.raises(ProcessGroupAbortedError, match="a member was lost"):
        waiting.result(LIMIT_S)


def test_abort_after_everything_was_done_spoils_nothing(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    work = group.allreduce([torch.zeros(1)])
    assert group.errored() is None
    group.abort("a member was lost")
    wait_until(device.communicators[0].aborted)
    assert isinstance(group.errored(), ProcessGroupAbortedError)
    assert work.is_completed()
    assert work.wait()


def test_abort_amid_an_operation_names_it(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    group.allreduce([torch.zeros(1)]).wait()
    group.abort("a member was lost")
    error = group.errored()
    assert error is not None
    assert not isinstance(error, ProcessGroupAbortedError)
    assert "allreduce (1 operations)" in str(error)
    assert "a member was lost" in str(error)


def test_stream_waits_for_an_operation_that_was_cut_off(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    work = group.allreduce([torch.zeros(1)])
    group.abort("a member was lost")
    wait_until(device.communicators[0].aborted)
    device.stream_waits_for.clear()
    with pytest.raises(ProcessGroupAbortedError):
        work.wait()
    assert device.stream_waits_for == [device.works[-1]]


def test_nobody_asks_nccl_during_an_abort(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    """torch would wait for the end of the abort, and hold the GIL while it does."""
    device.autofinish = False
    device.abort_may_end.clear()
    works = [group.allreduce([torch.zeros(1)]) for _ in range(2)]
    group.abort("a member was lost")
    wait_until(device.is_aborting)
    assert [work.is_completed() for work in works] == [False, False]
    assert "allreduce (2 operations)" in str(group.errored())
    with pytest.raises(ProcessGroupAbortedError):
        works[0].wait(timedelta(seconds=LIMIT_S))
    device.abort_may_end.set()
    wait_for(lambda: all(work.is_completed() for work in works))
    assert device.asked_during_abort == 0


def test_error_of_the_communicator_aborts_early(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    group.allreduce([torch.zeros(1)])
    for work in device.works:
        work.error = RuntimeError("remote process exited or there was a network error")
    wait_until(device.communicators[0].aborted)
    error = str(group.errored())
    assert "remote process exited" in error
    assert "allreduce (1 operations)" in error


def test_failed_device_is_told(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    group.allreduce([torch.zeros(1)]).wait()
    device.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert "an illegal memory access" in str(group.errored())
    device.failure = None


def test_whoever_asks_for_errors_waits_for_the_operations_and_no_stream(
    group: ProcessGroupNCCL, device: FakeDevice, party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: pytest.fail("it may have anything to do"))
    device.autofinish = False
    group.allreduce([torch.zeros(1)])
    asking = party.aside(group.errored)
    with pytest.raises(TimeoutError):
        asking.result(0.05)
    device.works[-1].finish()
    assert asking.result(LIMIT_S) is None


def test_tensors_live_until_nccl_is_off_the_device(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.autofinish = False
    device.abort_takes_effect = False
    tensor = torch.zeros(1)
    handle = group.allreduce([tensor])
    memory = weakref.ref(tensor)
    del tensor
    group.abort("a member was lost")
    wait_for(lambda: device.works[-1].tensors == [])
    gc.collect()
    assert memory() is not None
    device.works[-1].off_the_device.set()

    def is_freed() -> bool:
        group.errored()
        gc.collect()
        return memory() is None

    wait_for(is_freed)
    assert not handle.is_success()


def test_an_abort_needs_no_room_in_a_stream(
    group: ProcessGroupNCCL, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA blocks a thread that has one more wait for a stream with very many."""
    device.autofinish = False
    work = group.allreduce([torch.zeros(1)])
    communicator, block = device.communicators[0], FakeWork.block_current_stream

    def block_until_there_is_room(work: FakeWork) -> None:
        wait_until(communicator.aborted)
        block(work)

    monkeypatch.setattr(FakeWork, "block_current_stream", block_until_there_is_room)
    group.abort("a member was lost")
    wait_for(work.is_completed)
    assert communicator.aborted.is_set()
    assert "allreduce (1 operations)" in str(group.errored())


@pytest.mark.parametrize("check", [None, "new", True])
def test_the_ranks_calls_are_compared(
    device: FakeDevice, party: Party, no_operator: None, check: Check | None
) -> None:
    groups = party.meet(2, lambda: ProcessGroupNCCL(LIMIT_S, check_collectives=check))
    works = [group.allreduce([torch.zeros(1 + rank)]) for rank, group in enumerate(groups)]
    for work in works:
        with pytest.raises(CollectiveMismatchError):
            work.wait()


@pytest.mark.no_zombie
def test_next_generation_awaits_the_device(group: ProcessGroupNCCL, device: FakeDevice, party: Party) -> None:
    device.autofinish = False
    device.abort_takes_effect = False
    group.allreduce([torch.zeros(1)])
    configuring = party.aside(group.configure, party.prefix(), 0, 1)
    wait_until(device.communicators[0].aborted)
    with pytest.raises(TimeoutError):
        configuring.result(0.05)
    assert len(device.communicators) == 1
    device.works[-1].off_the_device.set()
    configuring.result(LIMIT_S)
    assert len(device.communicators) == 2
    assert group.errored() is None


def test_operations_no_abort_ends_are_told(group: ProcessGroupNCCL, device: FakeDevice, party: Party) -> None:
    device.autofinish = False
    device.abort_takes_effect = False
    group.set_timeout(timedelta(seconds=0.05))
    group.allreduce([torch.zeros(1)])
    with pytest.raises(ProcessGroupError, match="restart this process, or use ProcessGroupBabyNCCL"):
        group.configure(party.prefix(), 0, 1)
    device.works[-1].off_the_device.set()


def test_abort_reaches_a_configure_whose_peer_never_comes(device: FakeDevice, party: Party) -> None:
    group = ProcessGroupNCCL(LIMIT_S)
    party.own(group)
    configuring = party.aside(group.configure, party.prefix(), 0, 2)
    wait_for(lambda: group._generation)  # an earlier abort would be one of nothing
    with pytest.raises(TimeoutError):
        configuring.result(0.05)
    group.abort("a member was lost")
    with pytest.raises(ProcessGroupAbortedError, match="a member was lost"):
        configuring.result(LIMIT_S)
    assert device.communicators == []


def test_abort_while_nccl_connects_reaches_the_communicator(device: FakeDevice, party: Party) -> None:
    device.may_connect.clear()
    group = ProcessGroupNCCL(LIMIT_S)
    party.own(group)
    configuring = party.aside(group.configure, party.prefix(), 0, 1)
    wait_until(device.connecting)
    group.abort("a member was lost")
    with pytest.raises(ProcessGroupAbortedError, match="a member was lost"):
        configuring.result(LIMIT_S)
    assert not device.communicators[0].aborted.is_set()
    device.may_connect.set()
    wait_until(device.communicators[0].aborted)


def test_configure_anew_does_not_wait_for_one_that_still_connects(device: FakeDevice, party: Party) -> None:
    device.may_connect.clear()
    group = ProcessGroupNCCL(LIMIT_S)
    party.own(group)
    superseded = party.aside(group.configure, party.prefix(), 0, 1)
    wait_until(device.connecting)
    group.configure(party.prefix(), 0, 1)
    with pytest.raises(ProcessGroupAbortedError, match="configured anew"):
        superseded.result(LIMIT_S)
    device.may_connect.set()
    wait_until(device.communicators[0].aborted)
    assert not device.communicators[1].aborted.is_set()
    assert group.allreduce([torch.ones(1)]).wait()
    assert group.errored() is None


def test_peer_that_never_comes_is_named(device: FakeDevice, party: Party) -> None:
    group = ProcessGroupNCCL(1)
    party.own(group)
    with pytest.raises(ProcessGroupError, match="rank 1 did not come within 1 s"):
        group.configure(party.prefix(), 0, 2)


def test_capture_in_a_graph_is_refused(group: ProcessGroupNCCL, device: FakeDevice) -> None:
    device.is_capturing = True
    with pytest.raises(NotSupportedError, match="cannot be captured in a CUDA graph"):
        group.allreduce([torch.zeros(1)])


def test_even_splits_of_an_all_to_all_are_named() -> None:
    """torch would ask NCCL for an all-to-all, and take its answer "in progress" for an error."""
    calls: list[tuple[Any, ...]] = []
    start = naming_even_splits(lambda *args, **kwargs: calls.append((*args[2:], kwargs)), 2)
    out, in_ = torch.zeros(4, 3), torch.zeros(6)
    start(out, in_, [], [], "options")
    start(output=out, input=in_, output_split_sizes=[], input_split_sizes=[], timeout=1)
    start(out, in_, [1, 3], [])
    start(torch.zeros(3), in_, [], [])
    assert calls == [
        ([2, 2], [3, 3], "options", {}),
        ([2, 2], [3, 3], {"timeout": 1}),
        ([1, 3], [], {}),
        ([], [], {}),
    ]


@pytest.mark.no_leak
def test_shutdown_leaves_no_thread(group: ProcessGroupNCCL) -> None:
    group.allreduce([torch.zeros(1)]).wait()
    names = ("torchft-device-watch", "torchft-nccl-abort")
    assert any(thread.name in names for thread in threading.enumerate())
    group.shutdown()
    for thread in threading.enumerate():
        if thread.name in names:
            thread.join(LIMIT_S)
            assert not thread.is_alive()


# Beside a thread that captures a graph.


def test_asking_spoils_no_capture(device: FakeDevice, party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture of the training thread ends with an error if another thread asks in the same mode."""
    asked_beside: list[tuple[str, bool]] = []
    local = threading.local()

    @contextlib.contextmanager
    def beside(device: object) -> Iterator[None]:
        before, local.is_beside = getattr(local, "is_beside", False), True
        yield
        local.is_beside = before

    def query(event: FakeEvent) -> bool:
        asked_beside.append((threading.current_thread().name, getattr(local, "is_beside", False)))
        return all(off_the_device.is_set() for off_the_device in event.behind)

    monkeypatch.setattr(nccl, "beside_captures", beside)
    monkeypatch.setattr(FakeEvent, "query", query)
    group = ProcessGroupNCCL(LIMIT_S)
    party.own(group)
    group.configure(party.prefix(), 0, 1)
    device.autofinish = False
    group.allreduce([torch.zeros(1)]).wait()
    wait_for(lambda: any(name == "torchft-device-watch" for name, _ in asked_beside))
    group.abort("a member was lost")
    wait_until(device.communicators[-1].aborted)
    group.shutdown()
    aside = {name: is_beside for name, is_beside in asked_beside if name.startswith("torchft")}
    # The thread that closes the group asks only for operations that the watch has not dropped by then.
    assert {"torchft-device-watch", "torchft-nccl-abort"} <= set(aside)
    assert all(is_beside for name, is_beside in asked_beside if name.startswith("torchft"))


# Asking torch's flight recorder for a trace: through a real pipe, and where nobody reads one.


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, f"{tmp_path}/rank_")
    return f"{tmp_path}/rank_"


def test_the_reader_of_the_ranks_pipe_is_asked(prefix: str) -> None:
    os.mkfifo(f"{prefix}3.pipe")
    reader = os.open(f"{prefix}3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert trigger_nccl_fr_trace_through_pipe(3)
        assert os.read(reader, 10) == b"1\n"
    finally:
        os.close(reader)


def test_a_pipe_that_nobody_reads_blocks_nobody(prefix: str) -> None:
    os.mkfifo(f"{prefix}3.pipe")
    assert not trigger_nccl_fr_trace_through_pipe(3)
    assert not trigger_nccl_fr_trace_through_pipe(4)  # there is none


def test_without_the_variable_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, raising=False)
    assert not trigger_nccl_fr_trace_through_pipe(0)


def test_each_quorum_has_a_folder_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_FR_DUMP_TEMP_FILE_ENV, f"{tmp_path}/trace")
    prefix = os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV]
    send_traces_to(prefix, None, 1)
    assert os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] == f"{tmp_path}/trace"
    for quorum_id in (7, 8):
        send_traces_to(prefix, quorum_id, 1)
        assert os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] == f"{tmp_path}/trace_quorum_{quorum_id}/1"
        assert (tmp_path / f"trace_quorum_{quorum_id}").is_dir()


def test_a_folder_that_cannot_be_made_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(TORCH_FR_DUMP_TEMP_FILE_ENV, f"{tmp_path}/file/trace")
    send_traces_to(f"{tmp_path}/file/trace", 7, 1)
    assert os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] == f"{tmp_path}/file/trace"
