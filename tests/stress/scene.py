"""A lighthouse, a ManagerServer and a checkpoint server in processes of their own, and the resources they
hold.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import psutil

from lighthouse.address import Address, parse_address
from tests.integration.lighthouse_clients import LIMIT_S
from tests.managers import PATIENCE_MS
from tests.stress.beside import Beside, HealthyHeals, HealthyReplicas, RankPair
from tests.waiting import soon
from torchft_like.testing.cluster import LighthouseProcess
from torchft_like.testing.processes import Processes

SERVERS = ("lighthouse", "manager", "checkpoint")
MB = 1 << 20


@dataclass(frozen=True)
class Held:
    """The resources that a process holds."""

    files: int
    threads: int
    resident_mb: float

    def __str__(self) -> str:
        return f"{self.files} files, {self.threads} threads, {self.resident_mb:.1f} MB"


class Scene:
    """The servers' addresses and processes."""

    def __init__(
        self, where: dict[str, str], processes: dict[str, psutil.Process], said: Callable[[], str]
    ) -> None:
        self._where = where
        self.said = said  # returns all that the servers have written
        self._processes = processes
        self._ranks = RankPair(where["manager"])

    def close(self) -> None:
        self._ranks.close()

    def url(self, server: str) -> str:
        return self._where[server]

    def address(self, server: str) -> Address:
        return parse_address(self._where[server])

    def healthy(self, server: str) -> Beside:
        """Return clients of a server that must not notice what is done to it."""
        if server == "manager":
            return Beside(self._ranks.vote)
        return {"lighthouse": HealthyReplicas, "checkpoint": HealthyHeals}[server](self._where[server])

    def held(self, server: str) -> Held:
        process = self._processes[server]
        return Held(process.num_fds(), process.num_threads(), process.memory_info().rss / MB)

    def settled(self, server: str, files_max: int, threads_max: float = math.inf) -> Held:
        """Return what the server holds once its files and threads are at most as many; what it holds at the
        limit if they never are.
        """

        def is_settled() -> bool:
            held = self.held(server)
            return held.files <= files_max and held.threads <= threads_max

        soon(is_settled, LIMIT_S)
        return self.held(server)


@contextmanager
def running() -> Iterator[Scene]:
    """Yield the servers, and end them with the block.

    The ManagerServer has a lighthouse of its own: healthy clients, which may be late, would wait at theirs
    for a replica that never joins.
    """
    with (
        Processes() as starter,
        LighthouseProcess(
            "--min_replicas=2", f"--keepalive_timeout_ms={PATIENCE_MS}", is_cold=True
        ) as lighthouse,
        LighthouseProcess(is_cold=True) as another,
    ):
        started = starter.start(sys.executable, "-m", "tests.stress.servers", another.address)
        found = json.loads(started.wait_for_output(r"(?m)^\{.*\}$")[0])
        group = psutil.Process(started.pid)
        scene = Scene(
            {"lighthouse": lighthouse.url, **found},
            {"lighthouse": psutil.Process(lighthouse.pid), "manager": group, "checkpoint": group},
            lambda: lighthouse.output + started.output,
        )
        with closing(scene):
            yield scene
