"""The seven histories of torchft's regression test of DiLoCo, step by step: its source distribution has them.

Each of two replicas has two layers of one weight, which begins at 1 and always has the gradient 2. So the
average over both is what each of them sends.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.dropin.environments import sources
from tests.unit.test_local_sgd import Average, Peer
from tools.environments import UnavailableError
from torchft_like.local_sgd import DiLoCo

# The first test of a machine downloads the source distribution.
pytestmark = [pytest.mark.interop, pytest.mark.slow, pytest.mark.timeout(600)]

LAYERS, SYNC_EVERY = 2, 6
NAME = "torchft.diloco_regression_test.DiLoCoMockedUpdateTest.test_diloco_mocked_{}.json"


@pytest.fixture(scope="module")
def fixtures() -> Path:
    try:
        return sources() / "torchft-0.2.0" / "test_fixtures"
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("number", "delay", "alpha"),
    [(0, 0, 0.0), (1, 0, 0.5), (2, 0, 1.0), (3, 1, 0.0), (4, 1, 0.5), (5, 1, 1.0)],
)
def test_the_parameters_are_those_of_torchft(fixtures: Path, number: int, delay: int, alpha: float) -> None:
    for history in of_replicas(fixtures, f"updates_{number}"):
        # torchft's test has committed two steps before it trains.
        assert list(Replica(delay, alpha, Same(step=2)).train(len(history))) == pytest.approx(
            history, rel=1e-5
        )


def test_the_parameters_of_a_replica_that_failed_and_healed_are_those_of_torchft(fixtures: Path) -> None:
    """The second one heals in the third sync of the first one."""
    of_first, of_second = of_replicas(fixtures, "failure_recovery_0")
    first = Replica(0, 0.0, Same())
    seen = list(first.train(len(of_first)))
    assert seen == pytest.approx(of_first)
    second = Replica(0, 0.0, Same(heals_from=first.states[2]))
    assert list(second.train(len(of_second))) == pytest.approx(of_second)


def of_replicas(fixtures: Path, name: str) -> list[Any]:
    """Return of each replica the two weights before each step, as one list."""
    replicas = json.loads((fixtures / NAME.format(name)).read_text())
    histories = [list(replica[0]["history"].values()) for replica in replicas]
    assert len(histories) == 2
    assert min(map(len, histories)) > 2 * SYNC_EVERY
    return [
        [step[f"layers.{layer}.weight"][0][0] for step in history for layer in range(LAYERS)]
        for history in histories
    ]


class Same(Peer):
    """A Manager whose peer sends what this replica sends; one that heals gets a state in its first quorum."""

    def __init__(self, step: int = 0, heals_from: Any = None) -> None:
        super().__init__(step=step)
        self.heals_from = heals_from
        self.replica: Replica

    def start_quorum(self) -> None:
        super().start_quorum()
        if self.heals_from is not None:
            self.replica.load(self.heals_from)
            self.heals_from = None
        self.replica.states.append(self.replica.save())

    def allreduce(self, tensor: Any, should_quantize: Any = False, *, error_feedback: Any = None) -> Any:
        return Average(tensor, tensor.clone())


class Replica:
    """A replica, and its state at each of its quorums."""

    def __init__(self, delay: int, alpha: float, peer: Same) -> None:
        self.peer, peer.replica = peer, self
        self.states: list[Any] = []
        self.net = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(LAYERS)))
        for parameter in self.net.parameters():
            nn.init.ones_(parameter)
        self.inner = torch.optim.SGD(self.net.parameters(), lr=1.0)
        outers: list[torch.optim.Optimizer] = [
            torch.optim.SGD(layer.parameters(), lr=2.0) for layer in self.net
        ]
        self.diloco = DiLoCo(
            peer,
            list(self.net),
            self.inner,
            outers,
            sync_every=SYNC_EVERY,
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
        )

    def save(self) -> Any:
        state = [
            self.net.state_dict(),
            self.peer.step,
            *(save() for _, save in self.peer.registered.values()),
        ]
        return copy.deepcopy(state)

    def load(self, state: Any) -> None:
        net, self.peer.step, *of_fragments = state
        self.net.load_state_dict(net)
        for (load, _), own in zip(self.peer.registered.values(), of_fragments, strict=True):
            load(own)

    def train(self, numbers: int) -> Iterator[float]:
        """Yield the weights before each step, until there are so many numbers."""
        with self.diloco:
            for _ in range(numbers // LAYERS):
                yield from (parameter.item() for parameter in self.net.parameters())
                for parameter in self.net.parameters():
                    parameter.grad = torch.full_like(parameter, 2.0)
                self.inner.step()
