"""A lighthouse in a process of its own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Final, Self

from torchft_like.testing.processes import END_S_MAX, ForkedProcess, RunningProcess

LISTENING: Final = r"(?m)^lighthouse listening on (http://\S+)\n"
START_S_MAX: Final = 60.0
# No member of a quorum can be about to come back to an address at which there was no lighthouse before.
NO_PAGE: Final = ("--page=off",)  # it takes a moment to load; a flag that follows asks for one
FIRST_OF_ALL: Final = ("--start_grace_ms=0",)


class LighthouseProcess:
    """`python -m lighthouse`: it listens when the constructor returns, and is ended when its block ends.

    Args:
        flags: the flags of its command line.
        bind: host and port to listen at; a free port of loopback by default.
        event_file: the file into which it writes its events.
        is_cold: whether to start a new interpreter, which is what a measurement of its memory needs.

    Raises:
        OutputError: it does not listen; the text has its output.
    """

    def __init__(
        self,
        *flags: str,
        bind: str = "127.0.0.1:0",
        event_file: Path | None = None,
        is_cold: bool = False,
    ) -> None:
        first = FIRST_OF_ALL if bind.endswith(":0") else ()
        command = ["lighthouse", "--bind", bind, *NO_PAGE, *first, *flags]
        variables = {"TORCHFT_EVENT_FILE": str(event_file)} if event_file else {}
        self.process = (
            RunningProcess([sys.executable, "-m", *command], variables=variables)
            if is_cold
            else ForkedProcess(command, variables=variables)
        )
        try:
            self.url = self.process.wait_for_output(LISTENING, START_S_MAX)[1]
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def address(self) -> str:
        """Host and port, at which another lighthouse may listen after this one."""
        return self.url.removeprefix("http://")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        self.process.signal(number)
        return self.process.wait(END_S_MAX)

    def kill(self) -> None:
        """Send SIGKILL, and wait until the process is gone."""
        self.process.kill()
