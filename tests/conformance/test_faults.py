"""A member is killed or stopped inside every collective: who needs it hears of it, and the rest goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from operator import attrgetter

import pytest

from tests.versions import NEEDS_ALLTOALL_OF_LISTS
from tests.waiting import wait_for
from torchft_like.testing.ranks import Rank

from .calls import CALLS
from .fleet import Fleet
from .member import Member
from .subjects import MEETING, Subject

pytestmark = [pytest.mark.integration, pytest.mark.progress, pytest.mark.no_zombie]

WORLD = 3
VICTIM = 2
# Those that somebody cannot finish without the victim; the root is rank 1.
NEEDY = (
    "all_reduce",
    "all_reduce_coalesced",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "barrier",
)
CASES = [pytest.param(name, marks=[NEEDS_ALLTOALL_OF_LISTS] * (name == "all_to_all")) for name in NEEDY]
# The channel to Baby's backend ends for all operations alike, so one operation of each shape of arguments
# stands for the others when a peer of Baby is killed.
# The waits for a stopped peer are shown for each operation, of Baby too, and so are killed peers of Gloo.
OF_EACH_SHAPE = ("all_reduce", "scatter", "all_to_all_single", "barrier")
KILLED = [
    pytest.param(subject, *case.values, id=f"{subject.name}-{case.values[0]}", marks=case.marks)
    for subject in MEETING
    for case in CASES
    if "Baby" not in subject.name or case.values[0] in OF_EACH_SHAPE
]
FELT_S = 0.2  # who still waits after this time waits for the victim


@pytest.fixture(scope="module")
def scene() -> Iterator[Fleet]:
    """Processes of its own: the victims are among them."""
    made = Fleet(WORLD)
    try:
        yield made
    finally:
        made.end()


def test_every_function_is_one_that_a_victim_can_stop() -> None:
    assert set(NEEDY) <= set(CALLS)


@pytest.mark.parametrize(("subject", "case"), KILLED)
def test_survivors_of_a_killed_peer_are_told_and_go_on(scene: Fleet, subject: Subject, case: str) -> None:
    scene.open(subject.name, WORLD)
    victim, survivors = scene.workers[VICTIM], scene.workers[:VICTIM]
    for survivor in survivors:
        survivor.ask(Member.begin, subject.name, case)
    assert await_victim(scene)
    victim.kill()
    assert any(survivor.ask(Member.result) is not None for survivor in survivors)
    scene.workers.remove(victim)
    victim.end()
    go_on(scene, subject, VICTIM)


@pytest.mark.parametrize("subject", MEETING, ids=attrgetter("name"))
@pytest.mark.parametrize("case", CASES)
def test_an_abort_ends_the_wait_for_a_stopped_peer(scene: Fleet, subject: Subject, case: str) -> None:
    scene.open(subject.name, WORLD)
    victim, survivors = scene.workers[VICTIM], scene.workers[:VICTIM]
    victim.stop()
    for survivor in survivors:
        survivor.ask(Member.begin, subject.name, case)
    assert await_victim(scene)
    were_over = [survivor.ask(Member.abort, subject.name) for survivor in survivors]
    errors = [survivor.ask(Member.result) for survivor in survivors]
    victim.resume()
    assert all(was_over or error is not None for was_over, error in zip(were_over, errors, strict=True))
    go_on(scene, subject, WORLD)


def await_victim(scene: Fleet) -> list[Rank]:
    """The survivors that are blocked: nothing that is only slow takes so long."""
    deadline = time.monotonic() + FELT_S
    wait_for(lambda: time.monotonic() > deadline)
    return [worker for worker in scene.workers[:VICTIM] if not worker.ask(Member.is_over)]


def go_on(scene: Fleet, subject: Subject, world: int) -> None:
    """The next group is clean."""
    scene.open(subject.name, world)
    members = scene.workers[:world]
    for member in members:
        member.ask(Member.begin, subject.name, "all_reduce")
    assert [member.ask(Member.result) for member in members] == [None] * world
