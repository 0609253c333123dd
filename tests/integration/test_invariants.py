"""The checker itself: it accepts a sound history and finds each way in which one can be unsound."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.conftest import ROOT
from torchft_like.testing.invariants import (
    INVARIANTS,
    Commit,
    Heal,
    History,
    Refusal,
    Sighting,
    progress,
    violations,
)

NAMES = ("a", "b", "c")


def commit(name: str, step: int, quorum_id: int, members: str, **changes: object) -> Commit:
    """A commit of `name` in a quorum in which everybody takes part and agrees."""
    ledger = sum(1 << NAMES.index(member) for member in members)
    sound = Commit(
        time=float(step),
        replica_id=name,
        group_rank=0,
        step=step,
        quorum_id=quorum_id,
        members=frozenset(members),
        participants=len(members),
        participating=name in members,
        index=NAMES.index(name),
        ledger=ledger,
        ledger_steps=ledger * (step - 1),
        digest=f"state {step}",
        ledger_quorums=ledger * quorum_id,
        average=ledger / len(members),
        before=f"state {step - 1}",
    )
    return replace(sound, **changes)  # type: ignore[arg-type]


def sound_commits() -> list[Commit]:
    """a and b train, b dies after step 2, c joins at step 4 and heals."""
    joins = {"ledger": 0b1, "ledger_steps": 0b1 * 3, "participants": 1, "ledger_quorums": 3, "average": 1.0}
    return [
        commit("a", 1, 1, "ab"),
        commit("b", 1, 1, "ab"),
        commit("a", 2, 1, "ab"),
        commit("b", 2, 1, "ab"),
        commit("a", 3, 2, "a"),
        commit("a", 4, 3, "ac", **joins),
        commit("c", 4, 3, "ac", **joins, participating=False),
        commit("a", 5, 3, "ac"),
        commit("c", 5, 3, "ac"),
    ]


C_HEALS = Heal(time=3.5, replica_id="c", group_rank=0)
B_HEALS = Heal(time=1.5, replica_id="b", group_rank=0)


def changed(position: int, **changes: object) -> History:
    """The sound history with the commit at `position` changed."""
    commits = sound_commits()
    commits[position] = replace(commits[position], **changes)  # type: ignore[arg-type]
    return History(tuple(commits), (C_HEALS,))


def with_more(*more: Commit) -> History:
    return History((*sound_commits(), *more), (C_HEALS,))


def seen(*sightings: Sighting) -> History:
    return History(tuple(sound_commits()), (C_HEALS,), sightings)


def test_every_invariant_is_a_marker(pytestconfig: pytest.Config) -> None:
    table = (
        (ROOT / "docs" / "architecture.md").read_text().partition("## Invariants")[2].partition("\n## ")[0]
    )
    documented = set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))
    assert documented >= set(INVARIANTS)
    markers = {marker.partition(":")[0] for marker in pytestconfig.getini("markers")}
    assert documented - markers == set()


def test_a_sound_history_has_no_violations() -> None:
    assert violations(History(tuple(sound_commits()), (C_HEALS,))) == []
    refused = Refusal("a", 0, 2, 4)  # and done again in the next quorum
    assert violations(History(tuple(sound_commits()), (C_HEALS,), (), (refused,))) == []
    assert violations(seen(Sighting("", 0, 2, frozenset("a")), Sighting("", 0, 3, frozenset("ac")))) == []


def test_a_replica_that_healed_before_its_step_counts_with_the_state_that_it_took_over() -> None:
    assert violations(History(tuple(sound_commits()), (C_HEALS, B_HEALS))) == []


UNSOUND: dict[str, tuple[str, Callable[[], History]]] = {
    "two replicas differ after the same step": ("agreement", lambda: changed(3, digest="other")),
    "a rank commits what another one of its group does not": (
        "agreement",
        lambda: History(tuple(sound_commits()), (C_HEALS,), (), (Refusal("a", 1, 2, 3),)),
    ),
    "two quorums without a common member commit a step": (
        "one_quorum_per_step",
        lambda: with_more(commit("b", 4, 4, "b")),
    ),
    "a replica returns to an older quorum": ("monotonic", lambda: changed(8, quorum_id=1)),
    "a restarted lighthouse uses an id again": ("monotonic", lambda: with_more(commit("c", 6, 2, "c"))),
    "a later step is committed by an older quorum": ("monotonic", lambda: with_more(commit("b", 6, 1, "ab"))),
    "a process commits a step twice": ("no_regress", lambda: with_more(commit("a", 5, 4, "a"))),
    "a quorum starts behind one of its members": (
        "no_regress",
        lambda: History((commit("a", 1, 1, "a"), commit("a", 2, 1, "a"), commit("b", 1, 2, "ab"))),
    ),
    "a joiner commits without healing": ("heal_is_clean", lambda: History(tuple(sound_commits()))),
    "a joiner healed only after it committed": (
        "heal_is_clean",
        lambda: History(tuple(sound_commits()), (replace(C_HEALS, time=4.5),)),
    ),
    "a joiner healed to another state": ("heal_is_clean", lambda: changed(6, digest="other")),
    "a joiner has another sum": ("heal_is_clean", lambda: changed(6, ledger=0b11)),
    "a joiner adds to the average while it heals": (
        "no_zombie",
        lambda: changed(6, ledger=0b101, ledger_steps=0b101 * 3, participants=2),
    ),
    "a sum holds a contribution for another step": ("no_zombie", lambda: changed(0, ledger_steps=1)),
    "a sum holds a contribution for another quorum": ("no_zombie", lambda: changed(0, ledger_quorums=4)),
    "an average is divided by another number": ("no_zombie", lambda: changed(4, average=0.5)),
    "a failed step left a trace in the state": ("no_trace", lambda: changed(4, before="other")),
    "a replica that healed computes from a state that nobody has committed": (
        "no_trace",
        lambda: History((*changed(3, before="other").commits,), (C_HEALS, B_HEALS)),
    ),
    "a replica heals to a state that nobody has committed, and nobody else lives to tell": (
        "no_trace",
        lambda: History(
            (*sound_commits()[:4], replace(sound_commits()[6], step=3, before="other")), (C_HEALS,)
        ),
    ),
    "gradients of two states are averaged": (
        "no_trace",
        lambda: History(tuple(replace(c, step=1, before=c.replica_id) for c in sound_commits()[:2])),
    ),
    "a replica sees an older quorum in which it commits nothing": (
        "monotonic",
        lambda: seen(Sighting("a", 0, 3, frozenset("ac")), Sighting("a", 0, 2, frozenset("a"))),
    ),
    "an id is used again by a quorum that commits nothing": (
        "monotonic",
        lambda: seen(Sighting("", 0, 3, frozenset("bc"))),
    ),
    "a sum lacks a participant": ("no_zombie", lambda: changed(2, ledger=0b1, ledger_steps=0b1)),
    "a sum holds more than the participants": ("no_zombie", lambda: changed(0, ledger=0b111)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=getattr(pytest.mark, UNSOUND[case][0])) for case in UNSOUND]
)
def test_an_unsound_history_is_found(case: str) -> None:
    invariant, history = UNSOUND[case]
    assert [text for text in violations(history()) if text.startswith(f"{invariant}:")]


@pytest.mark.progress
def test_progress_counts_only_the_steps_after_the_given_time() -> None:
    history = History(tuple(sound_commits()), (C_HEALS,))
    assert list(progress(history, since=3.0, processes=[("a", 0), ("c", 0)], steps=2)) == []
    assert list(progress(history, since=4.0, processes=[("a", 0), ("c", 0)], steps=2)) == [
        "a/0 committed 1 of 2 steps",
        "c/0 committed 1 of 2 steps",
    ]
    assert list(progress(history, since=0.0, processes=[("z", 0)], steps=1)) == ["z/0 committed 0 of 1 steps"]
