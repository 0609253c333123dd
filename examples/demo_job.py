"""One run of the demo: the replicas, the faults they suffer, and what is known of them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from demo_faults import Act, Fault, plan
from demo_records import Record, ReplicaRecords, Story
from demo_replicas import Files, Replica
from demo_view import Row, View

LOOK_SECONDS = 0.05

# Of a group that the demo itself may be in; each of its replicas is a group of its own.
GROUP_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


class DemoError(Exception):
    """The demo cannot go on or did not hold; the message is for the user."""


@dataclass(frozen=True)
class Settings:
    """The settings that the user asks for."""

    replicas: int
    steps: int  # committed ones; more where a replica is not back by then
    batch_size: int
    seed: int
    faults: bool
    output_dir: Path
    step_time: float  # seconds that a step takes at the least
    time_limit: float  # seconds for the whole run
    script: Path  # what the replicas run


class Job:
    """The replicas of one run.

    It looks at them every few milliseconds: at what they wrote, whether they live, and whether a
    fault is due.
    """

    def __init__(self, settings: Settings, environment: Mapping[str, str], view: View) -> None:
        self.settings = settings
        self.view = view
        self.began = time.time()
        self.faults = plan(settings.replicas, settings.steps) if settings.faults else []
        self.replicas = [_make_replica(index, settings, environment) for index in range(settings.replicas)]
        self.records = [ReplicaRecords(r.files.events, r.files.metrics) for r in self.replicas]
        self._story = Story()
        self._story_file = settings.output_dir / "story.txt"
        self._story_file.write_text("")

    def run(self) -> None:
        """Train to the last step through all faults.

        Raises:
            DemoError: a replica crashed by itself, was not back in time, or it took too long.
        """
        for replica in self.replicas:
            replica.start()
        while not all(replica.finished for replica in self.replicas):
            self._look()
            self._check()
            self._strike()
            time.sleep(LOOK_SECONDS)
        self._look()
        self._check()

    def end(self) -> None:
        """Leave no process behind."""
        for replica in self.replicas:
            replica.kill()
        for replica in self.replicas:
            replica.wait()

    def results(self) -> dict[int, Record | None]:
        """Return the step and the digest that each replica printed at its end."""
        return {replica.index: replica.result() for replica in self.replicas}

    def _look(self) -> None:
        """Read what the replicas wrote, and show it."""
        news = [event for records in self.records for event in records.update()]
        for at, text in self._story.tell(news):
            self._tell(at, text)
        self.view.show([self._row(index) for index in range(len(self.replicas))])

    def _check(self) -> None:
        """End the run if it cannot end well any more."""
        for replica in self.replicas:
            if replica.crashed:
                raise DemoError(
                    f"replica {replica.index} ended by itself with exit code {replica.exit_code}; "
                    f"the end of its log ({replica.files.log}):\n\n{replica.log_tail()}"
                )
        pending = next((fault for fault in self.faults if not fault.over), None)
        if pending and any(replica.finished for replica in self.replicas):
            raise DemoError(
                f"the last step was reached before replica {pending.victim} was back from its "
                f"{pending.kind}: give it more --steps"
            )
        if time.time() - self.began > self.settings.time_limit:
            steps = ", ".join(str(records.step) for records in self.records)
            raise DemoError(
                f"not done after {self.settings.time_limit:.0f} s; the replicas are at steps {steps}"
            )

    def _strike(self) -> None:
        """Carry out what the first fault that is not over asks for: one fault at a time."""
        fault = next((fault for fault in self.faults if not fault.over), None)
        commits = {index: records.commits for index, records in enumerate(self.records)}
        if fault and (act := fault.next_act(commits, time.time())):
            self._do(fault, act)

    def _do(self, fault: Fault, act: Act) -> None:
        victim = self.replicas[fault.victim]
        do, verb = {
            ("SIGKILL", "strike"): (victim.kill, "SIGKILL to"),
            ("SIGKILL", "revive"): (victim.start, "starting again:"),
            ("SIGSTOP", "strike"): (victim.stop, "SIGSTOP to"),
            ("SIGSTOP", "revive"): (victim.resume, "SIGCONT to"),
        }[fault.kind, act]
        at = time.time()
        do()
        fault.did(act, at)
        self._tell(at, f">>> {verb} replica {fault.victim}", "bold red")

    def _tell(self, at: float, text: str, style: str = "") -> None:
        """Show a line of the story, and keep it."""
        self.view.tell(at - self.began, text, style)
        with self._story_file.open("a") as file:
            file.write(f"{at - self.began:7.2f} s  {text}\n")

    def _row(self, index: int) -> Row:
        records = self.records[index]
        state = _state(self.replicas[index], records)
        losses = [metric.loss for metric in records.metrics if metric.participating]
        takes_part = state in ("training", "healing", "finished") and records.metrics
        participants = records.metrics[-1].participants if takes_part else 0
        return Row(index, state, records.step, losses, participants)


def _state(replica: Replica, records: ReplicaRecords) -> str:
    if replica.stopped:
        return "stopped"
    if replica.exit_code is not None:
        return "finished" if replica.finished else "killed"
    if records.healing:
        return "healing"
    last_sign_of_life = records.metrics[-1].time if records.metrics else 0.0
    return "training" if last_sign_of_life > replica.started_at else "starting"


def _make_replica(index: int, settings: Settings, environment: Mapping[str, str]) -> Replica:
    options = {
        "--num-replicas": settings.replicas,
        "--steps": settings.steps,
        "--batch-size": settings.batch_size,
        "--seed": settings.seed,
        "--step-time": settings.step_time,
    }
    arguments = ["--finish-together", *(str(word) for option in options.items() for word in option)]
    files = Files.create(settings.output_dir, f"replica-{index}")
    inherited = {name: value for name, value in os.environ.items() if name not in GROUP_VARIABLES}
    return Replica(index, files, settings.script, arguments, {**inherited, **environment})
