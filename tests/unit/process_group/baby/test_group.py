"""Baby Gloo: two members in this process, each with its backend in a subprocess."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.forking import is_so_in_a_fork
from tests.managers import error_of
from tests.unit.process_group.conftest import LIMIT_S, Party, wait_until
from tests.waiting import soon, wait_for
from torchft_like.errors import (
    NotSupportedError,
    ProcessGroupAbortedError,
    ProcessGroupNotConfiguredError,
    SubprocessLostError,
)
from torchft_like.gang import ProcessGroupGang, all_sum
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupBabyNCCL,
)
from torchft_like.process_group.baby import group as backend
from torchft_like.process_group.baby import requests
from torchft_like.process_group.baby.fork_pool import WATCHED_MAX, fork_pool
from torchft_like.process_group.baby.group import RemoteBackend
from torchft_like.process_group.baby.heartbeat import Heartbeat
from torchft_like.process_group.checking import Check
from torchft_like.process_group.gloo import GLOO_THREADS_COUNT
from torchft_like.testing.processes import wait_ended

pytestmark = pytest.mark.usefixtures("no_operator")


def baby() -> ProcessGroup:
    return ProcessGroupBabyGloo(30, check_collectives=False)


def backend_of(group: ProcessGroup) -> RemoteBackend:
    remote: RemoteBackend = group.parent  # type: ignore[attr-defined]
    return remote


def process_of(group: ProcessGroup) -> psutil.Process:
    return psutil.Process(backend_of(group).pid)


def summed(party: Party, groups: list[ProcessGroup], shape: tuple[int, ...] = (3,)) -> list[Tensor]:
    def add(rank: int, group: ProcessGroup) -> Tensor:
        tensor = torch.full(shape, rank + 1.0)
        group.allreduce([tensor]).wait()
        return tensor

    return party.together(groups, add)


def shared(tensor: Tensor) -> Tensor:
    return tensor.share_memory_()  # type: ignore[no-any-return, no-untyped-call]


def shared_mappings(process: psutil.Process) -> list[str]:
    """The segments that the subprocess has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [
        line for line in lines if "rw-s" in line and ("/dev/shm/torch_" in line or "memfd:torchft" in line)
    ]


def test_a_tensor_in_shared_memory_is_mapped_once_and_let_go_when_it_is_gone(party: Party) -> None:
    groups = party.meet(2, baby)
    before = len(shared_mappings(process_of(groups[0])))

    def reduce(rank: int, group: ProcessGroup) -> None:
        tensor = shared(torch.ones(1000))
        for start in range(0, 1000, 100):
            group.allreduce([tensor[start : start + 100]]).wait()

    party.together(groups, reduce)
    assert len(shared_mappings(process_of(groups[0]))) == before + 1

    def is_let_go() -> bool:
        gc.collect()
        summed(party, groups, ())  # the next request says what is gone; its tensor is staged
        return not [line for line in shared_mappings(process_of(groups[0])) if "/dev/shm/torch_" in line]

    assert soon(is_let_go), "the thread that has read the last answer may have kept its tensor for a moment"


def test_a_tensor_in_shared_memory_is_not_copied(party: Party) -> None:
    groups = party.meet(2, baby)

    def reduce(rank: int, group: ProcessGroup) -> None:
        group.allreduce([shared(torch.ones(1000))]).wait()

    party.together(groups, reduce)
    assert not [line for line in shared_mappings(process_of(groups[0])) if "memfd:torchft" in line]


def test_operations_are_counted_until_they_are_over(party: Party) -> None:
    first, second = party.meet(2, baby)
    assert isinstance(first, ProcessGroupBabyGloo)
    works = [first.allreduce([torch.ones(1)]) for _ in range(5)]
    assert first.num_active_work() == 5
    for _ in range(5):
        second.allreduce([torch.ones(1)]).wait()
    for work in works:
        assert isinstance(work, ProcessGroupBabyGloo.WORK_CLASS)
        work.wait()
    assert first.num_active_work() == 0


