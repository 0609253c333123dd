"""An elastic coordinator: growing, shrinking, both; what is stale afterwards; what is rolled back."""

from __future__ import annotations

import random
import re
import socket
import threading
import time
from datetime import timedelta
from functools import partial

import pytest
import torch

from tests.managers import PATIENCE_S, error_of
from tests.unit.group_coordinator.elastic_crew import LIMIT_S, PAUSE_S, Crew
from tests.waiting import wait_for
from torchft_like.core.peer_links import Probe
from torchft_like.errors import (
    ChangeInDoubtError,
    ChangeRolledBackError,
    ConfigError,
    ConnectError,
    GroupCoordinatorError,
    QueueClosedError,
    StaleEpochError,
)
from torchft_like.group_coordinator import Change, ElasticCoordinator, Membership
from torchft_like.group_coordinator.elastic import EpochGroups, Member
from torchft_like.manager_server import server

# ---------------------------------------------------------------------------- it comes about


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("ab", "abcd", id="grow"),
        pytest.param("abcd", "bd", id="shrink, rank 0 leaves"),
        pytest.param("bcd", "acd", id="both, with another rank 0"),
        pytest.param("ab", "cd", id="all are replaced"),
        pytest.param("a", "ab", id="from one"),
        pytest.param("ab", "b", id="to one"),
    ],
)
def test_the_members_change_and_the_object_stays(crew: Crew, before: str, after: str) -> None:
    crew.change(before)
    assert crew.sums(before) == [len(before)] * len(before)
    objects = {name: crew[name] for name in {*before, *after}}
    first = crew[before[0]].epoch
    leaving = "".join(sorted(set(before) - set(after)))
    crew.change(after, leaving)
    assert crew.sums(after) == [len(after)] * len(after)
    crew.together(after, lambda c: c.barrier())
    (membership,) = {crew[name].membership for name in after}
    assert membership is not None
    assert membership.members == tuple(after)
    assert membership.epoch > first
    for name in after:
        assert crew[name] is objects[name]
        assert crew[name].epoch == membership.epoch
        assert (crew[name].rank_in_group, crew[name].world_size) == (after.index(name), len(after))
    assert crew.outcomes(leaving, lambda c: c.broadcast_object(1)) == ["StaleEpochError"] * len(leaving)


