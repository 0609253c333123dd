"""Whether a killed trainer with data-loader workers is found as soon as one without.

Workers outlive their trainer for seconds. A copy of its connections in them would hide its death for as
long. A recovery is measured as in `recovery`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.recovery import KILL, REPLICAS, SETTLED_STEPS, kill, standing_job
from benchmarks.report import Bar, Result
from benchmarks.systems import OURS

WORKERS = 4
WITH_WORKERS = replace(
    OURS, name=f"torchft_like, {WORKERS} loader workers", worker_options=(f"--loader-workers={WORKERS}",)
)

METHOD = [
    f"{REPLICAS} replicas of a small MLP and a lighthouse, all processes on one machine, default settings. "
    f"With workers, each replica takes every batch from a DataLoader with {WORKERS} of them, which are "
    "forked while its Manager trains, and are alive when it gets SIGKILL.",
    "The time runs from SIGKILL to the last survivor's first committed step in a quorum without the victim. "
    f"Then it is started again, and all commit {SETTLED_STEPS} steps together before the next one.",
    "Jobs with workers and without follow each other in turn.",
]


@dataclass(frozen=True)
class Plan:
    """How many jobs of each kind, and how many kills in each."""

    jobs: int = 3
    kills: int = 5


QUICK = Plan(jobs=1, kills=2)


def main(plan: Plan = Plan()) -> Result:
    result = Result("loaders", "Do data-loader workers hide the death of their trainer?", METHOD)
    samples: dict[str, list[float]] = {OURS.name: [], WITH_WORKERS.name: []}
    for _ in range(plan.jobs):
        for system in (OURS, WITH_WORKERS):
            with standing_job(system) as job:
                samples[system.name] += [job.sample(kill) for _ in range(plan.kills)]
    for name, times in samples.items():
        result.add(KILL, name, "s", times)
    ratio = result.ratio(KILL, WITH_WORKERS.name, OURS.name)
    result.bars = [Bar("recovery with live workers over that without, medians", ratio, 1.2, "x")]
    result.save()
    return result
