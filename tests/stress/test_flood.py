"""Thousands of connections that come and go: nothing is kept of them, and healthy clients never notice.

A bounded flood is part of the tests; `make stress` runs the full one and prints its numbers
(`STRESS_CONNECTIONS` says how many, for each server).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest

from lighthouse.net import allow_many_files
from tests.stress import hostile
from tests.stress.scene import SERVERS, Scene, running

pytestmark = pytest.mark.integration

CONNECTIONS = int(os.environ.get("STRESS_CONNECTIONS", "600"))
WARM_UP = 300
FILES_MORE = 5
THREADS_MORE = 8
# A leak of one kilobyte for each of ten thousand connections would be found; what gRPC's arenas and
# the allocator keep is less.
MB_MORE = 10.0


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    allow_many_files()
    with running() as found:
        yield found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("server", SERVERS)
def test_connections_that_come_and_go_leave_nothing(scene: Scene, server: str) -> None:
    address = scene.address(server)
    with scene.healthy(server) as healthy:
        asyncio.run(hostile.flood([address], WARM_UP))
        before = scene.settled(server, 40)
        healthy.take_times()
        healthy.goes_on()
        quiet = healthy.take_times()
        began = time.monotonic()
        accepted = asyncio.run(hostile.flood([address], CONNECTIONS))
        took_s = time.monotonic() - began
        healthy.goes_on()
        busy = healthy.take_times()
        after = scene.settled(server, before.files + FILES_MORE)
        print(f"\n{server}: {accepted} connections, {accepted / took_s:.0f} per second; {before} -> {after}")
        print(f"  healthy before: {quiet}\n  healthy during: {busy}")
        assert accepted >= CONNECTIONS * 0.9
        assert after.files <= before.files + FILES_MORE, (before, after)
        assert after.threads <= before.threads + THREADS_MORE, (before, after)
        assert after.resident_mb <= before.resident_mb + MB_MORE, (before, after)
