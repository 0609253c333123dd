"""A fork server for Baby groups that has torch loaded when it starts, for the processes of tests.

A trainer starts its fork server cold, which takes three seconds of a processor. The ranks and the workers of
tests are forks of a process that has torch loaded, and so may the fork server of each be. That it starts
cold is shown in tests/integration/test_baby_processes.py, with every kind of trainer, and in the unit tests.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

from torchft_like.process_group.baby import fork_pool as module
from torchft_like.process_group.baby.messages import Channel
from torchft_like.testing.forks import Fork

DESCRIPTORS_MAX = 1 << 16
STDERR = 2


class Standby:
    """The part of subprocess.Popen's interface that the pool uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._watch = os.pidfd_open(pid)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs, 0 if somebody else has reaped it."""
        if self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
                os.close(self._watch)
        return self._code

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._watch, signal.SIGKILL)

    def wait(self, timeout: float) -> None:
        """Wait for the end of the process."""
        if self.poll() is None:
            events = select.poll()
            events.register(self._watch, select.POLLIN)
            if not events.poll(timeout * 1000):
                raise subprocess.TimeoutExpired("the fork server", timeout)
            self.poll()


def stand_by() -> None:
    """Fork the first fork server of this process's Baby groups; call this before there is another thread."""
    assert len(os.listdir("/proc/self/task")) == 1, "a fork would have locks that nobody releases"
    trainer, start_cold = os.getpid(), module._start_server
    ours, theirs = Channel.pair()
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        # Whoever waits for the trainer's end at the other end of its channel must not wait for this process.
        os.closerange(3, theirs.fileno())
        os.closerange(theirs.fileno() + 1, DESCRIPTORS_MAX)
        module.main(theirs.fileno(), trainer)
    theirs.close()
    ready = [(Standby(pid), Channel(ours))]
    module._start_server = lambda: ready.pop() if ready else start_cold()  # type: ignore[assignment, return-value]


def start_loaded() -> tuple[Fork, Channel]:
    """Start a fork server, in place of `_start_server`, in a process that has threads: no child of it."""
    ours, theirs = Channel.pair()
    with theirs:
        server = Fork([__name__, str(os.getpid())], os.environ, [STDERR, theirs.fileno()])
    return server, Channel(ours)


if __name__ == "__main__":
    module._watch = os.pidfd_open
    module.main(int(sys.argv[2]), int(sys.argv[1]))
