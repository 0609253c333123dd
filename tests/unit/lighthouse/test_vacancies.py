"""Which spare takes which place."""

from __future__ import annotations

from lighthouse.core.vacancies import Decision, Filled, NoSpare, Told, Vacancies, Vacancy


def vacancy(
    rank: int = 1, group: str = "g", host: str = "h", meeting: str = "here", message: bytes = b"there"
) -> Vacancy:
    return Vacancy(group, rank, host, meeting, message)


def desk(*hosts: str) -> Vacancies:
    """Return a desk with spares on these hosts; their sessions are 0, 1, ..."""
    made = Vacancies()
    for session, host in enumerate(hosts):
        assert made.register(session, f"spare{session}", host) == []
    return made


def told(decisions: list[Decision]) -> list[int]:
    """The sessions that were told of a place; nothing else was decided."""
    assert all(isinstance(decision, Told) for decision in decisions)
    return [decision.session for decision in decisions if isinstance(decision, Told)]


def test_a_spare_on_the_same_host_goes_first_and_then_one_of_the_host_that_has_given_the_fewest() -> None:
    made = desk("x", "x", "y", "h")
    assert told(made.ask(10, vacancy(0), waits=False)) == [3]
    assert told(made.ask(11, vacancy(1), waits=False)) == [0]
    made.taken(0)
    assert told(made.ask(12, vacancy(2), waits=False)) == [2]


def test_who_does_not_wait_is_told_that_there_is_no_spare_and_others_wait_for_one() -> None:
    made = desk()
    assert made.ask(10, vacancy(), waits=False) == [NoSpare((10,))]
    assert made.ask(11, vacancy(), waits=True) == []
    assert told(made.register(0, "spare0", "x")) == [0]
    assert made.taken(0) == [Filled((11,), "spare0", vacancy())]


def test_a_spare_that_has_declined_a_place_is_told_of_it_again_only_if_the_others_meet_elsewhere() -> None:
    made = desk("x", "x")
    assert told(made.ask(10, vacancy(), waits=True)) == [0]
    assert told(made.declined(0)) == [1]
    assert made.declined(1) == []
    assert told(made.ask(10, vacancy(meeting="elsewhere"), waits=True)) == [0]


def test_a_place_that_nobody_asks_for_any_more_is_told_to_nobody() -> None:
    made = desk()
    made.ask(10, vacancy(), waits=True)
    made.withdraw(10)
    assert made.register(0, "spare0", "x") == []
