"""The fleet: processes that stay for the whole session, commanded by the tests."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.integration.gloo_member import serve_store
from torchft_like import LighthouseServer

from .member import run_member
from .scene import PLAIN, Kind
from .subjects import BY_NAME, WORLD_MAX

LIMIT_S = 60.0
_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(["tests.integration.gloo_member", "tests.conformance.member"])


class Worker:
    """A process that answers commands; see `member`."""

    def __init__(self, run: Callable[[Connection], None] = run_member) -> None:
        self._commands, theirs = multiprocessing.Pipe()
        self._process = _nursery.Process(target=run, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def tell(self, command: str, *arguments: Any) -> None:
        """Give a command."""
        self._commands.send((command, arguments))

    def answer(self, limit_s: float = LIMIT_S) -> Any:
        """The answer to the first command that was not answered yet; fails the test where it is an error."""
        if not self._commands.poll(limit_s):
            self.signal(signal.SIGUSR1)
            time.sleep(1)
            pytest.fail(f"process {self.pid} does not answer")
        try:
            is_good, value = self._commands.recv()
        except EOFError:
            pytest.fail(f"process {self.pid} died, exit code {self._process.exitcode}")
        if not is_good:
            pytest.fail(value)
        return value

    def ask(self, command: str, *arguments: Any) -> Any:
        """Give a command and wait for the answer."""
        self.tell(command, *arguments)
        return self.answer()

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def end(self) -> None:
        """Whatever state it is in."""
        if self._process.is_alive():
            self._process.kill()  # ends a stopped process, too
        self._process.join(LIMIT_S)
        self._commands.close()
        self._process.close()


class Fleet:
    """Processes, the groups under test in them, and what those are configured for."""

    def __init__(self, size: int = WORLD_MAX) -> None:
        self.size = size
        self._store: TCPStore = serve_store()
        self._prefixes = itertools.count()
        self._lighthouses: list[LighthouseServer] = []
        self._workers: list[Worker] = []
        self._worlds: dict[str, int] = {}  # of the subjects that are usable now

    def ask_all(self, command: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Give a command to the first processes, each with its own arguments; their answers."""
        workers = self._workers[: len(arguments)]
        for worker, own in zip(workers, arguments, strict=True):
            worker.tell(command, *own)
        return [worker.answer() for worker in workers]

    def check(self, subject: str, world: int, case: str, kind: Kind = PLAIN, mode: str = "sync") -> bool:
        """Run a case on all members; the test fails with what differs from torch's own group.

        Gives whether the group is of no use afterwards; then the next check configures it anew.
        """
        with self._whole():
            if self._worlds.get(subject) != world:
                self.configure(subject, world)
            answers = self.ask_all("run", [(subject, case, kind, mode)] * world)
            is_spoilt = any(spoilt for _, spoilt in answers)
            if is_spoilt:
                self._worlds.pop(subject)
        found = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text is not None]
        if found:
            pytest.fail(f"{subject}, {world} ranks, {case}, {kind}, {mode}\n" + "\n".join(found))
        return is_spoilt

    def renew(self, subject: str, world: int) -> None:
        """Give a subject members anew, though they be the same."""
        with self._whole():
            self.configure(subject, world)

    def configure(self, subject: str, world: int) -> None:
        """Give a subject new members, the first `world` processes; the others leave it."""
        self._worlds.pop(subject, None)
        address = self._lighthouse(subject) if BY_NAME[subject].managed else self.fresh_prefix()
        if BY_NAME[subject].managed:
            for worker in self._workers[world:]:
                worker.tell("close", subject)
                worker.answer()
        self.ask_all("configure", [(subject, address, rank, world) for rank in range(world)])
        self._worlds[subject] = world

    def open(self, subject: str, world: int) -> None:
        """Give a subject members, none of which has torch's groups; processes that are gone are replaced."""
        alive = [worker for worker in self._workers if worker.is_alive()]
        self._workers = alive + [Worker() for _ in range(self.size - len(alive))]
        for worker in self._workers[len(alive) :]:
            worker.answer()
        self.configure(subject, world)

    @property
    def workers(self) -> list[Worker]:
        """In the order of their ranks."""
        return self._workers

    def fresh_prefix(self) -> str:
        """An address in the store that was never used."""
        return f"127.0.0.1:{self._store.port}/{next(self._prefixes)}"

    def end(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._worlds.clear()
        for lighthouse in self._lighthouses:
            lighthouse.shutdown()
        self._lighthouses.clear()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """All processes are there; they are thrown away if one of them does not answer or fails."""
        try:
            if not self._workers:
                self._start()
            yield
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        self._workers = [Worker() for _ in range(self.size)]
        for worker in self._workers:
            worker.answer()
        host, port = "127.0.0.1", self._start_store()
        self.ask_all("meet", [(host, port, index, self.size) for index in range(self.size)])

    def _start_store(self) -> int:
        self._store = serve_store()
        return self._store.port

    def _lighthouse(self, subject: str) -> str:
        if not self._lighthouses:
            self._lighthouses.append(
                LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
            )
        return self._lighthouses[0].address()


def wait_until(is_true: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Until something that nobody announces is so."""
    deadline = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)
