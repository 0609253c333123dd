"""What a difference in the state means for a quorum: who heals from whom, and who contributes."""

from __future__ import annotations

import random

import pytest

from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.members import member
from torchft_like.core.assignment import QuorumResult, assign
from torchft_like.core.replica_group import RankJoin, RankQuorum, ReplicaGroup
from torchft_like.core.state_comparison import RankFingerprint, combine

pytestmark = pytest.mark.agreement


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
