"""How long training stands still after a fault: three replicas, a tiny model, real processes.

A recovery ends with the *last* survivor's first committed step whose quorum no longer holds the
victim; a step that was in flight and still committed by all three does not count. So a sample can
only end when the fault was felt.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

from benchmarks.processes import Fleet, FleetProcess, NotReportedError, Record
from benchmarks.report import Bar, Result
from benchmarks.systems import (
    OURS,
    PEER_VERSIONS,
    TORCHFT,
    TORCHFT_NIGHTLY,
    Lighthouse,
    System,
    start_lighthouse,
    start_worker,
)

REPLICAS = 3
STOP_OPERATION_TIMEOUT_S = 10
LIGHTHOUSE_AWAY_S = 2.0
LIGHTHOUSE_WAIT_S = 20.0
SETTLED_STEPS = 20
SECONDS_MAX = 90.0
BESIDE_S = 3.0  # after a newcomer's first step, in which steps are as long as those beside its heal

KILL = "SIGKILL of a replica"
STOP = "SIGSTOP inside a collective"
AWAY = "lighthouse killed, back after 2 s: longest pause"
JOIN = "a newcomer joins and heals: longest pause of the others"
STEP = "the step beside it"
LOST = "steps that the others lose by it"
HEAL = "1 GiB comes to a newcomer: longest pause of the others"
HEAL_STEP = "the step beside that"
REPLAY = replace(OURS, name=f"{OURS.name}, with a replay", worker_options=("--steps-kept=64",))
HEAL_OPTIONS = ("--ballast=64", "--compute=0.25")

# The DDP wrapper of torchft 0.2.0 does not outlive a dead peer, so its gradients go through its allreduce.
PEERS = (replace(TORCHFT, worker_options=("--gradients=allreduce",)), TORCHFT_NIGHTLY)
QUICK_HEARTBEAT = tuple(
    replace(
        peer, name=f"{peer.name}, heartbeat timeout 1 s", lighthouse_options=("--heartbeat_timeout_ms=1000",)
    )
    for peer in PEERS
)
RETRIES = tuple(
    replace(
        peer,
        name=f"{peer.name}, quorum_retries 10",
        worker_options=(*peer.worker_options, "--quorum-retries=10"),
    )
    for peer in PEERS
)

METHOD = [
    "3 replicas of a small MLP and the system's own lighthouse, all processes on one machine, one torch "
    "thread each; default settings unless the row says otherwise.",
    "The time runs from the fault to the last survivor's first committed step in a quorum without the "
    "victim; for the lighthouse it is the longest that any replica committed no step, from its death to the "
    "first step after it listens again.",
    "SIGKILL: sent from outside at an arbitrary point of a step. SIGSTOP: the victim stops itself when it "
    "has the quorum, before its backward pass, so that its peers block in the collective; the operation "
    f"timeout is {STOP_OPERATION_TIMEOUT_S} s for every system (the default of torchft is 60 s).",
    f"Between faults the victim is started again and all three replicas commit {SETTLED_STEPS} steps "
    "together. Every lighthouse outage is that of a fresh job.",
    "A newcomer is the victim of SIGKILL that comes back. From the moment at which its Manager is made until "
    "it commits: the longest time between two commits of a survivor, and how many of their steps were lost. "
    "The step beside it is the survivors' median one in the same seconds, three processes on two cores.",
    "1 GiB: the same with 64 parameters of 16 MiB beside those of the model, which the optimizer has and "
    "which get no gradients, and 0.25 s in each step in which the processes sleep, as they do where a device "
    "computes. With a replay the others do not wait for it (docs/healing.md) until 64 steps have passed.",
    f"{PEER_VERSIONS} 0.2.0 averages gradients with Manager.allreduce, because its DistributedDataParallel "
    "raises in the survivors when a peer dies; the nightly and ours use DistributedDataParallel.",
]


@dataclass(frozen=True)
class Plan:
    """How many samples of each case."""

    kills: int = 10
    kills_peer: int = 5
    stops: int = 5
    stops_peer: int = 3
    aways: int = 5
    aways_peer: int = 2
    aways_retries: int = 3
    heals: int = 5


QUICK = Plan(kills=2, kills_peer=1, stops=1, stops_peer=1, aways=1, aways_peer=1, aways_retries=1, heals=1)


def main(plan: Plan = Plan()) -> Result:
    result = Result("recovery", "How long does training stand still after a fault?", METHOD)
    _measure_kills(result, plan)
    _measure_stops(result, plan)
    _measure_lighthouse(result, plan)
    measure_heals(result, plan)
    result.bars = _bars(result)
    result.save()
    return result


def _bars(result: Result) -> list[Bar]:
    return [
        Bar("SIGKILL to next committed step, median", result.median(KILL, OURS.name), 0.20, "s"),
        *(
            Bar(f"the same over that of {peer.name}", result.ratio(KILL, OURS.name, peer.name), 1 / 20, "x")
            for peer in PEERS
        ),
        Bar("SIGSTOP to next committed step, median", result.median(STOP, OURS.name), 1.6, "s"),
        Bar("longest pause while the lighthouse is away, median", result.median(AWAY, OURS.name), 0.8, "s"),
        Bar(
            "longest pause while a newcomer joins, beyond a step, median",
            _difference(result.median(JOIN, OURS.name), result.median(STEP, OURS.name)),
            20,
            "ms",
        ),
        Bar(
            "longest pause while 1 GiB comes to a newcomer, beyond a step, median",
            _difference(result.median(HEAL, REPLAY.name), result.median(HEAL_STEP, REPLAY.name)),
            250,
            "ms",
        ),
    ]


def _difference(longer: float | None, shorter: float | None) -> float | None:
    return None if longer is None or shorter is None else longer - shorter


def _measure_kills(result: Result, plan: Plan) -> None:
    for system in (OURS, *PEERS, *QUICK_HEARTBEAT):
        count = plan.kills if system is OURS else plan.kills_peer
        samples: list[float] = []
        with standing_job(system) as job, contextlib.suppress(NotReportedError):
            for _ in range(count):
                samples.append(job.sample(kill))  # noqa: PERF401 - those before an error count
        missed = f"the job did not go on after kill {len(samples) + 1}" if len(samples) < count else ""
        result.add(KILL, system.name, "s", samples, missed)
        result.add(JOIN, system.name, "ms", [join.pause_s * 1e3 for join in job.joins])
        result.add(STEP, system.name, "ms", [join.step_s * 1e3 for join in job.joins])
        result.add(LOST, system.name, "steps", [join.lost for join in job.joins])


def measure_heals(result: Result, plan: Plan) -> None:
    for system in (OURS, REPLAY, PEERS[-1]):
        with standing_job(system, *HEAL_OPTIONS) as job:
            for _ in range(plan.heals):
                job.sample(kill)
        result.add(HEAL, system.name, "ms", [join.pause_s * 1e3 for join in job.joins])
        result.add(HEAL_STEP, system.name, "ms", [join.step_s * 1e3 for join in job.joins])


def _measure_stops(result: Result, plan: Plan) -> None:
    for system in (OURS, *PEERS):
        count = plan.stops if system is OURS else plan.stops_peer
        with standing_job(system, f"--timeout={STOP_OPERATION_TIMEOUT_S}") as job:
            result.add(STOP, system.name, "s", [job.sample(_stop) for _ in range(count)])


def _measure_lighthouse(result: Result, plan: Plan) -> None:
    counts = (
        (OURS, plan.aways),
        *((peer, plan.aways_peer) for peer in PEERS),
        *((peer, plan.aways_retries) for peer in RETRIES),
    )
    for system, count in counts:
        samples = []
        for _ in range(count):
            with standing_job(system) as job, contextlib.suppress(NotReportedError):
                samples.append(job.lighthouse_outage())
        missed = count - len(samples)
        note = f"no step within {LIGHTHOUSE_WAIT_S:.0f} s in {missed} of {count} outages" if missed else ""
        result.add(AWAY, system.name, "s", samples, note)


@contextlib.contextmanager
def standing_job(system: System, *options: str) -> Iterator[_Job]:
    with Fleet() as fleet:
        job = _Job(fleet, system, options)
        job.wait_settled()
        yield job


@dataclass(frozen=True)
class _Join:
    """What a newcomer cost the others: their longest pause, their median step, their lost steps."""

    pause_s: float
    step_s: float
    lost: int


class _Job:
    """Three replicas and their lighthouse, through many faults."""

    def __init__(self, fleet: Fleet, system: System, options: tuple[str, ...]) -> None:
        self._fleet = fleet
        self._system = system
        self._options = options
        self._lighthouse: Lighthouse = start_lighthouse(fleet, system, min_replicas=2)
        self._replicas = [self._start(rank) for rank in range(REPLICAS)]
        self._faults = 0
        self.joins: list[_Join] = []

    def sample(self, fault: _Fault) -> float:
        """Return the seconds from the fault to the last survivor's first step without the victim."""
        rank = self._faults % REPLICAS  # whoever hosts the store dies, too, in turn
        self._faults += 1
        victim = self._replicas[rank]
        survivors = [replica for replica in self._replicas if replica is not victim]
        since = fault(self._fleet, victim)
        ends = [
            self._fleet.wait_for(
                partial(_first_commit, r, since, REPLICAS - 1), f"step of {r.name} without it", SECONDS_MAX
            )
            for r in survivors
        ]
        victim.kill()
        self._replicas[rank] = self._start(rank)
        self.wait_settled()
        self.joins.append(_join_of(self._replicas[rank], survivors))
        return max(ends) - since

    def lighthouse_outage(self) -> float:
        """Return the most seconds without a committed step, of any replica, until the first one after the
        lighthouse is back.
        """
        port, since = self._lighthouse.port, time.time()
        self._lighthouse.process.kill()
        time.sleep(LIGHTHOUSE_AWAY_S)
        self._lighthouse = start_lighthouse(self._fleet, self._system, min_replicas=2, port=port)
        back = time.time()
        for r in self._replicas:
            self._fleet.wait_for(
                partial(_first_commit, r, back, REPLICAS), f"step of {r.name}", LIGHTHOUSE_WAIT_S
            )
        return max(_longest_pause(replica, since) for replica in self._replicas)

    def wait_settled(self) -> None:
        """Wait until all replicas have committed a number of steps together."""
        since = time.time()
        for replica in self._replicas:
            self._fleet.wait_for(
                partial(_are_joint, replica, since),
                f"joint steps of {replica.name}",
                SECONDS_MAX,
            )

    def _start(self, rank: int) -> FleetProcess:
        options = (f"--lighthouse={self._lighthouse.address}", f"--rank={rank}", *self._options)
        return start_worker(self._fleet, self._system, f"replica{rank}", *options)


