"""Fixtures for everybody. Above all `processes`: whatever a test starts through it ends with it.

A process leads a session of its own, so that its descendants are found and killed even when they
have lost their parent; and the kernel kills it should pytest itself die.

Process groups check their collectives (docs/checking-collectives.md), here and in every process that a
test starts, as their operator says. A test that is about groups with another choice, such as
`check_collectives=False`, has no such operator: it uses the fixture `no_operator`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from tests.warm import WarmProcess
from torchft_like.testing.processes import is_in_session, wait_ended

ROOT = Path(__file__).parents[1]
WAIT_LIMIT_S = 60.0
CHECK_ENV = "TORCHFT_CHECK_COLLECTIVES"
os.environ.setdefault(CHECK_ENV, "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
_PDEATHSIG = [setpriv, "--pdeathsig", "KILL", "--"] if (setpriv := shutil.which("setpriv")) else []


@pytest.fixture(scope="session", autouse=True)
def _first_square_root() -> None:
    """Of a process: were two threads to take it at once, one of them could get it wrong by 1 in 14,000.

    Torch does that by itself, in 1 or 2 of 4,000 fresh processes with two threads on two busy cores (2.13,
    x86). Threads that stand for replicas would diverge in their first step with Adam.
    """
    torch.ones(3).sqrt()


class RunningProcess:
    """A process of a test and what it has written to stdout and stderr so far."""

    folder = ROOT  # where it runs

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.command = list(command)
        self._popen = self._launch({**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **env})
        self._lines: list[str] = []
        self._eof = False
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, name=f"output of {self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._popen.poll()

    @property
    def output(self) -> str:
        with self._grown:
            return "".join(self._lines)

    def wait_for_output(self, pattern: str, limit_s: float = WAIT_LIMIT_S) -> re.Match[str]:
        """The first match in the output so far or to come; fails when it can no longer come."""

        def ready() -> bool:
            return self._eof or re.search(pattern, "".join(self._lines)) is not None

        with self._grown:
            self._grown.wait_for(ready, limit_s)
        if match := re.search(pattern, self.output):
            return match
        ended = "ended" if self._eof else f"has run for {limit_s:g} s"
        pytest.fail(f"{self.command} {ended} without writing {pattern!r}; it wrote:\n{self.output}")

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> int:
        """The exit code; negative for a signal."""
        code = self._popen.wait(limit_s)
        self._reader.join(limit_s)
        return code

    def session(self) -> list[psutil.Process]:
        """What lives in its session: itself, and all that it has started, whoever their parent is now."""
        return [process for process in psutil.process_iter() if is_in_session(process, self.pid)]

    def kill(self) -> None:
        """End it and every descendant, stopped ones too."""
        family = self.session()
        with contextlib.suppress(psutil.NoSuchProcess):
            family += psutil.Process(self.pid).children(recursive=True)  # those with a session of their own
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
                process.kill()
        self._popen.wait()
        wait_ended(family, WAIT_LIMIT_S)
        self._reader.join(WAIT_LIMIT_S)
        if self._popen.stdout is not None:
            self._popen.stdout.close()

    def _launch(self, env: Mapping[str, str]) -> subprocess.Popen[str] | WarmProcess:
        return subprocess.Popen(
            [*_PDEATHSIG, *self.command],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _read(self) -> None:
        for line in self._popen.stdout or ():
            with self._grown:
                self._lines.append(line)
                self._grown.notify_all()
        with self._grown:
            self._eof = True
            self._grown.notify_all()


class Processes:
    """Starts processes and remembers them."""

    def __init__(self) -> None:
        self.started: list[RunningProcess] = []

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> RunningProcess:
        """Start a command in the repository root; its packages can be imported there."""
        self.started.append(RunningProcess(command, env or {}))
        return self.started[-1]

    def kill_all(self) -> None:
        for process in self.started:
            process.kill()


@pytest.fixture
def processes() -> Iterator[Processes]:
    """A starter of processes that are killed, with their descendants, when the test ends."""
    starter = Processes()
    try:
        yield starter
    finally:
        starter.kill_all()


@pytest.fixture
def no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups check their collectives where their argument says so."""
    monkeypatch.delenv(CHECK_ENV, raising=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[pytest.TestReport]:
    """A failed test shows what its processes wrote."""
    report: pytest.TestReport = yield  # type: ignore[misc, assignment]
    starter = getattr(item, "funcargs", {}).get("processes")
    if report.failed and isinstance(starter, Processes):
        report.sections += [
            (f"output of process {process.pid}: {' '.join(process.command)}", process.output)
            for process in starter.started
        ]
    return report  # type: ignore[return-value]
