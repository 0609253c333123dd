"""What the death of one rank costs its replica group and the others, with spares and without."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

from benchmarks.processes import Fleet, FleetProcess, Record
from benchmarks.report import Bar, Result
from benchmarks.systems import FOLDER, OURS, start_lighthouse

SECONDS_MAX = 120.0
SETTLED_STEPS = 10
DIED, RAISED = "one rank of 4 is killed", "a rank raises an error"
NEXT = f"{DIED}: the next step of its group"
OTHERS = f"{DIED}: the next step of the other group"
STARTED = f"{DIED}: processes started beside it"
RESTART = f"{RAISED}: the next step of its group, in the same processes"
UNDISTURBED, CHURN = "steps of a group, undisturbed", "a rank is killed again and again"
SPARE, LAUNCHER = "a spare takes its place", "its group is started again"

METHOD = [
    "Two replica groups train a small model that FSDP shards over their ranks, with a pause of 50 ms in each "
    "step: all processes share the cores of one machine. A rank is killed; the times run to the next step "
    "that all ranks of a group have committed. The shards are of kilobytes: their transfer takes nothing.",
    "Beside it, what the launcher does without spares: it ends the other ranks, and starts them all again.",
    "An error of a rank, not a death: all ranks of its group run their function again in the same processes.",
    "A rank is killed again and again, in groups of 3 with 2 spares; another spare is started each time. The "
    "throughput is the steps that the groups have committed, against the same without a fault before. Each "
    "digest of a shard is compared with that of the same rank in the other group after the same step.",
]


@dataclass(frozen=True)
class Plan:
    deaths: int = 5
    churn_s: float = 300.0
    every_s: float = 20.0
    undisturbed_s: float = 60.0


QUICK = Plan(1, 20.0, 10.0, 10.0)


class Job:
    """Two replica groups, their spares, and the process that is each rank now."""

    def __init__(self, fleet: Fleet, ranks: int, spares: int) -> None:
        self._fleet, self._size = fleet, ranks
        self._lighthouse = start_lighthouse(fleet, OURS, min_replicas=1)
        self._started = 0
        self.spares = [self.start_spare() for _ in range(spares)]
        self.groups = {group: self.start_group(group) for group in ("0", "1")}
        self.settle()

    def _start(self, name: str, **variables: str) -> FleetProcess:
        self._started += 1
        command = [sys.executable, "-W", "ignore", str(FOLDER / "rank_loss_worker.py")]
        variables["TORCHFT_LIGHTHOUSE"] = self._lighthouse.address
        return self._fleet.start(name, command, variables)

    @property
    def started(self) -> int:
        """How many processes were started so far."""
        return self._started

    def start_spare(self) -> FleetProcess:
        return self._start("spare", TORCHFT_SPARE="rank", REPLICA_GROUP_ID="")

    def start_group(self, group: str) -> list[FleetProcess]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        variables = {
            "REPLICA_GROUP_ID": group,
            "WORLD_SIZE": str(self._size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        return [self._start(f"{group}.{rank}", RANK=str(rank), **variables) for rank in range(self._size)]

    def settle(self) -> None:
        """Wait until both groups have committed some steps together, and all spares are ready."""
        self._fleet.wait_for(lambda: all(map(waits, self.spares)) or None, "spares", SECONDS_MAX)
        since = time.time()

        def have() -> bool | None:
            processes = [process for group in self.groups.values() for process in group]
            together = [sum(r["members"] == 2 for r in steps(p, since)) for p in processes]
            return min(together) >= SETTLED_STEPS or None

        self._fleet.wait_for(have, "steps of both groups", SECONDS_MAX)

    def next_step(self, group: str, since: float) -> float:
        """Return when all ranks of a group have committed a step that they have begun after this time."""

        def last() -> float | None:
            self.adopt()
            ends = [next((r["time"] for r in steps(p, since)), None) for p in self.groups[group]]
            return None if None in ends else max(end for end in ends if end is not None)

        return self._fleet.wait_for(last, f"a step of group {group}", SECONDS_MAX)

    def adopt(self) -> None:
        """Enter spares that have taken a place."""
        for spare in list(self.spares):
            if tries := [record for record in spare.records if record["event"] == "try"]:
                self.groups[tries[0]["group"]][tries[0]["rank"]] = spare
                self.spares.remove(spare)


def waits(spare: FleetProcess) -> bool:
    return any(record["event"] == "waits" for record in list(spare.records))


def steps(process: FleetProcess, since: float = 0.0) -> list[Record]:
    return [r for r in list(process.records) if r["event"] == "step" and r["time"] > since]


def main(plan: Plan | None = None) -> Result:
    plan = plan or Plan()
    result = Result("rank_loss", "What does the death of one rank cost?", METHOD)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Fleet() as fleet:
        _deaths_with_spares(result, fleet, plan)
    with Fleet() as fleet:
        _deaths_without(result, fleet, plan)
    with Fleet() as fleet:
        _churn(result, fleet, plan)
    result.save()
    return result


def _deaths_with_spares(result: Result, fleet: Fleet, plan: Plan) -> None:
    job = Job(fleet, ranks=4, spares=1)
    own, other, restart = [], [], []
    before = job.started
    for number in range(plan.deaths):
        died = time.time()
        job.groups["0"][number % 4].kill()
        own.append(job.next_step("0", died) - died)
        other.append(job.next_step("1", died) - died)
        job.spares.append(job.start_spare())
        job.settle()
    beside = job.started - before - plan.deaths
    for number in range(plan.deaths):
        raised = time.time()
        victim = job.groups["0"][number % 4]
        victim.signal(signal.SIGUSR1)

        def error(victim: FleetProcess = victim, raised: float = raised) -> float | None:
            errors = (r["time"] for r in victim.records if r["event"] == "error")
            return next((when for when in errors if when > raised), None)

        raised = fleet.wait_for(error, "error", SECONDS_MAX)
        restart.append(job.next_step("0", raised) - raised)
        job.settle()
    result.add(NEXT, SPARE, "s", own)
    result.add(OTHERS, SPARE, "s", other)
    result.add(STARTED, SPARE, "", [float(beside)])
    result.add(RESTART, OURS.name, "s", restart)
    result.bars += [
        Bar(f"{NEXT}, median", result.median(NEXT, SPARE), 1.0, "s"),
        Bar(f"{STARTED}, a spare waits", float(beside), 0.0, ""),
        Bar(f"{RESTART}, median", result.median(RESTART, OURS.name), 0.5, "s"),
    ]


def _deaths_without(result: Result, fleet: Fleet, plan: Plan) -> None:
    job = Job(fleet, ranks=4, spares=0)
    own, other = [], []
    for number in range(plan.deaths):
        died = time.time()
        job.groups["0"][number % 4].kill()
        other.append(job.next_step("1", died) - died)
        for process in job.groups["0"]:
            process.kill()
        job.groups["0"] = job.start_group("0")
        own.append(job.next_step("0", died) - died)
        job.settle()
    result.add(NEXT, LAUNCHER, "s", own)
    result.add(OTHERS, LAUNCHER, "s", other)
    result.add(STARTED, LAUNCHER, "", [3.0])


def _churn(result: Result, fleet: Fleet, plan: Plan) -> None:
    job = Job(fleet, ranks=3, spares=2)
    began = time.time()
    time.sleep(plan.undisturbed_s)
    undisturbed = _rate(job, began, time.time())
    everybody = [process for group in job.groups.values() for process in group]
    chance, began, deaths = random.Random(0), time.time(), 0
    while time.time() - began < plan.churn_s:
        group, rank = chance.choice(["0", "1"]), chance.randrange(3)
        died = time.time()
        job.groups[group][rank].kill()
        deaths += 1
        job.next_step(group, died)
        spare = job.start_spare()
        job.spares.append(spare)
        everybody.append(spare)
        time.sleep(max(0.0, died + plan.every_s - time.time()))
    disturbed = _rate(job, began, time.time(), everybody)
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    for process in everybody:
        for record in steps(process):
            digests[record["rank"], record["step"]].add(record["digest"])
    divergences = float(sum(len(found) > 1 for found in digests.values()))
    share = disturbed / undisturbed
    note = f"{deaths} deaths, every {plan.every_s:g} s"
    result.add(f"{CHURN}: throughput, of that undisturbed", SPARE, "", [share], note)
    result.add(f"{CHURN}: digests that differ", SPARE, "", [divergences], f"of {len(digests)}")
    result.bars += [
        Bar(f"{CHURN}: lost throughput", 1.0 - share, 0.05, ""),
        Bar(f"{CHURN}: digests that differ", divergences, 0.0, ""),
    ]


def _rate(job: Job, begin: float, end: float, processes: list[FleetProcess] | None = None) -> float:
    """Return the steps per second that ranks 0 have committed."""
    everybody = processes or [process for group in job.groups.values() for process in group]
    mine = [r for p in everybody for r in steps(p) if r["rank"] == 0 and begin < r["time"] <= end]
    return len(mine) / (end - begin)
