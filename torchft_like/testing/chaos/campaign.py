"""A command of `torchft-like`: the job with faults, for a soak after the job without them, and the report.

A fault is injected at its time, or later: when the job has been whole again for a moment, that is, all
replica groups have committed a step together since the last fault was felt, and still do. A job that does not
come back within its limit hangs, which ends the run; so does a job that no longer trains before a fault or at
the end, for any reason. The engine records what happened; `kinds` and `invariants` judge it.

The report has numbers and a verdict, as text and as JSON. docs/testing.md defines the numbers ("The numbers
of a report"). A divergence is a violation of `agreement`, `heal_is_clean` or `no_trace`: other bits at the
same step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

import psutil

from torchft_like.testing.chaos.job import ChaosJob, JobError
from torchft_like.testing.chaos.kinds import (
    WHOLE_S_MAX,
    Injection,
    Outcome,
    SmallDisk,
    Target,
    clear_triggers,
    inject,
    judge,
)
from torchft_like.testing.chaos.network import Network, NetworkUnavailableError, why_unavailable
from torchft_like.testing.chaos.orders import JobSettings, Training
from torchft_like.testing.chaos.schedule import KINDS, Planned, draw
from torchft_like.testing.cluster import LIGHTHOUSE
from torchft_like.testing.invariants import INVARIANTS
from torchft_like.testing.log import Log
from torchft_like.testing.processes import holds_within

if TYPE_CHECKING:
    from matplotlib.axes import Axes  # which the package does not need: it is imported only to draw


FAILED, WRONG_ARGUMENT, INTERRUPTED = 1, 2, 130
SHOWN = ("seed", "replicas", "ranks", "spares", "algorithm", "backend", "interval", "length")


def run(options: argparse.Namespace) -> int:
    """Run a command, and return the exit status."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _carry_out(options)
    except (JobError, NetworkUnavailableError, OSError, ValueError) as error:
        _say(f"torchft-like: {error}", sys.stderr)
        return FAILED if isinstance(error, JobError) else WRONG_ARGUMENT
    except KeyboardInterrupt:
        _say("\ninterrupted; every process has been ended", sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)


def _settings(options: argparse.Namespace) -> JobSettings:
    return JobSettings(
        replicas=options.replicas,
        ranks=options.ranks,
        training=Training(
            pause_s=options.step_time,
            algorithm=options.algorithm,
            backend=options.backend,
            restarts=options.spares > 0,
        ),
        spares=options.spares,
        cold=options.cold,
        command=options.command,
        naming=options.names,
    )


def _carry_out(options: argparse.Namespace) -> int:
    """Run the job without faults, if asked for, and with them; save and print the report."""
    settings = _settings(options)
    missing = features(settings, network=not options.no_network)
    kinds, skipped = usable(options.kinds, missing)
    if not kinds:
        reasons = "\n".join(f"  {kind}: {why}" for kind, why in skipped.items())
        raise ValueError(f"--kinds: none of them can be injected here\n{reasons}")
    plan = draw(options.seed, kinds, options.length, options.interval, settings.replicas)
    out, passed = Path(options.out or tempfile.mkdtemp(prefix="torchft-like-")), False
    if any((out / name).exists() for name in ("baseline", "chaos")):
        raise ValueError(f"--out {out} holds another run; choose a folder that is new or empty")
    out.mkdir(parents=True, exist_ok=True)

    def run_job(name: str, faults: list[Planned], length_s: float) -> Run:
        line = Line("faults" if faults else "without faults")
        done = Engine(settings, out / name, missing, line, options.seed).run(faults, length_s)
        line.end()
        return done

    try:
        baseline = run_job("baseline", [], options.baseline) if options.baseline else None
        run = run_job("chaos", plan, options.length)
        setup = {name: getattr(options, name) for name in SHOWN}
        setup |= {"workers": "started cold" if options.cold else "forked", "pause": options.step_time}
        setup["began"] = round(run.began, 3)
        report = make_report(run, setup, baseline=baseline, skipped=skipped)
        report.save(out)
        _say(report.to_text().rstrip("\n"))
        passed = report.passed
        try:
            plot(report, out / "report.png")
        except ImportError as error:
            _say(f"no picture: {error}; pip install 'torchft-like[chaos]'", sys.stderr)
    finally:
        if not options.out and passed:
            shutil.rmtree(out)
        elif not options.out:
            _say(f"logs are kept in {out}", sys.stderr)
    return 0 if passed else FAILED


