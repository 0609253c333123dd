"""Where a Baby group's subprocess comes from, when there are no descriptors left."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from torchft_like.errors import SubprocessLostError
from torchft_like.process_group.baby.nursery import Nursery

LIMIT_S = 60.0
FOREVER_S = 10 * 3600.0


class Never:
    """No abort comes."""

    reason: str | None = None

    def add(self, hook: Callable[[], object]) -> None: ...

    def remove(self, hook: Callable[[], object]) -> None: ...

    def check(self) -> None: ...


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    own = Nursery()
    yield own
    own.stop()


@contextmanager
def no_descriptors_for(pid: int) -> Iterator[None]:
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


def test_a_server_that_takes_its_time_to_load_torch_is_not_given_up(nursery: Nursery) -> None:
    """Where each try began with a new one, none would ever come to its end on a busy machine."""
    nursery.start()
    server = psutil.Process(nursery.pids()["server"])
    server.suspend()
    try:
        with pytest.raises(SubprocessLostError, match="has not loaded torch yet"):
            nursery.take(Never(), 0.1)
    finally:
        server.resume()
    child = nursery.take(Never(), LIMIT_S)
    assert nursery.pids()["server"] == server.pid
    child.kill()
    child.close()


@pytest.mark.parametrize("whose", ["trainer", "server"])
def test_a_server_that_cannot_give_a_fork_for_want_of_descriptors_gives_the_next_one(
    nursery: Nursery, whose: str
) -> None:
    nursery.take(Never(), LIMIT_S).close()  # the server has torch loaded
    server = nursery.pids()["server"]
    with no_descriptors_for(os.getpid() if whose == "trainer" else server):
        for _ in range(2):
            with pytest.raises(SubprocessLostError, match="Too many open files"):
                nursery.take(Never(), LIMIT_S)
        assert not nursery.wait_for_spare(FOREVER_S)
        nursery.prepare_spare()
    child = nursery.take(Never(), LIMIT_S)
    assert not child.has_ended()
    child.kill()
    assert child.wait_ended(LIMIT_S)
    assert "SIGKILL" in child.how_ended()
    child.close()
    assert nursery.pids()["server"] == server
