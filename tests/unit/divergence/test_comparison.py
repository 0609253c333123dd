"""Who is wrong, seen from what every member says of its state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.members import member
from tests.unit.manager.test_step import quorum
from torchft_like.core.assignment import QuorumResult, assign
from torchft_like.core.replica_group import RankJoin, RankQuorum, ReplicaGroup
from torchft_like.core.state_comparison import UNKNOWN_RANK, Divergence, RankFingerprint, combine, compare
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.errors import DivergenceError
from torchft_like.manager.quorum_driver import HEALS_IN_VAIN_MAX, DivergenceWatch

pytestmark = pytest.mark.agreement

LAYOUT, OTHER_LAYOUT = b"layout 1", b"layout 2"
VALUES = st.integers(0, 2**64 - 1)


@dataclass(frozen=True)
class Member:
    replica_id: str
    fingerprint: bytes


def group(*values: int, layout: bytes = LAYOUT, heals: bool = True) -> bytes:
    """What a replica group with these ranks says."""
    return combine([RankFingerprint(heals, layout, value).to_bytes() for value in values])


def members(*fingerprints: bytes) -> list[Member]:
    return [Member("abcdefghij"[index], fingerprint) for index, fingerprint in enumerate(fingerprints)]


def found(fingerprints: Sequence[bytes]) -> Divergence:
    divergence = compare(members(*fingerprints))
    assert divergence is not None
    return divergence


@pytest.mark.parametrize("values", sorted(set(permutations([1, 1, 1, 2]))))
def test_the_one_that_differs_is_wrong_wherever_it_stands(values: tuple[int, ...]) -> None:
    divergence = found([group(value) for value in values])
    assert divergence.replica_ids == ("abcd"[values.index(2)],)
    assert set(divergence.kept) == set("abcd") - set(divergence.replica_ids)
    assert divergence.heals
    assert divergence.comparable
    assert not divergence.tied


@pytest.mark.parametrize(
    ("values", "kept"),
    [((1, 2), "a"), ((2, 1), "a"), ((1, 2, 2, 1), "ad"), ((1, 2, 3), "a"), ((3, 1, 2, 2, 1), "be")],
)
def test_in_a_tie_the_lowest_replica_rank_is_decisive(values: tuple[int, ...], kept: str) -> None:
    divergence = found([group(value) for value in values])
    assert divergence.tied
    assert divergence.kept == tuple(kept)


@given(st.lists(st.binary(max_size=60) | st.binary(min_size=41, max_size=41), max_size=5))
def test_whatever_comes_from_the_network_is_compared_or_counts_as_nothing(fingerprints: list[bytes]) -> None:
    assert len(combine(fingerprints)) in (0, len(group(1)))
    divergence = compare(members(*fingerprints))
    if any(len(fingerprint) != len(group(1)) for fingerprint in fingerprints) or len(set(fingerprints)) < 2:
        assert divergence is None
    elif divergence is not None:
        assert len(divergence.kept) + len(divergence.replica_ids) == len(fingerprints)


def test_a_difference_in_one_that_is_not_comparable_is_not_a_difference_of_values() -> None:
    divergence = found([group(1), group(2), group(1, layout=OTHER_LAYOUT)])
    assert divergence.replica_ids == ("c",)


def test_nobody_heals_where_one_wants_reports_only() -> None:
    divergence = found([group(1), group(1, heals=False), group(2)])
    assert divergence.replica_ids == ("c",)
    assert not divergence.heals


def test_another_wish_alone_is_no_divergence() -> None:
    assert compare(members(group(1), group(1, heals=False))) is None


def test_a_group_says_nothing_until_all_of_its_ranks_do() -> None:
    rank = RankFingerprint(True, LAYOUT, 1).to_bytes()
    assert combine([rank, b""]) == b""
    assert combine([rank, rank]) != b""


@given(st.lists(VALUES, min_size=1, max_size=300), st.data())
def test_the_rank_that_differs_is_named(values: list[int], data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, len(values) - 1))
    other = data.draw(VALUES.filter(lambda value: value != values[rank]))
    changed = [*values[:rank], other, *values[rank + 1 :]]
    divergence = found([group(*values), group(*values), group(*changed)])
    assert divergence.replica_ids == ("c",)
    assert divergence.group_ranks == (rank,)


def test_several_ranks_that_differ_are_not_taken_for_one() -> None:
    good = list(range(100, 108))
    bad = [good[0] + 2**40 + 1, *good[1:5], good[5] + 2**50 + 3, *good[6:]]
    assert found([group(*good), group(*good), group(*bad)]).group_ranks == (UNKNOWN_RANK,)


def test_exchanged_ranks_are_a_difference() -> None:
    assert found([group(1, 2), group(1, 2), group(2, 1)]).group_ranks == (UNKNOWN_RANK,)


# What a difference in the state means for a quorum: who heals from whom, and who contributes.


def rank_of(value: int, *, heals: bool = True) -> bytes:
    return RankFingerprint(heals, b"layout 1", value).to_bytes()


def of_group(value: int, *, heals: bool = True) -> bytes:
    return combine([rank_of(value, heals=heals)])


def described(
    replica_id: str, fingerprint: bytes, step: int = 5, commit_quorum_id: int = 3
) -> pb.QuorumMember:
    return member(replica_id, step, commit_quorum_id, fingerprint=fingerprint)


def results(members: list[pb.QuorumMember], group_rank: int = 0) -> dict[str, QuorumResult]:
    return {each.replica_id: assign(7, members, each.replica_id, group_rank, True) for each in members}


ODD_ONE = [
    described("a", of_group(2)),
    described("b", of_group(1)),
    described("c", of_group(1)),
    described("d", of_group(1)),
]


@pytest.mark.parametrize("quorum", [ODD_ONE, ODD_ONE[1:]], ids=["one heals", "all agree"])
def test_a_quorum_does_not_stand_in_which_one_heals(quorum: list[pb.QuorumMember]) -> None:
    """The lighthouse, which does not look into fingerprints, takes them for members of the same state."""
    group = ReplicaGroup("b", 1)
    group.rank_joined(RankJoin(0, 5, "", commit_quorum_id=3, may_stand=True))
    (answer,) = group.quorum_formed(7, quorum, 1, stands=True)
    assert isinstance(answer, RankQuorum)
    assert answer.result.stands == group.last_quorum_stands == (quorum is not ODD_ONE)


def test_the_store_is_not_that_of_the_odd_one() -> None:
    assert {result.store_address for result in results(ODD_ONE).values()} == {"b:2"}


def test_who_heals_for_another_reason_is_not_compared() -> None:
    """A replica that is behind has another state, and rightly so."""
    behind = described("a", of_group(9), step=4)
    older_quorum = described("b", of_group(8), commit_quorum_id=2)
    seen = results([behind, older_quorum, described("c", of_group(1)), described("d", of_group(1))])
    assert {result.divergence for result in seen.values()} == {None}
    assert [name for name in "abcd" if seen[name].heal] == ["a", "b"]


def test_one_that_is_behind_does_not_heal_from_the_odd_one() -> None:
    behind = described("z", of_group(2), step=4)
    for group_rank in range(8):
        seen = results([*ODD_ONE, behind], group_rank)
        assert seen["z"].recover_src_replica_rank in (1, 2, 3)
        assert seen["a"].recover_dst_replica_ranks == ()


def test_at_step_zero_everybody_takes_the_state_of_the_first_anyway() -> None:
    seen = results([described("a", of_group(1), 0, 0), described("b", of_group(2), 0, 0)])
    assert seen["a"].divergence is None
    assert seen["b"].heal
    assert seen["b"].max_replica_rank == 1


def test_replicas_that_begin_on_their_own_are_compared_at_step_zero() -> None:
    members = [described("a", of_group(1), 0, 0), described("b", of_group(2), 0, 0)]
    assert assign(7, members, "b", 0, init_sync=False).heal


@pytest.mark.parametrize("seed", range(200))
def test_all_members_derive_the_same_plan(seed: int) -> None:
    """Whatever they say of their states, who heals has one source, which is up to date and does not heal, and
    both know it.
    """
    rng = random.Random(seed)
    fingerprints = [of_group(rng.randint(1, 3), heals=rng.random() < 0.9) for _ in range(8)] + [b""] * (
        seed % 2
    )
    members = [
        described(f"r{i}", rng.choice(fingerprints), rng.choice([0, 3, 4]), rng.choice([1, 2]))
        for i in rng.sample(range(20), rng.randint(1, 9))
    ]
    group_rank, init_sync = rng.randint(0, 3), rng.random() < 0.5
    ordered = sorted(members, key=lambda each: each.replica_id)
    newest = max((each.step, each.commit_quorum_id) for each in members)
    plans = [
        assign(7, rng.sample(members, len(members)), each.replica_id, group_rank, init_sync)
        for each in ordered
    ]
    assert (
        len(
            {
                (p.store_address, p.max_step, p.max_world_size, p.healing_replica_ids, p.divergence)
                for p in plans
            }
        )
        == 1
    )
    assert sum(plan.max_replica_rank is not None for plan in plans) == plans[0].max_world_size > 0
    for rank, plan in enumerate(plans):
        assert plan.replica_rank == rank
        assert plan.heal == (plan.max_replica_rank is None) or newest[0] == 0
        assert all(plans[to].recover_src_replica_rank == rank for to in plan.recover_dst_replica_ranks)
        if (source := plan.recover_src_replica_rank) is not None:
            assert not plans[source].heal
            assert rank in plans[source].recover_dst_replica_ranks
            assert (ordered[source].step, ordered[source].commit_quorum_id) == newest


# What a rank does about divergence: whom it tells, and when it gives up.


SLICES = 4
FOUND = Divergence(("b",), (0,), ("a", "c"), tied=False, comparable=True, heals=True)


class Watched:
    """A watch of replica `b`, and the events that it wrote."""

    def __init__(self, on_divergence: OnDivergence = OnDivergence.HEAL) -> None:
        self.events: list[dict[str, Any]] = []
        self.watch = DivergenceWatch(lambda kind, **fields: self.events.append({"kind": kind, **fields}))
        self.watch.fingerprint = StateFingerprint(
            [torch.zeros(1)], slices=SLICES, on_divergence=on_divergence
        )

    def hear(
        self, step: int, divergence: Divergence | None, allow_heal: bool = True
    ) -> DivergenceError | None:
        return self.watch.quorum(quorum_of(step, divergence), allow_heal)


def quorum_of(step: int, divergence: Divergence | None) -> QuorumResult:
    return quorum()._replace(
        max_step=step, replica_ids=("a", "b", "c"), replica_rank=1, divergence=divergence
    )


def test_a_report_is_repeated_only_when_it_was_not_true_in_between() -> None:
    watched, report = Watched(OnDivergence.REPORT), replace(FOUND, heals=False)
    for step in range(5):
        watched.hear(step, report)
    assert len(watched.events) == 1
    watched.hear(5, None)
    watched.hear(6, report)
    assert len(watched.events) == 2
    watched.hear(7, replace(report, replica_ids=("c",), kept=("a", "b")))
    assert len(watched.events) == 3


@pytest.mark.parametrize("distance", [1, SLICES])
def test_a_replica_that_heals_in_vain_again_and_again_gives_up(distance: int) -> None:
    watched = Watched()
    steps = range(7, 7 + distance * HEALS_IN_VAIN_MAX, distance)
    assert [watched.hear(step, FOUND) for step in steps] == [None] * HEALS_IN_VAIN_MAX
    error = watched.hear(steps.stop, FOUND)
    assert error is not None
    assert "b has taken over its peers' state 3 times" in str(error)


@pytest.mark.parametrize(
    ("steps", "odd_one", "allow_heal"),
    [
        (range(0, 100 * (SLICES + 1), SLICES + 1), "b", True),
        ([7] * 20, "b", True),
        (range(20), "b", False),
        (range(20), "a", True),
    ],
    ids=["heals that last for a round", "a step that is tried again", "nobody may heal", "the others"],
)
def test_what_does_not_count_as_a_heal_in_vain(steps: Sequence[int], odd_one: str, allow_heal: bool) -> None:
    watched = Watched()
    divergence = replace(FOUND, replica_ids=(odd_one,), kept=tuple({*"abc"} - {odd_one}))
    assert {watched.hear(step, divergence, allow_heal) for step in steps} == {None}


def test_one_that_watches_nothing_computes_nothing_and_still_tells() -> None:
    watched = Watched()
    watched.watch.fingerprint = None
    assert watched.watch.take(3) is None
    assert watched.hear(3, replace(FOUND, tied=True)) is None
    assert len(watched.events) == 1