class Line:
    """The live line: rewritten every second on a terminal, written every half minute elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_terminal = sys.stderr.isatty()
        self._next = 0.0

    def __call__(self, run: Run) -> None:
        """Write the state of the run, if it is time."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (1.0 if self._is_terminal else 30.0)
        ran = time.strftime("%H:%M:%S", time.gmtime(time.time() - run.began if run.began else 0))
        step = max((commit.step for commit in run.log.commits[-run.settings.replicas :]), default=0)
        felt = sum(bool(outcome.felt) for outcome in run.outcomes)
        text = f"{self._name} {ran} | step {step} | {len(run.outcomes)}/{run.planned} faults, {felt} felt"
        text += f" | {len(hangs(run))} hangs"
        if run.outcomes:
            last = run.outcomes[-1]
            recovered = "?" if last.recovery_s is None else f"{last.recovery_s:.2f} s"
            text += f" | last: {last.injection.kind} {' '.join(last.injection.victims)} {recovered}"
        _say(f"\r\033[K{text}" if self._is_terminal else text, sys.stderr, "" if self._is_terminal else "\n")

    def end(self) -> None:
        """End the line."""
        if self._is_terminal:
            _say("", sys.stderr)


def _say(text: str, stream: TextIO | None = None, end: str = "\n") -> None:
    stream = stream or sys.stdout
    stream.write(text + end)
    stream.flush()


