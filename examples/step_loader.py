"""Batches that worker processes load ahead, each for the step in which it is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler


class StepLoader:
    """`batch()` is `data[step]` for the step that the Manager is at.

    Workers load the batches of the steps to come. A step that is not committed comes again, and a replica
    that has fetched its peers' state goes on at theirs: then the workers begin anew at that step.

    Args:
        data: gives the batch of a step, which depends on nothing else.
        current_step: the Manager's.
        workers: processes that load; with 0 this one does.
    """

    def __init__(self, data: Dataset[Any], current_step: Callable[[], int], workers: int) -> None:
        self._current_step = current_step
        self._loader = DataLoader(
            data,
            batch_size=None,
            sampler=_StepsToCome(current_step),
            num_workers=workers,
            persistent_workers=workers > 0,
        )
        self._batches: Iterator[Any] = iter(())
        self._next: int | None = None

    def batch(self) -> Any:
        """Return the batch of the current step; the same one again as long as the step is not committed."""
        step = self._current_step()
        if step != self._next:
            self._batches = iter(self._loader)
        self._next = step + 1
        return next(self._batches)


class _StepsToCome(Sampler[int]):
    def __init__(self, current_step: Callable[[], int]) -> None:
        self._current_step = current_step

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self._current_step())