def test_of_many_operations_at_once_each_is_answered(party: Party) -> None:
    """The first ones by the subprocess's first thread, those beyond what it watches by the backend's."""
    groups = party.meet(2, baby)
    tensors = [[torch.full((1,), float(n)) for n in range(3 * WATCHED_MAX)] for _ in groups]
    works = [group.allreduce([tensor]) for group, own in zip(groups, tensors, strict=True) for tensor in own]
    for work in works:
        work.wait()
    for own in tensors:
        assert [tensor.item() for tensor in own] == [2.0 * n for n in range(3 * WATCHED_MAX)]


@pytest.mark.progress
def test_a_killed_backend_fails_what_is_under_way_and_configure_is_clean(party: Party) -> None:
    groups = party.meet(2, baby)
    waited = groups[0].allreduce([torch.ones(3)])
    followed = groups[0].allreduce([torch.ones(3)]).get_future()
    waiter = party.aside(waited.wait)
    peer = party.aside(groups[1].recv([torch.ones(3)], 0, 9).wait)
    process_of(groups[0]).send_signal(signal.SIGKILL)
    with pytest.raises(SubprocessLostError, match=r"SIGKILL.*configure"):
        waiter.result(LIMIT_S)
    with pytest.raises(RuntimeError, match=r"Connection (closed|reset) by peer"):
        peer.result(LIMIT_S)
    with pytest.raises(RuntimeError, match="SIGKILL"):
        followed.wait()
    assert isinstance(groups[0].errored(), SubprocessLostError)
    party.configure(groups)
    assert groups[0].errored() is None
    assert summed(party, groups)[0].tolist() == [3, 3, 3]


@pytest.mark.progress
@pytest.mark.parametrize("how", ["wait", "future", "full channel"])
def test_a_stopped_backend_fails_what_waits_long_before_the_timeout(party: Party, how: str) -> None:
    """The timeout is longer than the limit of the waits here."""
    groups = party.meet(2, lambda: ProcessGroupBabyGloo(10 * LIMIT_S, check_collectives=False))
    victim = process_of(groups[0])
    victim.send_signal(signal.SIGSTOP)

    def fill() -> None:
        works = [groups[0].allreduce([torch.ones(3)]) for _ in range(5000)]
        works[-1].wait()

    work = groups[0].allreduce([torch.ones(3)])
    waits = {"wait": work.wait, "future": lambda: work.get_future().wait(), "full channel": fill}
    with pytest.raises(RuntimeError, match=r"was stopped \(SIGSTOP.*configure\(\) starts another"):
        party.aside(waits[how]).result(LIMIT_S)
    assert isinstance(groups[0].errored(), SubprocessLostError)
    party.configure(groups)
    assert not victim.is_running()
    assert summed(party, groups)[0].tolist() == [3, 3, 3]


def test_a_stopped_spare_is_not_used(party: Party) -> None:
    (group,) = party.meet(1, baby)
    assert fork_pool.wait_for_spare(LIMIT_S)
    spare = psutil.Process(fork_pool.pids()["spare"])
    spare.send_signal(signal.SIGSTOP)
    wait_for(lambda: spare.status() == psutil.STATUS_STOPPED)  # on a busy machine a signal takes its time
    party.configure([group])
    assert process_of(group) != spare
    assert wait_ended([spare], LIMIT_S)