def _interrupt(_signal: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


# -- a run

FIRST_STEP_S_MAX = 60.0
QUIET_S = 1.0
FELT_S_MAX = 10.0
LOOK_S = 0.2
STACKS_S = 1.0
LEFT_S_MAX = 5.0

Tell = Callable[["Run"], None]


@dataclass
class Run:
    """The record of a run.

    Attributes:
        began, ended: the time in which steps and batches are counted, in seconds since the Unix epoch.
        length_s: how many seconds that should last.
        planned: how many faults were planned.
        log: the records of the processes.
        outcomes: the outcomes of the faults that were injected.
        hangs: in words: when the replica groups no longer trained together, and which did not end when asked
          to; hangs after faults are in their outcomes.
        crashes, leaks: in words.
        compared: processes that lived through enough faults for a leak to show.
    """

    settings: JobSettings
    length_s: float
    planned: int
    log: Log = field(default_factory=Log)
    began: float = 0.0
    ended: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    compared: int = 0


# Why this machine, this user or these settings lack what faults need, by the names in `Kind.needs`.
Missing = Mapping[str, str]


def features(settings: JobSettings, *, network: bool = True) -> Missing:
    """Return what the faults of a run have to do without; `network=False` does without hosts."""
    missing: dict[str, str | None] = {
        "network": "a spare is on no host of its own" if settings.spares else why_unavailable(),
        "disk": SmallDisk.why_unavailable(),
        "third": None if settings.replicas > 2 else "of two replica groups it would leave no survivor",
        "ranks": None if settings.ranks > 1 else "replica groups have one rank",
        "baby": None if settings.training.backend != "gloo" else "the backend is gloo, without a subprocess",
        "steps": "of a sync no script gives anything up" if settings.training.is_local else None,
        "worker": "the user's command cannot be told to do it" if settings.command else None,
    }
    if not network:
        missing["network"] = "the run was told to do without"
    return {name: reason for name, reason in missing.items() if reason is not None}


def usable(kinds: Sequence[str], missing: Missing) -> tuple[list[str], dict[str, str]]:
    """Return the kinds of fault that can be injected, and why each of the others cannot."""
    lacking = {kind: [missing[need] for need in KINDS[kind].needs if need in missing] for kind in kinds}
    skipped = {kind: "; ".join(reasons) for kind, reasons in lacking.items() if reasons}
    return [kind for kind in kinds if kind not in skipped], skipped


class Engine:
    """Runs one schedule.

    Args:
        folder: the folder for all records; the engine makes it, so it must not exist.
        missing: what the faults do without; a network and a disk are made where they are not missing.
        tell: called regularly, with the run so far.
        seed: the seed of the network's losses.
    """

    def __init__(self, settings: JobSettings, folder: Path, missing: Missing, tell: Tell, seed: int) -> None:
        self._settings = settings
        self._folder = folder.resolve()  # processes in other namespaces and folders use it, too
        self._missing = missing
        self._tell = tell
        self._seed = seed
        self._watch = Watch()

    def run(self, plan: Sequence[Planned], length_s: float) -> Run:
        """Run for `length_s` seconds from the first common step on. No process is left, however the run ends.

        Raises:
            JobError: the job did not even start.
        """
        run = Run(self._settings, length_s, len(plan))
        self._folder.mkdir(parents=True)
        with ExitStack() as stack:
            target = self._set_up(stack, run)
            job, run.log = target.job, target.job.log
            job.start()
            self._await_first_step(job)
            run.began = time.time()
            all(self._strike(target, planned, run) for planned in plan)  # up to one that hangs
            self._finish(job, run)
        run.leaks += self._watch.leaks() + self._watch.shared_memory_left()
        run.compared = self._watch.compared()
        return run

    def _await_first_step(self, job: ChaosJob) -> None:
        def has_begun() -> object:
            return job.crashes or job.strangers() or job.is_whole(0.0)

        if not job.tend_until(has_begun, FIRST_STEP_S_MAX):
            tails = "\n".join(rank.tail() for rank in job.ranks())
            raise JobError(f"no first step of all replica groups within {FIRST_STEP_S_MAX:g} s:\n{tails}")
        if job.crashes:
            raise JobError(f"before a first step of all replica groups {job.crashes[0]}")
        if strangers := job.strangers():
            names = ", ".join(self._settings.names)
            raise JobError(
                f"{', '.join(strangers)} trains, and the groups are to be called {names} (--names)"
            )

    def _set_up(self, stack: ExitStack, run: Run) -> Target:
        network = disk = None
        if "network" not in self._missing:
            hosts = (LIGHTHOUSE, *self._settings.names)
            network = stack.enter_context(Network(hosts, self._folder, self._seed))
        if "disk" not in self._missing:
            disk = SmallDisk(self._folder)
            stack.callback(disk.close)
        checkpoints = disk.path if disk else str(self._folder)
        job = ChaosJob(self._settings, self._folder, checkpoints, network, lambda: self._tell(run))
        stack.callback(job.kill)
        return Target(job, disk)

    def _strike(self, target: Target, planned: Planned, run: Run) -> bool:
        """Inject one fault and wait until the job is whole again; return False if it hangs."""
        job = target.job
        due = max(run.began + planned.at_s, time.time() + QUIET_S)
        job.tend_until(lambda: time.time() >= due, planned.at_s + WHOLE_S_MAX)
        if not self._trains_on(job, run, due - QUIET_S):
            return False
        self._watch.sample(job.pids())
        clear_triggers(target)
        job.expect_no_end()
        injection = self._inject(target, planned)
        whole = job.tend_until(lambda: self._is_over(job, injection), WHOLE_S_MAX)
        outcome = self._judge(job, injection)
        run.outcomes.append(outcome)
        if not whole:
            run.hangs += [] if outcome.is_hang else [f"{outcome}, but not at the same time"]
            self._print_stacks(job)
        return whole

    def _trains_on(self, job: ChaosJob, run: Run, since: float) -> bool:
        """Wait for a common step that began after `since`, even if no fault came; without one the job
        hangs.
        """
        if job.tend_until(lambda: job.is_whole(since), WHOLE_S_MAX):
            return True
        when = f"{since - run.began:.1f} s after the beginning"
        run.hangs.append(f"{when} no fault was there, and {WHOLE_S_MAX:g} s later no step of all")
        self._print_stacks(job)
        return False

    def _print_stacks(self, job: ChaosJob) -> None:
        job.print_stacks()
        end = time.monotonic() + STACKS_S
        job.tend_until(lambda: time.monotonic() >= end, STACKS_S + 1)

    def _inject(self, target: Target, planned: Planned) -> Injection:
        time_of = time.time()
        job, lasts_s = target.job, planned.duration_s
        with inject(target, planned) as injected:

            def so_far() -> Injection:
                lifted = time.time() if lasts_s else time_of
                details = dict(injected.details)
                return Injection(planned.number, planned.kind, time_of, lifted, injected.victims, details)

            job.tend_until(lambda: time.time() >= time_of + lasts_s, lasts_s + WHOLE_S_MAX)
            if KINDS[planned.kind].is_lifted_when_felt:
                job.tend_until(lambda: self._judge(job, so_far()).felt, FELT_S_MAX)
        return so_far()

    def _judge(self, job: ChaosJob, injection: Injection) -> Outcome:
        return judge(injection, job.log, self._settings, time.time())

    def _is_over(self, job: ChaosJob, injection: Injection) -> bool:
        """Return whether all train together again, and the fault was felt, or no longer can be."""
        if not job.is_whole(injection.lifted):
            return False
        outcome = self._judge(job, injection)
        may_still_be_felt = time.time() < injection.lifted + FELT_S_MAX
        return outcome.whole_s is not None and (bool(outcome.felt) or not may_still_be_felt)

    def _finish(self, job: ChaosJob, run: Run) -> None:
        end = run.began + run.length_s
        hangs = bool(run.hangs) or any(outcome.is_hang for outcome in run.outcomes)
        if not hangs:
            job.tend_until(lambda: time.time() >= end, run.length_s + WHOLE_S_MAX)
        run.ended = time.time()
        if not hangs:
            self._trains_on(job, run, run.ended)
        self._watch.sample(job.pids())
        run.hangs += job.stop()
        run.crashes += job.crashes
        job.log.sort()
        # All faults are judged again by all records, each up to the next fault.
        injections = [outcome.injection for outcome in run.outcomes]
        until = [*(injection.time for injection in injections[1:]), run.ended]
        run.outcomes = [
            judge(injection, job.log, self._settings, end)
            for injection, end in zip(injections, until, strict=False)
        ]
        holds_within(LEFT_S_MAX, lambda: not job.left_behind(), LOOK_S)
        run.leaks += job.left_behind()


# -- what the processes of the job hold

SAMPLES_COMPARED = 3
# By how much a process may grow beyond its first samples: pools fill up, and some things are about to be
# closed.
ALLOWED_MORE = 4
ALLOWED_MORE_MB = 96
MAPPED_WITHIN_S = 0.2  # the maker of shared memory maps it at once


class Watch:
    """The resources of a job's processes, sampled between faults, by the label of each start.

    Each fault makes every survivor configure its process group anew; what that leaves behind adds up. A
    process is compared with itself: its first samples with its last ones.
    """

    def __init__(self) -> None:
        self._samples: dict[str, list[Counter[str]]] = defaultdict(list)
        self._shared_memory = frozenset(_inodes())

    def sample(self, pids: Mapping[str, int]) -> None:
        """Sample each of these processes once."""
        for label, pid in pids.items():
            if (held := holdings(pid)) is not None:
                self._samples[label].append(held)

    def leaks(self) -> list[str]:
        """Return the resources that have grown, in words."""
        found = [f"{label}: {what}" for label, samples in self._samples.items() for what in growth(samples)]
        return sorted(found)

    def compared(self) -> int:
        """Return how many processes lived long enough to be compared with themselves."""
        return sum(len(samples) >= 2 * SAMPLES_COMPARED for samples in self._samples.values())

    def shared_memory_left(self) -> list[str]:
        """Return the entries of /dev/shm that were not there at first and that no process has mapped.

        The processes of the job have ended: an entry that a process has mapped belongs to another program.
        """
        found = _inodes().keys() - self._shared_memory - mapped_shared_memory()
        time.sleep(MAPPED_WITHIN_S)
        return [f"shared memory {name}" for name in sorted(found & _inodes().keys() - mapped_shared_memory())]


def growth(samples: list[Counter[str]]) -> list[str]:
    """Return the resources of which all last samples of a process have more than any first sample, in
    words.
    """
    if len(samples) < 2 * SAMPLES_COMPARED:
        return []
    first, last = samples[:SAMPLES_COMPARED], samples[-SAMPLES_COMPARED:]
    found = []
    for thing in sorted(set().union(*last)):
        before, after = max(sample[thing] for sample in first), min(sample[thing] for sample in last)
        allowed = ALLOWED_MORE_MB if thing == "MB" else ALLOWED_MORE
        if after > before + allowed:
            found.append(f"{after} {thing}, {before} at first")
    return found


def holdings(pid: int) -> Counter[str] | None:
    """Count descriptors by kind, threads, descendants and resident MB; return None for a process that is
    gone.
    """
    held = Counter("threads" if thing.startswith("thread ") else thing for thing in things_of(pid))
    try:
        process = psutil.Process(pid)
        held["descendants"] = len(process.children(recursive=True))
        held["MB"] = process.memory_info().rss >> 20
    except (OSError, psutil.NoSuchProcess):
        return None
    return held


def things_of(pid: int) -> Iterator[str]:
    """Yield a name of each thread and each descriptor of a process, as far as it is there."""
    with contextlib.suppress(OSError):  # the process has just ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield f"thread {(task / 'comm').read_text().strip()}"
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed since
                yield f"descriptor {kind_of(os.readlink(descriptor))}"


def kind_of(name: str) -> str:
    """Replace what differs every time in a name: numbers and random parts."""
    return re.sub(r"[0-9a-zA-Z]*\d[0-9a-zA-Z]*", "*", name)


def mapped_shared_memory(but: Collection[int] = ()) -> set[str]:
    """Return the entries of /dev/shm that processes have mapped.

    Args:
        but: ids of processes to leave out.
    """
    mapped: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        if int(folder.name) not in but:
            with contextlib.suppress(OSError):  # gone since, or another user's
                mapped.update(map(int, re.findall(r"(\d+) +/dev/shm/", (folder / "maps").read_text())))
    # By inode: the maker of a semaphore has mapped it under its first name, which is no more.
    return {name for name, inode in _inodes().items() if inode in mapped}


def _inodes() -> dict[str, int]:
    with contextlib.suppress(OSError), os.scandir("/dev/shm") as entries:  # noqa: S108 - read only
        return {entry.name: entry.inode() for entry in entries}
    return {}


# -- the report

PERCENTILES = (50, 90, 99, 100)
BIN_S = 5.0
LISTED_MAX = 20
# Invariants that cannot be checked for a command that writes no digests and no ledger.
NEEDS_JOURNAL = ("agreement", "no_trace", "no_zombie")
DIVERGENCE = ("agreement", "heal_is_clean", "no_trace")


@dataclass(frozen=True)
class Throughput:
    """The throughput of one run.

    Attributes:
        seconds: the seconds over which it was counted.
        steps: the number of steps that the job made.
        batches, steps_lost: as docs/testing.md defines them.
        curve: batches per second in each `BIN_S` seconds.
        quiet_rate: batches per second while no fault was being recovered from.
    """

    seconds: float
    steps: int
    batches: int
    steps_lost: int
    curve: tuple[float, ...] = ()
    quiet_rate: float = 0.0

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class OfKind:
    """The summary of all faults of one kind; times are percentiles 50, 90, 99 and the largest, in seconds."""

    faults: int
    felt: int
    recovery_s: tuple[float, ...]
    pause_s: tuple[float, ...]
    whole_s: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """The report of a run. `problems` has lists of sentences; a run with any of them has failed."""

    setup: Mapping[str, Any]
    throughput: Throughput
    baseline: Throughput | None
    by_kind: Mapping[str, OfKind]
    overall: OfKind
    faults: Sequence[Mapping[str, Any]]
    skipped: Mapping[str, str]
    compared: int
    problems: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing diverged, hung, crashed, leaked or went unfelt."""
        return not any(self.problems.values())

    @property
    def kept(self) -> float | None:
        """The part of the fault-free throughput that was kept; None if that is not known."""
        if self.baseline is None or not self.baseline.rate:
            return None
        return self.throughput.rate / self.baseline.rate

    def to_json(self) -> str:
        """Return the whole report as JSON."""
        fields = {**asdict(self), "kept": self.kept, "passed": self.passed}
        return json.dumps(fields, indent=1)

    def to_text(self) -> str:
        """Return the report as readable text."""
        now, before = self.throughput, self.baseline
        lines = [
            ", ".join(f"{key} {value}" for key, value in self.setup.items()),
            f"{self.overall.faults} faults, {self.overall.felt} felt",
            f"{_amount(now)}, {now.steps_lost} steps lost",
        ]
        if before is not None and self.kept is not None:
            lines += [f"without faults: {_amount(before)}", f"throughput kept: {self.kept:.2%}"]
        if now.quiet_rate:
            lines.append(f"of its own rate between faults: {now.rate / now.quiet_rate:.2%}")
        lines.append(f"{self.compared} processes lived through enough faults for a leak to show")
        lines += [f"left out: {kind}: {why}" for kind, why in self.skipped.items()]
        lines += ["", *_table(self.by_kind, self.overall), ""]
        lines += [f"{name}: {len(found)}" for name, found in self.problems.items()]
        lines += [f"  {text}" for found in self.problems.values() for text in found[:LISTED_MAX]]
        return "\n".join([*lines, "", "PASSED" if self.passed else "FAILED"]) + "\n"

    def save(self, folder: Path) -> None:
        """Write `report.json` and `report.txt`."""
        (folder / "report.json").write_text(self.to_json() + "\n")
        (folder / "report.txt").write_text(self.to_text())


def make_report(
    run: Run,
    setup: Mapping[str, Any],
    *,
    baseline: Run | None = None,
    skipped: Mapping[str, str] | None = None,
) -> Report:
    """Check all records of a run, and sum them up."""
    outcomes = run.outcomes
    kinds = sorted({outcome.injection.kind for outcome in outcomes})
    of = {kind: [o for o in outcomes if o.injection.kind == kind] for kind in kinds}
    return Report(
        setup=setup,
        throughput=measure(run),
        baseline=None if baseline is None else measure(baseline),
        by_kind={kind: _sum_up(found) for kind, found in of.items()},
        overall=_sum_up(outcomes),
        faults=[{**(fields := asdict(o)).pop("injection"), **fields} for o in outcomes],
        skipped={**(skipped or {}), **_unchecked(run)},
        compared=run.compared,
        problems=_problems(run, baseline),
    )


def hangs(run: Run) -> list[str]:
    """Return the faults from which the job did not recover, and the replica groups that did not end, in
    words.
    """
    return [str(outcome) for outcome in run.outcomes if outcome.is_hang] + run.hangs


def measure(run: Run) -> Throughput:
    """Count steps and batches."""
    seconds = min(run.ended - run.began, run.length_s)
    counted = [
        commit
        for commit in run.log.commits
        if commit.group_rank == 0 and run.began < commit.time <= run.began + seconds
    ]
    batches = [commit for commit in counted if commit.participating]
    steps = [commit.step for commit in counted]
    bins = Counter(int((commit.time - run.began) / BIN_S) for commit in batches)
    failed = run.log.notes_between(run.began, run.began + seconds, "failed")
    return Throughput(
        seconds=seconds,
        steps=max(steps) - min(steps) + 1 if steps else 0,
        batches=len(batches),
        steps_lost=sum(note.get("group_rank", 0) == 0 for note in failed),
        curve=tuple(bins[index] / BIN_S for index in range(int(seconds / BIN_S))),
        quiet_rate=_quiet_rate(run, [commit.time for commit in batches], seconds),
    )


def percentiles(values: Iterable[float]) -> tuple[float, ...]:
    """Compute percentiles by nearest rank, so that each is a measured value; empty if there are no values."""
    ordered = sorted(values)
    ranks = (max(1, math.ceil(percent / 100 * len(ordered))) for percent in PERCENTILES)
    return tuple(ordered[rank - 1] for rank in ranks) if ordered else ()


def _amount(done: Throughput) -> str:
    return f"{done.steps} steps, {done.batches} batches in {done.seconds:.0f} s ({done.rate:.2f} a second)"


def _sum_up(outcomes: Sequence[Any]) -> OfKind:
    return OfKind(
        faults=len(outcomes),
        felt=sum(bool(outcome.felt) for outcome in outcomes),
        recovery_s=percentiles(o.recovery_s for o in outcomes if o.recovery_s is not None),
        pause_s=percentiles(o.pause_s for o in outcomes),
        whole_s=percentiles(o.whole_s for o in outcomes if o.whole_s is not None),
    )


def _problems(run: Run, baseline: Run | None) -> dict[str, list[str]]:
    runs = [run, *([baseline] if baseline else [])]
    broken: dict[str, list[str]] = defaultdict(list)
    for one in runs:
        for name, check in INVARIANTS.items():
            if name not in _unchecked(one):
                broken[name] += check(one.log.history())
    unfelt = [
        f"fault {o.injection.number}: {o.injection.kind} {dict(o.injection.details)}"
        for o in run.outcomes
        if not o.felt
    ]
    if len(run.outcomes) < run.planned:
        unfelt.append(f"{run.planned - len(run.outcomes)} of {run.planned} planned faults never came")
    return {
        "divergences": [f"{name}: {text}" for name in DIVERGENCE for text in broken[name]],
        "other violations": [
            f"{n}: {text}" for n, texts in broken.items() if n not in DIVERGENCE for text in texts
        ],
        "hangs": [text for one in runs for text in hangs(one)],
        "leaked resources": [text for one in runs for text in one.leaks],
        "crashes": [text for one in runs for text in one.crashes],
        "faults that nobody felt": unfelt,
    }


def _unchecked(run: Run) -> dict[str, str]:
    """Return the invariants that cannot be checked for this run, and why."""
    return dict.fromkeys(NEEDS_JOURNAL, "the command writes no digests") if run.settings.command else {}


def _quiet_rate(run: Run, times: Sequence[float], seconds: float) -> float:
    """Return the batches per second outside of the times from an injection until all were back."""
    spans = [(o.injection.time, o.injection.time + (o.whole_s or seconds)) for o in run.outcomes]
    end = run.began + seconds
    troubled_s = sum(max(0.0, min(until, end) - max(since, run.began)) for since, until in spans)
    quiet = sum(not any(since < time <= until for since, until in spans) for time in times)
    return quiet / (seconds - troubled_s) if seconds > troubled_s else 0.0


def _table(by_kind: Mapping[str, OfKind], overall: OfKind) -> Iterator[str]:
    titles = "".join(f"{title:^32}" for title in ("recovery, s", "longest pause, s", "whole, s"))
    yield f"{'':18}{'faults':>7}{'felt':>6}   {titles}"
    yield " " * 34 + "".join(f"{name:>8}" for name in ("p50", "p90", "p99", "max")) * 3
    for name, of in {**by_kind, "all": overall}.items():
        measures = [
            each or (math.nan,) * len(PERCENTILES) for each in (of.recovery_s, of.pause_s, of.whole_s)
        ]
        times = "".join(f"{value:8.2f}" for values in measures for value in values)
        yield f"{name:18}{of.faults:7}{of.felt:6}   {times}"


def plot(report: Report, path: Path) -> None:
    """Draw recovery times by kind, and throughput over time beside that of the run without faults.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl  # noqa: PLC0415
    import matplotlib.pyplot as plt  # noqa: PLC0415

    mpl.use("Agg")
    kinds = list(report.by_kind)
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 2.0 + 0.35 * max(6, len(kinds))))
    _draw_recoveries(left, kinds, report)
    _draw_throughput(right, report)
    kept = "" if report.kept is None else f", {report.kept:.1%} of the throughput kept"
    problems = ", ".join(f"{len(found)} {name}" for name, found in report.problems.items())
    figure.suptitle(f"{report.overall.faults} faults{kept}\n{problems}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_recoveries(axes: Axes, kinds: list[str], report: Report) -> None:
    """Draw a dot for each fault."""
    for measure, color, shift, label in (
        ("recovery_s", "tab:blue", 0.12, "survivors commit again"),
        ("whole_s", "tab:orange", -0.12, "all together again"),
    ):
        shown: list[dict[str, Any]] = [dict(f) for f in report.faults if f[measure] is not None]
        axes.scatter(
            [fault[measure] for fault in shown],
            [kinds.index(fault["kind"]) + shift for fault in shown],
            s=12,
            color=color,
            alpha=0.6,
            label=label,
        )
    axes.set_yticks(range(len(kinds)), kinds)
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set(xlim=(0, None), xlabel="seconds from the injection")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)


def _draw_throughput(axes: Axes, report: Report) -> None:
    for throughput, color, label in (
        (report.baseline, "tab:gray", "without faults"),
        (report.throughput, "tab:blue", "with faults"),
    ):
        if throughput is not None:
            times = [BIN_S * (index + 0.5) for index in range(len(throughput.curve))]
            axes.plot(times, throughput.curve, color=color, label=label, linewidth=1)
    began = float(report.setup.get("began", 0.0))
    for fault in report.faults:
        axes.axvline(fault["time"] - began, color="tab:red", alpha=0.15, linewidth=0.8)
    axes.set(ylim=(0, None), xlabel="seconds", ylabel="batches per second")
    axes.legend(fontsize=8)
