"""A replica that catches up beside the steps of the others: what it keeps, says and takes again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lighthouse.core.decisions import DISOWNED, NO_STATE
from tests.unit.manager.members import member
from tests.unit.manager.test_quorum_driver import LIMIT_S
from tests.unit.manager.test_state_exchange import Replica, no_memory
from torchft_like.core.assignment import QuorumResult, assign
from torchft_like.core.catch_up import Version
from torchft_like.core.replica_group import LossNotice, RankJoin, RankVerdict, ReplicaGroup, Verdict
from torchft_like.core.step import StepProtocol, StepRules
from torchft_like.errors import CheckpointError, ShutdownError
from torchft_like.manager import state_exchange
from torchft_like.manager.attempt import Attempt
from torchft_like.optim import GradientReplay

OTHERS = {"b": Version(5, 9), "c": Version(5, 9)}


def quorum(quorum_id: int, own: RankJoin, others: dict[str, Version], asks: str = "a") -> QuorumResult:
    """Return what a quorum of replica a, which has said this, and of others is to one of them."""
    members = [member(name, *version) for name, version in others.items()]
    said = {"may_catch_up": own.may_catch_up, "has_fetched": own.has_fetched}
    reached = {"reached_step": own.reached_step, "reached_quorum_id": own.reached_quorum_id}
    members.append(member("a", own.step, own.commit_quorum_id, **said, **reached))
    return assign(quorum_id, members, asks, 0, init_sync=True)


@pytest.mark.parametrize("rules", [{"steps_kept_max": 0}, {"use_async_quorum": False}], ids=str)
def test_a_replica_waits_where_it_keeps_no_steps(rules: dict[str, Any]) -> None:
    protocol = StepProtocol(StepRules(1, use_async_quorum=rules.get("use_async_quorum", True)))
    protocol.steps_kept_max = rules.get("steps_kept_max", 8)
    assert protocol.agreed(quorum(10, protocol.begin(), OTHERS), allow_heal=True).heal
    assert protocol.catch_up is None


def test_a_replica_does_not_catch_up_with_a_state_of_its_own_or_of_no_version() -> None:
    protocol = StepProtocol(StepRules(1))
    protocol.steps_kept_max = 8
    protocol.lose_state()
    assert not protocol.begin().may_catch_up
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
        self.said = self.driver.begin(attempt)
        self.driver.quorum(quorum(quorum_id, self.said, others))
        attempt.wait_configured(str)
        self.protocol.is_bound = True
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
    assert a.said.has_fetched
    assert (a.loaded, a.replay.taken) == ([{}], [1, 2, 3])
    assert a.protocol.step == 9
    assert a.exchange._beside is None
    a.driver.stop(ShutdownError("over"), LIMIT_S)


@pytest.mark.progress
@pytest.mark.heal_is_clean
def test_a_state_is_loaded_by_all_ranks_of_a_group_or_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script's function may use collectives of the group, and one rank may give the step up."""
    a, answers = Catching(monkeypatch), [False, True]
    a.exchange.agree = lambda _, has_fetched: has_fetched and answers.pop(0)
    a.step(10, OTHERS)
    assert a.exchange._beside is not None
    a.release.set()
    a.exchange._beside.result()
    a.step(10, dict.fromkeys("bc", Version(6, 10)))
    others = dict.fromkeys("bc", Version(7, 10))
    assert not a.step(10, others)
    assert a.loaded == []
    assert a.step(10, others), "the others have lost that step, too"
    assert (a.loaded, a.replay.taken, answers) == ([{}], [1, 2], [])
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
        a.exchange.member_lost(LossNotice(10, "b", "it died"))
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
        assert beside.done()
    a.driver.stop(ShutdownError("over"), LIMIT_S)


def test_a_fetch_without_a_thread_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(*_: object) -> Any:
        raise RuntimeError("can't start new thread")

    a = Catching(monkeypatch)
    monkeypatch.setattr(state_exchange, "in_background", no_thread)
    assert not a.step(10, OTHERS)
    assert "new thread" in str(a.protocol.failure)
    assert a.exchange.source == ""
    a.exchange.end_fetch("nothing is ended")
    assert not a.transport._aborted.is_set()
    a.driver.stop(ShutdownError("over"), LIMIT_S)
