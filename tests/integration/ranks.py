"""Ranks of a job: processes that do what a test asks of them and answer with the result.

They are forked from a server that has imported torch, which takes milliseconds. What is asked is a
function of an importable module; it gets the namespace `here`, in which a rank keeps what it made.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

LIMIT_S = 60.0

_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(["tests.integration.torch_job", "tests.integration.elastic_job"])

Act = Callable[..., Any]


class RankError(AssertionError):
    """What was asked of a rank failed there; says how."""


class Rank:
    """One process; the limit is that of every answer."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._connection, theirs = multiprocessing.Pipe()
        self._process = _nursery.Process(target=_obey, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def signal(self, number: signal.Signals) -> None:
        """To this process alone."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def tell(self, act: Act, *args: Any) -> None:
        """Ask for something whose answer is fetched later, or never."""
        self._connection.send((act, args))

    def has_answer(self) -> bool:
        """Whether `answer` would return at once."""
        return self._connection.poll()

    def answer(self) -> Any:
        """The oldest answer that was not fetched yet."""
        if not self._connection.poll(self._limit_s):
            raise RankError(f"no answer within {self._limit_s:g} s")
        succeeded, answer = self._connection.recv()
        if not succeeded:
            raise RankError(answer)
        return answer

    def ask(self, act: Act, *args: Any) -> Any:
        """Ask and wait for the answer."""
        self.tell(act, *args)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.join(LIMIT_S)

    def end(self) -> None:
        """Whatever state it is in."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, signal.SIGCONT)
            self.kill()
        self._connection.close()


class Ranks(list[Rank]):
    """All ranks of a job."""

    def ask(self, act: Act, *args: Any) -> list[Any]:
        """The same of all at once: `act(here, rank, *args)`; the answers in the order of the ranks."""
        for number, rank in enumerate(self):
            rank.tell(act, number, *args)
        return [rank.answer() for rank in self]


@contextmanager
def running(count: int, limit_s: float = LIMIT_S) -> Iterator[Ranks]:
    """Ranks that are killed at the end of the block."""
    ranks = Ranks(Rank(limit_s) for _ in range(count))
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.end()


def _obey(connection: Connection) -> None:
    here = SimpleNamespace()
    while True:
        try:
            act, args = connection.recv()
        except EOFError:
            return
        try:
            answer = True, act(here, *args)
        except Exception as error:  # noqa: BLE001 - the test is told
            answer = False, f"{type(error).__name__}: {error}"
        connection.send(answer)