def test_the_old_members_serve_until_the_new_are_there(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.change("ab")
    configure, may_meet = EpochGroups.configure, threading.Event()

    def when_c_is_there(groups: EpochGroups, membership: Membership, rank: int) -> None:
        if "c" in membership.members and membership.members[rank] == "c":
            may_meet.wait(LIMIT_S)
        configure(groups, membership, rank)

    monkeypatch.setattr(EpochGroups, "configure", when_c_is_there)
    joining = crew.aside(crew["c"].follow, LIMIT_S)

    def until_all_know(c: ElasticCoordinator) -> Change:
        while True:
            change = c.begin_change()
            assert not c.is_due(change)
            if c.all_reduce(torch.tensor([change.membership is not None], dtype=torch.int)).item() == 2:
                return change

    changes = {change.rank: change for change in crew.together("ab", until_all_know)}
    assert crew.sums("ab") == [2, 2]
    assert crew.together("ab", lambda c: c.is_due(changes[c.rank_in_group])) == [False, False]
    may_meet.set()
    assert all(change.wait_ready(LIMIT_S) for change in changes.values())
    assert crew.sums("ab") == [2, 2]
    assert crew.together("ab", lambda c: c.is_due(changes[c.rank_in_group])) == [True, True]
    assert crew.outcomes("ab", lambda c: changes[c.rank_in_group].complete()) == ["", ""]
    assert joining.result(LIMIT_S).members == ("a", "b", "c")
    assert crew.sums("abc") == [3, 3, 3]


def test_a_change_is_due_when_all_members_have_the_same(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc")
    assert crew.together("ab", lambda c: c.is_due(changes["a"] if c.name == "a" else None)) == [False] * 2
    assert crew.complete(changes) == ["", "", ""]
    assert crew.together("abc", lambda c: c.is_due(changes[c.name])) == [False] * 3  # it has come about


def test_nothing_changes_where_nobody_has_come_or_gone(crew: Crew) -> None:
    crew.change("ab")
    before = crew["a"].membership
    for _ in range(3):
        assert crew.outcomes("ab", lambda c: c.change()) == ["", ""]
    assert crew["a"].membership == before
    assert crew.sums("ab") == [2, 2]


def test_a_compiled_function_is_one_of_the_present_members(crew: Crew) -> None:
    torch._dynamo.reset()

    def everyones(coordinator: ElasticCoordinator) -> list[float]:
        def function(rank: torch.Tensor) -> torch.Tensor:
            rows = coordinator.all_gather(rank, 0)
            return rows.sum() + rows.shape[0] + coordinator.reduce_scatter(rows, 0)

        compiled = torch.compile(function, backend="eager", fullgraph=True)
        return compiled(torch.tensor([coordinator.rank_in_group])).tolist()

    for members, leaving in (("ab", ""), ("abc", ""), ("b", "ac")):
        crew.change(members, leaving)
        ranks = range(len(members))
        shared = sum(ranks) + len(ranks)
        assert crew.together(members, everyones) == [[shared + len(ranks) * rank] for rank in ranks]


def test_members_grow_and_shrink_between_calls(crew: Crew) -> None:
    crew.change("ab")
    joining = crew.aside(crew["c"].follow, LIMIT_S)
    crew.switch("ab")
    joining.result(LIMIT_S)
    assert crew.sums("abc") == [3, 3, 3]
    leaving = crew["a"].begin_change(leaving=True)
    going = crew.aside(_serve_until_due, crew["a"], leaving)
    crew.switch("bc")
    going.result(LIMIT_S)
    assert (crew["a"].membership, crew.sums("bc")) == (None, [2, 2])


def _serve_until_due(coordinator: ElasticCoordinator, change: Change) -> None:
    wait_for(lambda: coordinator.is_due(change))
    change.complete()


# ----------------------------------------------------------------------------------- stale


def test_handles_of_an_old_epoch_raise_done_or_not(crew: Crew) -> None:
    crew.change("ab")
    sent = {"x": torch.ones(2)}
    done, _ = crew.together("ab", lambda c: c.ibroadcast_tensor_dict(sent if c.name == "a" else None))
    assert done.wait(LIMIT_S)["x"].tolist() == [1, 1]
    _, [pending], _ = crew["b"].irecv_tensor_dict()
    crew.change("abc")
    assert (done.is_completed(), pending.is_completed()) == (True, True)
    with pytest.raises(StaleEpochError, match="which is over: its members are those of epoch"):
        done.wait(LIMIT_S)
    with pytest.raises(StaleEpochError, match="which is over: its members are those of epoch"):
        pending.wait(LIMIT_S)


def test_a_message_of_an_old_epoch_never_arrives_in_a_new_one(crew: Crew) -> None:
    crew.change("ab")
    crew["a"].isend_tensor_dict({"epoch": 1, "x": torch.ones(3)})  # nobody receives it
    crew.change("abc")
    [handle] = crew["a"].isend_tensor_dict({"epoch": 2, "x": torch.zeros(3)})
    assert crew.aside(crew["b"].recv_tensor_dict).result(LIMIT_S)["epoch"] == 2  # type: ignore[index]
    handle.wait(LIMIT_S)


def test_tokens_that_were_dispatched_to_others_are_not_combined(crew: Crew) -> None:
    crew.change("ab")
    tokens = torch.ones(2, 3)
    crew.together("ab", lambda c: c.dispatch(tokens, tokens))
    crew.change("abc")
    assert crew.outcomes("ab", lambda c: c.combine(torch.ones(4, 3))) == ["StaleEpochError"] * 2
    gathered = crew.together("abc", lambda c: c.dispatch(tokens, tokens)[0])
    combined = crew.together("abc", lambda c: c.combine(gathered[c.rank_in_group]))
    assert all(torch.equal(each, 3 * tokens) for each in combined)


def test_queues_end_with_their_epoch(crew: Crew) -> None:
    crew.change("ab")
    queues = crew.together("ab", lambda c: c.create_mq_broadcaster())
    queues[0].enqueue("first", LIMIT_S)
    assert queues[1].dequeue(LIMIT_S) == "first"
    crew.change("abc")
    with pytest.raises(QueueClosedError):
        queues[0].enqueue("second", LIMIT_S)


# ------------------------------------------------------------------------------- rolled back


def test_a_change_that_one_gives_up_is_rolled_back_on_all(crew: Crew) -> None:
    crew.change("ab")
    epoch = crew["a"].epoch
    _, [pending], _ = crew["b"].irecv_tensor_dict()
    changes = crew.begin("abc")
    changes["c"].roll_back("it has changed its mind")
    assert crew.complete({name: changes[name] for name in "ab"}) == ["ChangeRolledBackError"] * 2
    with pytest.raises(GroupCoordinatorError, match="is over"):
        changes["b"].complete()
    with pytest.raises(GroupCoordinatorError, match="c: it has changed its mind"):
        changes["c"].complete()
    crew["a"].send_tensor_dict({"x": 1})
    assert pending.wait(LIMIT_S) == {"x": 1}  # begun before, and of the epoch that goes on
    assert (crew["a"].epoch, crew.sums("ab")) == (epoch, [2, 2])
    crew.change("abc")
    assert crew["a"].epoch > epoch
    assert crew.sums("abc") == [3, 3, 3]


def test_a_member_that_comes_too_late_is_bound_by_what_was_decided(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc")
    with pytest.raises(ChangeRolledBackError, match="a: has waited for the others in vain"):
        changes["a"].complete(timeout=0.1)
    assert crew.complete({name: changes[name] for name in "bc"}) == ["ChangeRolledBackError"] * 2
    assert crew.sums("ab") == [2, 2]


def test_who_asks_alone_waits_no_longer_than_it_wants(crew: Crew) -> None:
    crew.change("ab")
    with pytest.raises(ChangeRolledBackError, match="in vain"):
        crew["a"].change(timeout=0.1)
    assert crew.sums("ab") == [2, 2]
    crew.change("abc")
    assert crew.sums("abc") == [3, 3, 3]


def test_a_newcomer_during_a_change_waits_for_the_next(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc")
    joining = crew.aside(crew["d"].follow, LIMIT_S)
    wait_for(lambda: crew["d"]._session._change is not None)
    assert crew.complete(changes) == ["", "", ""]
    assert crew.sums("abc") == [3, 3, 3]
    crew.switch("abc")
    assert joining.result(LIMIT_S).members == ("a", "b", "c", "d")
    assert crew.sums("abcd") == [4] * 4


def test_who_shrinks_only_lets_nobody_in(crew: Crew) -> None:
    crew.change("ab")
    joining = crew.aside(crew["c"].follow, LIMIT_S)
    wait_for(lambda: crew["c"]._session._change is not None)
    for _ in range(3):
        crew.together("ab", lambda c: c.begin_change(shrink_only=True).complete())
    assert crew.sums("ab") == [2, 2]
    crew.switch("ab")
    assert joining.result(LIMIT_S).members == ("a", "b", "c")


def test_members_follow_until_a_change_comes_about(crew: Crew) -> None:
    crew.change("ab")
    assert {m.members for m in crew.together("ab", lambda c: c.follow(LIMIT_S))} == {("a", "b")}
    assert crew.sums("ab") == [2, 2]
    with pytest.raises(TimeoutError, match="not enough members"):
        crew["a"].follow(timeout=0.05)  # b asks for nothing
    assert crew.outcomes("b", lambda c: c.all_reduce(torch.ones(1))) == ["GroupCoordinatorError"]
    assert {m.members for m in crew.together("ab", lambda c: c.follow(LIMIT_S))} == {("a", "b")}
    assert crew.sums("ab") == [2, 2]


def test_who_follows_completes_what_was_begun(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc")
    (epoch,) = {m.epoch for m in crew.together("abc", lambda c: c.follow())}
    assert {change.membership and change.membership.epoch for change in changes.values()} == {epoch}


def test_who_is_destroyed_is_not_waited_for(crew: Crew) -> None:
    crew.change("abc")
    waiting = [crew.aside(crew[name].all_reduce, torch.ones(1)) for name in "ab"]
    crew.coordinators.pop("c").destroy()
    for each in waiting:
        with pytest.raises(GroupCoordinatorError):
            each.result(LIMIT_S)
    assert {m.members for m in crew.together("ab", lambda c: c.follow())} == {("a", "b")}
    assert crew.sums("ab") == [2, 2]


def c_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let c give no answer to the other members' probes."""

    async def probe(asked: Probe, *_: object) -> frozenset[str]:
        return frozenset("c") & {name for name, _ in asked.peers}

    monkeypatch.setattr(server, "silent_peers", probe)


def test_a_call_that_waits_for_a_member_out_of_reach_names_it(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew.hire("abc", 3600)
    crew.change("abc")
    with monkeypatch.context() as cut:
        c_is_silent(cut)
        calls = [crew.aside(error_of, partial(crew[name].all_reduce, torch.ones(1))) for name in "ab"]
        errors = [call.result(LIMIT_S) for call in calls]
        assert {type(error) for error in errors} == {GroupCoordinatorError}
        assert any("cannot reach c; check the network" in str(error) for error in errors)
        following = crew.aside(crew["c"].follow, 3600)
        assert {m.members for m in crew.together("ab", lambda c: c.follow())} == {("a", "b")}
        why = r"the others go on without it, as it and (a|b|a, b) do not reach each other"
        wait_for(lambda: re.search(why, crew["c"]._session.why_no_quorum))
    crew.switch("ab")
    assert following.result(LIMIT_S).members == ("a", "b", "c")


def test_who_leaves_stays_if_the_change_is_rolled_back(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    vote = Member.vote

    def not_a(member: Member, change: Change) -> bool:
        if member.name == "a":
            member.roll_back(change, "not now")
        return vote(member, change)

    crew.change("abc")
    monkeypatch.setattr(Member, "vote", not_a)
    changes = {"c": crew["c"].begin_change(leaving=True)}

    def until_due(c: ElasticCoordinator) -> None:
        while True:
            change = changes["c"] if c.name == "c" else c.begin_change()
            if c.is_due(change):
                changes[c.name] = change
                return

    crew.together("abc", until_due)
    assert crew.complete(changes) == ["ChangeRolledBackError"] * 3
    assert crew.sums("abc") == [3, 3, 3]


def test_a_proposal_with_one_who_leaves_is_due_for_nobody(crew: Crew) -> None:
    crew.change("abc")
    changes = crew.begin("abcd")
    changes["c"] = crew["c"].begin_change(leaving=True)
    assert crew.together("abc", lambda c: c.is_due(changes[c.name])) == [False] * 3
    assert crew.sums("abc") == [3, 3, 3]


@pytest.mark.parametrize("how", ["leaves", "is destroyed"])
def test_nobody_waits_for_who_goes_while_it_is_in_a_proposal(crew: Crew, how: str) -> None:
    crew.hire("b", 10 * LIMIT_S)
    if how == "leaves":
        crew.change("a")
    joining = crew.aside(crew["b"].follow, LIMIT_S)
    while (change := crew["a"].begin_change()).membership is None or change.membership.members != ("a", "b"):
        if change.has_met:  # it has asked first, and was alone
            change.roll_back("the test wants both")
        if joining.done():  # so was the other
            joining = crew.aside(crew["b"].follow, LIMIT_S)
        time.sleep(PAUSE_S)
    if how == "leaves":
        crew["a"].begin_change(leaving=True).complete()
    else:
        crew["a"].destroy()
    assert joining.result(2 * LIMIT_S).members == ("b",)


def test_a_member_that_is_late_is_not_left_out_while_it_answers() -> None:
    crew = Crew("--join_timeout_ms", "500")
    try:
        crew.change("abc")
        late = {name: crew[name].begin_change() for name in "ab"}
        assert all(change.wait_ready(LIMIT_S) for change in late.values())
        assert {change.membership and change.membership.members for change in late.values()} == {("a", "b")}
        assert crew.together("abc", lambda c: c.is_due(late.get(c.name))) == [False] * 3
        assert crew.sums("abc") == [3, 3, 3]
        crew.change("abc")
        assert crew.sums("abc") == [3, 3, 3]
    finally:
        crew.end()


def test_a_member_destroyed_after_its_vote_is_past(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.hire("ab", 3600)
    changes, vote = crew.begin("ab"), Member.vote

    def interrupted(member: Member, change: Change) -> bool:
        has_voted = vote(member, change)
        if change is changes["a"]:
            raise KeyboardInterrupt
        return has_voted

    monkeypatch.setattr(Member, "vote", interrupted)
    completing = crew.aside(changes["b"].complete)
    with pytest.raises(KeyboardInterrupt):
        changes["a"].complete()
    completing.result(LIMIT_S)
    waiting = crew.aside(crew["b"].all_reduce, torch.ones(1))
    crew["a"].destroy()
    with pytest.raises(GroupCoordinatorError):
        waiting.result(LIMIT_S)


def test_wrong_arguments_are_refused(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    crew.change("ab")
    with pytest.raises(GroupCoordinatorError, match="no members yet"):
        crew["z"].all_reduce(torch.ones(1))
    for name in ("", "x" * 201, "two\nlines", None):
        with pytest.raises(ValueError, match="a name has"):
            ElasticCoordinator(name)  # type: ignore[arg-type] # on purpose
    monkeypatch.delenv("TORCHFT_LIGHTHOUSE", raising=False)
    with pytest.raises(ConfigError, match="TORCHFT_LIGHTHOUSE"):
        ElasticCoordinator("z").follow()
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", "3")  # to reach the lighthouse, which refuses it
    second = ElasticCoordinator("a", lighthouse=crew.lighthouse.url)
    with pytest.raises(ConnectError, match="replica 'a' has a session"):
        second.begin_change()
    second.destroy()
    assert crew.sums("ab") == [2, 2]


# ---------------------------------------------------------------------- the lighthouse is lost


def test_those_who_have_members_serve_on_without_a_lighthouse(crew: Crew) -> None:
    crew.change("ab")
    crew.lighthouse.kill()
    changes = {name: crew[name].begin_change() for name in "ab"}
    for change in changes.values():
        with pytest.raises(ChangeRolledBackError, match="in vain"):
            change.complete(timeout=0.2)
    assert crew.sums("ab") == [2, 2]
    crew.restart_lighthouse()
    crew.change("abc")
    assert crew.sums("abc") == [3, 3, 3]


def test_a_lighthouse_that_is_back_in_time_counts_the_votes(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc")
    crew.lighthouse.kill()
    completing = [crew.aside(change.complete) for change in changes.values()]
    wait_for(lambda: all(change._has_voted for change in changes.values()))
    crew.restart_lighthouse()
    for each in completing:
        each.result(LIMIT_S)
    assert {crew[name].epoch for name in "abc"} == {changes["a"].membership and changes["a"].membership.epoch}
    assert crew.sums("abc") == [3, 3, 3]


def test_a_lighthouse_lost_after_the_vote_leaves_members_in_doubt(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc")
    crew.lighthouse.kill()
    for change in changes.values():
        change.timeout = timedelta(seconds=1)
    for each in [crew.aside(change.complete, 5.0) for change in changes.values()]:
        with pytest.raises(ChangeInDoubtError, match="the lighthouse is away"):
            each.result(LIMIT_S)
    assert crew.outcomes("ab", lambda c: c.all_reduce(torch.ones(1))) == ["StaleEpochError"] * 2
    crew.restart_lighthouse()
    following = [crew.aside(crew[name].follow, LIMIT_S) for name in "abc"]
    assert all("a" in each.result(LIMIT_S).members for each in following[:1])
    crew.coordinators.pop("b").destroy()
    crew.coordinators.pop("c").destroy()


def test_who_follows_waits_as_long_as_it_says_for_the_answer_to_its_vote(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc", timeout=PATIENCE_S)
    crew.lighthouse.kill()
    for each in [crew.aside(crew[name].follow, 1.0) for name in changes]:
        with pytest.raises(TimeoutError, match="the lighthouse cannot be reached"):
            each.result(LIMIT_S)


def test_who_follows_waits_as_long_as_it_says_for_a_lighthouse_that_says_nothing(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHFT_CONNECT_TIMEOUT_SEC", str(PATIENCE_S))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        coordinator = ElasticCoordinator("a", lighthouse=f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConnectError, match="no lighthouse answered"):
            crew.aside(coordinator.follow, 0.5).result(LIMIT_S)
        coordinator.destroy()


def test_a_line_that_is_lost_is_not_the_lighthouse(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("abc")
    crew["b"]._session.lighthouse_disconnected("for the test")  # and back before the vote
    assert crew.complete(changes) == ["", "", ""]
    assert crew.sums("abc") == [3, 3, 3]


def test_an_elastic_coordinator_says_who_it_is() -> None:
    coordinator = ElasticCoordinator("a", group_name="experts")
    assert "a, epoch 0, no members" in repr(coordinator)
    coordinator.destroy()
    with pytest.raises(GroupCoordinatorError, match="destroyed"):
        coordinator.all_reduce(torch.ones(1))
    with pytest.raises(GroupCoordinatorError, match="destroyed"):
        coordinator.begin_change()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_goes_wrong_all_members_decide_alike(crew: Crew, seed: int) -> None:
    """Random changes, in which one member at random gives up, dawdles or is gone: agreement, and progress."""
    choose = random.Random(seed)
    crew.change("abc")
    felt = set()
    for _ in range(6):
        present = crew.serving()
        newcomer = choose.choice([name for name in "abcdef" if name not in present])
        fault = choose.choice(["none", "none", "gives up", "dawdles", "is gone"])
        victim = newcomer if fault == "is gone" else choose.choice(present + newcomer)
        leaving = choose.choice(present) if len(present) > 2 else ""
        departures = [crew[name].begin_change(leaving=True) for name in leaving]
        staying = "".join(sorted({*present, newcomer} - {*leaving}))
        changes = crew.begin(staying)
        if fault != "none" and victim in changes:
            given_up = changes.pop(victim)
            if fault == "is gone":
                crew.lose(victim)
            elif fault == "gives up":
                given_up.roll_back("at random")
        elif victim not in changes:
            fault = "none"
        outcomes = set(crew.complete(changes, None if fault == "none" else 0.5))
        assert outcomes == ({""} if fault == "none" else {"ChangeRolledBackError"})
        felt.add(fault)
        for change in departures:
            change.complete()
        if fault != "none" and newcomer in crew.coordinators:  # else it would be a member next time
            crew.lose(newcomer)
        if fault != "none" and leaving:  # who has left is missed by those who have rolled back
            rest = crew.serving()
            assert len({m.members for m in crew.together(rest, lambda c: c.follow())}) == 1
        serving = crew.serving()
        assert len({crew[name].membership for name in serving}) == 1
        assert crew.sums(serving) == [len(serving)] * len(serving)
    assert len(felt) > 1
