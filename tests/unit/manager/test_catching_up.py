"""A replica that catches up beside the steps of the others: what it keeps, says and takes again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lighthouse.core.decisions import DISOWNED, NO_STATE
from lighthouse.wire import torchft_pb2 as pb
from tests.unit.manager.test_quorum_driver import LIMIT_S
from tests.unit.manager.test_state_exchange import Replica, Transport, no_memory
from torchft_like.core.assignment import QuorumResult, assign
from torchft_like.core.catch_up import Version
from torchft_like.core.replica_group import RankJoin, RankVerdict, ReplicaGroup, Verdict
from torchft_like.core.step import Plan, StepProtocol, StepRules
from torchft_like.errors import CheckpointError, ShutdownError
from torchft_like.manager.attempt import Attempt
from torchft_like.optim import GradientReplay

OTHERS = {"b": Version(5, 9), "c": Version(5, 9)}


def quorum(quorum_id: int, own: RankJoin, others: dict[str, Version], asks: str = "a") -> QuorumResult:
    """Return what a quorum of replica a, which has said this, and of others is to one of them."""
    members = [
        pb.QuorumMember(replica_id=name, step=version.step, commit_quorum_id=version.commit_quorum_id)
        for name, version in others.items()
    ]
    members.append(
        pb.QuorumMember(
            replica_id="a",
            step=own.step,
            commit_quorum_id=own.commit_quorum_id,
            may_catch_up=own.may_catch_up,
            reached_step=own.reached_step,
            reached_quorum_id=own.reached_quorum_id,
            has_fetched=own.has_fetched,
        )
    )
    return assign(quorum_id, members, asks, 0, init_sync=True)


class Follower:
    """Replica a, which is behind, as far as its protocol goes."""

    def __init__(self, steps_kept_max: int = 8, **rules: Any) -> None:
        self.protocol = StepProtocol(StepRules(1, **rules))
        self.protocol.steps_kept_max = steps_kept_max
        self.said = self.protocol.begin()

    def enter(self, quorum_id: int, others: dict[str, Version], *, is_bound: bool = True) -> Plan:
        """Take a quorum of what it has said; begin to fetch where the plan is to."""
        result = quorum(quorum_id, self.said, others)
        plan = self.protocol.agreed(result, allow_heal=True)
        self.protocol.configured(quorum_id)
        if is_bound:
            self.protocol.bind()
        if plan.catch_up:
            self.protocol.begin_to_catch_up(Version(result.max_step, result.max_commit_quorum_id))
        return plan

    def leave(self, averages: object = None, *, has_fetched: bool = False) -> None:
        """Decide, and begin the next attempt."""
        self.protocol.decide(self.protocol.vote(), averages, has_fetched)
        self.said = self.protocol.begin()


@pytest.mark.heal_is_clean
def test_steps_that_pass_are_kept_in_order_and_the_version_stays_until_they_are_taken() -> None:
    a = Follower()
    assert a.enter(10, OTHERS).catch_up
    for step in range(3):
        assert a.protocol.passes
        assert not a.protocol.vote()
        assert not a.protocol.is_participating
        a.leave(f"averages {step}", has_fetched=step == 2)
        assert (a.said.step, a.said.commit_quorum_id) == (0, 0)
        assert (a.said.reached_step, a.said.reached_quorum_id, a.said.commit_failures) == (6 + step, 10, 0)
        plan = a.enter(10, dict.fromkeys("bc", Version(6 + step, 10)))
        assert plan == Plan(configure=False, serve=False, heal=False, hold=step < 2)
    assert a.protocol.loads
    counters = {"step": 5, "commit_quorum_id": 9, "batches_committed": 50, "first_quorum_id": 1}
    assert a.protocol.steps_to_take(counters) == ["averages 0", "averages 1", "averages 2"]
    a.protocol.caught_up(counters)
    assert a.protocol.counters() == {**counters, "step": 8, "commit_quorum_id": 10, "batches_committed": 56}
    assert not a.protocol.is_participating
    assert a.protocol.vote()
    a.leave()
    assert (a.said.reached_step, a.said.reached_quorum_id) == (0, 0)
    assert not quorum(10, a.said, dict.fromkeys("bc", Version(9, 10))).heal


@pytest.mark.heal_is_clean
def test_counters_of_another_state_are_refused() -> None:
    a = Follower()
    a.enter(10, OTHERS)
    with pytest.raises(ValueError, match="since another one"):
        a.protocol.steps_to_take({"step": 5, "commit_quorum_id": 8})


@pytest.mark.progress
@pytest.mark.parametrize("why", ["too many", "too few", "bare"])
def test_a_step_that_cannot_be_kept_waits_for_the_state(why: str) -> None:
    a = Follower(steps_kept_max=1)
    if why == "too few":
        a.protocol._rules = StepRules(3)
    a.enter(10, OTHERS, is_bound=why != "bare")
    if why == "too many":
        a.leave("averages")
        a.enter(10, dict.fromkeys("bc", Version(6, 10)))
    assert a.protocol.loads
    assert not a.protocol.passes
    a.protocol.fail(10, OSError("broken"))
    assert not a.protocol.loads


def test_a_replica_waits_where_it_cannot_catch_up() -> None:
    for a in (Follower(steps_kept_max=0), Follower(use_async_quorum=False)):
        assert a.enter(10, OTHERS).heal
        assert a.protocol.catch_up is None
    a = Follower()
    a.protocol.lose_state()
    assert not a.protocol.begin().may_catch_up
    for first in (Version(0, 0), Version(5, DISOWNED)):  # all take over the state of one
        own = RankJoin(0, 0, "", commit_quorum_id=NO_STATE, may_catch_up=True)
        result = quorum(10, own, dict.fromkeys("bc", first))
        assert (result.begins_to_catch_up, result.catches_up) == (False, False)


def test_a_source_keeps_its_offer_until_who_catches_up_has_the_state_and_offers_no_other() -> None:
    said = RankJoin(0, 0, "", may_catch_up=True, reached_step=6, reached_quorum_id=10)
    for has_fetched in (False, True):
        now = said._replace(has_fetched=has_fetched)
        result = quorum(10, now, dict.fromkeys("bc", Version(6, 10)), asks="b")
        assert result.recover_dst_replica_ranks == ()
        assert not result.helped_ranks
        assert result.is_awaited is not has_fetched
        assert result.healing_replica_ids == ("a",)
        assert StepProtocol(StepRules(1)).agreed(result, allow_heal=True).hold is not has_fetched


@pytest.mark.agreement
def test_a_group_keeps_a_step_if_all_ranks_do_and_nobody_takes_that_for_a_no() -> None:
    group = ReplicaGroup("a", 2)
    passed = Verdict(4, committed=False, passed=True, has_fetched=True)
    assert group.rank_voted(0, passed) == []
    assert group.rank_voted(1, passed) == [RankVerdict(rank, passed) for rank in (0, 1)]
    group.rank_voted(0, passed)
    lost = Verdict(4, committed=False)
    assert group.rank_voted(1, lost) == [RankVerdict(rank, lost) for rank in (0, 1)]


def test_an_optimizer_takes_kept_steps_again_and_leaves_the_present_gradients() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def differentiate(model: nn.Module, factor: float) -> None:
        model.zero_grad()
        (model(torch.ones(3)).sum() * factor).backward()

    (model, optimizer, scheduler), (other, followed, later) = make(), make()
    replay, kept = GradientReplay(followed, later.step), list[object]()
    for factor in (1.0, -2.0, 3.0):
        for each in (model, other):
            differentiate(each, factor)
        optimizer.step()
        scheduler.step()
        kept.append(replay.keep())
    differentiate(other, 7.0)
    present = [parameter.grad for parameter in other.parameters()]
    replay.take(kept)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert all(p.grad is g for p, g in zip(other.parameters(), present, strict=True))
    assert later.get_last_lr() == scheduler.get_last_lr()


class Steps:
    """A replay that notes what it is to take."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.kept = 0

    def keep(self) -> object:
        self.kept += 1
        return self.kept

    def take(self, steps: Sequence[object]) -> None:
        self.taken += steps


