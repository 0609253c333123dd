"""What fault tolerance costs while nothing fails: the time of a step, beside plain DDP.

The systems stay alive side by side and take turns of some steps each, round after round, so that
whatever else this machine does hits all of them alike; ratios are taken within a round.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from benchmarks.processes import Fleet
from benchmarks.report import Bar, Result
from benchmarks.systems import OURS, PEER_VERSIONS, PEERS, PLAIN_DDP, System, start_job, take_turn

SYSTEMS = (PLAIN_DDP, *PEERS, OURS)
REPLICAS = 2
STEPS_PER_TURN = {"tiny": 200, "0.3M": 150, "4M": 30}
OVER_PLAIN_MAX = {"tiny": 1.12, "0.3M": 1.08, "4M": 1.03}

METHOD = [
    f"{REPLICAS} replicas of a three-layer MLP (tiny, 0.3M and 4M parameters), batch 32, SGD with momentum, "
    "gloo, one torch thread for each process, all processes on one machine.",
    "Every system through its DistributedDataParallel; torchft's and ours with their Optimizer (torchft asks "
    "for a quorum and votes in every step; ours stands) and their own lighthouse daemon. "
    f"{PEER_VERSIONS}",
    "Own cores: each process keeps to a core of its own, the lighthouse has both.",
    "The systems run at the same time and take turns; a sample is the mean step of a turn on replica 0. "
    "Every step of every turn was committed by all replicas, or the benchmark fails.",
    "The ratio is the median over rounds of a system's sample over plain DDP's of the same round.",
]


@dataclass(frozen=True)
class Plan:
    rounds: int = 11
    warmup_turns: int = 2


QUICK = Plan(rounds=3, warmup_turns=1)


def main(plan: Plan = Plan()) -> Result:
    result = Result("step_time", "What does a step cost while nothing fails?", METHOD)
    for model, steps in STEPS_PER_TURN.items():
        for own_cores in (False, True):
            _measure_model(result, plan, model, steps, own_cores)
    result.save()
    return result


def _measure_model(result: Result, plan: Plan, model: str, steps: int, own_cores: bool) -> None:
    systems = tuple(
        replace(system, worker_options=(*system.worker_options, "--own-core")) if own_cores else system
        for system in SYSTEMS
    )
    samples = step_times(systems, REPLICAS, model, steps, plan)
    case = f"{model} MLP, own cores" if own_cores else f"{model} MLP"
    for system in SYSTEMS:
        result.add(case, system.name, "ms", samples[system.name])
    over_plain = {}
    for system in (*PEERS, OURS):
        ratios = [a / b for a, b in zip(samples[system.name], samples[PLAIN_DDP.name], strict=True)]
        over_plain[system.name] = statistics.median(ratios)
        result.add(f"{case}, over plain DDP", system.name, "x", ratios)
    result.bars += [
        Bar(f"{case}: over plain DDP", over_plain[OURS.name], OVER_PLAIN_MAX[model], "x"),
        *(
            Bar(
                f"{case}: over plain DDP, against that of {peer.name}",
                over_plain[OURS.name],
                over_plain[peer.name],
                "x",
            )
            for peer in PEERS
        ),
    ]


def step_times(
    systems: tuple[System, ...], replicas: int, model: str, steps: int, plan: Plan
) -> dict[str, list[float]]:
    """Milliseconds per step on replica 0, a sample for each round, the systems in turns."""
    samples: dict[str, list[float]] = {system.name: [] for system in systems}
    with Fleet() as fleet:
        jobs = [start_job(fleet, system, replicas, model) for system in systems]
        for _ in range(plan.warmup_turns):
            for job in jobs:
                take_turn(fleet, job, steps)
        for _ in range(plan.rounds):
            for job in jobs:
                of_first_replica = take_turn(fleet, job, steps)[0]
                samples[job.system.name].append(statistics.fmean(of_first_replica) * 1e3)
    return samples
