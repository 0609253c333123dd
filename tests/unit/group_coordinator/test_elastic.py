"""An elastic coordinator: growing, shrinking, both; what is stale afterwards; what is rolled back."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from tests.unit.group_coordinator.elastic_crew import LIMIT_S, Crew
from torchft_like.errors import (
    ChangeInDoubtError,
    ChangeRolledBackError,
    GroupCoordinatorError,
    QueueClosedError,
    StaleEpochError,
)
from torchft_like.group_coordinator import Change, CoordinatorOptions, ElasticCoordinator, Membership
from torchft_like.group_coordinator.elastic.ballot import Ballot
from torchft_like.group_coordinator.elastic.membership import SWITCH, Verdict


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.end()


# ---------------------------------------------------------------------------- it comes about


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("ab", "abcd", id="grow"),
        pytest.param("abcd", "bd", id="shrink, rank 0 leaves"),
        pytest.param("abc", "cdb", id="both, in another order"),
        pytest.param("ab", "cd", id="all are replaced"),
        pytest.param("abc", "abc", id="the same members"),
        pytest.param("a", "ab", id="from one"),
        pytest.param("ab", "b", id="to one"),
    ],
)
def test_the_members_change_and_the_object_stays(crew: Crew, before: str, after: str) -> None:
    crew.change(before)
    assert crew.sums(before) == [len(before)] * len(before)
    objects = {name: crew[name] for name in {*before, *after}}
    leaving = sorted(set(before) - set(after))
    membership = crew.change(after, *leaving)
    assert crew.sums(after) == [len(after)] * len(after)
    for name in after:
        assert crew[name] is objects[name]
        assert (crew[name].epoch, crew[name].membership) == (2, membership)
        assert (crew[name].rank_in_group, crew[name].world_size) == (after.index(name), len(after))
    assert crew.outcomes(leaving, lambda c: c.broadcast_object(1)) == ["StaleEpochError"] * len(leaving)


def test_the_old_members_serve_until_all_new_ones_are_there(crew: Crew) -> None:
    crew.change("ab")
    membership = crew.board.announce("cab")
    changes = crew.begin("ab", membership, ready=False)
    assert crew.sums("ab") == [2, 2]
    assert crew.together("ab", lambda c: c.is_due(changes[c.name])) == [False, False]
    changes |= crew.begin("c", membership)
    assert all(change.wait_ready(LIMIT_S) for change in changes.values())
    assert crew.sums("ab") == [2, 2]
    assert crew.together("ab", lambda c: c.is_due(changes[c.name])) == [True, True]
    assert crew.complete(changes) == [""] * 3
    assert crew.sums("cab") == [3, 3, 3]


def test_a_change_is_due_when_all_members_have_the_same(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("ab", crew.board.announce("ab"))
    assert crew.together("ab", lambda c: c.is_due(changes["a"] if c.name == "a" else None)) == [False] * 2
    assert crew.complete(changes) == ["", ""]
    assert crew.together("ab", lambda c: c.is_due(changes[c.name])) == [False] * 2  # it has come about


def test_a_compiled_function_is_one_of_the_present_members(crew: Crew) -> None:
    torch._dynamo.reset()

    def everyones(coordinator: ElasticCoordinator) -> list[float]:
        def function(rank: torch.Tensor) -> torch.Tensor:
            rows = coordinator.all_gather(rank, 0)
            return rows.sum() + rows.shape[0] + coordinator.reduce_scatter(rows, 0)

        compiled = torch.compile(function, backend="eager", fullgraph=True)
        return compiled(torch.tensor([coordinator.rank_in_group])).tolist()

    for members in ("ab", "abc", "b"):
        crew.change(members, *(name for name in crew.coordinators if name not in members))
        ranks = range(len(members))
        shared = sum(ranks) + len(ranks)
        assert crew.together(members, everyones) == [[shared + len(ranks) * rank] for rank in ranks]


def test_several_changes_in_a_row(crew: Crew) -> None:
    for number, members in enumerate(("a", "ab", "abc", "cb", "cbd"), start=1):
        gone = sorted({name for name, c in crew.coordinators.items() if c.membership} - set(members))
        crew.change(members, *gone)
        assert crew.sums(members) == [len(members)] * len(members)
        assert {crew[name].epoch for name in members} == {number}


# ----------------------------------------------------------------------------------- stale


def test_handles_of_an_old_epoch_raise_done_or_not(crew: Crew) -> None:
    crew.change("ab")
    sent = {"x": torch.ones(2)}
    done, _ = crew.together("ab", lambda c: c.ibroadcast_tensor_dict(sent if c.name == "a" else None))
    assert done.wait(LIMIT_S)["x"].tolist() == [1, 1]
    _, [pending], _ = crew["b"].irecv_tensor_dict()
    crew.change("ab")
    assert (done.is_completed(), pending.is_completed()) == (True, True)
    with pytest.raises(StaleEpochError, match="epoch 1, which is over"):
        done.wait(LIMIT_S)
    with pytest.raises(StaleEpochError, match="epoch 1, which is over"):
        pending.wait(LIMIT_S)


def test_who_waits_for_a_handle_during_the_switch_is_told(crew: Crew) -> None:
    crew.change("ab")
    _, [handle], _ = crew["b"].irecv_tensor_dict()
    waiting = crew.aside(handle.wait)
    crew.change("ab")
    with pytest.raises(StaleEpochError):
        waiting.result(LIMIT_S)


def test_a_message_of_an_old_epoch_never_arrives_in_a_new_one(crew: Crew) -> None:
    crew.change("ab")
    crew["a"].isend_tensor_dict({"epoch": 1, "x": torch.ones(3)})  # nobody receives it
    crew.change("ab")
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
    crew.change("ab")
    with pytest.raises(QueueClosedError):
        queues[0].enqueue("second", LIMIT_S)


def test_a_barrier_names_who_is_missing_in_every_epoch(crew: Crew) -> None:
    for _ in range(2):
        crew.change("ab")
        crew.together("ab", lambda c: c.barrier())


# ------------------------------------------------------------------------------- rolled back


def test_a_change_that_one_gives_up_is_rolled_back_on_all(crew: Crew) -> None:
    crew.change("ab")
    _, [pending], _ = crew["b"].irecv_tensor_dict()
    changes = crew.begin("abc", crew.board.announce("abc"))
    changes["c"].roll_back("it has changed its mind")
    with pytest.raises(ChangeRolledBackError, match="c: it has changed its mind"):
        changes["a"].complete()
    with pytest.raises(ChangeRolledBackError, match="c: it has changed its mind"):
        changes["b"].complete()
    with pytest.raises(GroupCoordinatorError, match="is over"):
        changes["b"].complete()
    crew["a"].send_tensor_dict({"x": 1})
    assert pending.wait(LIMIT_S) == {"x": 1}  # begun before, and of the epoch that goes on
    assert (crew["a"].epoch, crew.sums("ab")) == (1, [2, 2])
    crew.change("abc")
    assert (crew["a"].epoch, crew.sums("abc")) == (3, [3, 3, 3])


def test_a_member_that_comes_too_late_is_bound_by_what_was_decided(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("ab", crew.board.announce("ba"))
    with pytest.raises(ChangeRolledBackError, match="a has waited for the others in vain"):
        changes["a"].complete(timeout=0.1)
    with pytest.raises(ChangeRolledBackError, match="a has waited for the others in vain"):
        changes["b"].complete()
    assert crew.sums("ab") == [2, 2]


def test_a_member_that_never_comes_rolls_the_change_back(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("ab", crew.board.announce("abc"), timeout=0.3)
    assert crew.complete(changes) == ["ChangeRolledBackError"] * 2
    assert crew.sums("ab") == [2, 2]


def test_a_change_that_is_withdrawn_is_not_waited_for(crew: Crew) -> None:
    crew.change("ab")
    membership = crew.board.announce("abc")
    changes = crew.begin("ab", membership, timeout=3600, ready=False)
    crew.board.withdraw(membership, "c has died")
    for change in changes.values():
        with pytest.raises(ChangeRolledBackError):
            change.complete()
    assert crew.sums("ab") == [2, 2]


def test_a_change_that_is_withdrawn_when_the_members_have_met_is_not_waited_for(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew.change("ab")
    membership, say = crew.board.announce("abc"), Ballot.say
    have_met, is_withdrawn = threading.Barrier(4), threading.Event()

    def say_unless_c(ballot: Ballot, rank: int, text: str) -> None:
        if rank != membership.rank_of("c"):
            say(ballot, rank, text)
        have_met.wait(LIMIT_S)
        if rank == membership.rank_of("c"):
            is_withdrawn.wait(LIMIT_S)

    monkeypatch.setattr(Ballot, "say", say_unless_c)
    changes = crew.begin("abc", membership, timeout=3600, ready=False)
    have_met.wait(LIMIT_S)
    crew.board.withdraw(membership, "c does not speak")
    for name in "ab":
        assert changes[name].wait_ready(LIMIT_S)
        with pytest.raises(ChangeRolledBackError, match="withdrawn: c does not speak"):
            changes[name].complete()
    is_withdrawn.set()
    assert crew.sums("ab") == [2, 2]


@pytest.mark.parametrize("slow_s", [0.0, 0.3])
def test_members_that_were_told_different_things_do_not_switch(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, slow_s: float
) -> None:
    """Nobody takes it for a death, however long the one who has found it out first takes to say it."""
    refuse = Ballot.refuse

    def slow_refusal(ballot: Ballot, reason: str) -> None:
        if "could not meet" in reason:
            time.sleep(slow_s)
        refuse(ballot, reason)

    crew.change("ab")
    monkeypatch.setattr(Ballot, "refuse", slow_refusal)
    announced = crew.board.announce("abc")
    other = Membership(announced.epoch, announced.store_address, ("a", "b", "d"))
    changes = {
        name: crew[name].begin_change(told, LIMIT_S)
        for name, told in zip("abc", (announced, other, announced), strict=True)
    }
    for change in changes.values():
        with pytest.raises(ChangeRolledBackError, match="told another membership"):
            change.complete()
    assert crew.sums("ab") == [2, 2]


def test_members_follow_the_board_until_a_change_comes_about(crew: Crew) -> None:
    crew.change("ab")
    joining = crew.aside(crew["d"].follow, crew.board, LIMIT_S)
    withdrawn = crew.board.announce("abx")  # no business of d's
    following = [crew.aside(crew[name].follow, crew.board, LIMIT_S) for name in "ab"]
    crew.board.withdraw(withdrawn, "x has died")
    announced = crew.board.announce("dba")
    assert [each.result(LIMIT_S) for each in (joining, *following)] == [announced] * 3
    assert crew.sums("dba") == [3, 3, 3]
    with pytest.raises(TimeoutError):
        crew["a"].follow(crew.board, timeout=0.05)


def test_who_follows_completes_what_was_begun(crew: Crew) -> None:
    crew.change("ab")
    crew.begin("ab", crew.board.announce("ba"))
    assert [m.epoch for m in crew.together("ab", lambda c: c.follow(crew.board))] == [2, 2]


def test_a_later_announcement_rolls_back_the_one_before(crew: Crew) -> None:
    crew.change("ab")
    first = crew.begin("ab", crew.board.announce("abx"), ready=False)
    second = crew.board.announce("abc")
    begun = crew.begin("a", second, ready=False)
    with pytest.raises(ChangeRolledBackError, match="a goes on to epoch 3"):
        first["b"].complete()
    assert first["a"].is_over
    begun |= crew.begin("bc", second)
    assert crew.complete(begun) == [""] * 3
    assert crew.sums("abc") == [3, 3, 3]


def test_the_board_has_no_gaps_and_one_membership_for_each_epoch(crew: Crew) -> None:
    with pytest.raises(ValueError, match="members"):
        crew.board.announce([])
    many = [crew.aside(crew.board.announce, "abcdef"[: number + 1]) for number in range(6)]
    found = sorted((each.result(LIMIT_S) for each in many), key=lambda m: m.epoch)
    assert [membership.epoch for membership in found] == [1, 2, 3, 4, 5, 6]
    assert crew.board.latest() == found[-1]
    assert crew.board.wait_for(after=2) == found[-1]
    with pytest.raises(TimeoutError):
        crew.board.wait_for(after=6, timeout=0.05)


def test_who_leaves_and_does_not_care_does_not_stop_the_others(crew: Crew) -> None:
    crew.change("abc")
    membership = crew.board.announce("ab")
    crew.together("ab", lambda c: c.change(membership))
    assert crew.sums("ab") == [2, 2]
    assert crew.outcomes("c", lambda c: c.all_reduce(torch.ones(1))) == ["GroupCoordinatorError"]


def test_who_leaves_stays_if_the_change_is_rolled_back(crew: Crew) -> None:
    crew.change("abc")
    changes = crew.begin("abc", crew.board.announce("ab"))
    changes["a"].roll_back("not now")
    assert crew.complete({name: changes[name] for name in "bc"}) == ["ChangeRolledBackError"] * 2
    assert crew.sums("abc") == [3, 3, 3]


def test_a_member_that_is_destroyed_after_its_vote_is_not_waited_for(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = CoordinatorOptions(timeout=3600)
    crew.coordinators |= {name: ElasticCoordinator(name, options=options) for name in "ab"}
    changes, read = crew.begin("ab", crew.board.announce("ab")), Change._read

    def interrupted(change: Change, deadline: float) -> Verdict:
        if change is changes["a"]:
            raise KeyboardInterrupt
        return read(change, deadline)

    monkeypatch.setattr(Change, "_read", interrupted)
    completing = crew.aside(changes["b"].complete)
    with pytest.raises(KeyboardInterrupt):
        changes["a"].complete()
    completing.result(LIMIT_S)
    waiting = crew.aside(crew["b"].all_reduce, torch.ones(1))
    crew["a"].destroy()
    with pytest.raises(GroupCoordinatorError):
        waiting.result(LIMIT_S)


def test_wrong_arguments_are_refused(crew: Crew) -> None:
    membership = crew.change("ab")
    with pytest.raises(ValueError, match="comes after 1"):
        crew["a"].begin_change(membership)
    with pytest.raises(ValueError, match="not a member"):
        crew["z"].begin_change(membership)
    with pytest.raises(GroupCoordinatorError, match="no members yet"):
        crew["z"].all_reduce(torch.ones(1))
    for epoch, address, members in (
        (0, "127.0.0.1:1/x", ("a",)),
        (1, "127.0.0.1:1/x", ()),
        (1, "127.0.0.1:1/x", ("a", "a")),
        (1, "127.0.0.1:1/x", ("",)),
        (1, "nowhere", ("a",)),
    ):
        with pytest.raises(ValueError, match=r"."):
            Membership(epoch, address, members)


# --------------------------------------------------------------------------- the store is lost


def test_a_store_that_gives_no_answer_holds_up_no_later_change(crew: Crew) -> None:
    crew.change("ab")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        nowhere = Membership(2, f"127.0.0.1:{silent.getsockname()[1]}/x", ("a", "b", "c"))
        crew.begin("ab", nowhere, 3600, ready=False)
        later = Membership(3, f"127.0.0.1:{crew.port}/later", ("a", "b"))
        begun = crew.together("ab", lambda c: c.begin_change(later))
        assert crew.complete(dict(zip("ab", begun, strict=True))) == [""] * 2
        crew["a"].begin_change(Membership(4, nowhere.store_address, ("a", "b")), 3600)
        crew.together("a", lambda c: c.destroy())


def test_a_store_that_is_lost_before_the_vote_rolls_back_for_certain(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("ab", crew.board.announce("ba"), timeout=0.5)
    crew.lose_the_store()
    assert crew.complete(changes) == ["ChangeRolledBackError"] * 2
    assert crew.sums("ab") == [2, 2]


def test_a_store_that_is_lost_after_the_vote_leaves_the_member_in_doubt_until_the_next_change(
    crew: Crew,
) -> None:
    crew.change("ab")
    changes = crew.begin("ab", crew.board.announce("ba"), timeout=1.0)
    completing = crew.aside(changes["a"].complete)
    changes["a"]._ballot._ask(lambda store: store.wait(["vote/1"]))
    crew.lose_the_store()
    with pytest.raises(ChangeInDoubtError):
        completing.result(LIMIT_S)
    assert crew.outcomes("a", lambda c: c.all_reduce(torch.ones(1))) == ["StaleEpochError"]
    with pytest.raises(ChangeRolledBackError, match="before it voted"):
        changes["b"].complete()
    another = Crew()
    later = Membership(9, another.board.announce("ab").store_address, ("a", "b"))
    crew.together("ab", lambda c: c.change(later))
    assert crew.sums("ab") == [2, 2]
    another.end()


def test_a_connection_that_is_lost_is_not_the_store(crew: Crew) -> None:
    crew.change("ab")
    changes = crew.begin("ab", crew.board.announce("ba"))
    listening = changes["a"]._ballot._listening
    assert listening is not None
    listening.abort()
    assert crew.complete(changes) == ["", ""]
    assert crew.sums("ab") == [2, 2]


def test_of_votes_and_refusals_at_once_exactly_one_thing_stands(crew: Crew) -> None:
    place = crew.board.announce("abc").store
    for number in range(10):
        address = type(place)(place.server, f"{place.prefix}/{number}")
        ballots = [Ballot(address, 3, timedelta(seconds=LIMIT_S)) for _ in range(4)]
        gate = threading.Barrier(4)

        def act(place: int, ballots: list[Ballot] = ballots, gate: threading.Barrier = gate) -> Verdict:
            ballots[place].listen()
            gate.wait(LIMIT_S)
            ballots[place].vote(place) if place < 3 else ballots[place].refuse("too late")
            return ballots[place].verdict.result(LIMIT_S)

        verdicts = {each.result(LIMIT_S) for each in [crew.aside(act, place) for place in range(4)]}
        assert len(verdicts) == 1
        assert verdicts <= {SWITCH, Verdict(False, "too late")}


def test_an_elastic_coordinator_says_who_it_is(crew: Crew) -> None:
    coordinator = ElasticCoordinator("a", group_name="experts")
    assert "a, epoch 0, no members" in repr(coordinator)
    coordinator.destroy()
    with pytest.raises(GroupCoordinatorError, match="destroyed"):
        coordinator.all_reduce(torch.ones(1))
    with pytest.raises(GroupCoordinatorError, match="destroyed"):
        coordinator.begin_change(Membership(1, "127.0.0.1:1/x", ("a",)))


def test_messages_of_two_epochs_have_no_tag_in_common(crew: Crew) -> None:
    tags = []
    for _ in range(2):
        crew.change("ab")
        communicator = crew["a"]._current()
        tags.append({communicator.tag("to", 1) for _ in range(100)})
    assert len(tags[0] | tags[1]) == 200


@pytest.mark.parametrize("seed", range(3))
def test_whatever_goes_wrong_all_members_decide_alike(crew: Crew, seed: int) -> None:
    """Random changes, in which one member at random gives up, dawdles or is gone: agreement, and progress."""
    choose = random.Random(seed)
    crew.change("abc")
    felt = set()
    for _ in range(8):
        members = "".join(choose.sample("abcdef", choose.randint(1, 5)))
        present = [name for name, c in crew.coordinators.items() if c.membership is not None]
        fault, victim = (
            choose.choice(["none", "none", "gives up", "dawdles", "is gone"]),
            choose.choice(members),
        )
        changes = crew.begin("".join({*members, *present}), crew.board.announce(members), timeout=0.5)
        if fault == "is gone":
            groups = changes.pop(victim)._groups
            assert groups is not None
            groups.abort("gone")
        elif fault != "none":
            given_up = changes.pop(victim)
            if fault == "gives up":
                given_up.roll_back("at random")
        outcomes = set(crew.complete(changes)) if changes else {"ChangeRolledBackError"}
        assert outcomes == ({""} if fault == "none" else {"ChangeRolledBackError"})
        felt.add(fault)
        serving = [name for name, c in crew.coordinators.items() if c.membership is not None]
        epochs = {crew[name].membership for name in serving}
        assert len(epochs) == 1
        assert crew.sums("".join(serving)) == [len(serving)] * len(serving)
    assert len(felt) > 1
