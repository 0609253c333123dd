"""Groups that swallow errors, over real Gloo and a real Manager: members are killed, groups aborted.

Two survivors live in this process, as ranks 1 and 2; rank 0, the root of everything, is a process
that dies. Timeouts are five minutes: whatever ends sooner was ended. Collectives are not compared first:
a death is to be met by the collective itself.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.unit.process_group.test_collectives import ALONE
from torchft_like import LighthouseServer, ManagedProcessGroup, Manager
from torchft_like.errors import QuorumTimeoutError
from torchft_like.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroupGloo
from torchft_like.process_group.alone import tensors_of
from torchft_like.process_group.checking.backend import CHECK_ENV
from torchft_like.process_group.collectives import BY_NAME, COLLECTIVES, POINT_TO_POINT
from torchft_like.testing.ranks import LIMIT_S, Rank

from .gloo_member import serve_store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_operator")]

NAMES = [row.name for row in COLLECTIVES]
BEGUN_S = 0.05  # for the survivors to be inside the collective
MAY_BE_DONE = ("send", "gather", "reduce")  # by then: for whoever only sends
_prefixes = itertools.count()


def join(here: SimpleNamespace, address: str, rank: int, world_size: int) -> str:
    """What the process that dies is asked."""
    os.environ.pop(CHECK_ENV, None)  # as here: it compares on no side
    here.group = ProcessGroupGloo(300, check_collectives=False)
    here.group.configure(address, rank, world_size)
    return "joined"


class Survivors:
    """Ranks 1 and 2 of 3, and a rank 0 that can be killed."""

    def __init__(self) -> None:
        self.store: TCPStore = serve_store()
        self.groups: list[Any] = [
            ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(300, check_collectives=False))
            for _ in range(2)
        ]
        self.threads = ThreadPoolExecutor(8)

    def address(self) -> str:
        return f"127.0.0.1:{self.store.port}/{next(_prefixes)}"

    def on_both(self, act: Callable[[int, Any], Any]) -> list[Future[Any]]:
        return [self.threads.submit(act, rank, group) for rank, group in enumerate(self.groups, 1)]

    def meet(self, victim: Rank) -> None:
        address = self.address()
        joining = self.on_both(lambda rank, group: group.configure(address, rank, 3))
        assert victim.ask(join, address, 0, 3) == "joined"
        results(joining)

    def abort(self) -> None:
        for group in self.groups:
            group.abort("on purpose")

    def go_on_alone(self) -> None:
        """Without rank 0."""
        address = self.address()
        results(self.on_both(lambda rank, group: group.configure(address, rank - 1, 2)))
        assert [group.error() for group in self.groups] == [None, None]
        assert results(self.on_both(summed)) == [3.0, 3.0]

    def end(self) -> None:
        for group in self.groups:
            group.shutdown()
        self.threads.shutdown(cancel_futures=True)


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(LIMIT_S) for future in futures]


def summed(rank: int, group: Any) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


@pytest.fixture(scope="module")
def survivors() -> Iterator[Survivors]:
    with pytest.MonkeyPatch.context() as patch:  # comes before every `no_operator`
        patch.delenv(CHECK_ENV, raising=False)
        survivors = Survivors()
    yield survivors
    survivors.end()


@pytest.fixture
def victim() -> Iterator[Rank]:
    victim = Rank()
    yield victim
    victim.end()


def arguments(name: str) -> tuple[Any, ...]:
    """A call of who is not the root, which is rank 0, in a world of 3."""
    args = copy.deepcopy(ALONE[name][0])
    return {"gather": ([], args[-1]), "scatter": (args[0], [])}.get(name, args) if args else args


def issue(group: Any, name: str, *, by_future: bool) -> bool:
    work = getattr(group, name)(*arguments(name))
    if work is None:
        return True
    if by_future and name not in POINT_TO_POINT:
        work.get_future().wait()
    return bool(work.wait())


def assert_skipped(group: Any, name: str) -> tuple[Any, ...]:
    args: tuple[Any, ...] = copy.deepcopy(ALONE[name][0])
    work = getattr(group, name)(*args)
    assert work is None or work.wait()
    return args


def assert_skipped_as_if_alone(group: Any, name: str) -> None:
    args = assert_skipped(group, name)
    outputs = tensors_of(BY_NAME[name].bind(args, {}).outputs)
    for output, wanted in zip(outputs, tensors_of(ALONE[name][1]), strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_peer_is_no_error_to_who_calls(survivors: Survivors, victim: Rank, name: str) -> None:
    survivors.meet(victim)
    calling = survivors.on_both(lambda rank, group: issue(group, name, by_future=rank == 2))
    wait(calling, timeout=BEGUN_S)
    assert name in MAY_BE_DONE or not any(future.done() for future in calling)
    victim.kill()
    if name == "recv_anysource":  # Gloo, which waits for anybody, does not notice that one is gone
        survivors.abort()
    assert results(calling) == [True, True]
    results(survivors.on_both(summed))
    assert all(isinstance(group.error(), Exception) for group in survivors.groups), "the death was felt"
    assert_skipped_as_if_alone(survivors.groups[0], name)
    survivors.go_on_alone()


@pytest.mark.parametrize("name", NAMES)
def test_an_abort_is_no_error_to_who_is_blocked(survivors: Survivors, victim: Rank, name: str) -> None:
    survivors.meet(victim)  # which never calls
    calling = survivors.on_both(lambda rank, group: issue(group, name, by_future=rank == 2))
    wait(calling, timeout=BEGUN_S)
    assert name in MAY_BE_DONE or not any(future.done() for future in calling)
    survivors.abort()
    assert results(calling) == [True, True]
    results(survivors.on_both(summed))
    assert all(isinstance(group.error(), Exception) for group in survivors.groups)
    assert_skipped_as_if_alone(survivors.groups[0], name)
    survivors.go_on_alone()


# A real Manager


class Job:
    """A lighthouse and what Managers in threads do with it."""

    def __init__(self, min_replicas: int) -> None:
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=10_000
        )
        self.threads = ThreadPoolExecutor(4)

    def manager(self, name: str, **settings: Any) -> Manager:
        return Manager(
            pg=ProcessGroupGloo(300, check_collectives=False),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=1,
            lighthouse_addr=self.lighthouse.address(),
            replica_id=name,
            init_sync=False,
            **settings,
        )

    def end(self) -> None:
        self.lighthouse.shutdown()
        self.threads.shutdown(cancel_futures=True)


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    job = Job(min_replicas=request.param)
    yield job
    job.end()


CORE = ("allreduce", "broadcast", "allgather", "reduce_scatter", "alltoall_base", "recv", "barrier")


class OopsError(Exception):
    """Reported by one replica, to see what becomes of the other."""


@pytest.mark.parametrize("job", [2], indirect=True)
def test_an_error_of_one_replica_costs_both_a_step_and_raises_in_neither(job: Job) -> None:
    met, over = threading.Barrier(2), threading.Barrier(2)

    def replica(rank: int) -> list[Any]:
        seen: list[Any] = []
        with job.manager(f"replica-{rank}") as manager:
            group = ManagedProcessGroup(manager)
            for name in CORE:
                manager.start_quorum()
                assert (group.size(), group.rank()) == (2, rank)
                met.wait(LIMIT_S)
                if rank == 0:
                    manager.report_error(OopsError(name))
                else:
                    assert call_of_two(group, name)
                lost = manager.errored() is not None
                assert call_of_two(group, name), "skipped"
                seen.append((name, lost, manager.should_commit()))
                manager.start_quorum()
                seen.append((summed(rank, group), manager.should_commit()))
            over.wait(LIMIT_S)
        return seen

    expected = [entry for name in CORE for entry in ((name, True, False), (1.0, True))]
    assert results([job.threads.submit(replica, rank) for rank in range(2)]) == [expected] * 2


def call_of_two(group: Any, name: str) -> bool:
    """A call that waits for the other of two replicas."""
    two, pair = torch.ones(2), [torch.ones(1), torch.ones(1)]
    args: dict[str, tuple[Any, ...]] = {
        "allreduce": ([two],),
        "broadcast": ([two],),
        "allgather": ([[torch.zeros(2), torch.zeros(2)]], [two]),
        "reduce_scatter": ([torch.zeros(1)], [pair]),
        "alltoall_base": (torch.zeros(2), two, [], []),
        "recv": ([two], 0, 0),
        "barrier": (),
    }
    return bool(getattr(group, name)(*args[name]).wait())


@pytest.mark.parametrize("job", [1], indirect=True)
def test_the_size_of_a_managed_group_follows_the_quorum(job: Job) -> None:
    leave = threading.Event()

    def step(manager: Manager, group: Any) -> tuple[int, float]:
        manager.start_quorum()
        size, tensor = dist.get_world_size(group), torch.ones(1)
        dist.all_reduce(tensor, group=group)
        assert size == group.size() == manager.num_participants()
        return (size, float(tensor)) if manager.should_commit() else (0, 0.0)

    def second() -> None:
        with job.manager("second") as manager:
            group = ManagedProcessGroup(manager)
            while not leave.is_set():
                step(manager, group)

    with job.manager("first") as manager:
        group = ManagedProcessGroup(manager)
        seen = [step(manager, group)]
        joining = job.threads.submit(second)
        while seen[-1] != (2, 2.0):
            seen.append(step(manager, group))
        leave.set()
        while seen[-1] != (1, 1.0):
            seen.append(step(manager, group))
        joining.result(LIMIT_S)
    assert all(size == total for size, total in seen), seen


@pytest.mark.parametrize("job", [2], indirect=True)
def test_without_a_quorum_only_should_commit_raises(job: Job) -> None:
    with job.manager("lonely", quorum_timeout=1) as manager:
        group = ManagedProcessGroup(manager)
        manager.start_quorum()
        for name in NAMES:
            assert_skipped(group, name)
        assert group.size() == 1
        error = manager.errored()
        assert error is not None
        assert isinstance(error.original_exception, QuorumTimeoutError)
        with pytest.raises(QuorumTimeoutError):
            manager.should_commit()
