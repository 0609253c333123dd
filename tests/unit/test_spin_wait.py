"""When it is worth while to watch for what is awaited."""

from __future__ import annotations

import itertools
import math

import pytest

from torchft_like.runtime.spin_wait import CROWDED_S, SPIN_S_MAX, AdaptiveSpin


def test_who_was_answered_soon_watches_and_who_was_not_sleeps() -> None:
    patience = AdaptiveSpin()
    assert patience.spin_s() == SPIN_S_MAX
    patience.learn(1.0)
    patience.learn(1.0)
    assert patience.spin_s() == 0.0
    for _ in range(10):
        patience.learn(SPIN_S_MAX / 10)
    assert patience.spin_s() == SPIN_S_MAX


def test_where_others_need_the_core_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, moment = AdaptiveSpin(), itertools.count(0.0, 2 * CROWDED_S)  # each look comes late
    monkeypatch.setattr("torchft_like.runtime.spin_wait.time.monotonic", moment.__next__)
    assert not patience.watch(lambda: False, math.inf)
    assert patience.spin_s() == 0.0
    for _ in range(20):
        patience.learn(10e-6)
    assert patience.spin_s() == SPIN_S_MAX  # it tries again


def test_watching_ends_with_what_is_awaited_or_with_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    moment, looks = itertools.count(0.0, CROWDED_S / 10), iter([False, False, True])
    monkeypatch.setattr("torchft_like.runtime.spin_wait.time.monotonic", moment.__next__)
    assert AdaptiveSpin().watch(lambda: next(looks), math.inf)
    assert not AdaptiveSpin().watch(lambda: False, next(moment) + CROWDED_S)
    assert not AdaptiveSpin().watch(lambda: False, math.inf)


def test_one_long_wait_among_short_ones_is_forgotten() -> None:
    patience = AdaptiveSpin()
    patience.learn(3600.0)
    for _ in range(8):
        patience.learn(10e-6)
    assert patience.spin_s() == SPIN_S_MAX
