"""The replica processes of the demo: started, killed, stopped, continued, and never left behind.

A process group of its own keeps a terminal's Ctrl-C away from a replica, so that the demo decides
how it ends; the kernel's parent-death signal ends it should the demo itself be killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

LOG_TAIL_LINES = 30

# Run by the child before it becomes the training script. A function run between fork and exec would
# do the same, but is not safe in a parent with threads, and the embedded lighthouse has some.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


@dataclass(frozen=True)
class Files:
    """Where one replica writes; a restarted replica appends."""

    log: Path
    events: Path
    metrics: Path

    @classmethod
    def create(cls, directory: Path, name: str) -> Files:
        """The files of replica `name`, emptied."""
        files = cls(*(directory / f"{name}.{what}" for what in ("log", "events.jsonl", "metrics.jsonl")))
        for path in (files.log, files.events, files.metrics):
            path.write_bytes(b"")
        return files


class Replica:
    """One replica group of one process."""

    def __init__(
        self, index: int, files: Files, script: Path, arguments: list[str], env: Mapping[str, str]
    ) -> None:
        self.index = index
        self.files = files
        self.stopped = False
        self.killed = False
        self.started_at = 0.0  # seconds since the Unix epoch
        command = [str(script), "--replica-id", str(index), "--metrics-file", str(files.metrics), *arguments]
        self._command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        self._env = {**env, "TORCHFT_EVENT_FILE": str(files.events), "PYTHONUNBUFFERED": "1"}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, or start it again after its end; call it from the main thread only.

        The parent-death signal is sent when the *thread* that started the child ends.
        """
        self.wait()
        self.killed = False
        self.started_at = time.time()
        with self.files.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL, to it and whatever it started."""
        self.killed = True
        self._signal(signal.SIGKILL)

    def wait(self) -> None:
        """Return when it is gone."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """SIGSTOP: alive, its sockets open, but not answering."""
        self.stopped = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self.stopped = False
        self._signal(signal.SIGCONT)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def crashed(self) -> bool:
        """It ended, with an error, and it was not the demo that killed it."""
        return not self.killed and self.exit_code not in (None, 0)

    @property
    def finished(self) -> bool:
        """It ended as a training script should."""
        return self.exit_code == 0

    def log_tail(self) -> str:
        """The last lines that it wrote."""
        return "\n".join(self.files.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def result(self) -> dict[str, object] | None:
        """The JSON line with step and digest that the script prints at its end, once it is there."""
        for line in reversed(self.files.log.read_text(errors="replace").splitlines()):
            if line.startswith("{") and '"digest"' in line:
                result: dict[str, object] = json.loads(line)
                return result
        return None

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, number)
