"""The arithmetic of samples: each belongs to exactly one rank of one replica group."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from torchft_like.core.step import Share
from torchft_like.data import DistributedSampler, GlobalBatches, GlobalBatchLoader


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def test_shard_is_group_rank_plus_ranks_of_the_groups_before() -> None:
    sampler = DistributedSampler(
        Numbers(100), replica_rank=2, num_replica_groups=3, group_rank=1, num_replicas=4
    )
    assert sampler.global_rank == 1 + 4 * 2
    assert sampler.global_world_size == 12
    assert (sampler.rank, sampler.num_replicas) == (9, 12)


def test_keyword_arguments_reach_torchs_sampler() -> None:
    sampler = DistributedSampler(
        Numbers(10), 0, 4, group_rank=0, num_replicas=1, shuffle=False, drop_last=True
    )
    assert list(sampler) == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 3, 0, 1), r"with num_replica_groups 3, replica_rank is 3: .* number, in \[0, 2\]"),
        ((-1, 3, 0, 1), "replica_rank is -1"),
        ((0, 0, 0, 1), "num_replica_groups is 0: it must be a whole number, 1 or more"),
        ((0, 2, 2, 2), r"with num_replicas 2, group_rank is 2: .* in \[0, 1\]"),
        ((0, 2, -1, 2), "group_rank is -1"),
        ((0, 2, 0, 0), "num_replicas is 0"),
    ],
)
def test_ranks_out_of_range_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedSampler(Numbers(10), *arguments)


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, (3, 4)),
        ({}, (1, 2)),
        ({"WORLD_SIZE": "2"}, "num_replicas is 2, so group_rank is needed"),
        ({"RANK": "first"}, "RANK='first' is not a number"),
    ],
)
def test_ranks_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], found: tuple[int, int] | str
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=found) if isinstance(found, str) else nullcontext():
        sampler = DistributedSampler(Numbers(10), 1, 2)
        assert (sampler.global_rank, sampler.global_world_size) == found


def test_steps_of_an_epoch_use_every_sample_once_in_another_order_than_the_last() -> None:
    batches = GlobalBatches(103, 10, seed=5)
    assert batches.steps == 11
    epochs = [
        list(itertools.chain.from_iterable(map(batches.of, range(11 * e, 11 * e + 11)))) for e in (0, 1, 2)
    ]
    assert [sorted(epoch) for epoch in epochs] == [list(range(103))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches.of(25) == GlobalBatches(103, 10, seed=5).of(25)  # whatever was asked before
    assert epochs[2] == torch.randperm(103, generator=torch.Generator().manual_seed(5 + 2)).tolist(), (
        "another version, which goes on in the epoch, has this order too"
    )
    assert len(batches._orders) == 2, "memory is bounded"


def test_a_last_batch_that_is_shorter_can_be_dropped() -> None:
    assert GlobalBatches(103, 10, drop_last=True).steps == 10
    assert GlobalBatches(10, 10, drop_last=True).steps == 1
    assert [len(GlobalBatches(103, 10).of(step)) for step in (9, 10, 11)] == [10, 3, 10]
    assert GlobalBatches(7, 3, shuffle=False).of(4) == [3, 4, 5]


@pytest.mark.parametrize(("length", "batch_size", "drop_last"), [(0, 4, False), (3, 4, True), (3, 0, False)])
def test_less_than_one_batch_is_refused(length: int, batch_size: int, drop_last: bool) -> None:
    with pytest.raises(ValueError, match="batch"):
        GlobalBatches(length, batch_size, drop_last=drop_last)


@dataclass
class Turn:
    """The Manager of one replica group, at a step and with a share of it."""

    step: int
    share: Share

    def current_step(self) -> int:
        return self.step

    def share_of_step(self) -> Share:
        return self.share


@pytest.mark.parametrize(
    ("groups", "ranks", "step"), [(1, 1, 0), (3, 1, 0), (3, 2, 1), (5, 1, 10), (4, 3, 10)]
)
@pytest.mark.parametrize("healing", [0, 2])
def test_weighted_losses_average_to_the_mean_of_the_global_batch(
    groups: int, ranks: int, step: int, healing: int
) -> None:
    values = torch.randn(103, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = torch.zeros((), dtype=torch.float64)
    used: list[int] = []
    for place in (*range(groups), *[None] * healing):
        for rank in range(ranks):
            manager = Turn(step, Share(place, groups, groups + healing))
            batches = GlobalBatchLoader(manager, values, GlobalBatches(103, 10, seed=4), rank, ranks)  # type: ignore[arg-type]
            batch = next(batches)
            used += batches.samples if batches.weight else []
            total += batch.mean() * batches.weight
    batch_of_all = GlobalBatches(103, 10, seed=4).of(step)
    assert sorted(used) == sorted(batch_of_all)
    torch.testing.assert_close(total / ((groups + healing) * ranks), values[batch_of_all].mean())


def test_workers_load_ahead_until_parts_change_or_a_step_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, got, load = list[int](), list[list[int]](), DataLoader.__iter__
    manager = Turn(0, Share(0, 2, 2))

    def begin(loader: DataLoader[int]) -> Iterator[int]:
        begun.append(len(got))
        return load(loader)

    monkeypatch.setattr(DataLoader, "__iter__", begin)
    batches = GlobalBatchLoader(
        manager, Numbers(60), GlobalBatches(60, 6, shuffle=False), 0, 1, num_workers=1
    )
    assert (len(batches), iter(batches), batches._loader.persistent_workers) == (10, batches, True)
    for step, share in [(0, (0, 2)), (1, (0, 2)), (1, (0, 2)), (2, (1, 3)), (9, (1, 3)), (10, (0, 1))]:
        manager.step, manager.share = step, Share(*share, divisor=share[1])
        got.append(next(batches).tolist())
    assert got == [[0, 1, 2], [6, 7, 8], [6, 7, 8], [14, 15], [56, 57], [0, 1, 2, 3, 4, 5]]
    assert begun == [0, 2, 3, 4, 5]
