"""Processes that do not outlive the process that started them.

Each process leads a session of its own, so that its descendants are found even after they have lost their
parent, and the kernel kills it if the process that started it is killed. Start them on the main thread only:
the kernel sends that signal when the *thread* that started the process ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import psutil

from torchft_like.testing.forks import Fork

TAIL_LINES: Final = 40
HARMLESS_SIGNALS: Final = (signal.SIGSTOP, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2)
TRACEBACK_END: Final = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)
OUTPUT_S_MAX: Final = 60.0
END_S_MAX: Final = 60.0
LOOK_EVERY_S: Final = 0.01
# The shell looks whether the parent has ended before the kernel was told to watch it.
_RUN_WHILE_PARENT_LIVES = """[ "$PPID" = "$0" ] && exec "$@\""""
_SETPRIV = shutil.which("setpriv")


class OutputError(AssertionError):
    """A process did not write what a test waited for; the text has its output."""


class RunningProcess:
    """A process, and its output so far, standard output and error together.

    Args:
        command: the program and its arguments; of a fork the module, or the path of a script, and its
            arguments.
        log: the file to which the output is appended; without one it is kept in memory.
        variables: variables of the environment, beside those of this process.
        is_fork: whether it is a fork of a process that has torch loaded.
        namespace: the path of a network namespace to run in; empty for that of this process.
        descriptors: open files for a fork; their numbers there are added to its arguments.
        folder: the folder in which the command runs; by default that of this process, and always for a fork.

    Attributes:
        may_end: whether it has a reason to end, as after a deadly signal.
    """

    # A subclass may read the standard output itself, and call `tell`: it says PIPE.
    _stdout: int | None = None
    _stdin: int = subprocess.DEVNULL

    def __init__(
        self,
        command: Sequence[str],
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
        *,
        is_fork: bool = False,
        namespace: str = "",
        descriptors: Sequence[int] = (),
        folder: Path | None = None,
    ) -> None:
        self.command: list[str] = list(command)
        self.log: Path = log or self._in_memory()
        self.may_end: bool = False
        with self.log.open("ab") as output:
            self._begin = output.tell()
            environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(variables or {})}
            self._popen: subprocess.Popen[bytes] | Fork
            if is_fork:
                self._popen = Fork(self.command, environment, [output.fileno(), *descriptors], namespace)
                return
            entering = ["nsenter", f"--net={namespace}", "--"] if namespace else []
            self._popen = subprocess.Popen(  # noqa: S603 - the caller's own command
                [*_end_with_this_process(), *entering, *self.command],
                cwd=folder,
                env=environment,
                stdin=self._stdin,
                stdout=self._stdout or output.fileno(),
                stderr=output.fileno(),
                start_new_session=True,
            )

    @property
    def label(self) -> str:
        """The name of its log, by which messages call it."""
        return self.log.stem

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._popen.poll()

    @property
    def is_stopped(self) -> bool:
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, and everything that it has started."""
        return self.exit_code is not None and not self.session()

    @property
    def last_error(self) -> str:
        """The last line of the last traceback in its output; empty if there is none."""
        return str((TRACEBACK_END.findall(self.output) or [""])[-1])

    @property
    def output(self) -> str:
        """The whole output."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode(errors="replace")

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines of the output."""
        return "\n".join(self.output.splitlines()[-lines:])

    def wait_for_output(self, pattern: str, limit_s: float = OUTPUT_S_MAX) -> re.Match[str]:
        """Wait for a match in the output so far or to come, and return the first one.

        Raises:
            OutputError: there is none within `limit_s` seconds, or all processes that could write it have
              ended.
        """
        deadline = time.monotonic() + limit_s
        while True:
            has_ended = self.is_gone
            if match := re.search(pattern, self.output):
                return match
            if has_ended or time.monotonic() > deadline:
                ended = "ended" if has_ended else f"has run for {limit_s:g} s"
                raise OutputError(
                    f"{self.command} {ended} without writing {pattern!r}; it wrote:\n{self.output}"
                )
            time.sleep(LOOK_EVERY_S)

    def tell(self, line: str, *, more: bool = False) -> None:
        """Write a line to the process's standard input, and close it unless there will be more."""
        if self._popen.stdin is None:
            raise RuntimeError(f"{self.command} takes no orders")
        self._popen.stdin.write(line.encode() + b"\n")
        self._popen.stdin.flush()
        if not more:
            self._popen.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone; one that has ended gets none. After a deadly one it may
        end.
        """
        if number not in HARMLESS_SIGNALS:
            self.may_end = True
        self._popen.send_signal(number)

    def wait(self, limit_s: float = END_S_MAX) -> int:
        """Wait for the end of the process, and return its exit code, negative for a signal.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `limit_s` seconds.
        """
        return self._popen.wait(limit_s)

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end of the process; return whether it came."""
        try:
            self.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def session(self) -> list[psutil.Process]:
        """Return the live processes of its session: itself, and all that it has started, whatever their
        parent is now.
        """
        return _in_sessions_of([self])

    def descendants(self) -> list[psutil.Process]:
        """Return all processes that it has started and that are still its descendants."""
        if self.exit_code is not None:
            return []
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """End the process and every descendant, stopped ones too."""
        self.may_end = True
        kill_all([self])

    def _in_memory(self) -> Path:
        descriptor = os.memfd_create("output", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, descriptor)
        return Path(f"/proc/self/fd/{descriptor}")


