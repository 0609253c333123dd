"""Processes that report in JSON lines, and the place where their reports are awaited.

A `Fleet` starts processes and ends all of them when it is left. What a process
writes to its standard output as a JSON object is a record; every other line is kept. Its standard
error goes to a file and is read only when something goes wrong: a chatty process costs the
measurement nothing. This module knows nothing of training.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tools.environments import ROOT
from torchft_like.testing.processes import RunningProcess

T = TypeVar("T")
Record = dict[str, Any]
KEPT_LINES_MAX = 40
LEAVE_SECONDS_MAX = 3.0
ANSWER_SECONDS_MAX = 180.0  # processes that begin load torch


class NotReportedError(RuntimeError):
    """What was awaited did not happen; the message says why and has the processes' last words."""


class FleetProcess(RunningProcess):
    """One process and everything that it reported so far; `output` is its standard error alone."""

    _stdin = _stdout = subprocess.PIPE

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        errors: Path,
        variables: Mapping[str, str],
        changed: threading.Condition,
    ) -> None:
        self.name = name
        self.records: list[Record] = []
        self._changed = changed
        self._lines: deque[str] = deque(maxlen=KEPT_LINES_MAX)
        super().__init__(command, errors, variables, folder=ROOT)
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    def is_alive(self) -> bool:
        return self.exit_code is None

    def ended_by_itself(self) -> bool:
        """Whether it is gone although nobody asked it to end."""
        return not self.may_end and not self.is_alive()

    def order(self, **fields: object) -> None:
        """Write one line of JSON to its standard input."""
        self.tell(json.dumps(fields), more=True)

    def lines(self) -> list[str]:
        """The last lines of its standard output that were no records."""
        return list(self._lines)

    def kill(self) -> None:
        """End it now, stopped or not, and collect everything that it still had to say."""
        self.signal(signal.SIGKILL)  # at once: what is measured begins here
        super().kill()
        self._reader.join()

    def _read(self) -> None:
        assert isinstance(self._popen, subprocess.Popen)
        assert self._popen.stdout is not None
        with self._popen.stdout as stream:
            for line in map(bytes.decode, stream):
                record = _parse(line)
                with self._changed:
                    if record is None:
                        self._lines.append(line.rstrip())
                    else:
                        self.records.append(record)
                    self._changed.notify_all()
        self._popen.wait()
        with self._changed:
            self._changed.notify_all()  # its end is an event, too


def _parse(line: str) -> Record | None:
    if not line.startswith("{"):
        return None
    try:
        return dict(json.loads(line))
    except ValueError:
        return None


class Fleet:
    """Starts processes, waits for what they report, and ends them all on the way out.

    Args:
        variables: variables of the environment of all of them, beside those of this process.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._changed = threading.Condition()
        self._variables = {"PYTHONPATH": str(ROOT), **(variables or {})}
        self._processes: list[FleetProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-")

    @property
    def folder(self) -> Path:
        """A folder for the files of these processes, which is removed at the end."""
        return Path(self._folder.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def start(
        self, name: str, command: list[str], environment: Mapping[str, str] | None = None
    ) -> FleetProcess:
        """Start a command in the repository's root. It dies with this process at the latest."""
        errors = self.folder / f"{len(self._processes)}-{name}.stderr"
        variables = {**self._variables, **(environment or {})}
        process = FleetProcess(name, command, errors, variables, self._changed)
        self._processes.append(process)
        return process

    def wait_for(self, probe: Callable[[], T | None], what: str, seconds: float) -> T:
        """Return the first answer of `probe` that is not None; it is asked again after every new report.

        Raises:
            NotReportedError: there was none within `seconds`, or a process ended by itself.
        """
        deadline = time.monotonic() + seconds
        with self._changed:
            while (answer := probe()) is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise NotReportedError(f"no {what} within {seconds} s\n{self.last_words()}")
                if any(process.ended_by_itself() for process in self._processes):
                    raise NotReportedError(f"no {what}: a process has ended\n{self.last_words()}")
                self._changed.wait(remaining)
            return answer

    def record(self, process: FleetProcess, number: int = 0) -> Record:
        """Return a record of a process, counted from 0, once it is there."""
        return self.wait_for(
            lambda: process.records[number] if len(process.records) > number else None,
            f"record of {process.name}",
            ANSWER_SECONDS_MAX,
        )

    def begin(self, process: FleetProcess, **command: object) -> Callable[[], Record]:
        """Give a process that is ready a command; return a function that waits for the answer."""
        number = len(process.records)
        process.order(**command)
        return lambda: self.record(process, number)

    def ask(self, processes: Sequence[FleetProcess], **command: object) -> list[Record]:
        """Give processes the same command once all of them are ready; return their answers."""
        for process in processes:
            self.record(process)
        return [answer() for answer in [self.begin(process, **command) for process in processes]]

    def last_words(self) -> str:
        """Return what each process wrote last, so that a person can find out why."""
        return "\n".join(
            line
            for process in self._processes
            for line in (
                f"--- {process.name} (pid {process.pid}, exit code {process.exit_code})",
                *(json.dumps(record) for record in process.records[-3:]),
                *process.lines()[-3:],
                *process.tail(12).splitlines(),
            )
        )

    def end(self) -> None:
        """Ask every process to end, then make it: nothing is left when this returns."""
        for process in self._processes:
            if process.is_alive():
                process.signal(signal.SIGCONT)
                process.signal(signal.SIGTERM)
        deadline = time.monotonic() + LEAVE_SECONDS_MAX
        for process in self._processes:
            while process.is_alive() and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
        self._processes.clear()
        self._folder.cleanup()