class _Fault(Protocol):
    """Do something to a victim; return the time at which it happened."""

    def __call__(self, fleet: Fleet, victim: FleetProcess) -> float: ...


def kill(fleet: Fleet, victim: FleetProcess) -> float:
    now = time.time()
    victim.signal(signal.SIGKILL)
    return now


def _stop(fleet: Fleet, victim: FleetProcess) -> float:
    victim.signal(signal.SIGUSR1)
    return fleet.wait_for(lambda: _stopping(victim), f"stop of {victim.name}", SECONDS_MAX)


def _stopping(victim: FleetProcess) -> float | None:
    return next((float(r["time"]) for r in reversed(victim.records) if r["event"] == "stopping"), None)


def _steps_since(replica: FleetProcess, since: float) -> Iterator[Record]:
    """Yield the steps of the record, newest first."""
    for record in reversed(replica.records):
        if record["time"] <= since:
            return
        if record["event"] == "step":
            yield record


def _first_commit(replica: FleetProcess, since: float, participants_max: int) -> float | None:
    commits = [
        float(record["time"])
        for record in _steps_since(replica, since)
        if record["committed"] and record["participants"] <= participants_max
    ]
    return min(commits, default=None)


def _longest_pause(replica: FleetProcess, since: float) -> float:
    commits = sorted(float(record["time"]) for record in _steps_since(replica, since) if record["committed"])
    return max(after - before for before, after in pairwise([since, *commits]))


def _join_of(newcomer: FleetProcess, others: list[FleetProcess]) -> _Join:
    made = next(float(r["time"]) for r in newcomer.records if r["event"] == "ready")
    joined = _first_commit(newcomer, made, REPLICAS)
    assert joined is not None, "it has settled"
    pauses, beside, lost = [], [], 0
    for other in others:
        records = sorted(_steps_since(other, 0.0), key=lambda r: r["time"])
        times = [float(r["time"]) for r in records if r["committed"]]
        pauses += [after - before for before, after in pairwise(times) if after > made and before <= joined]
        beside += [after - before for before, after in pairwise(times) if made < after <= joined + BESIDE_S]
        lost += sum(not r["committed"] for r in records if made < r["time"] <= joined + BESIDE_S)
    return _Join(max(pauses), statistics.median(beside), lost)


def _are_joint(replica: FleetProcess, since: float) -> bool | None:
    """Return True once the replica has committed enough steps with all the others."""
    joint = sum(r["committed"] and r["participants"] == REPLICAS for r in _steps_since(replica, since))
    return joint >= SETTLED_STEPS or None
