"""The processes of a chaos run: started, watched, and never left behind.

Each leads a session of its own, so that its descendants are found when they have lost their parent;
and the kernel kills it should the engine itself be killed. Start them on the main thread only: the
kernel sends that signal when the *thread* that started the process ends.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import psutil

TAIL_LINES = 40
END_S_MAX = 20.0
LOOK_EVERY_S = 0.01
_DIE_WITH_PARENT = [found, "--pdeathsig", "KILL", "--"] if (found := shutil.which("setpriv")) else []


class Child:
    """One process and the log of its standard output and error."""

    def __init__(
        self, command: Sequence[str], log: Path, variables: Mapping[str, str], *, takes_orders: bool = False
    ) -> None:
        self.command = list(command)
        self.log = log
        with log.open("ab") as output:
            self._popen = subprocess.Popen(  # noqa: S603 - the user's own command, and ours
                [*_DIE_WITH_PARENT, *command],
                env={**os.environ, "PYTHONUNBUFFERED": "1", **variables},
                stdin=subprocess.PIPE if takes_orders else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._popen.poll()

    def tell(self, line: str) -> None:
        """Write the one line that it waits for, and hang up."""
        if self._popen.stdin is None:
            raise RuntimeError(f"{self.command} takes no orders")
        self._popen.stdin.write(line.encode() + b"\n")
        self._popen.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone; one that has ended gets none."""
        self._popen.send_signal(number)

    def session(self) -> list[psutil.Process]:
        """What lives in its session: itself, and all that it has started, whoever their parent is now."""
        if self.exit_code is not None and psutil.pid_exists(self.pid):
            return []  # its number was given to somebody else, which means that nobody of the session lived
        return [process for process in psutil.process_iter() if is_in_session(process, self.pid)]

    def descendants(self) -> list[psutil.Process]:
        """All processes that it has started and that are still below it."""
        if self.exit_code is not None:
            return []
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end; whether it came."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """End it and every descendant, stopped ones too."""
        family = [*self.descendants(), *self.session()]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
                process.kill()
        self._popen.kill()
        self._popen.wait()
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):  # it was never told anything, and is gone
                self._popen.stdin.close()
        wait_ended(family, END_S_MAX)
        psutil.wait_procs(family, timeout=0)  # reaps orphans, where they come to this process

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def run_tool(*command: str) -> str | None:
    """Run a system tool to its end; what it complained of, or None."""
    done = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - ours
    return f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode else None


def wait_ended(processes: Iterable[psutil.Process], limit_s: float) -> bool:
    """Wait until all have ended; False if one has not.

    A zombie has, once all its threads have: an orphan stays one until process 1 reaps it, which may look for
    orphans every now and then only.
    """
    waited_for, deadline = list(processes), time.monotonic() + limit_s
    while any(map(is_alive, waited_for)):
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_EVERY_S)
    return True


def is_alive(process: psutil.Process) -> bool:
    """Whether it has not ended."""
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return process.is_running() and not (is_zombie and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return False


def is_in_session(process: psutil.Process, leader: int) -> bool:
    """Whether it lives, and in the session of `leader`."""
    try:
        return os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False
