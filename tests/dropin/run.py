"""Runs each upstream script as its users would: two replica groups, one SIGKILL, and equal parameters.

A script passes when two replica groups train together, a process of one is killed, the group comes back
with the state of the other, and after every step that both committed their parameters are equal.
What starts the killed group again is the script's own launcher: torchrun, or Ray. Where the script writes
checkpoints, all processes are killed then, those of the lighthouse, too; started again, both groups begin
with the state of the newest complete one, bit by bit, which is one that both had.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil

from lighthouse.events import EVENT_FILE_ENV, read_events
from tests.conftest import ROOT
from tests.dropin.environments import make_data, python_for, sources
from tests.dropin.evidence import Record, common_steps, differences, incarnation, names
from tests.dropin.scripts import Script
from tools.environments import UnavailableError
from torchft_like.testing.cluster import LISTENING
from torchft_like.testing.processes import RunningProcess, wait_ended

T = TypeVar("T")
STAGE = Path(__file__).with_name("stage")
RECORDS = "DROPIN_RECORDS"
REPLICAS = 2
POLL_S = 0.5
ENDING_S = 30.0
TAIL_LINES = 400
TRIES = 2
# What torchrun writes before it ends itself, whatever --max-restarts: it had ended a worker between the
# two lines in which torch's `record` opens the file of the worker's error and fills it.
UNREADABLE = "Failed to parse reply file"


class DropinError(AssertionError):
    """The script did not do what it must; the message ends with what its processes wrote last."""


@dataclass
class Outcome:
    """One row of the table.

    Attributes:
        killed_at_step: the last step before the kill.
        back_after_s: from the kill to the first step that the killed group committed again.
        healed_bytes, healed_s: of the state that it took over.
        equal_steps: after how many steps the parameters of both groups were compared, and equal.
        repeated_steps: of those that were committed when all was killed, the ones since the checkpoint.
        not_run, failed: why; empty otherwise.
    """

    name: str
    source: str
    supplies: str = ""
    killed_at_step: int | None = None
    back_after_s: float | None = None
    healed_bytes: int | None = None
    healed_s: float | None = None
    equal_steps: int | None = None
    repeated_steps: int | None = None
    not_run: str = ""
    failed: str = ""
    seconds: float = 0.0


def run_script(script: Script, seconds_left: float) -> Outcome:
    """Run the script, and return how it ended."""
    outcome = Outcome(script.name, script.source, script.supplies, not_run=script.not_run)
    if script.not_run:
        return outcome
    if seconds_left <= 0:
        outcome.failed = "no time was left for it"
        return outcome
    began = time.monotonic()
    try:
        python = python_for(script)
        folder_of_sources = sources()
    except UnavailableError as error:
        outcome.not_run = str(error)
        return outcome
    for _ in range(TRIES):
        outcome.failed, fell = "", False
        with tempfile.TemporaryDirectory(prefix="dropin-", ignore_cleanup_errors=True) as folder:
            job = Job(script, python, Path(folder), folder_of_sources)
            try:
                with job:
                    limit_s = min(script.limit_s, seconds_left - (time.monotonic() - began))
                    deadline = time.monotonic() + limit_s
                    _kill_and_compare(job, deadline, outcome)
                    if script.saves:
                        _kill_all_and_go_on(job, deadline, outcome)
            except DropinError as error:
                outcome.failed = str(error)
                print(job.last_words(), file=sys.stderr, flush=True)
                fell = job.fell_over_an_error_file()
        if not fell:
            break
        print(f"{script.name}: torchrun ended over the error of a worker that it had ended", flush=True)
    outcome.seconds = time.monotonic() - began
    return outcome


def _kill_and_compare(job: Job, deadline: float, outcome: Outcome) -> None:
    ranks = job.script.ranks

    def together() -> list[str] | None:
        records = job.records()
        found = [incarnation(records, name) or "" for name in names(records)]
        return found if len(found) == REPLICAS and common_steps(records, found, ranks) else None

    survivor, victim = job.wait_for(together, "two replica groups train together", deadline)
    killed = job.kill_rank_of(victim)
    outcome.killed_at_step = max(record.step for record in job.records())

    def back() -> list[int] | None:
        records = job.records()
        started = incarnation(records, victim.rpartition(":")[0])
        steps = common_steps(records, [survivor, started or ""], ranks)
        new = [step for step in steps if step > (outcome.killed_at_step or 0)]
        return new if started != victim and len(new) >= job.script.steps else None

    job.wait_for(back, "the killed group trains again, with the state of the other", deadline)
    records = job.records()
    started = incarnation(records, victim.rpartition(":")[0])
    outcome.back_after_s = min(record.time for record in records if record.replica == started) - killed
    heals = [event for event in job.events("heal") if event["replica_id"] == started]
    if not heals:
        raise DropinError(f"{started} committed steps without a heal")
    outcome.healed_bytes, outcome.healed_s = int(str(heals[-1]["bytes"])), float(str(heals[-1]["seconds"]))
    if differing := differences(records):
        raise DropinError(f"parameters differ: {'; '.join(differing[:5])}")
    both = [common_steps(records, [survivor, other], ranks) for other in (victim, started or "")]
    outcome.equal_steps = len({step for steps in both for step in steps})


def _kill_all_and_go_on(job: Job, deadline: float, outcome: Outcome) -> None:
    """Kill all processes, and check with which state the job goes on once they are started again."""
    saved = job.newest_checkpoint()
    job.wait_for(lambda: job.newest_checkpoint() > saved or None, "a checkpoint is complete", deadline)
    step = job.records()[-1].step
    job.wait_for(lambda: job.records()[-1].step > step or None, "another step is committed", deadline)
    job.end()
    earlier, newest, restarted = job.records(), job.newest_checkpoint(), time.time()
    job.start()

    def later() -> list[Record] | None:
        records = [record for record in job.records() if record.time > restarted]
        found = [incarnation(records, name) or "" for name in names(records)]
        steps = common_steps(records, found, job.script.ranks) if len(found) == REPLICAS else []
        return records if len(steps) >= job.script.steps else None

    records = job.wait_for(later, "all train again, from their newest checkpoint", deadline)
    if differing := differences(records):
        raise DropinError(f"parameters differ after all was killed: {'; '.join(differing[:5])}")
    for output in (launcher.output for launcher in job.launchers[-REPLICAS:]):
        if f"Training starts at step {newest + 1}" not in output:
            raise DropinError(f"a group does not go on from checkpoint {newest}, the newest")
        loaders = [int(step) for step in re.findall(r"Loading the FT checkpoint at step (\d+)", output)]
        if not loaders or min(loaders) < newest:
            raise DropinError(f"a loader goes on from {loaders}, and its group from step {newest}")
    first = min(record.step for record in records)
    begun = {(record.rank, record.before) for record in records if record.step == first}
    had = [{r.step for r in earlier if (r.rank, r.digest) == one} for one in begun]
    steps = set.intersection(*had)
    if len(begun) != job.script.ranks or not steps:
        raise DropinError(f"they go on from a state that they did not have: {sorted(begun)}")
    outcome.repeated_steps = max(record.step for record in earlier) - max(steps)


@dataclass
class Job:
    """The processes of one script, in a folder of their own; none is left when the block ends."""

    script: Script
    python: Path
    folder: Path
    sources: Path
    launchers: list[RunningProcess] = field(default_factory=list)

    def __enter__(self) -> Job:
        try:
            self.start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def newest_checkpoint(self) -> int:
        """Return the number in the name of the newest complete checkpoint; 0 if there is none."""
        complete = self.folder.glob("shared/**/checkpoint/step-*/.metadata")
        return max((int(path.parent.name.split("-")[1]) for path in complete), default=0)

    def records(self) -> list[Record]:
        """Return what the observer has written in all processes so far, in the order of time."""
        lines = [line for path in self.folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        records = []
        for line in lines:
            with contextlib.suppress(ValueError):  # a killed process leaves half a line
                records.append(Record(**json.loads(line)))
        if self.script.ranks == 1:  # Ray numbers its workers over all replica groups
            records = [Record(**{**vars(record), "rank": 0}) for record in records]
        return sorted(records, key=lambda record: record.time)

    def events(self, kind: str) -> list[dict[str, object]]:
        """Return the Managers' event records of one kind."""
        path = self.folder / "events"
        return [event for event in read_events(path) if event["kind"] == kind] if path.exists() else []

    def kill_rank_of(self, replica: str) -> float:
        """Send SIGKILL to one rank of the incarnation; return the time at which it was sent."""
        pid = next(record.pid for record in reversed(self.records()) if record.replica == replica)
        os.kill(pid, signal.SIGKILL)
        return time.time()

    def wait_for(self, probe: Callable[[], T | None], what: str, deadline: float) -> T:
        """Return the first answer of `probe` that is not None.

        Raises:
            DropinError: there was none before the deadline, or a launcher has ended.
        """
        while (answer := probe()) is None:
            ended = [code for launcher in self.launchers if (code := launcher.exit_code) is not None]
            if ended:
                raise DropinError(f"a launcher ended with {ended[0]} before: {what}")
            if time.monotonic() > deadline:
                raise DropinError(f"not in time: {what}; steps so far: {self._progress()}")
            time.sleep(POLL_S)
        return answer

    def last_words(self) -> str:
        """Return the end of what each process wrote."""
        tails = (launcher.output.splitlines()[-TAIL_LINES:] for launcher in self.launchers)
        return "\n".join("\n".join(["-" * 80, *tail]) for tail in tails)

    def fell_over_an_error_file(self) -> bool:
        """Whether a launcher ended because of what it found of an error, and not because of the script."""
        ended = (launcher for launcher in self.launchers if launcher.exit_code == 1)
        return any(UNREADABLE in launcher.output for launcher in ended)

    def _progress(self) -> dict[str, int]:
        return {record.replica: record.step for record in self.records()}

    def start(self) -> None:
        """Start all processes of the script, and a lighthouse if it starts none."""
        self.launchers = []
        address = "" if self.script.has_lighthouse else self._start_lighthouse()
        needs_data = any("{data}" in word for word in self.script.command)
        data = self.folder / "data" if needs_data else self.folder
        if needs_data and not data.exists():
            make_data(data, self.python)
        count = 1 if self.script.starts_all else REPLICAS
        for replica in range(count):
            place = self.folder / f"replica{replica}"
            place.mkdir(exist_ok=True)
            names_of = {"replica": replica, "data": data, "folder": place, "sources": self.sources}
            names_of["shared"] = self.folder / "shared"
            variables = {key: value.format(**names_of) for key, value in self.script.variables.items()}
            variables |= {"HF_HOME": str(place), "TORCHFT_LIGHTHOUSE": address} if address else {}
            command = [word.format(**names_of) for word in self.script.command]
            self._launch(place, [str(self.python), *command], variables)

    def _start_lighthouse(self) -> str:
        least = str(self.script.min_replicas)
        flags = ["--bind", "127.0.0.1:0", "--min_replicas", least, "--join_timeout_ms", "10000"]
        self._launch(self.folder, [sys.executable, "-m", "lighthouse", *flags], {})
        return self.launchers[0].wait_for_output(LISTENING)[1]

    def _launch(self, place: Path, command: list[str], variables: dict[str, str]) -> None:
        common = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{STAGE}",
            "PATH": f"{self.python.parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            RECORDS: str(self.folder),
            "DROPIN_SUPPLIES": self.script.supplies,
            **({"DROPIN_OPTIMIZER": self.script.optimizer} if self.script.optimizer else {}),
            EVENT_FILE_ENV: str(self.folder / "events"),
        }
        self.launchers.append(RunningProcess(command, None, {**common, **variables}, folder=place))

    def end(self) -> None:
        """End all processes of the script; Ray's daemons and torchrun's workers have sessions of their own,
        but all have the variable.
        """
        for launcher in self.launchers:
            launcher.kill()
        deadline = time.monotonic() + ENDING_S
        while (left := list(self._processes())) and time.monotonic() < deadline:
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            wait_ended(left, ENDING_S)

    def _processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(RECORDS) == str(self.folder):
                    yield process
