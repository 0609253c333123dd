"""Members of an elastic coordinator are killed at every point of a change, and replicas of a managed one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest

from tests.integration import elastic_job
from tests.integration.gloo_member import serve_store
from torchft_like import LighthouseServer
from torchft_like.group_coordinator import Membership, MembershipBoard
from torchft_like.process_group.abortable_store import AbortableStore
from torchft_like.process_group.store import StoreAddress
from torchft_like.testing.processes import Processes
from torchft_like.testing.ranks import Rank, Ranks, running

pytestmark = pytest.mark.integration


class Crew:
    """Members by name; `board` is theirs."""

    def __init__(self) -> None:
        self._store = serve_store()
        self.board = MembershipBoard(f"127.0.0.1:{self._store.port}/job")
        self.ranks: dict[str, Rank] = {}

    def hire(self, names: str, ranks: Ranks) -> None:
        for name, rank in zip(names, ranks, strict=True):
            self.ranks[name] = rank
            rank.ask(elastic_job.make, 0, name)

    def of(self, names: str) -> Ranks:
        return Ranks(self.ranks[name] for name in names)

    def begin(self, names: str, membership: Membership) -> None:
        told = membership.epoch, membership.store_address, membership.members
        self.of(names).ask(elastic_job.begin, *told)

    def change(self, members: str) -> None:
        self.begin(members, self.board.announce(members))
        assert self.of(members).ask(elastic_job.complete) == [""] * len(members)
        assert self.of(members).ask(elastic_job.total) == [len(members)] * len(members)

    def kill(self, name: str) -> None:
        self.ranks.pop(name).kill()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Two members, a and b, for all tests; each brings a third one, c."""
    with running(2) as ranks:
        crew = Crew()
        crew.hire("ab", ranks)
        yield crew


@pytest.fixture
def with_c(crew: Crew) -> Iterator[Crew]:
    """c is rank 0 of the members, and is killed in the test."""
    with running(1) as victim:
        crew.hire("c", victim)
        crew.change("cab")
        yield crew
    crew.change("ba")  # whatever was, those who live go on


def test_one_killed_before_it_has_met_the_others(with_c: Crew) -> None:
    membership = with_c.board.announce("bca")
    with_c.kill("c")
    with_c.begin("ab", membership)
    with_c.board.withdraw(membership, "c has died")
    assert with_c.of("ab").ask(elastic_job.complete) == ["ChangeRolledBackError"] * 2


def test_one_killed_when_it_has_met_the_others_and_has_not_said_so(with_c: Crew) -> None:
    membership = with_c.board.announce("bca")
    told = membership.epoch, membership.store_address, membership.members
    (victim,) = with_c.of("c")
    victim.tell(elastic_job.begin_and_say_nothing, 0, *told)
    with_c.begin("ab", membership)
    assert victim.answer()
    with_c.kill("c")
    assert with_c.of("ab").ask(elastic_job.complete) == ["ChangeRolledBackError"] * 2


def test_one_killed_when_it_is_ready_and_has_not_voted(with_c: Crew) -> None:
    with_c.begin("abc", with_c.board.announce("bca"))
    assert with_c.of("abc").ask(elastic_job.wait_ready) == [True] * 3
    with_c.kill("c")
    assert with_c.of("ab").ask(elastic_job.complete) == ["ChangeRolledBackError"] * 2


def test_one_killed_between_its_vote_and_the_decision(with_c: Crew) -> None:
    membership = with_c.board.announce("bca")
    with_c.begin("abc", membership)
    assert with_c.of("abc").ask(elastic_job.wait_ready) == [True] * 3
    with_c.of("c").ask(elastic_job.complete_aside)
    wait_for_vote(membership, membership.rank_of("c"))
    with_c.kill("c")
    outcomes = with_c.of("ab").ask(elastic_job.complete)
    assert outcomes in (["ChangeRolledBackError"] * 2, ["", ""])  # both the same, whichever was first
    epochs = {epoch for epoch, _, _ in with_c.of("ab").ask(elastic_job.place)}
    assert epochs == {membership.epoch if outcomes == ["", ""] else membership.epoch - 1}


def test_one_killed_after_the_decision(with_c: Crew) -> None:
    with_c.begin("abc", with_c.board.announce("bca"))
    assert with_c.of("abc").ask(elastic_job.complete) == [""] * 3
    with_c.kill("c")
    assert with_c.of("ab").ask(elastic_job.total) == ["GroupCoordinatorError"] * 2


def test_one_killed_inside_a_call_is_replaced(with_c: Crew) -> None:
    with_c.of("ac").ask(elastic_job.begin_total)
    with_c.kill("c")
    with_c.of("b").ask(elastic_job.begin_total)
    assert with_c.of("ab").ask(elastic_job.end_total) == ["GroupCoordinatorError"] * 2
    with running(1) as fresh:
        with_c.hire("d", fresh)
        with_c.change("dba")
        with_c.kill("d")


def wait_for_vote(membership: Membership, rank: int | None) -> None:
    place = membership.store
    store = AbortableStore(StoreAddress(place.server, f"{place.prefix}/ballot"), timedelta(seconds=50))
    with contextlib.closing(store):
        store.connect()
        store.wait([f"vote/{rank}"])


@pytest.mark.slow
def test_the_example_gives_no_wrong_answer(processes: Processes) -> None:
    example = processes.start(sys.executable, "examples/elastic_experts.py")
    assert example.wait(110) == 0
    assert example.output.count(", 0 of them wrong") == 3
    assert "b: epoch 3, rank 2 of 3" in example.output


def test_the_epochs_of_a_managed_coordinator_are_the_quorums_of_its_manager() -> None:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60_000)
    try:
        with running(3) as ranks:
            for number, rank in enumerate(ranks):
                rank.ask(elastic_job.join, 0, f"replica-{number}", lighthouse.address())
            found = ranks.ask(elastic_job.step)
            assert [each["place"] for each in found] == [(0, 3), (1, 3), (2, 3)]
            assert [each["combined"] for each in found] == [[3.0]] * 3
            assert [each["old"] for each in ranks.ask(elastic_job.step)] == ["1.0"] * 3

            assert len(ranks.ask(elastic_job.open_step)) == 3
            Ranks([ranks[0], ranks[2]]).ask(elastic_job.begin_total)
            ranks[2].kill()
            ranks[1].ask(elastic_job.begin_total, 1)
            survivors = Ranks(ranks[:2])
            assert set(survivors.ask(elastic_job.end_total)) <= {"GroupCoordinatorError", "StaleEpochError"}
            assert survivors.ask(elastic_job.close_step) == [False, False]

            found = survivors.ask(elastic_job.step)
            assert [each["place"] for each in found] == [(0, 2), (1, 2)]
            assert [each["combined"] for each in found] == [[2.0]] * 2
            assert [each["old"] for each in found] == ["StaleEpochError"] * 2
            assert [each["committed"] for each in found] == [True, True]
    finally:
        lighthouse.shutdown()
