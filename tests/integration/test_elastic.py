"""Members of an elastic coordinator are killed at every point of a change, and replicas of a managed one."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.integration import elastic_job
from tests.managers import PATIENCE_MS, lighthouse_here
from torchft_like.testing.cluster import LighthouseProcess
from torchft_like.testing.processes import Processes
from torchft_like.testing.ranks import Rank, Ranks, running

pytestmark = pytest.mark.integration


class Crew:
    """Members by name, and their lighthouse."""

    def __init__(self, lighthouse: str) -> None:
        self._lighthouse = lighthouse
        self.ranks: dict[str, Rank] = {}

    def hire(self, names: str, ranks: Ranks) -> None:
        for name, rank in zip(names, ranks, strict=True):
            self.ranks[name] = rank
            rank.ask(elastic_job.make, 0, name, self._lighthouse)

    def of(self, names: str) -> Ranks:
        return Ranks(self.ranks[name] for name in names)

    def follow(self, members: str) -> None:
        """Have these members, whatever was before."""
        assert len(set(self.of(members).ask(elastic_job.follow, members))) == 1
        assert self.of(members).ask(elastic_job.total) == [len(members)] * len(members)

    def kill(self, name: str) -> None:
        self.ranks.pop(name).kill()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    """Two members, b and c, for all tests; each brings a third one, a."""
    patience = f"--keepalive_timeout_ms={PATIENCE_MS}"
    with LighthouseProcess(patience) as lighthouse, running(2) as ranks:
        crew = Crew(lighthouse.url)
        crew.hire("bc", ranks)
        yield crew


@pytest.fixture
def with_a(crew: Crew) -> Iterator[Crew]:
    """a is rank 0 of the members, and is killed in the test."""
    with running(1) as victim:
        crew.hire("a", victim)
        crew.follow("abc")
        yield crew
    crew.follow("bc")  # whatever was, those who live go on


@pytest.fixture
def newcomer(crew: Crew) -> Iterator[Crew]:
    """b and c are members, and d is killed when it is about to be one."""
    with running(1) as victim:
        crew.hire("d", victim)
        crew.follow("bc")
        yield crew
    assert crew.of("bc").ask(elastic_job.total) == [2, 2]  # d was none of the members


def test_one_killed_before_it_has_asked(with_a: Crew) -> None:
    with_a.of("bc").ask(elastic_job.ask)
    with_a.kill("a")
    assert with_a.of("bc").ask(elastic_job.complete) == ["", ""]
    assert {size for _, _, size in with_a.of("bc").ask(elastic_job.place)} == {2}


def test_one_killed_when_it_has_asked_and_has_not_met_the_others(newcomer: Crew) -> None:
    (victim,) = newcomer.of("d")
    victim.tell(elastic_job.ask_and_meet_nobody, 0)
    assert newcomer.of("bc").ask(elastic_job.proposed) == ["bcd"] * 2
    assert victim.answer()
    newcomer.kill("d")
    assert newcomer.of("bc").ask(elastic_job.complete) == ["ChangeRolledBackError"] * 2


def test_one_killed_when_it_has_met_the_others_and_has_not_voted(newcomer: Crew) -> None:
    newcomer.of("bcd").ask(elastic_job.begin, "bcd")
    newcomer.kill("d")
    assert newcomer.of("bc").ask(elastic_job.complete) == ["ChangeRolledBackError"] * 2


def test_one_killed_between_its_vote_and_the_decision(newcomer: Crew) -> None:
    newcomer.of("bcd").ask(elastic_job.begin, "bcd")
    newcomer.of("bc").ask(elastic_job.hold_votes)
    newcomer.of("bcd").ask(elastic_job.complete_aside)
    assert newcomer.of("d").ask(elastic_job.wait_voted) == [True]
    newcomer.kill("d")
    newcomer.of("bc").ask(elastic_job.release_votes)
    assert newcomer.of("bc").ask(elastic_job.completed) == ["ChangeRolledBackError"] * 2


def test_one_killed_while_all_vote(with_a: Crew) -> None:
    before = {epoch for epoch, _, _ in with_a.of("bc").ask(elastic_job.place)}
    with running(1) as fresh:
        with_a.hire("d", fresh)
        with_a.of("abcd").ask(elastic_job.begin, "abcd")
        with_a.of("abcd").tell(elastic_job.complete)
        with_a.kill("d")
        outcomes = with_a.of("abc").answers()
        epochs = {epoch for epoch, _, _ in with_a.of("abc").ask(elastic_job.place)}
    assert outcomes in (["ChangeRolledBackError"] * 3, [""] * 3)  # all the same, whichever was first
    assert (epochs == before) == (outcomes != [""] * 3)
    with_a.kill("a")


def test_one_killed_after_the_decision(with_a: Crew) -> None:
    with running(1) as fresh:
        with_a.hire("d", fresh)
        with_a.of("abcd").ask(elastic_job.begin, "abcd")
        assert with_a.of("abcd").ask(elastic_job.complete) == [""] * 4
        with_a.kill("a")
        assert with_a.of("bcd").ask(elastic_job.total) == ["GroupCoordinatorError"] * 3


def test_one_killed_inside_a_call_is_replaced(with_a: Crew) -> None:
    with_a.of("ba").tell(elastic_job.total)
    with_a.ranks["a"].wait_blocked()
    with_a.kill("a")
    with_a.of("c").tell(elastic_job.total)
    assert with_a.of("bc").answers() == ["GroupCoordinatorError"] * 2
    with running(1) as fresh:
        with_a.hire("d", fresh)
        with_a.follow("bcd")
        with_a.kill("d")


def test_one_stopped_inside_a_call_holds_up_nobody(with_a: Crew) -> None:
    with_a.of("bc").tell(elastic_job.total)
    with_a.ranks["a"].stop()
    assert with_a.of("bc").answers() == ["GroupCoordinatorError"] * 2
    with_a.follow("bc")


@pytest.mark.slow
def test_the_example_gives_no_wrong_answer(processes: Processes) -> None:
    example = processes.start(sys.executable, "examples/elastic_experts.py")
    assert example.wait(110) == 0
    assert example.output.count(", 0 of them wrong") == 3
    assert "b: members a, b, c, rank 1 of 3" in example.output


def test_the_epochs_of_a_managed_coordinator_are_the_quorums_of_its_manager() -> None:
    patient = lighthouse_here(min_replicas=1, keepalive_timeout_ms=PATIENCE_MS)
    with patient as lighthouse, running(3) as ranks:
        for number, rank in enumerate(ranks):
            rank.ask(elastic_job.join, 0, f"replica-{number}", lighthouse.address())
        found = ranks.ask(elastic_job.step)
        assert [each["place"] for each in found] == [(0, 3), (1, 3), (2, 3)]
        assert [each["combined"] for each in found] == [[3.0]] * 3
        assert [each["old"] for each in ranks.ask(elastic_job.step)] == ["1.0"] * 3

        assert len(ranks.ask(elastic_job.open_step)) == 3
        Ranks([ranks[0], ranks[2]]).tell(elastic_job.total)
        ranks[2].wait_blocked()
        ranks[2].kill()
        ranks[1].tell(elastic_job.total, 1)
        survivors = Ranks(ranks[:2])
        assert set(survivors.answers()) <= {"GroupCoordinatorError", "StaleEpochError"}
        assert survivors.ask(elastic_job.close_step) == [False, False]

        found = survivors.ask(elastic_job.step)
        assert [each["place"] for each in found] == [(0, 2), (1, 2)]
        assert [each["combined"] for each in found] == [[2.0]] * 2
        assert [each["old"] for each in found] == ["StaleEpochError"] * 2
        assert [each["committed"] for each in found] == [True, True]
