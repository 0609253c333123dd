"""Who goes on without whom, where ranks of a replica group do not hear each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from torchft_like.core.meeting import MeetingProtocol
from torchft_like.core.restarts import RankProcess

pytestmark = pytest.mark.agreement

SILENT = "it answers nothing"


def ranks_of(size: int) -> list[RankProcess]:
    return [RankProcess(rank, f"host:{rank}") for rank in range(size)]


def goes_on_without(ranks: Sequence[RankProcess], lost: Sequence[RankProcess], own: RankProcess) -> bool:
    protocol = MeetingProtocol(own, ranks)
    look(protocol, lost, ())
    look(protocol, lost, [rank for rank in ranks if rank not in lost])
    return not set(lost).intersection(protocol.others)


def look(protocol: MeetingProtocol, lost: Sequence[RankProcess], answer: Sequence[RankProcess]) -> bool:
    """Find all of these silent, one after the other, and the others answering."""
    news = [protocol.silent(process, SILENT) for process in lost]
    news += [protocol.silent(process, "") for process in answer if process != protocol.own]
    return any(news)


@pytest.mark.parametrize("size", range(2, 6))
def test_of_two_sides_of_a_cut_one_goes_on(size: int) -> None:
    ranks = ranks_of(size)
    for count in range(1, size):
        for side in itertools.combinations(ranks, count):
            other = tuple(rank for rank in ranks if rank not in side)
            ways = [
                {goes_on_without(ranks, lost, own) for lost in itertools.permutations(there) for own in here}
                for here, there in ((side, other), (other, side))
            ]
            assert ways in ([{True}, {False}], [{False}, {True}])
            assert 2 * count == size or ways[0] == {2 * count > size}


def test_a_process_that_has_ended_is_of_no_side() -> None:
    ranks = ranks_of(4)
    protocol = MeetingProtocol(ranks[3], ranks)
    assert protocol.ended(ranks[1])
    assert protocol.ended(ranks[2])
    assert not protocol.silent(ranks[0], SILENT)
    protocol = MeetingProtocol(ranks[0], ranks)
    assert protocol.ended(ranks[1])
    assert protocol.ended(ranks[2])
    assert protocol.silent(ranks[3], SILENT)
