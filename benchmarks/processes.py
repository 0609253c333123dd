"""Processes that report in JSON lines, and the place where their reports are awaited.

A `Fleet` starts processes and ends all of them when it is left, however it is left. What a process
writes to its standard output as a JSON object is a record; every other line is kept. Its standard
error goes to a file and is read only when something goes wrong: a chatty process costs the
measurement nothing. This module knows nothing of training.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tools.environments import ROOT

T = TypeVar("T")
Record = dict[str, Any]
LEASH = Path(__file__).with_name("leash.py")
KEPT_LINES_MAX = 40
LEAVE_SECONDS_MAX = 3.0
ENDING_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


class NotReportedError(RuntimeError):
    """What was awaited did not happen; the message says why and has the processes' last words."""


class FleetProcess:
    """One process and everything that it reported so far."""

    def __init__(
        self, name: str, popen: subprocess.Popen[str], errors: Path, changed: threading.Condition
    ) -> None:
        self.name = name
        self.records: list[Record] = []
        self._popen = popen
        self._errors = errors
        self._changed = changed
        self._end_is_expected = False
        self._lines: deque[str] = deque(maxlen=KEPT_LINES_MAX)
        self._reader = threading.Thread(target=self._read, name=f"read-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def exit_code(self) -> int | None:
        """None while it runs; minus the signal's number when one ended it."""
        return self._popen.poll()

    def ended_by_itself(self) -> bool:
        """Whether it is gone although nobody asked it to end."""
        return not self._end_is_expected and not self.is_alive()

    def signal(self, number: signal.Signals) -> None:
        self._end_is_expected |= number in ENDING_SIGNALS
        self._popen.send_signal(number)

    def tell(self, **command: object) -> None:
        """Write one line of JSON to its standard input."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(json.dumps(command) + "\n")
        self._popen.stdin.flush()

    def lines(self) -> list[str]:
        """The last lines of its standard output that were no records."""
        return list(self._lines)

    def errors(self) -> list[str]:
        """The last lines of its standard error."""
        return self._errors.read_text(errors="replace").splitlines()[-KEPT_LINES_MAX:]

    def kill(self) -> None:
        """End it now, stopped or not, and collect everything that it still had to say."""
        if self.is_alive():
            self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Wait for its end and for the last line of its output."""
        self._popen.wait()
        self._reader.join()
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # an unread command died with its reader
                self._popen.stdin.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as stream:
            for line in stream:
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
    """Starts processes, waits for what they report, and ends them all on the way out."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._processes: list[FleetProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-")

    @property
    def folder(self) -> Path:
        """A folder for the files of these processes; removed at the end."""
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
        with errors.open("w") as stderr:
            popen = subprocess.Popen(
                # -S: the leash needs no packages; a fast start keeps measured restarts honest.
                [sys.executable, "-S", str(LEASH), str(os.getpid()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        process = FleetProcess(name, popen, errors, self._changed)
        self._processes.append(process)
        return process

    def wait_for(self, probe: Callable[[], T | None], what: str, seconds: float) -> T:
        """The first answer of `probe` that is not None; it is asked again after every new report.

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

    def last_words(self) -> str:
        """What each process wrote last, for a person who has to find out why."""
        return "\n".join(
            line
            for process in self._processes
            for line in (
                f"--- {process.name} (pid {process.pid}, exit code {process.exit_code()})",
                *(json.dumps(record) for record in process.records[-3:]),
                *process.lines()[-3:],
                *process.errors()[-12:],
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
