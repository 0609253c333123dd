"""A rank that trains on its parts of global batches, loaded by workers, and records which samples it took.

python -m tests.integration.sampled_job NAME INDEX
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.managers import manager_alone
from torchft_like import GlobalBatches, GlobalBatchLoader, Manager
from torchft_like.shutdown_signals import stop_on_signals
from torchft_like.testing.journal import Journal
from torchft_like.testing.training import Loop, Model, prepare_process

SAMPLES = 500
BATCHES = GlobalBatches(SAMPLES, 24, seed=3)  # the last batch of an epoch has 20


class Numbered(Dataset[tuple[int, Tensor, Tensor]]):
    """Samples with their numbers."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randn(8, generator=generator), torch.randn(4, generator=generator)


class SampledModel(Model):
    """The kit's model, trained on a data set that the replica groups share."""

    def __init__(self, name: str, journal: Journal) -> None:
        super().__init__(name, 0)
        self._journal = journal

    def use(self, manager: Manager) -> None:
        super().use(manager)
        self._batches = GlobalBatchLoader(manager, Numbered(), BATCHES, num_workers=2)

    def backward(self, step: int) -> None:
        numbers, inputs, targets = next(self._batches)
        self._journal.write(
            "took",
            step=step,
            quorum_id=self._manager.quorum_id,
            samples=numbers.tolist() if self._batches.weight else [],
        )
        loss: Any = nn.functional.mse_loss((self._ddp or self.net)(inputs), targets)
        (loss * self._batches.weight).backward()


def main() -> None:
    prepare_process()
    name, index = sys.argv[1], int(sys.argv[2])
    journal = Journal.of_this_process()
    model = SampledModel(name, journal)
    manager = manager_alone(name, model=model, init_sync=True)
    loop = Loop(model, manager, journal, index, pause_s=0.01)
    with manager, stop_on_signals(manager) as stop:
        while not stop.requested:
            loop.attempt_step()


if __name__ == "__main__":
    main()
