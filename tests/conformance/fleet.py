"""The fleet: processes that stay for the whole session, commanded by the tests."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.stores import serve_store
from torchft_like import LighthouseServer
from torchft_like.testing.ranks import Act, Rank, end_all

from .member import Member
from .scene import PLAIN, Kind
from .subjects import BY_NAME, PATIENT_MS, WORLD_MAX

LIMIT_S = 60.0
SYNC = ("sync",)


class Fleet:
    """Processes, the groups under test in them, and what those are configured for."""

    def __init__(self, size: int = WORLD_MAX) -> None:
        self.size = size
        self._store: TCPStore = serve_store()
        self._prefixes = itertools.count()
        self._lighthouses: list[LighthouseServer] = []
        self._workers: list[Rank] = []
        self._worlds: dict[str, int] = {}  # by subject, for those that are usable now

    def ask_all(self, command: Act, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Give a command to the first processes, each with its own arguments, and return their answers."""
        workers = self._workers[: len(arguments)]
        for worker, own in zip(workers, arguments, strict=True):
            worker.tell(command, *own)
        return [worker.answer() for worker in workers]

    def assert_like_torch(
        self,
        subject: str,
        world: int,
        case: str,
        kinds: Sequence[Kind] = (PLAIN,),
        modes: Sequence[str] = SYNC,
    ) -> bool:
        """Run a case on all members, and fail the test with what differs from torch's own group.

        It returns whether the group is of no use afterwards; the next case then configures it anew.
        """
        forms, found, is_spoilt = list(itertools.product(kinds, modes)), set[str](), False
        with self._whole():
            while forms:
                if self._worlds.get(subject) != world:
                    self.configure(subject, world)
                answers = self.ask_all(Member.run, [(subject, case, forms)] * world)
                found |= {f"rank {r}: {text}" for r, (_, texts, _) in enumerate(answers) for text in texts}
                done, _, is_spoilt = answers[0]
                forms = forms[done:]
                if is_spoilt:
                    self._worlds.pop(subject)
        if found:
            pytest.fail(f"{subject}, {world} ranks, {case}\n" + "\n".join(sorted(found)))
        return is_spoilt

    def renew(self, subject: str, world: int) -> None:
        """Give a subject its members anew, even if they are the same."""
        with self._whole():
            self.configure(subject, world)

    def configure(self, subject: str, world: int) -> None:
        """Give a subject new members, the first `world` processes; the others leave it."""
        self._worlds.pop(subject, None)
        address = self._lighthouse(subject) if BY_NAME[subject].managed else self.fresh_prefix()
        if BY_NAME[subject].managed:
            for worker in self._workers[world:]:
                worker.ask(Member.close, subject)
        self.ask_all(Member.configure, [(subject, address, rank, world) for rank in range(world)])
        self._worlds[subject] = world

    def open(self, subject: str, world: int) -> None:
        """Give a subject members without torch's own groups, and replace processes that are gone."""
        alive = [worker for worker in self._workers if worker.is_alive()]
        self._workers = alive + [Rank(Member) for _ in range(self.size - len(alive))]
        self.configure(subject, world)

    @property
    def workers(self) -> list[Rank]:
        """The processes in the order of their ranks."""
        return self._workers

    def fresh_prefix(self) -> str:
        """Return an address in the store that was never used."""
        return f"127.0.0.1:{self._store.port}/{next(self._prefixes)}"

    def end(self) -> None:
        """End every process."""
        end_all(self._workers)
        self._workers.clear()
        self._worlds.clear()
        for lighthouse in self._lighthouses:
            lighthouse.shutdown()
        self._lighthouses.clear()

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Start the processes if there are none, and end them all if one of them does not answer or fails."""
        try:
            if not self._workers:
                self._start()
            yield
        except BaseException:
            self.end()
            raise

    def _start(self) -> None:
        self._workers = [Rank(Member) for _ in range(self.size)]
        self._store = serve_store()  # those of a fleet that has ended have left their keys in the old one
        self.ask_all(Member.meet, [(self._store.port, rank, self.size) for rank in range(self.size)])

    def _lighthouse(self, subject: str) -> str:
        if not self._lighthouses:
            self._lighthouses.append(
                LighthouseServer(join_timeout_ms=10_000, keepalive_timeout_ms=PATIENT_MS)
            )
        return self._lighthouses[0].address()
