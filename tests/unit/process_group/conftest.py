"""A store, and members of a group that live in threads of one process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.stores import serve_store
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo

T = TypeVar("T")
LIMIT_S = 60.0
_prefixes = itertools.count()


class Party:
    """Members of one group, each with a thread of its own, and a store in which they meet."""

    def __init__(self, store: TCPStore) -> None:
        self.store = store
        self._groups: list[ProcessGroup] = []
        self._threads = ThreadPoolExecutor(max_workers=16)

    def prefix(self) -> str:
        """Return a store address that was never used."""
        return f"127.0.0.1:{self.store.port}/party/{next(_prefixes)}"

    def own(self, group: ProcessGroup) -> ProcessGroup:
        """Shut `group` down at the end, and return it."""
        self._groups.append(group)
        return group

    def meet(
        self, world_size: int, make: Callable[[], ProcessGroup] = lambda: ProcessGroupGloo(30)
    ) -> list[ProcessGroup]:
        """Return configured groups, in the order of their ranks."""
        groups = [self.own(make()) for _ in range(world_size)]
        self.configure(groups)
        return groups

    def configure(self, groups: list[ProcessGroup]) -> None:
        """Let the groups meet again under a new prefix."""
        prefix = self.prefix()
        self.together(groups, lambda rank, group: group.configure(prefix, rank, len(groups)))

    def together(self, members: Sequence[Any], act: Callable[[int, Any], T]) -> list[T]:
        """Run `act` on every member at once, and return the results in the order of the ranks."""
        futures = [self.aside(act, rank, member) for rank, member in enumerate(members)]
        return [future.result(LIMIT_S) for future in futures]

    def aside(self, act: Callable[..., T], *args: Any) -> Future[T]:
        """Run `act` on a thread of its own."""
        return self._threads.submit(act, *args)

    def end(self) -> None:
        """Shut everything down."""
        for group in self._groups:
            group.abort("the test is over")
        for group in self._groups:
            group.shutdown()
        self._threads.shutdown(wait=True, cancel_futures=True)


@pytest.fixture(scope="session")
def store() -> TCPStore:
    return serve_store()


@pytest.fixture
def party(store: TCPStore) -> Iterator[Party]:
    """Yield members in threads, and end them even if the test fails."""
    party = Party(store)
    yield party
    party.end()


@pytest.fixture
def pair(party: Party) -> list[ProcessGroup]:
    """Two members whose collectives are checked."""
    return party.meet(2, lambda: ProcessGroupGloo(60, check_collectives=True))


def wait_until(happened: threading.Event) -> None:
    """Wait for an event; fail the test rather than hang."""
    assert happened.wait(LIMIT_S)


def allreduced(group: ProcessGroup, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait()
    return float(tensor[0])
