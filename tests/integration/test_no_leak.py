"""Reconfigurations leave no process, thread, descriptor, segment or mapping behind, and memory is flat.

Each class is probed in a process of its own. The bounded run is part of `make test`; `make leaks`
runs a thousand reconfigurations of each class, a hundred of Baby groups.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from torchft_like.testing.ranks import Rank, running

from .footprint import Allowance, left_by
from .gloo_member import StoreHost
from .leak_probe import SUBJECTS, allowance, left_by_restarts, left_by_rounds

pytestmark = [pytest.mark.integration, pytest.mark.no_leak]

WARM_UP, REPEATS = 10, 40
FULL_WARM_UP, FULL_REPEATS, FULL_REPEATS_BABY = 100, 1000, 100


@pytest.fixture(scope="module")
def store() -> Iterator[int]:
    """The port of a store in a process of its own."""
    host = Rank(StoreHost)
    yield host.ask(StoreHost.port)
    host.end()


def probe(subject: str, store: int, warm_up: int, repeats: int, limit_s: float) -> object:
    """What is left behind by a fresh process."""
    with running(1, limit_s) as ranks:
        return ranks[0].ask(left_by_rounds, subject, store, warm_up, repeats)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_reconfigurations_leave_nothing_behind(subject: str, store: int) -> None:
    assert probe(subject, store, WARM_UP, REPEATS, 100) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("subject", SUBJECTS)
def test_a_thousand_reconfigurations_leave_nothing_behind(subject: str, store: int) -> None:
    repeats = FULL_REPEATS_BABY if subject.startswith("Baby") else FULL_REPEATS
    assert probe(subject, store, FULL_WARM_UP, repeats, 1700) == []


def test_restarts_leave_nothing_behind() -> None:
    with running(1, 100) as ranks:
        assert ranks[0].ask(left_by_restarts, 3, 20) == []


def test_what_restarts_leave_behind_is_found() -> None:
    """The probe itself: a script that keeps what it has made keeps its memory, too."""
    with running(1, 100) as ranks:
        left = ranks[0].ask(left_by_restarts, 1, 2, True)
    assert [line for line in left if "resident" in line], left


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_hundred_restarts_leave_nothing_behind() -> None:
    with running(1, 500) as ranks:
        assert ranks[0].ask(left_by_restarts, 10, 200) == []


class Hoard:
    """Keeps one thing more of a kind each time, until the end."""

    def __init__(self) -> None:
        self._enough = threading.Event()
        self._kept: list[object] = []
        self._files: list[str] = []

    def socket(self) -> None:
        self._kept.append(socket.socket())

    def eventpoll(self) -> None:
        self._kept.append(select.epoll())

    def memfd(self) -> None:
        self._kept.append(os.fdopen(os.memfd_create("hoard"), "wb"))

    def thread(self) -> None:
        threading.Thread(target=self._enough.wait).start()

    def shm(self) -> None:
        self._files.append(f"/dev/shm/hoard_{os.getpid()}_{len(self._files)}")
        open(self._files[-1], "xb").close()

    def process(self) -> None:
        self._kept.append(subprocess.Popen(["sleep", "1000"]))

    def resident(self) -> None:
        memory = mmap.mmap(-1, 1 << 20)  # fresh pages: a tensor might get memory that was freed before
        memory.write(b"x" * (1 << 20))
        self._kept.append(memory)

    def end(self) -> None:
        self._enough.set()
        for kept in self._kept:
            if isinstance(kept, subprocess.Popen):
                kept.kill()
                kept.wait()
            else:
                kept.close()  # type: ignore[attr-defined] # all others have it
        for file in self._files:
            os.unlink(file)


@pytest.fixture
def hoard() -> Iterator[Hoard]:
    hoard = Hoard()
    yield hoard
    hoard.end()


@pytest.mark.parametrize("kind", ["socket", "eventpoll", "memfd", "thread", "shm", "process", "resident"])
def test_what_is_left_behind_is_found(kind: str, hoard: Hoard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe itself: of whatever one is kept each time, it tells."""
    monkeypatch.setattr("tests.integration.footprint.SETTLE_S", 0.5)
    keep: Callable[[], None] = getattr(hoard, kind)
    left = left_by(lambda _: keep(), 1, 8, Allowance(mappings=32, bytes=4 << 20))
    assert [line for line in left if kind in line], left


def test_a_reconfiguration_may_keep_less_than_a_page_or_two() -> None:
    """What the full run finds at the least: two pages each time, or a mapping every fifth time."""
    assert allowance(FULL_REPEATS).bytes < FULL_REPEATS * 8192 + (1 << 20)
    assert allowance(FULL_REPEATS).mappings < FULL_REPEATS // 5
