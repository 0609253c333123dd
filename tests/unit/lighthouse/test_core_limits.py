"""The quorum core at a thousand replicas, and with input that only a broken peer would send."""

from __future__ import annotations

import pytest

from lighthouse.core.claims import QUORUMS_MAX, Claims, Past
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import Member, MemberLost, QuorumFormed
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.quorum import ALARMS_PER_QUORUM_MAX, QuorumCore

REPLICAS = 1000
NONE = QuorumNumber(0, 0)


def _core_with_quorum() -> QuorumCore:
    core = QuorumCore(LighthouseConfig(min_replicas=REPLICAS // 4), 1)
    for number in range(REPLICAS):
        core.register(number, f"{number:04}", NONE, [], now=0.0)
    decisions = [core.join(n, Member(f"{n:04}"), now=1.0) for n in range(REPLICAS)]
    assert [len(d) for d in decisions] == [0] * (REPLICAS - 1) + [1]
    return core


def test_a_mass_loss_alarms_survivors_a_bounded_number_of_times() -> None:
    core = _core_with_quorum()
    told = []
    for number in range(REPLICAS // 2):
        [lost] = core.lost(number, "gone", now=2.0)
        assert isinstance(lost, MemberLost)
        told.append(len(lost.sessions))
    assert told[0] == REPLICAS - 1
    assert sum(count > 0 for count in told) == ALARMS_PER_QUORUM_MAX


@pytest.mark.progress
def test_the_survivors_of_a_mass_loss_form_a_quorum_at_once() -> None:
    core = _core_with_quorum()
    for number in range(REPLICAS // 2):
        core.lost(number, "gone", now=2.0)
    decisions = [d for n in range(REPLICAS // 2, REPLICAS) for d in core.join(n, Member(f"{n:04}"), now=3.0)]
    [formed] = decisions
    assert isinstance(formed, QuorumFormed)
    assert len(formed.sessions) == len(formed.left) == REPLICAS // 2


@pytest.mark.no_leak
def test_a_bounded_number_of_different_reports_is_kept() -> None:
    claims, liar = Claims(), Member("x", step=10**6)
    made_up = {f"y{n}": Past(90, frozenset({f"y{n}"}), 1, stood=False) for n in range(QUORUMS_MAX)}
    for replica_id, past in made_up.items():
        claims.reported(replica_id, past)
    true = Past(100, frozenset("abc"), 49, stood=False)
    members = [Member(i, step=50, commit_quorum_id=100) for i in "ab"]
    for expected in (set(), {"x"}):
        for member in members:
            claims.reported(member.replica_id, true)
        assert claims.unproven([*members, liar]) == expected
        claims.forget("y0")


@pytest.mark.no_leak
def test_nothing_remains_when_everybody_is_gone() -> None:
    core = _core_with_quorum()
    for number in range(REPLICAS):
        core.leave(number, now=2.0)
    assert len(core) == 0
    assert core.next_deadline() is None


def test_a_description_names_a_bounded_number_of_replicas() -> None:
    text = _core_with_quorum().describe(now=2.0)
    assert "and 968 more" in text
    assert len(text) < 1000


def test_a_session_cannot_join_for_another_replica() -> None:
    core = QuorumCore(LighthouseConfig(), 1)
    core.register(1, "a", NONE, [], now=0.0)
    assert core.join(1, Member("b"), now=0.0) == []
    assert "b" not in core
