"""Thousands of connections that come and go: nothing is kept of them, and healthy clients never notice.

A bounded flood is part of the tests; `make stress` runs the full one and prints its numbers
(`STRESS_CONNECTIONS` says how many, for each server).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from lighthouse.address import Address
from tests.stress import hostile
from tests.stress.beside import Beside
from tests.stress.scene import SERVERS, Held, Scene

pytestmark = pytest.mark.integration

CONNECTIONS = int(os.environ.get("STRESS_CONNECTIONS", "400"))
WARM_UP = 100
FILES_CALM = 40
FILES_MORE = 5
THREADS_MORE = 8
# What gRPC and the allocator keep after a flood does not grow with the next one. A leak of four kilobytes
# for each of ten thousand connections would be found.
MB_MORE = 40.0


@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", SERVERS)
def test_connections_that_come_and_go_leave_nothing(scene: Scene, server: str) -> None:
    address = scene.address(server)
    with scene.healthy(server) as healthy:
        before, quiet = calm(scene, server, healthy)
        began = time.monotonic()
        accepted = asyncio.run(hostile.flood([address], CONNECTIONS))
        rate = accepted / (time.monotonic() - began)
        after, busy = assert_nothing_is_left(scene, server, healthy, before)
        print(
            f"\n{server}: {accepted} connections that come and go, {rate:.0f} per second; {before} -> {after}"
        )
        print(f"  healthy before: {quiet}\n  healthy during: {busy}")
        assert accepted >= CONNECTIONS * 0.9


@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", SERVERS)
def test_connections_that_stay_and_say_nothing_leave_nothing(scene: Scene, server: str) -> None:
    address = scene.address(server)
    with scene.healthy(server) as healthy:
        stay(address)  # what so many at once take is kept by the allocator, and used by the next
        before, quiet = calm(scene, server, healthy)
        peak = stay(address, lambda: seen(scene, server, healthy))
        after, busy = assert_nothing_is_left(scene, server, healthy, before)
        print(f"\n{server}: {CONNECTIONS // 2} connections that stay; {before} -> {peak} -> {after}")
        print(f"  healthy before: {quiet}\n  healthy during: {busy}")


def stay(address: Address, meanwhile: Callable[[], Held | None] = lambda: None) -> Held | None:
    """Have many silent connections open at once, and tell what was found meanwhile."""
    with ExitStack() as stack:
        for _ in range(CONNECTIONS // 2):
            stack.enter_context(hostile.connected(address))
        return meanwhile()


def seen(scene: Scene, server: str, healthy: Beside) -> Held:
    """What the server holds while the healthy go on."""
    healthy.goes_on()
    return scene.held(server)


def calm(scene: Scene, server: str, healthy: Beside) -> tuple[Held, str]:
    """What the server holds once its allocator and its threads have seen some clients."""
    asyncio.run(hostile.flood([scene.address(server)], WARM_UP))
    before = scene.settled(server, FILES_CALM)
    healthy.take_times()
    healthy.goes_on()
    return before, healthy.take_times()


def assert_nothing_is_left(scene: Scene, server: str, healthy: Beside, before: Held) -> tuple[Held, str]:
    """What it holds when all are gone, which is what it held before; and how the healthy fared."""
    healthy.goes_on()
    busy = healthy.take_times()
    after = scene.settled(server, before.files + FILES_MORE, before.threads + THREADS_MORE)
    assert after.files <= before.files + FILES_MORE, (before, after)
    assert after.threads <= before.threads + THREADS_MORE, (before, after)
    assert after.resident_mb <= before.resident_mb + MB_MORE, (before, after)
    return after, busy
