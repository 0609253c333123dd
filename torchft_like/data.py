"""The samples of a rank of a replica group.

`GlobalBatchLoader` cuts the batch of each step, which is a function of the step's number, among the replica
groups that take part in it. So the batch that the optimizer sees has the same samples however many replica
groups there are, each sample is used once per epoch, a step that is not committed gets its batch again, and a
replica group that heals, or a job that starts again from a checkpoint, goes on where the Manager's counter of
steps is. There is nothing else to save.

`DistributedSampler` is torchft's: it cuts the data set for the largest number of replica groups that there
may be, so that the shard of a group does not change while others come and go. While a group is away no
replica trains on its shard, and a step that is not committed drops its batch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler
from torch.utils.data.distributed import DistributedSampler as _TorchSampler

from torchft_like.core.step import Share
from torchft_like.errors import ConfigError
from torchft_like.runtime.numbers import whole_number


class GlobalBatches:
    """The samples of every step: step s takes batch `s % steps` of epoch `s // steps`.

    Args:
        length: the number of samples of the data set.
        batch_size: the number of samples of a step, of all ranks together.
        shuffle: whether each epoch has an order of its own; it depends on `seed` and the epoch alone.
        drop_last: whether a last batch that is shorter is left out, else it is used as it is.

    Attributes:
        steps: the number of steps of an epoch.

    Raises:
        ConfigError: there is not one batch.
    """

    def __init__(
        self, length: int, batch_size: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        length, batch_size = whole_number(length, "length"), whole_number(batch_size, "batch_size", 1)
        self.steps: int = length // batch_size if drop_last else -(-length // batch_size)
        if self.steps < 1:
            raise ConfigError(f"{length} samples are not one batch of {batch_size}")
        self._length, self._size = length, batch_size
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, torch.Tensor] = {}  # of two epochs at most: batches are loaded ahead

    def of(self, step: int) -> list[int]:
        """Return the samples of a step, in their order."""
        epoch, batch = divmod(step, self.steps)
        window = slice(batch * self._size, (batch + 1) * self._size)
        return self._order(epoch)[window].tolist() if self._shuffle else list(range(self._length)[window])

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            if len(self._orders) > 1:
                del self._orders[min(self._orders)]
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._orders[epoch] = torch.randperm(self._length, generator=generator)
        return self._orders[epoch]

    def part(self, step: int, index: int, count: int) -> list[int]:
        """Return part `index` of `count` of a step's samples; the sizes of parts differ by one at most."""
        samples = self.of(step)
        return samples[len(samples) * index // count : len(samples) * (index + 1) // count]


class StepSource(Protocol):
    """The methods of the Manager that say which step it is, and whose."""

    def current_step(self) -> int: ...
    def share_of_step(self) -> Share: ...


class GlobalBatchLoader:
    """This rank's part of the batch of each step, loaded ahead for as long as the parts stay the same.

        batches = GlobalBatchLoader(manager, dataset, GlobalBatches(len(dataset), 512), num_workers=4)
        while manager.current_step() < 10 * len(batches):
            optimizer.zero_grad()
            inputs, targets = next(batches)
            (loss(model(inputs), targets) * batches.weight).backward()
            optimizer.step()

    Take the batch after `zero_grad`, which begins the step: until then the participants are not known.

    Args:
        manager: the Manager of this rank.
        dataset: the data set, which gives the sample of a number.
        batches: the samples of every step; the same on all ranks.
        rank, num_ranks: which part of the replica group's samples this rank takes. Ranks that compute the
            same (tensor parallelism) have one number together. None takes them as `DistributedSampler` does.
        **loader: further arguments of torch's DataLoader: `num_workers`, `collate_fn`, `pin_memory`...

    Attributes:
        weight: what to multiply the loss of the present batch by, if that is a mean over its samples. The
            average over all ranks is then the mean over the global batch, whose parts may differ in size. It
            is 0 where this replica group's gradients do not count.
        samples: the numbers of the present batch's samples.

    Raises:
        ConfigError: a number is out of its range, or RANK or WORLD_SIZE is needed and not a number.
    """

    def __init__(
        self,
        manager: StepSource,
        dataset: Dataset[Any],
        batches: GlobalBatches,
        rank: int | None = None,
        num_ranks: int | None = None,
        **loader: Any,
    ) -> None:
        self._rank, self._num_ranks = _place_in_group(rank, num_ranks, "rank", "num_ranks")
        self._manager = manager
        self._batches = batches
        self._to_come = _BatchesToCome(batches)
        loader.setdefault("persistent_workers", loader.get("num_workers", 0) > 0)
        self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._to_come, **loader)
        self._loading: Iterator[Any] = iter(())
        self._next: _Part | None = None
        self.weight: float = 0.0
        self.samples: list[int] = []

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        return self._batches.steps

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return this rank's part of the current step's batch; the same again if the step is not committed.

        Raises:
            RuntimeError: no step has begun.
        """
        share, step = self._manager.share_of_step(), self._manager.current_step()
        count = share.size * self._num_ranks
        part = (step, (share.rank or 0) * self._num_ranks + self._rank, count)
        if part != self._next:
            self._to_come.part = part
            self._loading = iter(self._loader)
        self._next = (step + 1, *part[1:])
        self.samples = self._batches.part(*part)
        of_all = len(self._batches.of(step))
        divisor = share.divisor * self._num_ranks
        self.weight = 0.0 if share.rank is None else len(self.samples) * divisor / of_all
        return next(self._loading)


_Part = tuple[int, int, int]


class _BatchesToCome(Sampler[list[int]]):
    """The same part of each step's batch, from one step on."""

    def __init__(self, batches: GlobalBatches) -> None:
        self._batches = batches
        self.part: _Part = (0, 0, 1)

    def __iter__(self) -> Iterator[list[int]]:
        step, index, count = self.part
        for later in itertools.count(step):
            # An empty part has one sample that has no weight, as a model wants one.
            yield self._batches.part(later, index, count) or self._batches.of(later)[:1]


