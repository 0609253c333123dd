"""Ranks of a job: processes that run functions for a test and answer with the results.

They are forks that have torch loaded, which takes milliseconds. A function has to be in an importable module.
Its first argument is `here`, in which the rank keeps its objects: a namespace, or an object that the caller
chose. So the methods of that object's class may be run, too: `rank.ask(Member.configure, address)`.
"""

from __future__ import annotations

import faulthandler
import fcntl
import os
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torchft_like.testing.processes import RunningProcess, holds_within, kill_all

LIMIT_S = 60.0
STATE_S_MAX = 60.0
STACKS_S = 1.0

Act = Callable[..., Any]


class RankError(AssertionError):
    """A call failed in the rank, or the rank is gone; the text says how."""


class Rank:
    """One process, which runs functions for a test.

    Args:
        make: called in the process; returns the first argument of every function.
        limit_s: the limit of an answer, in seconds.
        variables, namespace: as in RunningProcess.
    """

    def __init__(
        self,
        make: Callable[[], object] = SimpleNamespace,
        *,
        limit_s: float = LIMIT_S,
        variables: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> None:
        self._limit_s = limit_s
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        with theirs:
            self.process = RunningProcess(
                [__name__],
                None,
                variables,
                is_fork=True,
                namespace=namespace,
                descriptors=[theirs.fileno()],
            )
        self._connection.send(make)

    @property
    def pid(self) -> int:
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process.exit_code is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone."""
        self.process.signal(number)

    def stop(self) -> None:
        """Send SIGSTOP, and wait until the process has stopped."""
        self.signal(signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Wait until the process is stopped, by any signal."""
        self._wait_until("has not stopped", lambda: self._state() == "T")

    def wait_blocked(self) -> None:
        """Wait until the call that the rank was told to make waits for something."""

        def has_read_all() -> bool:
            return not any(fcntl.ioctl(self._connection.fileno(), termios.TIOCOUTQ, bytes(4)))

        self._wait_until("does not wait", lambda: has_read_all() and self._state() == "S")

    def resume(self) -> None:
        """Send SIGCONT."""
        self.signal(signal.SIGCONT)

    def tell(self, act: Act, *args: Any) -> None:
        """Ask for a call whose answer is fetched later, or never."""
        self._connection.send((act, args))

    def has_answer(self) -> bool:
        """Return whether `answer` would return at once."""
        return self._connection.poll()

    def answer(self) -> Any:
        """Return the oldest answer that was not fetched yet.

        Raises:
            RankError: the answer is an error, it does not come within the limit, or the rank has ended.
        """
        if not self._connection.poll(self._limit_s):
            self.signal(signal.SIGUSR2)
            time.sleep(STACKS_S)
            raise RankError(f"no answer within {self._limit_s:g} s\n{self.process.tail()}")
        try:
            succeeded, answer = self._connection.recv()
        except (EOFError, ConnectionResetError):
            code = self.process.wait(self._limit_s)
            raise RankError(f"the rank has ended with {code}\n{self.process.tail()}") from None
        if not succeeded:
            raise RankError(answer)
        return answer

    def ask(self, act: Act, *args: Any) -> Any:
        """Ask for a call, and wait for the answer."""
        self.tell(act, *args)
        return self.answer()

    def kill(self) -> None:
        """Send SIGKILL to this process alone, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        """End the process and its descendants, in whatever state they are."""
        end_all([self])

    def _wait_until(self, otherwise: str, holds: Callable[[], bool]) -> None:
        if not holds_within(STATE_S_MAX, holds, 0.002):
            raise RankError(f"process {self.pid} {otherwise}")

    def _state(self) -> str:
        """Return the letter by which the kernel tells the state of the process's main thread."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]


class Ranks(list[Rank]):
    """All ranks of a job."""

    def tell(self, act: Act, *args: Any) -> None:
        """Have `act(here, rank, *args)` run on all ranks; the answers are fetched later, or never."""
        for number, rank in enumerate(self):
            rank.tell(act, number, *args)

    def answers(self) -> list[Any]:
        """Return the oldest answer of every rank that was not fetched yet, in the order of the ranks."""
        return [rank.answer() for rank in self]

    def ask(self, act: Act, *args: Any) -> list[Any]:
        """Run `act(here, rank, *args)` on all ranks at once; return the answers in the order of the ranks."""
        self.tell(act, *args)
        return self.answers()


@contextmanager
def running(count: int, limit_s: float = LIMIT_S) -> Iterator[Ranks]:
    """Start ranks that are killed at the end of the block."""
    ranks = Ranks(Rank(limit_s=limit_s) for _ in range(count))
    try:
        yield ranks
    finally:
        end_all(ranks)


def end_all(ranks: list[Rank]) -> None:
    """End ranks and their descendants, in whatever state they are."""
    kill_all(rank.process for rank in ranks)
    for rank in ranks:
        rank._connection.close()


# ------------------------------------------------------------------------------- in the process


def main(connection: Connection) -> None:
    """Run the calls that are asked for, until the connection ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)
    here = connection.recv()()
    while True:
        try:
            act, args = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = True, act(here, *args)
        except Exception as error:  # noqa: BLE001 - the test gets it
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # threads of the rank's objects may hang, so nothing is torn down
