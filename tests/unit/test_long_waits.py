"""Long waits: which lines they log, and what a fork takes over of those of its parent."""

from __future__ import annotations

import logging
import os

import pytest

from torchft_like.runtime import long_waits
from torchft_like.runtime.long_waits import LONG_WAIT_S, LongWait


def test_a_line_is_due_once_in_every_minute_of_a_wait(caplog: pytest.LogCaptureFixture) -> None:
    wait = LongWait(1000.0)
    with caplog.at_level(logging.INFO):
        for second in range(0, 200, 5):
            wait.look(1000.0 + second, lambda: "rank 1, for rank 0")
    assert caplog.messages == [f"waiting for {n * LONG_WAIT_S:.0f} s: rank 1, for rank 0" for n in (1, 2, 3)]


def test_nothing_is_said_of_a_wait_that_may_be_long(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        LongWait(0.0, is_expected=True).look(1e9, lambda: "rank 1")
    assert caplog.messages == []


def test_a_call_is_told_of_until_it_has_returned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: dict[object, tuple[float, str, object]] = {}
    monkeypatch.setattr(long_waits, "calls", calls)
    watch = long_waits._Watch()
    with caplog.at_level(logging.INFO):
        calls["old"], calls["new"] = (0.0, "recv", "group a"), (float("inf"), "send", "group a")
        watch._look()
        del calls["old"]
        watch._look()
    assert [text.partition(": ")[2] for text in caplog.messages] == ["recv over group a"]
    assert set(watch._waits) == {"new"}


def test_a_fork_has_none_of_its_parents_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_waits._watch, "_has_begun", True)
    long_waits.calls["a test's"] = 0.0, "recv", "a group"
    try:
        if (child := os.fork()) == 0:
            os._exit(bool(long_waits.calls) or long_waits._watch._has_begun)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        del long_waits.calls["a test's"]
