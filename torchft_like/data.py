"""The samples of a rank of a replica group.

The data set is cut for the largest number of replica groups that there may be, so that the shard of a group
does not change while others come and go. That has a cost: while a group is away no replica trains on its
shard, and a step that is not committed drops its batch.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler as _TorchSampler

from torchft_like.errors import ConfigError


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
        ValueError: a rank is out of its range or a count is below 1.
        ConfigError: RANK or WORLD_SIZE is needed and not a number; it is a ValueError too.
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
        has_group = dist.is_initialized()
        if group_rank is None:
            group_rank = dist.get_rank() if has_group else _env_int("RANK", 0)
        if num_replicas is None:
            num_replicas = dist.get_world_size() if has_group else _env_int("WORLD_SIZE", 1)
        _check_range("replica_rank", replica_rank, "num_replica_groups", num_replica_groups)
        _check_range("group_rank", group_rank, "num_replicas", num_replicas)
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)


def _check_range(name: str, value: int, count_name: str, count: int) -> None:
    if count < 1:
        raise ValueError(f"{count_name} is {count}, must be at least 1")
    if not 0 <= value < count:
        raise ValueError(f"{name} is {value}, must be in [0, {count}), for {count_name} is {count}")


def _env_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r:.100} is not a number") from None
