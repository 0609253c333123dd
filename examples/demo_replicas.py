"""The replica processes of the demo: started, killed, stopped, continued, and never left behind.

A session of its own keeps a terminal's Ctrl-C away from a replica, so that the demo decides how it
ends; the kernel ends it should the demo itself be killed (torchft_like/testing/processes.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchft_like.testing.processes import RunningProcess


@dataclass(frozen=True)
class Files:
    """The files that one replica writes; a restarted replica appends."""

    log: Path
    events: Path
    metrics: Path

    @classmethod
    def create(cls, directory: Path, name: str) -> Files:
        """Return the files of replica `name`, emptied."""
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
        options = ["--replica-id", str(index), "--metrics-file", str(files.metrics)]
        self._command = [sys.executable, str(script), *options, *arguments]
        self._env = {**env, "TORCHFT_EVENT_FILE": str(files.events)}
        self._process: RunningProcess | None = None

    def start(self) -> None:
        """Start the process, or start it again after its end; call this from the main thread only."""
        self.wait()
        self.killed = False
        self.started_at = time.time()
        self._process = RunningProcess(self._command, self.files.log, self._env)

    def kill(self) -> None:
        """Send SIGKILL to the process and to all that it has started."""
        self.killed = True
        if self._process is not None:
            self._process.kill()

    def wait(self) -> None:
        """Wait until the process is gone."""
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """Stop the process: it is alive, its sockets are open, but it does not answer."""
        self.stopped = True
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the process go on."""
        self.stopped = False
        self._signal(signal.SIGCONT)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.exit_code

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
        return self._process.tail() if self._process else ""

    def result(self) -> dict[str, object] | None:
        """The JSON line with step and digest that the script prints at its end, once it is there."""
        for line in reversed(self._process.output.splitlines() if self._process else []):
            if line.startswith("{") and '"digest"' in line:
                result: dict[str, object] = json.loads(line)
                return result
        return None

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to its whole group of processes, data-loader workers included."""
        if self._process is not None and self._process.exit_code is None:
            os.killpg(self._process.pid, number)
