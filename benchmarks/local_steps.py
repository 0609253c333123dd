"""What DiLoCo costs the inner steps: between two syncs, and for how long a sync stops them.

Each system runs in its own environment; `local_steps_worker` is the program of a replica.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.processes import Fleet, FleetProcess
from benchmarks.report import Bar, Result
from benchmarks.systems import FOLDER, OURS, PEER_VERSIONS, TORCHFT, System, start_lighthouse

SYSTEMS = (OURS, TORCHFT)
REPLICAS = 2
WIDTH = 512
SYNC_EVERY, FRAGMENTS, DELAY = 32, 8, 2
NEVER = 1_000_000
WHOLE, STREAMED = "whole", "streamed"
OVER_PLAIN_MAX, PAUSE_RATIO_MAX = 1.01, 1 / 4
STEP, PAUSE = "step between two syncs, over one without DiLoCo", "longest pause of a sync"

METHOD = [
    f"An MLP of 8 layers, batch 32, AdamW, one torch thread for each process. {PEER_VERSIONS}",
    f"Between syncs: one replica, layers of {WIDTH}, takes inner steps within DiLoCo's block and outside of "
    "it in turns, none of which syncs. A sample is the median of the ones over that of the others.",
    f"Pauses: {REPLICAS} replicas on one machine, 8.4 million parameters, over loopback. Each is synced "
    f"every {SYNC_EVERY} steps, the whole model at once and waited for, or streamed: {FRAGMENTS} fragments, "
    f"{DELAY} inner steps between sending one and taking over its average. A sample is the longest step of "
    f"{SYNC_EVERY}, less the median step; the two ways take turns. The wait for the other replica is part of "
    "it: both have their own steps behind them, and a quorum is of both.",
]


@dataclass(frozen=True)
class Plan:
    turns: int = 21
    steps: int = 60
    rounds: int = 9


QUICK = Plan(turns=3, steps=10, rounds=2)


def main(plan: Plan = Plan()) -> Result:
    result = Result("local_steps", "What does DiLoCo cost the inner steps?", METHOD)
    for system in SYSTEMS:
        ratios = _over_plain(system, plan)
        result.add(STEP, system.name, "x", ratios)
        if system is OURS:
            result.bars.append(Bar(STEP, statistics.median(ratios), OVER_PLAIN_MAX, "x"))
    for system in SYSTEMS:
        pauses = _pauses(system, plan)
        for way, seconds in pauses.items():
            result.add(PAUSE, f"{system.name}, {way}", "ms", [each * 1e3 for each in seconds])
        if system is OURS:
            ratio = statistics.median(pauses[STREAMED]) / statistics.median(pauses[WHOLE])
            result.bars.append(Bar(f"{PAUSE}: streamed over whole", ratio, PAUSE_RATIO_MAX, "x"))
    result.save()
    return result


def _over_plain(system: System, plan: Plan) -> list[float]:
    with Fleet() as fleet:
        replicas = _start(fleet, system, f"--sync-every={NEVER}", f"--width={WIDTH}", replicas=1)
        turns = [
            fleet.ask(replicas, do="take", steps=plan.steps, beside=True)[0] for _ in range(plan.turns + 1)
        ]
        return [statistics.median(t["seconds"]) / statistics.median(t["outside"]) for t in turns[1:]]


def _pauses(system: System, plan: Plan) -> dict[str, list[float]]:
    """Return for each way the seconds of the longest pause of each round."""
    ways = {WHOLE: [], STREAMED: [f"--fragments={FRAGMENTS}", f"--delay={DELAY}"]}
    pauses: dict[str, list[float]] = {way: [] for way in ways}
    with Fleet() as fleet:
        jobs = {way: _start(fleet, system, f"--sync-every={SYNC_EVERY}", *more) for way, more in ways.items()}
        for number in range(plan.rounds + 1):
            for way, replicas in jobs.items():
                taken = fleet.ask(replicas, do="take", steps=SYNC_EVERY, beside=False)
                seconds = taken[0]["seconds"]
                if number > 0:  # the first one warms up
                    pauses[way].append(max(seconds) - statistics.median(seconds))
        for way, replicas in jobs.items():
            syncs = (plan.rounds + 1) * (FRAGMENTS if way == STREAMED else 1)
            if any(replica.records[-1]["syncs"] != syncs for replica in replicas):
                raise AssertionError(f"{system.name}, {way}: not all of {syncs} syncs were committed")
    return pauses


def _start(fleet: Fleet, system: System, *options: str, replicas: int = REPLICAS) -> list[FleetProcess]:
    address = start_lighthouse(fleet, system, min_replicas=replicas).address
    command = [system.interpreter, "-W", "ignore", str(FOLDER / "local_steps_worker.py")]
    own = [f"--package={system.package}", f"--lighthouse={address}", f"--replicas={replicas}", *options]
    return [fleet.start(system.name, [*command, *own, f"--rank={rank}"]) for rank in range(replicas)]
