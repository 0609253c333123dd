"""Replica groups on this machine, with spare ranks: one rank is killed, and only a spare takes its place."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchft_like.testing.processes import end_with_parent


class LocalProcess:
    """A rank or a spare, which runs the present script, and what it has told.

    Attributes:
        tries: each try of its training function: the group and rank, and when it began.
        result: what it has printed as JSON in the end.
        ended: when its output ended.
    """

    def __init__(self, name: str, variables: Mapping[str, str]) -> None:
        self.name = name
        self.tries: list[dict[str, Any]] = []
        self.result: dict[str, Any] = {}
        self.lines: list[str] = []
        self.ended = 0.0
        self.process = subprocess.Popen(
            [*end_with_parent(), sys.executable, *sys.argv, "--finish-together"],
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            print(f"{self.name} | {line.rstrip()}", flush=True)
            self.lines.append(line)
            if line.startswith('{"try"'):
                self.tries.append(json.loads(line))
            elif line.startswith("{"):
                self.result = json.loads(line)
        self.ended = self.ended or time.time()

    def trains_with_others_at(self, step: int) -> bool:
        found = (re.match(r"step (\d+) .* participants (\d+)", line) for line in list(self.lines))
        return any(m is not None and int(m[1]) >= step and int(m[2]) > 1 for m in found)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.reader.join()


def run_ranks(
    groups: int, ranks: int, spares: int, lighthouse: str, kill_at_step: int | None, picture: Path | None
) -> int:
    """Run the present script without --local as groups of ranks and as spares; kill the last rank once.

    Returns:
        0 if all groups end with the same bits, and no process but a spare began anything after the start.
    """
    sys.argv.remove("--local")
    killed_at = 0.0
    job = {"TORCHFT_LIGHTHOUSE": lighthouse}
    waiting = [LocalProcess(f"spare {number}", {**job, "TORCHFT_SPARE": "rank"}) for number in range(spares)]
    members = [
        LocalProcess(f"rank {variables['REPLICA_GROUP_ID']}.{variables['RANK']}", variables)
        for variables in _places(job, groups, ranks)
    ]
    try:
        victim, *_, first = members[-1], members[-ranks]
        while any(p.process.poll() is None for p in members):
            if kill_at_step is not None and not killed_at and first.trains_with_others_at(kill_at_step):
                print(f"{victim.name} | killed", flush=True)
                victim.process.kill()
                killed_at = victim.ended = time.time()
            time.sleep(0.02)
        used = [spare for spare in waiting if spare.tries]
        for spare in used:
            spare.process.wait()
    finally:
        for process in (*members, *waiting):
            process.end()
    lived = [p for p in (*members, *used) if p is not victim or not killed_at]
    digests = {p.result["digest"] for p in lived if "digest" in p.result}
    is_identical = len(digests) == 1 and not any(p.process.returncode for p in lived)
    print("all groups ended with the same bits" if is_identical else f"failed: {digests}")
    print(f"{len(used)} spares were used; {len(lived) - len(used)} processes ran from the start to the end")
    if picture is not None:
        draw((*members, *used), killed_at, picture)
    return 0 if is_identical and len(used) == bool(killed_at) else 1


def _places(job: Mapping[str, str], groups: int, ranks: int) -> list[dict[str, str]]:
    places = []
    for group in range(groups):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        shared = {**job, "REPLICA_GROUP_ID": str(group), "WORLD_SIZE": str(ranks)}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        places += [{**shared, "RANK": str(rank)} for rank in range(ranks)]
    return places


def draw(processes: tuple[LocalProcess, ...], killed_at: float, path: Path) -> None:
    """Draw each process as a bar, from its first try to its end, and where its function began anew."""
    began = min(each["time"] for process in processes for each in process.tries)
    from matplotlib.figure import Figure  # noqa: PLC0415 - only who wants a picture needs it

    figure = Figure(figsize=(9, 0.5 * len(processes) + 1.5), layout="constrained")
    axes = figure.subplots()
    for row, process in enumerate(reversed(processes)):
        starts = [each["time"] - began for each in process.tries]
        if process.name.startswith("spare"):
            axes.barh(row, starts[0], color="#dddddd")
            axes.text(0.0, row, " waits", va="center")
        ends = [*starts[1:], process.ended - began]
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            place = process.tries[number]
            axes.barh(row, end - start, left=start, color=f"C{place['try']}", edgecolor="white")
            axes.text(start, row, f" rank {place['group']}.{place['rank']}", va="center", color="white")
    axes.set_yticks(range(len(processes)), [f"{p.name}, pid {p.process.pid}" for p in reversed(processes)])
    if killed_at:
        axes.axvline(killed_at - began, color="#c0392b", linestyle=":", label="SIGKILL")
        axes.legend(loc="lower right")
    axes.set_xlabel("seconds; another color is another try of the training function")
    figure.savefig(path, dpi=110, format="png")
