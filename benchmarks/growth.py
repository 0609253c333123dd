"""What more replicas cost: step time, memory of a replica and of the lighthouse, for 2, 4 and 8.

All replicas share the cores of one machine, so a step grows with their number for every system;
what a system adds shows in the comparison with plain DDP.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import psutil

from benchmarks.processes import Fleet, FleetProcess
from benchmarks.report import Result
from benchmarks.systems import OURS, PEER_VERSIONS, PEERS, PLAIN_DDP, System, start_job, take_turn

SYSTEMS = (PLAIN_DDP, *PEERS, OURS)
REPLICA_COUNTS = (2, 4, 8)
STEPS_PER_TURN = 50

METHOD = [
    "2, 4 and 8 replicas of the tiny MLP on one machine, one system after the other, one torch thread for "
    f"each process. A sample is the mean step of a turn of {STEPS_PER_TURN} on replica 0.",
    "Memory after the last turn: resident (RSS), and unique to the process (USS), which leaves out what "
    "processes share, such as torch's libraries.",
    PEER_VERSIONS,
    "torchft's lighthouse is measured as its users start it, by a Python process that imports torchft and "
    "with it torch; the lighthouse of this project imports no torch.",
]


def main(turns: int = 5) -> Result:
    result = Result("growth", "What do more replicas cost, in time and in memory?", METHOD)
    for replicas in REPLICA_COUNTS:
        for system in SYSTEMS:
            _measure(result, system, replicas, turns)
    result.save()
    return result


def _measure(result: Result, system: System, replicas: int, turns: int) -> None:
    with Fleet() as fleet:
        job = start_job(fleet, system, replicas, "tiny")
        take_turn(fleet, job, STEPS_PER_TURN)
        samples = [statistics.fmean(take_turn(fleet, job, STEPS_PER_TURN)[0]) * 1e3 for _ in range(turns)]
        result.add(f"step, {replicas} replicas", system.name, "ms", samples)
        _add_memory(result, f"replica of {replicas}", system, job.workers)
        if job.lighthouse is not None:
            _add_memory(result, f"lighthouse of {replicas}", system, [job.lighthouse.process])


def _add_memory(result: Result, what: str, system: System, processes: Sequence[FleetProcess]) -> None:
    used = [psutil.Process(process.pid).memory_full_info() for process in processes]
    result.add(f"RSS, {what}", system.name, "MB", [memory.rss / 1e6 for memory in used])
    result.add(f"USS, {what}", system.name, "MB", [memory.uss / 1e6 for memory in used])
