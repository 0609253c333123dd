"""A Manager over NCCL: what was cut off is never committed, and later steps are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from torchft_like import LighthouseServer, Manager, ProcessGroupBabyNCCL, ProcessGroupNCCL

LIMIT_S = 60.0
LONG_CYCLES = 3_000_000_000  # more than a second of a GPU


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(8, 8).cuda()


@pytest.fixture(params=[ProcessGroupNCCL, ProcessGroupBabyNCCL])
def manager(request: pytest.FixtureRequest, model: nn.Module) -> Iterator[Manager]:
    """The only replica."""
    lighthouse = LighthouseServer(min_replicas=1, join_timeout_ms=100)
    manager = Manager(
        request.param(LIMIT_S),
        model.load_state_dict,
        model.state_dict,
        min_replica_size=1,
        replica_id="alone",
        lighthouse_addr=lighthouse.address(),
    )
    yield manager
    manager.shutdown()
    lighthouse.shutdown()


def test_step_whose_allreduce_was_cut_off_is_not_committed_and_a_later_one_is(manager: Manager) -> None:
    manager.start_quorum()
    manager.wait_quorum()
    torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
    manager.allreduce(torch.ones(4, device="cuda"))
    manager.process_group.abort("a member was lost")
    assert not manager.should_commit()
    assert_steps_commit_again(manager)


def test_abort_after_the_last_collective_does_not_cost_that_step(manager: Manager) -> None:
    manager.start_quorum()
    tensor = torch.ones(4, device="cuda")
    manager.allreduce(tensor).wait()
    torch.cuda.synchronize()
    manager.process_group.abort("a member was lost")
    assert manager.should_commit()
    assert_steps_commit_again(manager)


def assert_steps_commit_again(manager: Manager) -> None:
    """The one after an abort that the Manager has not heard of may be lost, too."""
    for _ in range(3):
        manager.start_quorum()
        tensor = torch.full((4,), 3.0, device="cuda")
        manager.allreduce(tensor).wait()
        if manager.should_commit():
            assert tensor.tolist() == [3.0] * 4
            return
    pytest.fail("no step commits any more")
