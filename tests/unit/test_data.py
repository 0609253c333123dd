"""The sampler's arithmetic: every sample belongs to exactly one rank of one replica group."""

from __future__ import annotations

import pytest
from torch.utils.data import Dataset

from torchft_like.data import DistributedSampler


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


def test_every_sample_belongs_to_exactly_one_rank() -> None:
    seen = [
        index
        for replica_rank in range(3)
        for group_rank in range(2)
        for index in DistributedSampler(
            Numbers(60), replica_rank, 3, group_rank=group_rank, num_replicas=2, shuffle=True, seed=7
        )
    ]
    assert sorted(seen) == list(range(60))


def test_keyword_arguments_reach_torchs_sampler() -> None:
    sampler = DistributedSampler(
        Numbers(10), 0, 4, group_rank=0, num_replicas=1, shuffle=False, drop_last=True
    )
    assert list(sampler) == [0, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((3, 3, 0, 1), r"replica_rank is 3, must be in \[0, 3\)"),
        ((-1, 3, 0, 1), "replica_rank is -1"),
        ((0, 0, 0, 1), "num_replica_groups is 0, must be at least 1"),
        ((0, 2, 2, 2), r"group_rank is 2, must be in \[0, 2\)"),
        ((0, 2, -1, 2), "group_rank is -1"),
        ((0, 2, 0, 0), "num_replicas is 0"),
    ],
)
def test_ranks_out_of_range_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DistributedSampler(Numbers(10), *arguments)


def test_ranks_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert DistributedSampler(Numbers(10), 1, 2).global_rank == 3


def test_a_group_of_one_needs_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert DistributedSampler(Numbers(10), 1, 2).global_world_size == 2


def test_a_rank_that_is_not_a_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ValueError, match="RANK='first' is not a number"):
        DistributedSampler(Numbers(10), 0, 2)
