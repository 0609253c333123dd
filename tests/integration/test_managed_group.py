"""A ManagedProcessGroup over a real Manager: plain code of torch.distributed in a fault-tolerant job."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from torchft_like import LighthouseServer, ManagedProcessGroup, Manager, ProcessGroupGloo

pytestmark = pytest.mark.integration

LIMIT_S = 60.0


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=10_000)
    yield server
    server.shutdown()


def test_collectives_of_two_replicas_go_through_their_managers(lighthouse: LighthouseServer) -> None:
    done = threading.Barrier(2)

    def replica(rank: int) -> tuple[int, float, float, list[float], bool]:
        with Manager(
            pg=ProcessGroupGloo(30),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=2,
            lighthouse_addr=lighthouse.address(),
            replica_id=f"replica-{rank}",
            init_sync=False,
        ) as manager:
            group = ManagedProcessGroup(manager)
            manager.start_quorum()
            summed = torch.tensor([1.0 + group.rank()])
            averaged = summed.clone()
            dist.all_reduce(summed, group=group)
            dist.all_reduce(averaged, dist.ReduceOp.AVG, group=group)
            gathered = [torch.zeros(1) for _ in range(group.size())]
            dist.all_gather(gathered, torch.tensor([1.0 + group.rank()]), group=group)
            committed = manager.should_commit()
            done.wait(LIMIT_S)
            values = [float(tensor[0]) for tensor in gathered]
            return group.size(), float(summed[0]), float(averaged[0]), values, committed

    with ThreadPoolExecutor(2) as replicas:
        futures = [replicas.submit(replica, rank) for rank in range(2)]
        results = [future.result(LIMIT_S) for future in futures]
    assert results == [(2, 3.0, 1.5, [1.0, 2.0], True)] * 2
