"""torch's own Gloo, which can be reconfigured from torch 2.14 on, beside ours.

Every kind of group has the same four ranks, in processes of an environment of its own with that torch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from benchmarks.native_rank import TORCHS
from benchmarks.process_groups import fresh_prefix, start_store
from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.report import Result
from benchmarks.systems import FOLDER
from tools.environments import Environment

TORCH = "torch==2.14.1"
WORLD_SIZE = 4
TIMEOUT_S = 8.0
SECONDS_MAX = 600.0  # for one answer; processes that begin load torch
BLOCKED_S = 0.5  # until who has begun an operation is sure to be blocked in it
WARM_UP = 10, 1024**2  # operations, of so many bytes
KINDS = (TORCHS, "Gloo", "BabyGloo")

METHOD = [
    f"{WORLD_SIZE} ranks in as many processes with {TORCH} on loopback, a timeout of {TIMEOUT_S:g} s, no "
    "Manager. The kinds take turns. A sample is the slowest rank's time, but for what is told below.",
    f"{TORCHS}: made by `init_process_group(enable_reconfigure=True)`; its handles go through a store "
    "(`reconfigure_with_store`) inside the time.",
    "Create: the object and its first configuration, in fresh processes. Again: all four; shrink: without "
    "rank 3; grow: with it again.",
    "Blocked: ranks 0 to 2 wait in an allreduce for rank 3, which is killed, is stopped, or never calls. A "
    "sample is a rank: from the signal, or from the call of `abort` on all three, until its operation has "
    "failed. No group notices a stopped member; a Manager aborts when the lighthouse has missed it.",
    "Memory of a rank, with what it has started: what only it holds (USS), after one configuration and "
    f"{WARM_UP[0]} allreduces of 1 MB, less what it held before it was made; and what {{again}} further "
    "configurations of all four add.",
]


@dataclass(frozen=True)
class Plan:
    """How often."""

    rounds: int = 3
    again: int = 10


QUICK = Plan(rounds=1, again=2)


def main(plan: Plan) -> Result:
    """Let every kind take its turn in each round, in new processes."""
    method = [line.format(again=plan.again) if "{again}" in line else line for line in METHOD]
    result = Result("native_groups", "Gloo groups: torch's own that can be reconfigured, or ours?", method)
    python = str(Environment(f"native {TORCH}", ("torch", "numpy"), pins=(TORCH,)).interpreter())
    samples: dict[tuple[str, str, str], list[float]] = {}
    for _ in range(plan.rounds):
        with Fleet() as fleet:
            for crew in _start_crews(fleet, python):
                for case, unit, values in _measure(crew, plan):
                    samples.setdefault((case, crew.kind, unit), []).extend(values)
    for (case, kind, unit), values in sorted(samples.items(), key=lambda item: CASES.index(item[0][0])):
        result.add(case, kind, unit, values)
    result.save()
    return result


CASES = (
    "create",
    "again",
    "shrink",
    "grow",
    "abort, blocked ranks freed",
    "SIGKILL, blocked ranks told",
    "SIGSTOP, blocked ranks told",
    "memory of a group",
    "memory that more configurations add",
)

Samples = tuple[str, str, list[float]]  # a case, its unit, and values


def _measure(crew: Crew, plan: Plan) -> Iterator[Samples]:
    """Measure everything, once, of one kind."""
    before = crew.memory()
    made = crew.make()
    yield "create", "ms", [made * 1e3 + crew.configure(crew.ranks)]
    crew.warm_up()
    first = crew.memory()
    yield "memory of a group", "MB", [(now - then) / 1e6 for now, then in zip(first, before, strict=True)]
    yield "again", "ms", [crew.configure(crew.ranks) for _ in range(plan.again)]
    crew.warm_up()
    more = [(now - then) / 1e6 for now, then in zip(crew.memory(), first, strict=True)]
    yield "memory that more configurations add", "MB", more
    yield "shrink", "ms", [crew.configure(crew.ranks[:-1])]
    yield "grow", "ms", [crew.configure(crew.ranks)]
    *others, last = crew.ranks
    yield "abort, blocked ranks freed", "ms", crew.told(others, lambda: crew.tell(others, do="abort"))
    crew.configure(crew.ranks)
    yield "SIGSTOP, blocked ranks told", "ms", crew.told(others, lambda: last.signal(signal.SIGSTOP))
    last.signal(signal.SIGCONT)
    crew.configure(crew.ranks)
    yield "SIGKILL, blocked ranks told", "ms", crew.told(others, last.kill)


def _start_crews(fleet: Fleet, python: str) -> list[Crew]:
    """Start the ranks of one group for each kind; return them once all are ready."""
    store = start_store(fleet)
    command = [python, "-W", "ignore", str(FOLDER / "native_rank.py")]
    crews = [
        Crew(fleet, kind, store, [fleet.start(f"{kind}-{rank}", command) for rank in range(WORLD_SIZE)])
        for kind in KINDS
    ]
    for crew in crews:
        crew.wait("ready", crew.ranks)
    return crews


class Crew:
    """The ranks of one group."""

    def __init__(self, fleet: Fleet, kind: str, store: int, ranks: list[FleetProcess]) -> None:
        self.ranks = ranks
        self._fleet = fleet
        self.kind = kind
        self._store = store
        self._seen: dict[tuple[FleetProcess, str], int] = {}

    def make(self) -> float:
        """Make the group; return the seconds of the slowest rank."""
        for rank, process in enumerate(self.ranks):
            process.order(
                do="make",
                kind=self.kind,
                store=self._store,
                rank=rank,
                world_size=WORLD_SIZE,
                timeout=TIMEOUT_S,
            )
        return max(float(answer["seconds"]) for answer in self.wait("make", self.ranks))

    def configure(self, members: list[FleetProcess]) -> float:
        """Configure the group; return the milliseconds of the slowest rank. A sum proves the meeting."""
        prefix = fresh_prefix()
        for rank, process in enumerate(members):
            process.order(do="configure", prefix=prefix, rank=rank, world_size=len(members))
        seconds = max(float(answer["seconds"]) for answer in self.wait("configure", members))
        self._sum(members, 4)
        return seconds * 1e3

    def warm_up(self) -> None:
        """Warm up, so that what the first operations need is there."""
        for _ in range(WARM_UP[0]):
            self._sum(self.ranks, WARM_UP[1])

    def told(self, members: list[FleetProcess], strike: Callable[[], object]) -> list[float]:
        """Return, for each of these ranks, the milliseconds from `strike` until its operation has failed."""
        self.tell(members, do="begin")
        self.wait("begin", members)
        time.sleep(BLOCKED_S)
        struck = time.time()
        strike()
        answers = self.wait("told", members)
        if not all(answer["error"] for answer in answers):
            raise ArithmeticError(f"{self.kind}: an operation without its last member succeeded: {answers}")
        return [(float(answer["at"]) - struck) * 1e3 for answer in answers]

    def memory(self) -> list[int]:
        """Return the bytes that only a rank and what it has started hold, for each rank."""
        return [_uss_of(psutil.Process(rank.pid)) for rank in self.ranks]

    def tell(self, members: list[FleetProcess], **command: object) -> None:
        for process in members:
            process.order(**command)

    def wait(self, event: str, members: list[FleetProcess]) -> list[Record]:
        """Return the next record of this kind, of each rank."""
        return [self._next(event, process) for process in members]

    def _next(self, event: str, process: FleetProcess) -> Record:
        number = self._seen.get((process, event), 0)
        self._seen[process, event] = number + 1

        def probe() -> Record | None:
            of_kind = [record for record in process.records if record["event"] == event]
            return of_kind[number] if len(of_kind) > number else None

        return self._fleet.wait_for(probe, f"{event} of {process.name}", SECONDS_MAX)

    def _sum(self, members: list[FleetProcess], nbytes: int) -> None:
        self.tell(members, do="allreduce", bytes=nbytes)
        sums = [answer["sum"] for answer in self.wait("allreduce", members)]
        if sums != [len(members)] * len(members):
            raise ArithmeticError(f"{self.kind}: {len(members)} ones are {sums}")


def _uss_of(process: psutil.Process) -> int:
    family = [process, *process.children(recursive=True)]
    return sum(
        int(member.memory_full_info().uss) for member in family if member.status() != psutil.STATUS_ZOMBIE
    )