class Catching(Replica):
    """A replica that catches up, and whose state comes when `release` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.release, self.loaded, self.replay = threading.Event(), list[object](), Steps()
        self.registry.register("model", self.loaded.append, dict)
        self.exchange.replay, self.protocol.steps_kept_max = self.replay, 3
        monkeypatch.setattr(self.transport, "recv_checkpoint", self._receive)

    def _receive(self, step: int, **_: object) -> object:
        self.transport.is_receiving.set()
        assert self.release.wait(LIMIT_S)
        if self.transport._aborted.is_set():
            raise CheckpointError("it was ended")
        return {"user": {"model": {}}, "torchft": {"step": step, "commit_quorum_id": {5: 9, 6: 12}[step]}}

    def step(self, quorum_id: int, others: dict[str, Version]) -> bool:
        """Do a step; return whether it is committed."""
        attempt = Attempt(True, LIMIT_S)
        said = self.driver.begin(attempt)
        self.driver.quorum(quorum(quorum_id, said, others))
        attempt.wait_configured(str)
        self.protocol.bind()
        self.exchange.exchange(attempt)
        vote = self.protocol.vote()
        averages = self.exchange.keep() if self.protocol.passes else None
        self.protocol.decide(vote, averages, self.exchange.has_fetched)
        return vote


@pytest.mark.at_rest
@pytest.mark.heal_is_clean
def test_a_state_comes_beside_the_steps_and_is_loaded_when_the_group_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    a = Catching(monkeypatch)
    assert not a.step(10, OTHERS)
    assert a.transport.is_receiving.wait(LIMIT_S)
    assert not a.step(10, dict.fromkeys("bc", Version(6, 10)))
    assert (a.loaded, a.replay.kept) == ([], 2)
    assert a.driver.step_and_source() == (0, "b"), "as the page shows it"
    a.release.set()
    assert a.exchange._beside is not None
    a.exchange._beside.result()
    assert not a.step(10, dict.fromkeys("bc", Version(7, 10)))
    assert a.loaded == []
    assert a.step(10, dict.fromkeys("bc", Version(8, 10)))
    assert (a.loaded, a.replay.taken) == ([{}], [1, 2, 3])
    assert a.protocol.step == 9
    assert a.exchange._beside is None
    a.driver.stop(ShutdownError("over"), LIMIT_S)


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("why", ["source", "memory", "begins anew"])
def test_what_fails_beside_the_steps_is_dropped(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    a = Catching(monkeypatch)
    if why == "memory":
        monkeypatch.setattr(a.replay, "keep", no_memory)
    a.step(10, OTHERS)
    a.transport._aborted.clear()
    beside = a.exchange._beside
    assert beside is not None
    others = dict.fromkeys("bc", Version(6, 10))
    if why == "source":
        a.exchange.member_lost(10, "b")
        a.release.set()
        with pytest.raises(CheckpointError):
            beside.result()
        assert not a.step(10, others)
        assert a.protocol.failure is not None
        assert a.protocol.can_communicate, "nothing of the others is broken"
        assert a.exchange._beside is None
    elif why == "memory":
        assert (a.protocol.catch_up, a.protocol.steps_kept_max) == (None, 0)
        a.release.set()
    else:
        a.release.set()
        beside.result()
        a.step(12, dict.fromkeys("bc", Version(6, 12)))
        assert a.exchange._beside is not beside
        assert beside.has_come
    a.driver.stop(ShutdownError("over"), LIMIT_S)


def test_a_transport_of_this_kind_keeps_no_offers_unless_it_says_so() -> None:
    assert not Transport().keeps_offers
