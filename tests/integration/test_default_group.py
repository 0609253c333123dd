"""torch's default group of a replica group, as a Manager starts it: no rank waits for one that has ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.integration import default_group_job as job
from tests.managers import lighthouse_here
from torchft_like.testing.ranks import Ranks, running

pytestmark = pytest.mark.integration

LOST = "GroupLostError: rank 1 of replica group a"


@pytest.fixture
def ranks(store: TCPStore) -> Iterator[Ranks]:
    """Three ranks of one replica group, which have connected."""
    with lighthouse_here(min_replicas=1) as lighthouse, running(3) as ranks:
        ranks.ask(job.join, 3, lighthouse.address(), store.port)
        yield ranks


def test_it_is_started_again_after_it_was_destroyed(ranks: Ranks) -> None:
    for _ in range(2):
        assert ranks.ask(job.init) == ["done"] * 3
        assert ranks.ask(job.summed) == [(6.0, 1800.0)] * 3  # torch's own timeout
        assert {said.partition(":")[0] for said in ranks.ask(job.init)} == {"ValueError"}
        ranks.ask(job.destroy)


def test_the_others_hear_of_a_rank_that_ends_before_it_starts_it(ranks: Ranks) -> None:
    for rank in (0, 2):
        ranks[rank].tell(job.init, rank)
    for rank in (0, 2):
        ranks[rank].wait_blocked()
    ranks[1].kill()
    for rank in (0, 2):
        assert ranks[rank].answer().startswith(LOST)
        assert ranks[rank].ask(job.init, rank).startswith(LOST)


def test_a_rank_says_so_where_it_waits_long_for_another_one(ranks: Ranks) -> None:
    said = [[line.partition(",")[0] for line in lines] for lines in ranks.ask(job.init_with_a_word)]
    waits = "waits for the others of this replica group"
    assert said == [[f"rank 0 {waits}"], [], [f"rank 2 {waits}"]]


def test_torch_does_not_wait_for_long_for_a_rank_that_ends_while_it_is_made(ranks: Ranks) -> None:
    ranks.ask(job.allow_torch, 3.0)
    ranks[1].ask(job.end_in_torch, 1)
    ranks.tell(job.init)
    for rank in (0, 2):
        assert ranks[rank].answer().startswith(LOST)
