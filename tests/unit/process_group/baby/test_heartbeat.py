"""Whether a subprocess runs: what counts as a sign of life, and who is believed to be silent."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from torchft_like.process_group.baby.heartbeat import (
    HUNG_S,
    LATE_S,
    LOOK_EVERY_S,
    STOPPED_S,
    Heartbeat,
    Silence,
    echo,
    state_of,
    why_silent,
)

LIMIT_S = 60.0


def test_silence_is_counted_from_the_last_sign_of_life() -> None:
    silence = Silence()
    looks = [silence.look(LOOK_EVERY_S * n, is_alive=n == 3) for n in range(8)]
    assert looks == pytest.approx([LOOK_EVERY_S * n for n in (0, 1, 2, 0, 1, 2, 3, 4)])


def test_an_observer_that_was_late_begins_to_count_anew() -> None:
    silence = Silence()
    for n in range(4):
        silence.look(LOOK_EVERY_S * n, is_alive=False)
    resumed = LOOK_EVERY_S * 4 + 2 * LATE_S
    assert silence.look(resumed, is_alive=False) == 0
    assert silence.look(resumed + LOOK_EVERY_S, is_alive=False) == pytest.approx(LOOK_EVERY_S)


@pytest.mark.parametrize(
    ("silent_s", "is_stopped", "says"),
    [
        (STOPPED_S - 0.1, True, None),
        (STOPPED_S, True, "because it was stopped"),
        (STOPPED_S, False, None),
        (HUNG_S, False, "frozen"),
    ],
)
def test_a_stopped_process_has_less_time(silent_s: float, is_stopped: bool, says: str | None) -> None:
    why = why_silent(silent_s, is_stopped=is_stopped)
    assert (why is None) if says is None else (why is not None and says in why)


def test_the_kernel_says_whether_a_process_is_stopped_and_what_it_has_used() -> None:
    own = state_of(os.getpid())
    assert own is not None
    assert not own.is_stopped
    times = os.times()
    assert 0 < own.used <= (times.user + times.system) * os.sysconf("SC_CLK_TCK") + 1
    child = fork(signal.pause)
    try:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        state = state_of(child)
        assert state is not None
        assert state.is_stopped
    finally:
        end(child)
    assert state_of(child) is None


def fork(then: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            then()
        finally:
            os._exit(1)
    return child


def serve(ours: socket.socket, theirs: socket.socket, watch: int) -> None:
    ours.close()
    echo(theirs, watch)


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def verdict(heartbeat: Heartbeat, until: Callable[[str | None, float], bool]) -> str | None:
    """Look as a waiting thread does, until there is a verdict or `until` is true of it and the time."""
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        why = heartbeat.why_lost(time.monotonic())
        if why is not None or until(why, time.monotonic() - began):
            return why
        time.sleep(LOOK_EVERY_S)
    raise AssertionError("no verdict")


def test_the_processor_time_that_a_process_uses_is_a_sign_of_life(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never answers, as one whose interpreter is held by a long call."""
    monkeypatch.setattr("torchft_like.process_group.baby.heartbeat.HUNG_S", 1.0)

    def compute() -> None:
        while True:
            pass

    busy, idle = fork(compute), fork(threading.Event().wait)
    try:
        assert verdict(Heartbeat(busy, ends[0]), lambda _, passed_s: passed_s > 2.0) is None
        why = verdict(Heartbeat(idle, ends[0]), lambda *_: False)
        assert why is not None
        assert "no processor time" in why
    finally:
        end(busy)
        end(idle)


def test_the_process_ends_when_the_trainer_closes_its_end(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    watch = os.pidfd_open(os.getpid())
    child = fork(lambda: serve(ours, theirs, watch))
    ours.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(watch)
