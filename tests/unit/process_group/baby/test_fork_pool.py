"""Where a Baby group's subprocess comes from, when there are no descriptors left."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import pytest

from torchft_like.errors import ProcessGroupAbortedError, SubprocessLostError
from torchft_like.process_group.baby.fork_pool import ForkPool
from torchft_like.process_group.configuration import AbortSignal

LIMIT_S = 300.0
SHORT_S = 0.1
FOREVER_S = 10 * 3600.0


@pytest.fixture
def fork_pool() -> Iterator[ForkPool]:
    own = ForkPool()
    yield own
    own.stop()


@pytest.fixture(scope="module")
def loaded() -> Iterator[ForkPool]:
    """Yield a pool that the tests share: its server has torch loaded."""
    shared = ForkPool()
    shared.take(AbortSignal(), LIMIT_S).close()
    yield shared
    shared.stop()


@contextmanager
def loading(fork_pool: ForkPool) -> Iterator[psutil.Process]:
    """The server is stopped before it has torch."""
    fork_pool.start()
    server = psutil.Process(fork_pool.pids()["server"])
    server.suspend()
    try:
        yield server
    finally:
        server.resume()


@contextmanager
def no_descriptors_for(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_loading_torch_does_not_count_against_the_timeout(fork_pool: ForkPool) -> None:
    with loading(fork_pool) as server, ThreadPoolExecutor(1) as aside:
        taken = aside.submit(fork_pool.take, AbortSignal(), SHORT_S)
        with pytest.raises(TimeoutError):
            taken.result(5 * SHORT_S)
        server.resume()
        child = taken.result(LIMIT_S)
    assert fork_pool.pids()["server"] == server.pid
    child.kill()
    child.close()


def test_an_abort_ends_the_wait_for_a_server_that_loads_torch(fork_pool: ForkPool) -> None:
    abort = AbortSignal()
    with loading(fork_pool), ThreadPoolExecutor(1) as aside:
        taken = aside.submit(fork_pool.take, abort, LIMIT_S)
        with pytest.raises(TimeoutError):
            taken.result(SHORT_S)
        abort.set("the test says so")
        with pytest.raises(ProcessGroupAbortedError, match="the test says so"):
            taken.result(LIMIT_S)


def test_a_server_that_does_not_load_is_ended(fork_pool: ForkPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchft_like.process_group.baby.fork_pool.LOAD_S_MAX", SHORT_S)
    with loading(fork_pool) as server:
        with pytest.raises(SubprocessLostError, match=f"has not loaded torch in {SHORT_S:g} s"):
            fork_pool.take(AbortSignal(), LIMIT_S)
        monkeypatch.undo()
        child = fork_pool.take(AbortSignal(), LIMIT_S)
        assert fork_pool.pids()["server"] != server.pid
        child.kill()
        child.close()


def test_a_server_that_has_loaded_torch_and_hangs_is_given_up_after_the_timeout(loaded: ForkPool) -> None:
    server = psutil.Process(loaded.pids()["server"])
    server.suspend()
    try:
        with pytest.raises(SubprocessLostError, match="in time; it runs"):
            loaded.take(AbortSignal(), SHORT_S)
        loaded.take(AbortSignal(), LIMIT_S).close()
        assert loaded.pids()["server"] != server.pid
    finally:
        server.resume()


@pytest.mark.parametrize("whose", ["trainer", "server"])
def test_a_server_without_descriptors_gives_the_next_fork(loaded: ForkPool, whose: str) -> None:
    server = loaded.pids()["server"]
    others = [loaded.take(AbortSignal(), LIMIT_S) for _ in range(2)]  # watched: more than it may open
    with no_descriptors_for(os.getpid() if whose == "trainer" else server):
        for _ in range(2):
            with pytest.raises(SubprocessLostError, match="Too many open files"):
                loaded.take(AbortSignal(), LIMIT_S)
        assert not loaded.wait_for_spare(FOREVER_S)
        loaded.prepare_spare()
    child = loaded.take(AbortSignal(), LIMIT_S)
    assert not child.has_ended()
    child.kill()
    assert child.wait_ended(LIMIT_S)
    assert "SIGKILL" in child.how_ended()
    child.close()
    assert loaded.pids()["server"] == server
    for other in others:
        other.kill()
        other.close()
