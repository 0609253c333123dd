"""Groups that swallow errors under a real Manager and a real lighthouse: errors, changing sizes, no quorum.

Every collective under a killed and a stopped peer is in tests/conformance/test_faults.py, and what is left in
the outputs in tests/unit/process_group/test_error_semantics.py.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.managers import manager_alone
from tests.unit.process_group.test_collectives import ALONE
from torchft_like import LighthouseServer, ManagedProcessGroup, Manager
from torchft_like.errors import QuorumTimeoutError
from torchft_like.process_group.collectives import COLLECTIVES
from torchft_like.testing.ranks import LIMIT_S

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_operator")]

NAMES = [row.name for row in COLLECTIVES]


def results(futures: list[Future[Any]]) -> list[Any]:
    return [future.result(LIMIT_S) for future in futures]


def summed(rank: int, group: Any) -> float:
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def assert_skipped(group: Any, name: str) -> tuple[Any, ...]:
    args: tuple[Any, ...] = copy.deepcopy(ALONE[name][0])
    work = getattr(group, name)(*args)
    assert work is None or work.wait()
    return args


class Job:
    """A lighthouse and what Managers in threads do with it."""

    def __init__(self, min_replicas: int) -> None:
        self.lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=min_replicas, join_timeout_ms=10_000
        )
        self.threads = ThreadPoolExecutor(4)

    def manager(self, name: str, **settings: Any) -> Manager:
        return manager_alone(name, self.lighthouse.address(), **settings)

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
