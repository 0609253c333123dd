"""How long a new replica takes from its process's start to its first joint step, and a spare to take over."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.processes import Fleet, FleetProcess
from benchmarks.report import Bar, Result
from benchmarks.systems import FOLDER, OURS, PEER_VERSIONS, PEERS, PLAIN_DDP, System, start_lighthouse

OWN_S_MAX = 0.5
SPARE_S_MAX = 0.3
SETTLED_STEPS = 20
SECONDS_MAX = 90.0
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # empty, it is as if it was not set
PAUSE_S = 0.02  # of a step, so that the one that trains leaves a core to the one that starts
TORCHS = ("import of torch", "what torch loads for a model and an optimizer")
WHOLE = "process start to first joint step"
BEYOND = "the same without the import of torch"
OWN = "the same without all that torch loads"
SPARE = "a member is killed: a spare's first joint step"

METHOD = [
    "One replica of the tiny MLP trains, with a pause of 20 ms in each step, and a second one is started, on "
    "one machine. The pieces follow one another; their sum is the time from the start of the process to the "
    "first step that it commits in a quorum of both, in which it heals.",
    "The systems take turns; a first turn, which reads the files and compiles them, is not counted: Python "
    "keeps the bytecode, as where a trainer has started before.",
    "Of torchft the pieces after the Manager is made are one: it tells no times. Ours are those of the "
    "event log. What torch loads for the first model and optimizer (its compiler) is torch's own: plain "
    "DDP, a process that trains the same model alone with torch's DistributedDataParallel, takes it, too.",
    "A spare: two replicas train under a lighthouse that is given --replicas=2, a third one waits with "
    "TORCHFT_SPARE=1, and one of the two is killed. The time runs from the kill to the spare's first commit.",
    PEER_VERSIONS,
]


def main(samples: int = 5) -> Result:
    result = Result("startup", "How long does a new replica take to its first joint step?", METHOD)
    with TemporaryDirectory() as folder:
        _measure(result, samples, BYTECODE | {"PYTHONPYCACHEPREFIX": folder})
    result.bars = [
        Bar(f"{case}, median", result.median(case, OURS.name), limit, "s")
        for case, limit in ((BEYOND, OWN_S_MAX), (OWN, OWN_S_MAX), (SPARE, SPARE_S_MAX))
    ]
    result.save()
    return result


def _measure(result: Result, samples: int, variables: dict[str, str]) -> None:
    systems = (OURS, *PEERS, PLAIN_DDP)
    pieces: dict[str, list[dict[str, float]]] = {system.name: [] for system in systems}
    for turn in range(samples + 1):
        for system in systems:
            with Fleet(variables) as fleet:
                start = _start_alone if system is PLAIN_DDP else _start_beside_another
                taken = start(fleet, system)
            if turn:
                pieces[system.name].append(taken)
    for case in dict.fromkeys(case for of in pieces.values() for taken in of for case in taken):
        for name, of_system in pieces.items():
            if case in of_system[0]:
                result.add(case, name, "s", [taken[case] for taken in of_system])
    result.add(SPARE, OURS.name, "s", [_take_over(variables) for _ in range(samples)])


def _start_beside_another(fleet: Fleet, system: System) -> dict[str, float]:
    """Return the seconds of each piece of a newcomer's start."""
    meet = f"--lighthouse={start_lighthouse(fleet, system, min_replicas=1).address}"
    _settle(fleet, _start(fleet, system, meet, "first"))
    events = fleet.folder / "events.jsonl"
    began = time.time()
    newcomer = _start(fleet, system, meet, "second", TORCHFT_EVENT_FILE=str(events))
    joint = _first_commit(fleet, newcomer)
    ends = _ends_of_start(newcomer)
    if system is OURS:
        ends |= _ends_of(json.loads(line) for line in events.read_text().splitlines())
        ends["step and commit"] = joint
    else:
        ends["quorum, configuration, heal, step and commit"] = joint
    return _pieces(began, ends)


def _start_alone(fleet: Fleet, system: System) -> dict[str, float]:
    """Return the seconds of each piece of the start of a process that trains without a Manager."""
    began = time.time()
    process = _start(fleet, system, f"--rendezvous={fleet.folder / 'rendezvous'}", "alone")
    first_step = _first_commit(fleet, process)
    return _pieces(began, {**_ends_of_start(process), "its first step": first_step})


def _ends_of_start(process: FleetProcess) -> dict[str, float]:
    """Return when each piece of a start was over, as the process has reported."""
    (started,) = (record for record in process.records if record["event"] == "started")
    return {**started["times"]}


def _pieces(began: float, ends: dict[str, float]) -> dict[str, float]:
    seconds = dict(zip(ends, (end - start for start, end in pairwise([began, *ends.values()])), strict=True))
    whole = sum(seconds.values())
    return {
        **seconds,
        WHOLE: whole,
        BEYOND: whole - seconds[TORCHS[0]],
        OWN: whole - sum(seconds[of] for of in TORCHS),
    }


def _ends_of(events: Any) -> dict[str, float]:
    """Return when a newcomer had its quorum, its configured group, and its peer's state."""
    first: dict[str, dict[str, Any]] = {}
    for event in events:
        first.setdefault(event["kind"], event)
    return {
        "first quorum, and configuration of the group": first["quorum"]["time"],
        "heal": first["heal"]["time"],
    }


def _take_over(variables: dict[str, str]) -> float:
    """Return the seconds from the death of a member to the first commit of a spare."""
    with Fleet(variables) as fleet:
        lighthouse = start_lighthouse(fleet, OURS, min_replicas=1, extra=("--replicas=2",))
        meet = f"--lighthouse={lighthouse.address}"
        first, second = (_start(fleet, OURS, meet, name) for name in ("first", "second"))
        for member in (first, second):
            _settle(fleet, member)
        spare = _start(fleet, OURS, meet, "spare", TORCHFT_SPARE="1")
        _wait(fleet, spare, "started")
        _settle(fleet, first)
        died = time.time()
        second.kill()
        return _first_commit(fleet, spare) - died


def _start(fleet: Fleet, system: System, meet: str, name: str, **variables: str) -> FleetProcess:
    options = [
        f"--package={system.package}",
        f"--name={name}",
        meet,
        f"--pause={PAUSE_S}",
        *system.worker_options,
    ]
    command = [system.interpreter, "-W", "ignore", str(FOLDER / "startup_worker.py"), *options]
    return fleet.start(name, command, variables)


def _settle(fleet: Fleet, process: FleetProcess) -> None:
    """Wait for some steps more that a replica commits."""
    count = len(_commits(process)) + SETTLED_STEPS
    fleet.wait_for(lambda: len(_commits(process)) >= count or None, f"steps of {process.name}", SECONDS_MAX)


def _first_commit(fleet: Fleet, process: FleetProcess) -> float:
    return fleet.wait_for(
        lambda: next(iter(_commits(process)), None), f"first step of {process.name}", SECONDS_MAX
    )


def _wait(fleet: Fleet, process: FleetProcess, event: str) -> None:
    fleet.wait_for(
        lambda: any(record["event"] == event for record in process.records) or None,
        f"{event} of {process.name}",
        SECONDS_MAX,
    )


def _commits(process: FleetProcess) -> list[float]:
    """Return the times of the steps that a replica has committed."""
    return [record["time"] for record in process.records if record["event"] == "step" and record["committed"]]
