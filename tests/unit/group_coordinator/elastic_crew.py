"""Elastic coordinators in threads of one process, and a board on which their members are announced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from tests.integration.gloo_member import serve_store
from torchft_like.group_coordinator import (
    Change,
    CoordinatorOptions,
    ElasticCoordinator,
    Membership,
    MembershipBoard,
)

T = TypeVar("T")
LIMIT_S = 60.0


class Crew:
    """Coordinators by name."""

    def __init__(self) -> None:
        self.store: TCPStore | None = serve_store()
        self.port = self.store.port
        self.board = MembershipBoard(f"127.0.0.1:{self.port}/job")
        self.coordinators: dict[str, ElasticCoordinator] = {}
        self._threads = ThreadPoolExecutor(16)

    def __getitem__(self, name: str) -> ElasticCoordinator:
        if name not in self.coordinators:
            options = CoordinatorOptions(timeout=30.0)
            self.coordinators[name] = ElasticCoordinator(name, options=options)
        return self.coordinators[name]

    def aside(self, act: Callable[..., T], *args: Any) -> Future[T]:
        return self._threads.submit(act, *args)

    def together(self, names: Sequence[str], act: Callable[[ElasticCoordinator], T]) -> list[T]:
        """The same on each at once."""
        futures = [self.aside(act, self[name]) for name in names]
        return [future.result(LIMIT_S) for future in futures]

    def outcomes(self, names: Sequence[str], act: Callable[[ElasticCoordinator], object]) -> list[str]:
        """As `together`: the classes of the errors, "" where there is none."""

        def caught(coordinator: ElasticCoordinator) -> str:
            try:
                act(coordinator)
            except Exception as error:  # noqa: BLE001 - it is what the test is about
                return type(error).__name__
            return ""

        return self.together(names, caught)

    def change(self, members: str, *leaving: str) -> Membership:
        """Give them these members, by their letters; those who leave take part."""
        membership = self.board.announce(members)
        self.together([*members, *leaving], lambda c: c.change(membership))
        return membership

    def begin(
        self, names: str, membership: Membership, timeout: float = LIMIT_S, *, ready: bool = True
    ) -> dict[str, Change]:
        """Each begins the change; returns when they are ready."""
        changes = {name: self[name].begin_change(membership, timeout) for name in names}
        assert not ready or all(change.wait_ready(LIMIT_S) for change in changes.values())
        return changes

    def complete(self, changes: dict[str, Change]) -> list[str]:
        """All at once; the classes of the errors."""
        return self.outcomes(list(changes), lambda c: changes[c.name].complete())

    def sums(self, names: str) -> list[float]:
        """What each gets for the sum of ones."""
        return self.together(names, lambda c: c.all_reduce(torch.ones(1)).item())

    def lose_the_store(self) -> None:
        self.store = None

    def end(self) -> None:
        for coordinator in self.coordinators.values():
            coordinator.destroy()
        self._threads.shutdown(wait=True, cancel_futures=True)
