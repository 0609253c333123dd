"""A source refuses its state: real servers and Gloo inside one process, a thread per replica."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from torchft_like import LighthouseServer, Manager, Optimizer, ProcessGroupGloo, PureDistributedDataParallel
from torchft_like.digest import state_digest

pytestmark = pytest.mark.integration

LIMIT_S = 60.0


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer(min_replicas=2, join_timeout_ms=60_000)
    yield server
    server.shutdown()


def test_a_replica_whose_source_refuses_heals_from_another_one_in_the_next_step(
    lighthouse: LighthouseServer,
) -> None:
    newcomer_is_due, newcomer_is_here = threading.Event(), threading.Event()
    asked: list[str] = []

    def train(name: str) -> tuple[str, list[int]]:
        model, healed_to = nn.Linear(4, 4), list[int]()

        def save() -> dict[str, Any]:
            if newcomer_is_due.is_set() and name != "c":
                asked.append(name)
                if name == "a":
                    raise RuntimeError("no memory for a copy")
            return model.state_dict()

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state)
            healed_to.append(manager.current_step())

        if name == "c":
            assert newcomer_is_due.wait(LIMIT_S)
        with Manager(
            ProcessGroupGloo(timeout=60.0),
            load,
            save,
            2,
            replica_id=name,
            lighthouse_addr=lighthouse.address(),
        ) as manager:
            parallel = PureDistributedDataParallel(manager, model)
            optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
            if name == "c":
                newcomer_is_here.set()
            while manager.current_step() < 8:
                if manager.current_step() == 2 and name != "c":
                    newcomer_is_due.set()
                    assert newcomer_is_here.wait(LIMIT_S)
                optimizer.zero_grad()
                parallel(torch.ones(2, 4)).sum().backward()
                optimizer.step()
            return state_digest(model.state_dict()), healed_to

    torch.manual_seed(3)
    with ThreadPoolExecutor(3) as threads:
        (a, _), (b, _), (c, healed_to) = threads.map(train, "abc")
    assert asked == ["a", "b"]
    assert a == b == c
    assert len(healed_to) == 1