class DistributedSampler(_TorchSampler[Any]):
    """torch's DistributedSampler over the ranks of all replica groups.

    Rank `group_rank` of replica group `replica_rank` takes shard
    `group_rank + num_replicas * replica_rank` of `num_replicas * num_replica_groups`.

    Args:
        dataset: the data set, or anything else with a length.
        replica_rank: this replica group's number, in [0, num_replica_groups). It is the user's own
            numbering and must be the same again after a restart.
        num_replica_groups: the largest number of replica groups that will ever be.
        group_rank: this rank within its replica group; None takes it from `torch.distributed` if
            that is initialized, else from RANK, else 0.
        num_replicas: the number of ranks per replica group, the same in all; None takes it from
            `torch.distributed` if that is initialized, else from WORLD_SIZE, else 1.
        **kwargs: `shuffle`, `seed` and `drop_last`, as for torch's sampler.

    Raises:
        ConfigError: a rank is out of its range or a count is below 1, or RANK or WORLD_SIZE is needed and not
            a number; it is a ValueError too.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_range("replica_rank", replica_rank, "num_replica_groups", num_replica_groups)
        group_rank, num_replicas = _place_in_group(group_rank, num_replicas, "group_rank", "num_replicas")
        self.global_rank: int = group_rank + num_replicas * replica_rank
        self.global_world_size: int = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)


def _place_in_group(rank: int | None, count: int | None, name: str, count_name: str) -> tuple[int, int]:
    has_group = dist.is_initialized()
    if count is None:
        count = dist.get_world_size() if has_group else _env_int("WORLD_SIZE", 1)
    if rank is None:
        if not has_group and count != 1 and "RANK" not in os.environ:
            raise ConfigError(f"{count_name} is {count}, so {name} is needed: pass it, or set RANK")
        rank = dist.get_rank() if has_group else _env_int("RANK", 0)
    _check_range(name, rank, count_name, count)
    return rank, count


def _check_range(name: str, value: int, count_name: str, count: int) -> None:
    count = whole_number(count, count_name, 1)
    whole_number(value, f"with {count_name} {count}, {name}", most=count - 1)


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r:.100} is not a number") from None
