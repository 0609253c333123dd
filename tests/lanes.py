"""All that `make test` checks after the style, side by side: `python -m tests.lanes`.

Each job is a run of pytest over a file or the small files of a folder, in a fork that has torch and pytest
loaded (torchft_like/testing/forks.py): to load them takes longer than most files. Tests of jobs run three at
a time: each uses a third of a processor, with more on two processors a PING goes unanswered for a second now
and then. What they leave while they wait is for the types, and for tests for which nobody has to answer in
time: these run with a niceness, and so do their processes.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchft_like.testing import forks
from torchft_like.testing.processes import RunningProcess, kill_all

TESTS = Path(__file__).parent

# The files that take longest come first, alone, or a processor has nothing to do at the end.
LONGEST = (
    "conformance/test_collectives.py",
    "interop/test_mixed_jobs.py",
    "integration/test_replica_faults.py",
    "integration/test_in_process_restart.py",
    "conformance/test_faults.py",
    "integration/test_loader_workers.py",
    "integration/test_hsdp.py",
    "conformance/test_functions.py",
    "integration/test_group_coordinator.py",
    "integration/test_standing_quorum.py",
    "integration/test_leaving.py",
    "integration/test_no_leak.py",
    "unit/group_coordinator/test_elastic.py",
    "unit/process_group/baby/test_group.py",
    "integration/test_demo.py",
    "unit/test_imports.py",
    "unit/test_as_torchft.py",
)
FILES_MAX = 6  # of one folder in one job; those that start no job may be twice as many, as they fill gaps
# What starts jobs or servers, whose answers are waited for, in the folders of tests that mostly do not.
WITH_JOBS = re.compile(
    r"test_elastic|process_group/baby|unit/manager/test_(group|lighthouse_link|peer_links|probing|service|stall)"
)
WITHOUT_JOBS = re.compile(
    r"(simulation|unit)/|stress/test_fuzz_|integration/test_grpc_in_forks|conformance/test_(coll|func|cpp|meth)"
)
LOADED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
OPTIONS = ("-q", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", LOADED)
NICE, PATIENT_S, LOOK_EVERY_S = 10, "600", 0.05
NOTHING_CHOSEN = 5  # pytest's exit code
LANES, NICE_LANES = 3, 2


class Job:
    """One run of pytest; of mypy where there are no files."""

    def __init__(self, files: Sequence[str]) -> None:
        self.files = files
        self.starts_jobs = any(map(starts_jobs, files))
        self._process: RunningProcess | None = None
        self._began = 0.0

    def start(self) -> None:
        self._began = time.monotonic()
        if not self.files:
            self._process = RunningProcess([sys.executable, "-m", "mypy"])
            return
        patience = () if self.starts_jobs else ("--timeout", PATIENT_S)
        self._process = RunningProcess(
            ["pytest", *OPTIONS, *patience, *(f"tests/{file}" for file in self.files)], is_fork=True
        )
        if not self.starts_jobs:
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)

    def has_ended(self) -> bool:
        return self._process is not None and self._process.exit_code is not None

    def has_failed(self) -> bool:
        return self._process is not None and self._process.exit_code not in (0, NOTHING_CHOSEN)

    def report(self) -> str:
        """Everything after a failure; else the last line, and what was skipped."""
        output = self._process.output if self._process else ""
        skipped = [line for line in output.splitlines() if line.startswith("SKIPPED")]
        last = output.strip().rpartition("\n")[2]
        whole = [output] if self.has_failed() else skipped
        return "\n".join([*whole, f"{time.monotonic() - self._began:6.1f} s  {self}: {last}"])

    def kill(self) -> None:
        if self._process is not None:
            kill_all([self._process])

    def __str__(self) -> str:
        first, *more = self.files or ["the types"]
        return f"{first} and {len(more)} more" if more else first


def starts_jobs(file: str) -> bool:
    """Return whether a file starts jobs, or servers, whose answers are waited for."""
    return bool(WITH_JOBS.search(file) or not WITHOUT_JOBS.match(file))


def jobs() -> list[Job]:
    """All of them, the longest first, then in the order of their names."""
    files = sorted(str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))
    found: list[Sequence[str]] = [[], *([file] for file in LONGEST if file in files)]
    folders: dict[tuple[str, bool], list[str]] = {}
    for file in files:
        if file not in LONGEST:
            folders.setdefault((os.path.dirname(file), starts_jobs(file)), []).append(file)
    for (_, is_job), those in folders.items():
        count = FILES_MAX if is_job else 2 * FILES_MAX
        found += [those[start : start + count] for start in range(0, len(those), count)]
    return [Job(files) for files in found]


def run(todo: Iterable[Job]) -> list[Job]:
    """Run all, and return those that have failed."""
    todo = list(todo)
    waiting = {starts: deque(job for job in todo if job.starts_jobs is starts) for starts in (True, False)}
    running: list[Job] = []
    failed: list[Job] = []
    while running or any(waiting.values()):
        busy = Counter(job.starts_jobs for job in running)
        # A lane that has nothing to do any more is for what starts no job.
        for starts, places in (
            (False, NICE_LANES if waiting[True] else NICE_LANES + LANES - busy[True]),
            (True, LANES),
        ):
            while waiting[starts] and sum(job.starts_jobs is starts for job in running) < places:
                job = waiting[starts].popleft()
                running.append(job)
                job.start()
        time.sleep(LOOK_EVERY_S)
        for job in [job for job in running if job.has_ended()]:
            running.remove(job)
            failed += [job] if job.has_failed() else []
            print(job.report(), flush=True)
    return failed


if __name__ == "__main__":
    forks.preload("pytest", "hypothesis")
    every = jobs()
    try:
        failed = run(every)
    finally:
        for job in every:
            job.kill()
    print("\n".join(f"failed: {job}" for job in failed) or "all passed")
    sys.exit(bool(failed))
