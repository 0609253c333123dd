"""Gradients over replicas, by the wrappers of modules: a thread per replica, real servers and Gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

from torchft_like import (
    DistributedDataParallel,
    LighthouseServer,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)
from torchft_like.digest import state_digest

pytestmark = pytest.mark.integration

T = TypeVar("T")


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer(min_replicas=2, join_timeout_ms=60_000)
    yield server
    server.shutdown()


class Replica:
    """One of two, which begin with the same parameters."""

    def __init__(self, name: str, manager: Manager, model: nn.Module) -> None:
        self.name = name
        self.manager = manager
        self.model = model


def on_both(
    lighthouse: LighthouseServer,
    make_model: Callable[[], nn.Module],
    act: Callable[[Replica], T],
    **settings: Any,
) -> list[T]:
    def run(name: str, model: nn.Module) -> T:
        with Manager(
            ProcessGroupGloo(timeout=60.0),
            model.load_state_dict,
            model.state_dict,
            min_replica_size=2,
            replica_id=name,
            lighthouse_addr=lighthouse.address(),
            **{"init_sync": False} | settings,
        ) as manager:
            return act(Replica(name, manager, model))

    models = [make_model() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, ["a", "b"], models))


class Branches(nn.Module):
    """Each replica goes its own way, and `unused` nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 1, bias=False)
        self.b = nn.Linear(3, 1, bias=False)
        self.unused = nn.Linear(3, 1, bias=False)

    def forward(self, rows: Tensor, branch: str) -> Tensor:
        result: Tensor = (self.a if branch == "a" else self.b)(rows)
        return result


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
@pytest.mark.parametrize("init_sync", [False, True])
def test_a_parameter_that_one_replica_uses_has_the_same_gradient_on_all(
    lighthouse: LighthouseServer, gradient_as_bucket_view: bool, init_sync: bool
) -> None:
    """With `init_sync` one of them heals in the first step."""

    def train(replica: Replica) -> tuple[str, list[list[float] | None]]:
        parallel = DistributedDataParallel(
            replica.manager, replica.model, gradient_as_bucket_view=gradient_as_bucket_view
        )
        optimizer = Optimizer(replica.manager, torch.optim.AdamW(replica.model.parameters()))
        while replica.manager.current_step() < 3:
            optimizer.zero_grad()
            parallel(torch.ones(1, 3), replica.name).sum().backward()
            optimizer.step()
        gradients = [parameter.grad for parameter in replica.model.parameters()]
        flat = [None if gradient is None else gradient.flatten().tolist() for gradient in gradients]
        return state_digest(replica.model.state_dict()), flat

    one, other = on_both(lighthouse, Branches, train, init_sync=init_sync)
    assert one == other
    assert one[1] == [[0.5] * 3, [0.5] * 3, None]
