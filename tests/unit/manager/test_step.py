"""The step protocol, event by event."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

import pytest

from lighthouse.core.decisions import DISOWNED, NO_STATE
from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.test_group import join, members
from torchft_like.core.assignment import QuorumResult, assign
from torchft_like.core.catch_up import Version
from torchft_like.core.replica_group import (
    GroupHolds,
    GroupLeftNotice,
    HoldRanks,
    LossNotice,
    RankJoin,
    RankQuorum,
    RankVerdict,
    ReleaseRanks,
    ReplicaGroup,
    Verdict,
)
from torchft_like.core.step import OnVerdict, Plan, StepProtocol, StepRules, WorldSizeMode
from torchft_like.errors import (
    OWN_FAILURE_MAX,
    MemberLostError,
    ProcessGroupAbortedError,
    ProcessGroupNotConfiguredError,
    SubprocessLostError,
    describe_own_error,
    is_own_error,
)


def quorum(quorum_id: int = 1, **changes: Any) -> QuorumResult:
    fields: dict[str, Any] = {
        "quorum_id": quorum_id,
        "replica_rank": 0,
        "replica_world_size": 3,
        "recover_src_manager_address": "",
        "recover_src_replica_rank": None,
        "recover_dst_replica_ranks": (),
        "store_address": "s:1",
        "max_step": 0,
        "max_replica_rank": 0,
        "max_world_size": 3,
        "heal": False,
        "commit_failures": 0,
        "replica_ids": ("a", "b", "c"),
    }
    return QuorumResult(**{**fields, **changes})


def own_failure_of(join: RankJoin) -> tuple[str, int]:
    return join.own_failure, join.own_failures


def protocol(min_replica_size: int = 1, **rules: Any) -> StepProtocol:
    return StepProtocol(StepRules(min_replica_size, **rules))


def ready(p: StepProtocol, quorum_id: int = 1, **changes: Any) -> None:
    p.begin()
    if p.agreed(quorum(quorum_id, **changes), allow_heal=True).configure:
        p.configured(quorum_id)


def test_a_rank_that_spoils_quorums_by_itself_says_so_in_its_joins_and_once_less_after_each_commit() -> None:
    p = protocol()
    for quorum_id in (1, 2):
        ready(p, quorum_id)
        p.fail(quorum_id, OSError("no device"), own="no device")
        p.fail(quorum_id, OSError("no device"), own="no device")
        p.decide(committed=False)
    assert own_failure_of(p.begin()) == ("no device", 2)
    p.agreed(quorum(3), allow_heal=True)
    p.decide(committed=False)
    assert own_failure_of(p.begin()) == ("", 2)  # the last quorum was not spoilt by it
    p.agreed(quorum(4), allow_heal=True)
    p.decide(committed=True)
    assert own_failure_of(p.begin()) == ("", 1)


def test_a_failure_before_the_quorum_is_known_is_of_that_quorum() -> None:
    p = protocol()
    p.begin()
    p.fail_current(ValueError("of the script"), own="of the script")
    p.agreed(quorum(1), allow_heal=True)
    p.decide(committed=False)
    assert own_failure_of(p.begin()) == ("of the script", 1)


def test_a_rank_that_gives_steps_up_without_a_verdict_is_to_blame_for_that() -> None:
    p = protocol()
    ready(p)
    ready(p, 2)
    assert own_failure_of(p.begin()) == ("it gave a step up without a verdict", 2)


@pytest.mark.agreement
def test_a_rank_takes_the_answer_to_its_last_request_only() -> None:
    p = protocol()
    first, second = p.begin(), p.begin()
    assert (first.answered, second.answered) == (0, 0)
    assert not p.awaits(quorum(1, request=first.request))
    assert p.awaits(quorum(2, request=second.request))
    p.agreed(quorum(2, request=second.request), allow_heal=True)
    assert not p.awaits(quorum(3, request=second.request)), "it has its quorum"
    p.decide(committed=True)
    assert p.begin().answered == second.request


def test_the_same_quorum_is_configured_once() -> None:
    p = protocol()
    ready(p)
    p.decide(committed=True)
    p.begin()
    assert p.agreed(quorum(1), allow_heal=True) == Plan(configure=False, serve=False, heal=False)
    p.begin()
    assert p.agreed(quorum(2), allow_heal=True) == Plan(configure=True, serve=False, heal=False)


def test_the_first_error_of_a_quorum_is_kept() -> None:
    p = protocol()
    ready(p)
    first = RuntimeError("first")
    assert p.fail(1, first)
    assert not p.fail(1, RuntimeError("second"))
    assert p.failure is first


def test_a_member_lost_after_the_last_collective_does_not_spoil_the_step() -> None:
    p = protocol()
    ready(p)
    assert p.group_broke(1)
    assert not p.group_broke(1), "told once"
    assert not p.can_communicate
    assert p.vote()
    p.decide(committed=True)
    assert p.begin().commit_failures == 1, "the next quorum must have a new id: the group is broken"


def test_a_failed_heal_does_not_break_the_group() -> None:
    p = protocol()
    ready(p, heal=True, max_replica_rank=None, max_world_size=2)
    assert p.fail(1, RuntimeError("source died"), group_broken=False)
    assert p.can_communicate
    assert not p.vote()


def test_a_group_that_breaks_after_a_failed_heal_is_news() -> None:
    p = protocol()
    ready(p)
    p.fail(1, RuntimeError("source died"), group_broken=False)
    assert p.fail(1, RuntimeError("peer died"))
    assert not p.can_communicate


def test_without_allow_heal_nothing_is_served_or_fetched() -> None:
    p = protocol()
    p.begin()
    plan = p.agreed(quorum(heal=True, recover_dst_replica_ranks=(1,)), allow_heal=False)
    assert plan == Plan(configure=True, serve=False, heal=False)


def test_why_a_step_was_not_committed_is_known_afterwards_also_where_nothing_failed() -> None:
    p = protocol(min_replica_size=4)
    ready(p)
    p.decide(p.vote())
    assert "3 replica groups took part in it, and min_replica_size is 4" in str(p.objection)
    ready(p, 2)
    p.fail(2, KeyError())
    p.decide(p.vote())
    assert p.objection == "KeyError()"
    p = protocol()
    ready(p)
    assert p.objection is None
    assert p.vote()


@pytest.mark.no_leak
def test_what_failed_in_quorums_of_the_past_is_forgotten() -> None:
    p = protocol()
    for quorum_id in range(1, 20, 2):
        ready(p, quorum_id)
        p.fail(quorum_id, RuntimeError("again"))
        p.decide(committed=False)
        p.fail(quorum_id + 1, RuntimeError("in one that it did not wait for any more"))
    assert max(len(kept) for kept in vars(p).values() if isinstance(kept, dict | set)) == 2


def test_max_retries_counts_failures_in_a_row() -> None:
    p = protocol(max_retries=1)
    for quorum_id in (1, 2):
        ready(p, quorum_id)
        p.fail(quorum_id, RuntimeError("again"))
        assert not p.out_of_retries
        p.decide(p.vote())
    assert p.out_of_retries
    ready(p, 3)
    p.decide(p.vote())
    assert not p.out_of_retries


def test_counters_survive_a_checkpoint_and_bad_ones_are_refused() -> None:
    p, q = protocol(), protocol()
    ready(p)
    p.decide(committed=True)
    q.restore(p.counters())
    assert q.counters() == p.counters()
    bad: dict[str, dict[str, object]] = {
        "step='five'": {"step": "five"},
        "no 'step'": {"model": {}, "manager": p.counters()},  # the whole checkpoint
        "step=-1": {"step": -1},
        "step=1180591620717411303424": {"step": 2**70},
        "step=True": {"step": True},
        "batches_committed=2.0": {"step": 7, "batches_committed": 2.0},
        "commit_quorum_id=-3": {"step": 7, "commit_quorum_id": -3},
        "first_quorum_id=-1": {"step": 7, "first_quorum_id": -1},
    }
    for text, counters in bad.items():
        with pytest.raises(ValueError, match=text):
            q.restore(counters)
        assert q.counters() == p.counters()
    q.restore({"step": 7, "batches_committed": 14})  # of torchft
    assert q.counters() == {"step": 7, "batches_committed": 14, "commit_quorum_id": 0, "first_quorum_id": 0}


def test_a_step_back_names_no_quorum_so_that_it_speaks_against_no_later_step() -> None:
    p, saved = protocol(), []
    for _ in range(2):
        ready(p)
        p.decide(committed=True)
        saved.append(p.counters())
    p.restore(saved[1])  # what it has
    assert p.counters() == saved[1]
    p.restore(saved[0])
    assert (p.step, p.begin().commit_quorum_id) == (1, 0)
    p.restore({**saved[0], "commit_quorum_id": DISOWNED})
    assert p.begin().commit_quorum_id == DISOWNED


def test_a_state_is_for_ever_of_the_job_in_which_its_training_began() -> None:
    p = protocol()
    assert p.begin().first_quorum_id == 0
    for quorum_id, first in ((5, 3), (9, 8)):
        ready(p, quorum_id, first_quorum_id=first)
        p.decide(committed=True)
        assert p.begin().first_quorum_id == 3


def test_a_rank_leaves_in_order_only_after_a_step_that_it_has_committed() -> None:
    p = protocol()
    found = []
    for committed in (True, False):
        ready(p)
        found.append(p.leaves_in_order)
        p.decide(committed)
        found.append(p.leaves_in_order)
    assert found == [False, True, False, False]


@pytest.mark.leave_together
def test_a_rank_that_hears_that_all_leave_does_so_also_if_its_script_does_not_end_the_step() -> None:
    stops = Verdict(0, False, stop=True)
    waits, is_between = protocol(), protocol()
    waits.begin()
    assert waits.hear(stops) == OnVerdict(gives_up=True, decides=True)
    is_between.hear(stops)
    for p in (waits, is_between):
        p.begin()
        assert (p.is_leaving, p.is_given_up) == (True, True)


@pytest.mark.parametrize(
    ("verdict", "heard"), [(Verdict(0, True), False), (Verdict(0, True, stop=True), True)], ids=str
)
def test_a_rank_that_gave_a_step_up_which_the_others_committed_ends_if_they_leave(
    verdict: Verdict, heard: bool
) -> None:
    p = protocol()
    p.begin()
    assert p.hear(verdict) == OnVerdict(ends_behind=heard)
    p.give_up()
    assert p.hear(verdict) == OnVerdict(ends_behind=True)


def test_a_step_that_is_kept_is_no_failure_and_the_state_is_loaded_in_one_too_many() -> None:
    p = protocol()
    p.steps_kept_max = 1
    ready(p, max_replica_rank=None, catches_up=True)
    p.begin_to_catch_up(Version(5, 9))
    p.is_bound = True
    assert (p.loads, p.passes) == (False, True)
    p.decide(committed=False, averages="of the step")
    assert p.begin().commit_failures == 0
    p.agreed(quorum(1, max_replica_rank=None, catches_up=True), allow_heal=True)
    p.is_bound = True
    assert (p.loads, p.passes) == (True, False)


def test_a_step_that_was_given_up_without_a_quorum_leaves_the_group_as_it_is() -> None:
    p = protocol()
    ready(p)
    p.decide(committed=True)
    p.begin()
    assert p.begin().broken_quorum_id == 0


@pytest.mark.parametrize(
    ("steps", "rules", "shares"),
    [
        ((4,), {}, [(0, 1, 1)]),
        ((4, 4, 4), {}, [(0, 3, 3), (1, 3, 3), (2, 3, 3)]),
        ((4, 2, 4), {}, [(0, 2, 2), (None, 2, 2), (1, 2, 2)]),  # b heals
        ((0, 0, 0), {}, [(0, 1, 3), (None, 1, 3), (None, 1, 3)]),  # the first step: all take a's state
        ((0, 0, 0), {"use_async_quorum": False}, [(0, 3, 3), (1, 3, 3), (2, 3, 3)]),
        ((4, 2, 4), {"use_async_quorum": False}, [(0, 3, 3), (1, 3, 3), (2, 3, 3)]),
        (
            (4, 4, 4),
            {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES},
            [(0, 2, 2), (1, 2, 2), (None, 2, 2)],
        ),
    ],
)
def test_the_shares_of_a_step_are_those_whose_gradients_count(
    steps: tuple[int, ...], rules: dict[str, Any], shares: list[tuple[int | None, int, int]]
) -> None:
    names = "abc"[: len(steps)]
    members = [pb.QuorumMember(replica_id=name, step=step) for name, step in zip(names, steps, strict=True)]
    found = []
    for name in names:
        p = protocol(2, **rules)
        p.begin()
        p.agreed(assign(1, members, name, 0, init_sync=True), allow_heal=True)
        found.append(tuple(p.share))
    assert found == shares


@pytest.mark.agreement
@pytest.mark.parametrize(
    ("own", "committed_in"),
    [((10, 7), 8), ((10, 5), DISOWNED), ((10, DISOWNED), DISOWNED), ((10, NO_STATE), NO_STATE)],
)
def test_one_that_is_behind_and_may_not_heal_does_not_pass_for_one_that_is_not(
    own: tuple[int, int], committed_in: int
) -> None:
    versions = {"a": own, "b": (10, 7)}
    members = [pb.QuorumMember(replica_id=i, step=v[0], commit_quorum_id=v[1]) for i, v in versions.items()]
    p = protocol()
    p.restore({"step": 10, "batches_committed": 10})
    p.commit_quorum_id = own[1]
    p.begin()
    p.agreed(assign(8, members, "a", 0, init_sync=True), allow_heal=False)
    p.decide(committed=True)
    assert (p.step, p.commit_quorum_id) == (11, committed_in)


def test_in_a_first_step_with_spares_the_source_is_one_whose_gradients_count_whoever_that_is() -> None:
    members = [pb.QuorumMember(replica_id=name, commit_failures=2) for name in "abc"]
    found = []
    for name in "abc":
        p = protocol(2, world_size_mode=WorldSizeMode.FIXED_WITH_SPARES)
        p.begin()
        p.agreed(assign(1, members, name, 0, init_sync=True), allow_heal=True)
        found.append((tuple(p.share), p.is_participating))
    assert found == [((None, 1, 2), False), ((None, 1, 2), False), ((0, 1, 2), True)]


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("version", [(0, 0), (4, DISOWNED)])
@pytest.mark.parametrize("mode", WorldSizeMode)
def test_beside_one_that_is_behind_a_first_step_counts_the_gradients_of_its_source(
    mode: WorldSizeMode, version: tuple[int, int]
) -> None:
    members = [
        pb.QuorumMember(replica_id=i, step=step, commit_quorum_id=quorum_id, commit_failures=1)
        for i, (step, quorum_id) in {"a": (0, NO_STATE), "b": version, "c": version}.items()
    ]
    found = []
    for name in "abc":
        p = protocol(1, world_size_mode=mode)
        p.begin()
        p.agreed(assign(1, members, name, 0, init_sync=True), allow_heal=True)
        found.append((p.share.rank, p.is_participating))
    assert found == [(None, False), (None, False), (0, True)]


# A quorum that stands, on the trainers' side: the step protocol of a rank, and the ranks of a group.


ERROR = ValueError("the script says so")


def standing(**rules: Any) -> StepProtocol:
    """A rank at the end of its first step in quorum 1, which stands."""
    p = protocol(**rules)
    p.begin()
    p.agreed(quorum(stands=True), allow_heal=True)
    p.configured(1)
    p.is_bound = True
    p.decide(committed=True)
    return p


def going_on(p: StepProtocol) -> StepProtocol:
    """The same rank in an attempt for which it has not asked, and which it has not entered."""
    assert p.goes_on
    p.begin()
    p.stand()
    return p


class TestRank:
    def test_it_never_may_with_a_synchronous_quorum(self) -> None:
        assert not standing(use_async_quorum=False).begin().may_stand

    def test_an_error_is_not_forgotten_when_the_attempt_asks(self) -> None:
        p = going_on(standing())
        p.fail_current(ERROR)
        p.hold(1)
        p.released(1, 1)
        assert p.ask_instead()
        p.agreed(quorum(2), allow_heal=True)
        p.is_bound = True
        assert p.failure is ERROR
        assert not p.vote()

    def test_what_ended_the_quorum_before_it_was_entered_fails_no_attempt_in_the_next(self) -> None:
        p = going_on(standing())
        p.hold(1)
        p.fail(1, ERROR)
        p.released(1, 1)
        assert p.ask_instead()
        p.agreed(quorum(2), allow_heal=True)
        assert p.failure is None

    @pytest.mark.parametrize("forget", [StepProtocol.disown_state, StepProtocol.lose_state])
    def test_one_that_has_not_the_state_of_its_step_asks(
        self, forget: Callable[[StepProtocol], None]
    ) -> None:
        p = standing()
        forget(p)
        assert not p.goes_on
        assert not p.begin().may_stand

    def test_what_another_quorum_releases_is_none_of_its_steps(self) -> None:
        p = going_on(standing())
        p.enter()
        assert p.released(0, 0)
        assert not p.released(1, 1), "it has entered that one"

    def test_what_is_lost_need_not_be_asked_for(self) -> None:
        p = going_on(standing())
        p.enter()
        p.group_broke(1)
        assert not p.needs_asking
        assert not p.vote()

    def test_a_step_that_was_given_up_before_it_was_entered_breaks_nothing(self) -> None:
        p = going_on(standing())
        assert p.begin().broken_quorum_id == 0
        p = going_on(standing())
        p.enter()
        assert p.begin().broken_quorum_id == 1


def formed(size: int, *, waits_for_lighthouse: bool = False) -> ReplicaGroup:
    """A group of so many ranks in quorum 9, which stands."""
    group = ReplicaGroup("a", size, waits_for_lighthouse)
    for rank in range(size):
        group.rank_joined(join(rank, may_stand=True))
    effects = group.quorum_formed(9, members("a", "b"), 1, stands=True)
    assert all(isinstance(effect, RankQuorum) and effect.result.stands for effect in effects)
    return group


class TestGroup:
    def test_a_rank_that_asks_for_a_step_which_another_has_begun_breaks_the_quorum(self) -> None:
        group = formed(3)
        group.rank_joined(join(1))
        group.rank_holds(2, 9, 4)
        notice, released = group.rank_holds(0, 9, 5)
        assert isinstance(notice, LossNotice)
        assert notice.is_alive
        assert released == ReleaseRanks((0, 2), 9, None), (
            "a rank that holds before step 4 would hold for ever"
        )
        assert group.rank_voted(0, Verdict(4, committed=True)) == [
            RankVerdict(0, Verdict(4, committed=False))
        ]

    def test_no_step_is_lost_where_all_ask_for_the_step_for_which_one_has_asked(self) -> None:
        group = formed(2)
        assert group.rank_joined(join(1)) == [HoldRanks((0,), 9)]
        assert group.rank_holds(0, 9, 4) == [GroupHolds(9, 1, 4)]
        assert group.released(9, 0, 4) == [], "it is of an earlier round"
        assert group.released(9, 1, 4) == [ReleaseRanks((0,), 9, 4)]

    def test_the_next_lighthouse_hears_of_a_rank_that_asks_and_of_no_other(self) -> None:
        group = formed(2)
        assert group.lighthouse_connected() == []
        group.rank_joined(join(1))
        assert group.lighthouse_connected() == [ReleaseRanks((0,), 9, None), HoldRanks((0,), 9)]

    def test_an_answer_to_an_earlier_request_to_hold_does_not_count(self) -> None:
        group = formed(2)
        group.hold(9, 1)
        group.rank_holds(0, 9, 4)
        assert group.lighthouse_disconnected() == [ReleaseRanks((0, 1), 9, None)]
        group.hold(9, 1)
        assert group.rank_holds(0, 9, 4) == []
        assert group.rank_holds(1, 9, 4) == []  # of the first request; then it went on
        assert group.rank_holds(1, 9, 5) == [GroupHolds(9, 1, 5)]

    @pytest.mark.progress
    def test_a_rank_that_leaves_ends_those_that_hold_in_a_quorum_that_is_over(self) -> None:
        """The group would name the step for them once all of its ranks hold."""
        group = formed(3)
        group.member_lost(9, "b", "its connection ended")
        group.rank_holds(0, 9, 4)
        (notice,) = group.rank_left(1, "shutdown")
        assert isinstance(notice, GroupLeftNotice)
        assert notice.group_ranks == (0, 2)

    def test_a_step_that_waits_for_too_long_is_given_up(self) -> None:
        group = formed(1)
        (notice,) = group.step_overdue(9, 60.0)
        assert isinstance(notice, LossNotice)
        assert notice.is_alive
        assert group.step_overdue(8, 60.0) == []

    @pytest.mark.one_quorum_per_step
    def test_a_step_whose_collectives_have_succeeded_is_not_committed_after_the_lease(self) -> None:
        group = formed(2)
        group.rank_voted(0, Verdict(4, committed=True))
        (notice,) = group.lease_ended()
        assert isinstance(notice, LossNotice)
        assert notice.must_fail
        verdicts = group.rank_voted(1, Verdict(4, committed=True))
        assert verdicts == [RankVerdict(rank, Verdict(4, committed=False)) for rank in (0, 1)]


# Which errors a rank takes for its own.


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        ValueError("a shape"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA out of memory"),
        SubprocessLostError("the subprocess died"),
        caused_by(ProcessGroupNotConfiguredError("failed"), OSError(errno.EMFILE, "Too many open files")),
    ],
    ids=str,
)
def test_an_error_of_the_process_its_device_or_its_host_is_its_own(error: Exception) -> None:
    assert is_own_error(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("not all peers were connected after 5 s"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:55141"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        ProcessGroupAbortedError("b was lost"),
        MemberLostError("b was lost"),
        caused_by(ProcessGroupNotConfiguredError("failed"), RuntimeError("Connection refused")),
    ],
    ids=str,
)
def test_what_the_end_of_a_peer_looks_like_is_not(error: Exception) -> None:
    assert not is_own_error(error)


def test_a_long_error_is_cut() -> None:
    assert len(describe_own_error(ValueError("x" * 10_000))) == OWN_FAILURE_MAX
