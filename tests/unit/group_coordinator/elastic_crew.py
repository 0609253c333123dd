"""Elastic coordinators in threads of one process, and a lighthouse that decides on the members."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from tests.managers import error_of
from torchft_like.errors import ChangeRolledBackError
from torchft_like.group_coordinator import Change, CoordinatorOptions, ElasticCoordinator
from torchft_like.testing.cluster import LighthouseProcess

T = TypeVar("T")
LIMIT_S = 60.0
PAUSE_S = 0.005
PATIENCE_MS = "20000"


class Crew:
    """Coordinators by name.

    Args:
        flags: of the lighthouse.
    """

    def __init__(self, *flags: str) -> None:
        self._flags = (f"--keepalive_timeout_ms={PATIENCE_MS}", *flags)
        self.lighthouse = LighthouseProcess(*self._flags)
        self.coordinators: dict[str, ElasticCoordinator] = {}
        self._threads = ThreadPoolExecutor(16)

    def __getitem__(self, name: str) -> ElasticCoordinator:
        if name not in self.coordinators:
            self.hire(name, 30.0)
        return self.coordinators[name]

    def hire(self, names: str, timeout: float) -> None:
        """Make coordinators with a timeout of their own."""
        for name in names:
            options = CoordinatorOptions(timeout=timeout)
            self.coordinators[name] = ElasticCoordinator(
                name, lighthouse=self.lighthouse.url, options=options
            )

    def aside(self, act: Callable[..., T], *args: Any) -> Future[T]:
        return self._threads.submit(act, *args)

    def together(self, names: Sequence[str], act: Callable[[ElasticCoordinator], T]) -> list[T]:
        """Run the same on each at once."""
        futures = [self.aside(act, self[name]) for name in names]
        return [future.result(LIMIT_S) for future in futures]

    def outcomes(self, names: Sequence[str], act: Callable[[ElasticCoordinator], object]) -> list[str]:
        """Run the same as `together` does; return the classes of the errors, "" where there is none."""

        errors = self.together(names, lambda coordinator: error_of(lambda: act(coordinator)))
        return [type(error).__name__ if error else "" for error in errors]

    def change(self, members: str, leaving: str = "") -> None:
        """Change to these members, given by their letters; those that leave say so first, and go last."""
        departures = [self[name].begin_change(leaving=True) for name in leaving]
        changes = self.begin(members)
        assert self.complete(changes) == [""] * len(members)
        for change in departures:
            change.complete()

    def begin(self, members: str, timeout: float = LIMIT_S) -> dict[str, Change]:
        """Let each begin the change to these members; return when they have met.

        Who comes when decides what the lighthouse proposes first: other proposals are rolled back.
        """
        wanted = tuple(sorted(members))
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            changes = {name: self[name].begin_change(timeout) for name in members}
            met = [(change, change.membership) for change in changes.values() if change.has_met]
            for change, membership in met:
                if membership is not None and membership.members != wanted:
                    change.roll_back("the test wants others")
            proposals = {membership for _, membership in met}
            if len(met) == len(members) and len(proposals) == 1 and not any(c.is_over for c, _ in met):
                return changes
            time.sleep(PAUSE_S)
        raise AssertionError(f"{members} have not met")

    def complete(self, changes: dict[str, Change], timeout: float | None = None) -> list[str]:
        """Complete all changes at once; return the classes of the errors."""
        return self.outcomes(list(changes), lambda c: changes[c.name].complete(timeout))

    def switch(self, names: str) -> None:
        """Change as programs do: at the same place of the program on all, as soon as a change is due."""

        def serve(coordinator: ElasticCoordinator) -> None:
            deadline = time.monotonic() + LIMIT_S
            while time.monotonic() < deadline:
                change = coordinator.begin_change()
                if coordinator.is_due(change):
                    try:
                        change.complete()
                    except ChangeRolledBackError:
                        continue
                    return
            raise AssertionError(f"nothing was due for {coordinator}")

        self.together(names, serve)

    def sums(self, names: str) -> list[float]:
        """Return what each gets for the sum of ones."""
        return self.together(names, lambda c: c.all_reduce(torch.ones(1)).item())

    def serving(self) -> str:
        """Return the names of the coordinators that have members."""
        return "".join(name for name, c in self.coordinators.items() if c.membership is not None)

    def lose(self, name: str) -> None:
        """Let this member be dead to the others."""
        coordinator = self.coordinators.pop(name)
        coordinator._session.hang_up("the test", in_order=False)
        coordinator.destroy()

    def restart_lighthouse(self) -> None:
        """Start the lighthouse again at the address that it had."""
        self.lighthouse = LighthouseProcess(*self._flags, bind=self.lighthouse.address)

    def end(self) -> None:
        for coordinator in self.coordinators.values():
            coordinator.destroy()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.lighthouse.kill()
