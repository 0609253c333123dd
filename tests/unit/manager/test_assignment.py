"""What a quorum means for each rank."""

from __future__ import annotations

import pytest

from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.members import member
from torchft_like.core.assignment import NotAMemberError, QuorumResult, assign


def result_of(
    members: list[pb.QuorumMember], replica_id: str, group_rank: int = 0, init_sync: bool = True
) -> QuorumResult:
    return assign(7, members, replica_id, group_rank, init_sync)


def test_who_is_up_to_date_helps_the_source_of_who_heals() -> None:
    members = [member("a", 4, 3), *(member(name, 5, 3) for name in "bcdefg"), member("h", 4, 3)]
    results = {name: result_of(members, name, rank) for rank, name in enumerate("abcdefgh")}
    assert results["a"].source_ranks == (1, 2, 3, 4)
    assert results["a"].source_addresses == tuple(f"http://{name}:1" for name in "bcde")
    assert results["h"].source_ranks == (2, 3, 4, 5)
    helped = {name: result.helped_ranks for name, result in results.items() if result.helped_ranks}
    assert helped == {"c": (0,), "d": (0, 7), "e": (0, 7), "f": (7,)}
    assert [name for name, result in results.items() if result.recover_dst_replica_ranks] == [*"bc"]


def test_nobody_helps_the_source_of_who_heals_beside_the_steps() -> None:
    members = [member(name, 5, 3) for name in "bcd"]
    members += [member("a", 4, 3, may_catch_up=True), member("e", 4, 3)]
    results = {name: result_of(members, name) for name in "abcde"}
    assert (results["a"].source_ranks, results["a"].begins_to_catch_up) == ((1,), True)
    assert results["e"].source_ranks == (2, 3, 1)
    assert [name for name, result in results.items() if result.helped_ranks] == [*"bd"]


@pytest.mark.parametrize(("step", "expected"), [(5, [0, 1, 0]), (0, [0, 1, 2])])
def test_after_a_step_not_committed_the_source_is_another_one(step: int, expected: list[int]) -> None:
    """The last one may have refused."""
    for failures, source in enumerate(expected):
        members = [member("a", step, 0), member("b", step, 0), member("c", 0, 0, commit_failures=failures)]
        results = {name: result_of(members, name) for name in "abc"}
        healing = [r for r in results.values() if r.heal]
        assert {r.recover_src_replica_rank for r in healing} == {source}
        assert len(healing) == (1 if step else 2)


def test_a_rank_gets_the_handles_of_its_own_rank_in_each_group() -> None:
    handles = {"b": ("b0", "b1"), "c": (), "a": ("a0",)}
    members = [member(i, 5, 3, reconfigure_handles=given) for i, given in handles.items()]
    for group_rank, expected in enumerate([("a0", "b0", ""), ("", "b1", ""), ()]):
        assert {result_of(members, i, group_rank).reconfigure_handles for i in handles} == {expected}


def test_a_replica_outside_of_the_quorum_is_an_error_that_names_it() -> None:
    with pytest.raises(NotAMemberError, match="replica z is not in quorum 7: a"):
        result_of([member("a", 0, 0)], "z")