def test_a_backend_that_is_stopped_now_and_then_goes_on(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_answered, answered = Heartbeat._has_answered, threading.Event()

    def noted(heartbeat: Heartbeat) -> bool:
        if is_answer := has_answered(heartbeat):
            answered.set()
        return is_answer

    monkeypatch.setattr(Heartbeat, "_has_answered", noted)
    groups = party.meet(2, baby)
    waited = torch.ones(3)
    waiter = party.aside(groups[0].allreduce([waited]).wait)
    for _ in range(4):
        process_of(groups[0]).suspend()
        time.sleep(0.3)
        process_of(groups[0]).resume()
        answered.clear()
        wait_until(answered)  # on a busy machine it takes its time until it runs again
    groups[1].allreduce([torch.ones(3)]).wait()
    waiter.result(LIMIT_S)
    assert waited.tolist() == [2.0] * 3


def test_a_backend_that_is_silent_for_longer_is_ended(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks it whether it runs."""
    monkeypatch.setattr(RemoteBackend, "_end_lost", lambda _: None)
    groups = party.meet(2, baby)
    monkeypatch.setattr(backend, "SILENCE_S", 0.2)
    monkeypatch.setattr(requests, "LAST_CHANCE_S", 0.1)
    victim = process_of(groups[0])
    victim.send_signal(signal.SIGSTOP)
    groups[0].set_timeout(timedelta(seconds=0.2))
    with pytest.raises(SubprocessLostError, match="said nothing"):
        groups[0].allreduce([torch.ones(3)]).wait()
    with pytest.raises(SubprocessLostError):
        groups[0].allreduce([torch.ones(3)]).get_future().wait()
    groups[0].set_timeout(timedelta(seconds=30))
    party.configure(groups)
    assert not victim.is_running()
    assert summed(party, groups)[0].tolist() == [3, 3, 3]


@pytest.mark.progress
@pytest.mark.no_leak
def test_an_abort_ends_what_is_under_way_and_the_subprocess(party: Party) -> None:
    groups = party.meet(2, baby)
    victim = process_of(groups[0])
    waiter = party.aside(groups[0].allreduce([torch.ones(3)]).wait)
    followed = groups[0].allreduce([torch.ones(3)]).get_future()
    groups[0].abort("enough")
    with pytest.raises(ProcessGroupAbortedError, match="enough"):
        waiter.result(LIMIT_S)
    with pytest.raises(RuntimeError, match="enough"):
        followed.wait()
    with pytest.raises(ProcessGroupAbortedError, match="enough"):
        groups[0].allreduce([torch.ones(3)])
    groups[0].shutdown()
    assert not victim.is_running()


def test_an_abort_ends_a_configure_whose_peer_never_comes(party: Party) -> None:
    group = party.own(baby())
    configured = party.aside(group.configure, party.prefix(), 0, 2)
    wait_for(lambda: configured.done() or group._generation)  # type: ignore[attr-defined]
    group.abort("not today")
    with pytest.raises(ProcessGroupAbortedError, match="not today"):
        configured.result(LIMIT_S)


def test_a_wait_may_end_before_the_operation(party: Party) -> None:
    groups = party.meet(2, baby)
    tensor = torch.ones(3)
    work = groups[0].allreduce([tensor])
    with pytest.raises(RuntimeError, match="goes on"):
        work.wait(timedelta(milliseconds=10))
    assert not work.is_completed()
    groups[1].allreduce([torch.ones(3)]).wait()
    work.wait()
    assert tensor.eq(2).all()


def test_a_future_may_start_the_next_collective(party: Party) -> None:
    groups = party.meet(2, baby)
    finished = [threading.Event() for _ in groups]

    def chain(rank: int, group: ProcessGroup) -> None:
        tensor = torch.ones(2)

        def again(_: object) -> None:
            group.allreduce([tensor]).wait()
            assert tensor.eq(4).all()
            finished[rank].set()

        group.allreduce([tensor]).get_future().add_done_callback(again)

    party.together(groups, chain)
    for event in finished:
        wait_until(event)


def test_the_environment_of_the_moment_counts(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = party.meet(2, baby)  # the fork server runs since before
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuchinterface")
    with pytest.raises(ProcessGroupNotConfiguredError, match="nosuchinterface"):
        party.configure(groups)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    party.configure(groups)
    assert summed(party, groups)[0].tolist() == [3, 3, 3]


def test_inputs_that_repeat_an_element_and_inference_tensors_work(party: Party) -> None:
    def gather(rank: int, group: ProcessGroup) -> list[list[float]]:
        with torch.inference_mode():
            outputs = [torch.zeros(3) for _ in range(2)]
        dist.all_gather(outputs, torch.full((1,), float(rank)).expand(3), group=group)
        return [output.tolist() for output in outputs]

    assert party.together(party.meet(2, baby), gather)[0] == [[0, 0, 0], [1, 1, 1]]


def test_numbers_of_other_libraries_and_tensors_that_are_sizes_are_handed_over(party: Party) -> None:
    def exchange(rank: int, group: ProcessGroup) -> list[float]:
        output, sizes = torch.zeros(2), [1, 1]
        dist.all_to_all_single(
            output, torch.tensor([1.0, 2.0]) + rank, np.array(sizes), list(torch.tensor(sizes)), group=group
        )
        return output.tolist()

    assert party.together(party.meet(2, baby), exchange) == [[1.0, 2.0], [2.0, 3.0]]


def test_a_message_shorter_than_its_tensor_leaves_the_rest_as_it_was(party: Party) -> None:
    def exchange(rank: int, group: ProcessGroup) -> list[float]:
        tensor = torch.full((4,), 5.0)
        group.allreduce([torch.full((4,), 7.0)]).wait()  # in the memory that the message passes through
        if rank == 0:
            group.send([torch.ones(2)], 1, 0).wait()
        else:
            group.recv([tensor], 0, 0).wait()
        return tensor.tolist()

    assert party.together(party.meet(2, baby), exchange)[1] == [1.0, 1.0, 5.0, 5.0]


def test_a_refused_call_gives_its_memory_back_and_the_next_one_works(party: Party) -> None:
    (group,), sparse = party.meet(1, baby), torch.zeros(3).to_sparse()
    for _ in range(20):
        with pytest.raises(NotSupportedError, match="sparse"):
            group.allreduce_coalesced([torch.zeros(100_000), shared(torch.zeros(10)), sparse])
    assert group.num_active_work() == 0  # type: ignore[attr-defined]
    gc.collect()
    group.allreduce([torch.zeros(100_000)]).wait()
    assert len([line for line in shared_mappings(process_of(group)) if "memfd" in line]) == 1


@pytest.mark.parametrize("check", [False, "new"])
def test_no_later_call_meets_one_that_cannot_be_handed_over(
    party: Party, monkeypatch: pytest.MonkeyPatch, check: Check
) -> None:
    """As where a member has no memory or no descriptor left. Gloo ends a process to which more comes than it
    awaits, which was the peer's.
    """
    groups = party.meet(2, lambda: ProcessGroupBabyGloo(30, check_collectives=check))
    exporter: Any = backend_of(groups[0])._exporter
    stage, failures = exporter.stage, [OSError(errno.EMFILE, os.strerror(errno.EMFILE))]

    def stage_later(tensor: Tensor) -> Any:
        if failures:
            raise failures.pop()
        return stage(tensor)

    def reduce_twice(_: int, group: ProcessGroup) -> list[Exception | None]:
        errors, works = list[Exception | None](), list[dist.Work]()
        for size in (2, 100_000):
            errors.append(error_of(lambda: works.append(group.allreduce([torch.ones(size)]))))  # noqa: B023
        return [error for error in errors if error] + [error_of(work.wait) for work in works]

    monkeypatch.setattr(exporter, "stage", stage_later)
    own, peers = party.together(groups, reduce_twice)
    assert isinstance(own[0], SubprocessLostError)
    assert "Too many open files" in str(own[0])
    assert all(own + peers)
    assert "SIGABRT" not in str(peers)
    party.configure(groups)
    assert [one.tolist() for one in summed(party, groups)] == [[3.0] * 3] * 2


def test_many_answers_that_nobody_has_read_block_nobody(party: Party) -> None:
    (group,) = party.meet(1, baby)
    wrong = [torch.ones(2), torch.ones(3)]
    works = [group.allreduce(wrong) for _ in range(2000)]
    for work in works:
        with pytest.raises(RuntimeError, match="invalid tensor size"):
            work.wait()


def test_a_slow_member_is_waited_for_as_elsewhere(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SILENCE_S", 0.3)
    monkeypatch.setattr(requests, "LAST_CHANCE_S", 0.1)
    first, second = party.meet(2, lambda: ProcessGroupBabyGloo(4, check_collectives=False))
    tensors = [torch.ones(1) for _ in range(6 * GLOO_THREADS_COUNT)]
    works = [first.allreduce([tensor]) for tensor in tensors]
    pause = threading.Event()
    for _ in works:
        pause.wait(0.1)  # all together take longer than the timeout, each one far less
        second.allreduce([torch.ones(1)]).wait()
    for work in works:
        work.wait()
    assert [tensor.item() for tensor in tensors] == [2.0] * len(tensors)


def test_a_trainers_fork_cannot_kill_its_backend(party: Party) -> None:
    groups = party.meet(2, baby)

    def abort() -> bool:
        groups[0].abort("in the fork")
        return True

    assert is_so_in_a_fork(abort)
    assert summed(party, groups)[0].tolist() == [3, 3, 3]


def test_a_fork_server_that_hangs_while_its_spare_dies_is_replaced(party: Party) -> None:
    """The spare dies after it was taken, while its peer has not come: nobody can say how it ended."""
    (group,) = party.meet(1, baby)
    assert fork_pool.wait_for_spare(LIMIT_S)
    pids = fork_pool.pids()
    server, spare = psutil.Process(pids["server"]), psutil.Process(pids["spare"])
    server.send_signal(signal.SIGSTOP)
    try:
        configured = party.aside(group.configure, party.prefix(), 0, 2)
        wait_for(lambda: fork_pool.pids().get("spare") != spare.pid)
        spare.kill()
        with pytest.raises(ProcessGroupNotConfiguredError, match="has ended or does not answer"):
            configured.result(LIMIT_S)
        party.configure([group])
        group.allreduce([torch.ones(3)]).wait()
    finally:
        server.send_signal(signal.SIGCONT)


@pytest.mark.no_leak
def test_groups_that_nobody_shuts_down_leave_no_descriptor(party: Party) -> None:
    def use_one() -> None:
        group = ProcessGroupBabyGloo(LIMIT_S, check_collectives=False)
        group.configure(party.prefix(), 0, 1)
        group.allreduce([torch.ones(3)]).wait()
        group.abort("dropped")

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    use_one()
    before = descriptors()
    for _ in range(5):
        use_one()
    assert soon(lambda: descriptors() <= before + 4)  # a child's end is seen later; a spare may be coming


def test_preparing_a_group_takes_no_longer_than_it_may(party: Party) -> None:
    fork_pool.stop()
    group = baby()
    server = psutil.Process(fork_pool.pids()["server"])
    server.suspend()  # no subprocess comes
    try:
        party.aside(group.prepare, timedelta(microseconds=1)).result(LIMIT_S)
        assert "spare" not in fork_pool.pids()
    finally:
        server.resume()


def test_a_spare_is_not_told_of_a_device_that_nobody_has_chosen() -> None:
    group: Any = SimpleNamespace(_device=None)  # a real one wants NCCL
    assert ProcessGroupBabyNCCL._warm_up(group) is None


def test_preparing_a_group_has_a_subprocess_wait_for_the_one_that_it_wraps() -> None:
    fork_pool.stop()
    ErrorSwallowingProcessGroupWrapper(baby()).prepare(timedelta(seconds=LIMIT_S))
    assert "spare" in fork_pool.pids()


def test_parts_of_a_gang_have_subprocesses_of_their_own(party: Party) -> None:
    def act(_: int, group: ProcessGroup) -> tuple[type, float]:
        part = ProcessGroupGang(group, torch.device("cpu")).create_gang([1, 0])
        assert part is not None
        total = all_sum(part, 1).item()
        kind = type(part.as_process_group())
        part.close()
        return kind, total

    assert party.together(party.meet(2, baby), act) == [(ProcessGroupBabyGloo, 2)] * 2