class Processes:
    """Starts processes, and ends them and all their descendants when its block ends.

    Args:
        folder: the folder in which they run; by default that of this process.
        variables: variables of each environment, beside those of this process.
    """

    def __init__(self, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> None:
        self.started: list[RunningProcess] = []
        self._folder = folder
        self._variables = variables or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> RunningProcess:
        """Start a command; `env` is added to its environment."""
        return self._start(command, env, is_fork=False)

    def fork(self, *command: str, env: Mapping[str, str] | None = None) -> RunningProcess:
        """Run a module or a script in a fork that has torch loaded; `env` is added to its environment."""
        return self._start(command, env, is_fork=True)

    def _start(
        self, command: Sequence[str], env: Mapping[str, str] | None, *, is_fork: bool
    ) -> RunningProcess:
        variables = {**self._variables, **(env or {})}
        self.started.append(RunningProcess(command, None, variables, is_fork=is_fork, folder=self._folder))
        return self.started[-1]

    def kill_all(self) -> None:
        """End all processes."""
        kill_all(self.started)


def kill_all(processes: Iterable[RunningProcess]) -> None:
    """End processes and all their descendants, stopped ones too."""
    processes = list(processes)
    family = _in_sessions_of(processes)
    for process in processes:
        family += process.descendants()  # these may have a session of their own
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGCONT)
            member.kill()
    for process in processes:
        process._popen.kill()
        process._popen.wait()
        if process._popen.stdin is not None:
            with contextlib.suppress(OSError):  # a process that was never told anything may be gone
                process._popen.stdin.close()
    wait_ended(family, END_S_MAX)
    psutil.wait_procs(family, timeout=0)  # reaps orphans, if they come to this process


def run_tool(*command: str) -> str | None:
    """Run a system tool to its end; return its complaint, or None."""
    done = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - ours
    return f"{' '.join(command)}: {done.stderr.strip()}" if done.returncode else None


def why_no_namespace(what: str, option: str, *tools: str) -> str | None:
    """Return why this user or machine cannot make a namespace with `unshare`; None if it can."""
    if os.geteuid() != 0:
        return f"{what} needs root"
    if missing := [tool for tool in ("setpriv", "unshare", *tools) if shutil.which(tool) is None]:
        return f"{what} needs {', '.join(missing)}"
    return run_tool("unshare", option, "true")


def wait_ended(processes: Iterable[psutil.Process], limit_s: float) -> bool:
    """Wait until all have ended; return False if one has not.

    A zombie counts as ended once all its threads have ended: an orphan stays a zombie until process 1 reaps
    it, which may happen only from time to time.
    """
    waited_for = list(processes)
    return holds_within(limit_s, lambda: not any(map(is_alive, waited_for)))


def holds_within(limit_s: float, holds: Callable[[], object], every_s: float = LOOK_EVERY_S) -> bool:
    """Look again and again whether something holds; return False if it does not come to that in time."""
    deadline = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process has not ended."""
    try:
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return process.is_running() and not (is_zombie and process.num_threads() <= 1)
    except psutil.NoSuchProcess:
        return False


def is_in_session(process: psutil.Process, *leaders: int) -> bool:
    """Return whether the process lives, in the session of one of the leaders, which are process ids."""
    try:
        return os.getsid(process.pid) in leaders and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def end_with_parent() -> list[str]:
    """Return what goes before a command, so that the kernel kills its process when the one that has started
    it ends; nothing where setpriv is missing.
    """
    return [] if _SETPRIV is None else [_SETPRIV, "--pdeathsig", "KILL", "--"]


def _end_with_this_process() -> list[str]:
    if not (before := end_with_parent()):
        return []
    return [*before, "sh", "-c", _RUN_WHILE_PARENT_LIVES, str(os.getpid())]


def _in_sessions_of(processes: Iterable[RunningProcess]) -> list[psutil.Process]:
    """Return the live processes of these sessions; a leader whose number another process has by now has
    none.
    """
    leaders = [p.pid for p in processes if p.exit_code is None or not psutil.pid_exists(p.pid)]
    if not leaders:
        return []
    return [process for process in psutil.process_iter() if is_in_session(process, *leaders)]
