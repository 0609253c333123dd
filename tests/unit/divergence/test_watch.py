"""What a rank does about divergence: whom it tells, and when it gives up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.manager.test_step import quorum
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.state_comparison import Divergence
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.errors import DivergenceError
from torchft_like.manager.divergence_watch import HEALS_IN_VAIN_MAX, DivergenceWatch

pytestmark = pytest.mark.agreement

SLICES = 4
FOUND = Divergence(("b",), (0,), ("a", "c"), tied=False, comparable=True, heals=True)


class Watched:
    """A watch of replica `b`, and the events that it wrote."""

    def __init__(self, on_divergence: OnDivergence = OnDivergence.HEAL) -> None:
        self.events: list[dict[str, Any]] = []
        self.watch = DivergenceWatch(lambda kind, **fields: self.events.append({"kind": kind, **fields}))
        self.watch.fingerprint = StateFingerprint(
            [torch.zeros(1)], slices=SLICES, on_divergence=on_divergence
        )

    def hear(
        self, step: int, divergence: Divergence | None, allow_heal: bool = True
    ) -> DivergenceError | None:
        return self.watch.quorum(quorum_of(step, divergence), allow_heal)


def quorum_of(step: int, divergence: Divergence | None) -> QuorumResult:
    return quorum()._replace(
        max_step=step, replica_ids=("a", "b", "c"), replica_rank=1, divergence=divergence
    )


def test_a_report_is_repeated_only_when_it_was_not_true_in_between() -> None:
    watched, report = Watched(OnDivergence.REPORT), replace(FOUND, heals=False)
    for step in range(5):
        watched.hear(step, report)
    assert len(watched.events) == 1
    watched.hear(5, None)
    watched.hear(6, report)
    assert len(watched.events) == 2
    watched.hear(7, replace(report, replica_ids=("c",), kept=("a", "b")))
    assert len(watched.events) == 3


@pytest.mark.parametrize("distance", [1, SLICES])
def test_a_replica_that_heals_in_vain_again_and_again_gives_up(distance: int) -> None:
    watched = Watched()
    steps = range(7, 7 + distance * HEALS_IN_VAIN_MAX, distance)
    assert [watched.hear(step, FOUND) for step in steps] == [None] * HEALS_IN_VAIN_MAX
    error = watched.hear(steps.stop, FOUND)
    assert error is not None
    assert "b has taken over its peers' state 3 times" in str(error)


def test_heals_that_last_for_a_round_are_not_counted_together() -> None:
    watched = Watched()
    assert {watched.hear(step, FOUND) for step in range(0, 100 * (SLICES + 1), SLICES + 1)} == {None}


def test_a_step_that_is_tried_again_counts_once() -> None:
    watched = Watched()
    assert {watched.hear(7, FOUND) for _ in range(20)} == {None}


def test_steps_in_which_nobody_may_heal_do_not_count() -> None:
    watched = Watched()
    assert {watched.hear(step, FOUND, allow_heal=False) for step in range(20)} == {None}


def test_the_others_do_not_give_up() -> None:
    watched = Watched()
    other = replace(FOUND, replica_ids=("a",), kept=("b", "c"))
    assert {watched.hear(step, other) for step in range(20)} == {None}


def test_one_that_watches_nothing_computes_nothing_and_still_tells() -> None:
    watched = Watched()
    watched.watch.fingerprint = None
    assert watched.watch.take(3) is None
    assert watched.hear(3, replace(FOUND, tied=True)) is None
    assert len(watched.events) == 1
