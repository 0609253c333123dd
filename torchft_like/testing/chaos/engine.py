"""A run: the job is started, the faults of a schedule strike it one after the other, and it ends.

A fault is injected at its time, or later: when the job has been whole again for a moment, that is, all
replica groups have committed a step together since the last fault was felt, and still do. A job that does not
come back within its limit hangs, which ends the run; so does a job that no longer trains before a fault or at
the end, for any reason. The engine records what happened; `evidence` and `invariants` judge it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from torchft_like.testing.chaos.evidence import WHOLE_S_MAX, Injection, Outcome, judge
from torchft_like.testing.chaos.injectors import SmallDisk, Target, clear_triggers, inject
from torchft_like.testing.chaos.job import ChaosJob, JobError
from torchft_like.testing.chaos.network import Network, why_unavailable
from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.chaos.schedule import KINDS, Planned
from torchft_like.testing.cluster import LIGHTHOUSE
from torchft_like.testing.log import Log
from torchft_like.testing.processes import holds_within

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
