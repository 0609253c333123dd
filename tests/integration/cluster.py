"""The clusters of the failure tests: every replica group runs tests/integration/worker.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.integration.options import WorkerOptions
from torchft_like.testing import cluster
from torchft_like.testing.cluster import Group
from torchft_like.testing.invariants import INVARIANTS

# The invariants that each cluster checks when its block ends.
CHECKED = [getattr(pytest.mark, name) for name in INVARIANTS]
Test = TypeVar("Test", bound=Callable[..., None])


def checked(test: Test) -> Test:
    """Mark one test by the invariants, of a file whose other tests have no cluster."""
    return reduce(lambda marked, mark: mark(marked), CHECKED, test)


PATIENT_MS = 20_000

REST = (pytest.mark.slow, pytest.mark.rest)


def also_slow(*values: object) -> Any:
    """Return a row of a test that `make rest` runs: `make test` shows the same sooner, by another row."""
    return pytest.param(*values, marks=REST)


class Cluster(cluster.Cluster):
    """A cluster of workers.

    Args:
        is_patient: nobody is suspected of being dead for a late answer, as a busy machine may give it. A test
            that stops a process, or leaves it without an answer otherwise, has no such patience.
    """

    def __init__(
        self, folder: Path, *, is_patient: bool = True, lighthouse_flags: Sequence[str] = (), **settings: Any
    ) -> None:
        patience = [f"--keepalive_timeout_ms={PATIENT_MS}"] if is_patient else []
        super().__init__(folder, lighthouse_flags=[*lighthouse_flags, *patience], **settings)
        self._variables = {"TORCHFT_KEEPALIVE_TIMEOUT_MS": str(PATIENT_MS)} if is_patient else {}

    def launch(
        self, name: str, command: Sequence[str], *, variables: Mapping[str, str] | None = None, **how: Any
    ) -> Group:
        """Start a replica group as the kit's cluster does, with the patience of this one."""
        return super().launch(name, command, variables={**self._variables, **(variables or {})}, **how)

    def start(self, name: str, *, size: int = 1, options: WorkerOptions | None = None) -> Group:
        """Start a replica group of `size` ranks; a name may be started again."""
        options = replace(options or WorkerOptions(), name=name, index=self.index_of(name))
        group = self.launch(name, ["tests.integration.worker", options.to_json()], size=size)
        for rank in group.ranks:
            rank.may_end = any(fault.startswith("kill@") for fault in options.faults)
        return group

    def start_all(self, names: str, *, size: int = 1, options: WorkerOptions | None = None) -> list[Group]:
        """Start a group for every letter and wait until all of them train together."""
        groups = [self.start(name, size=size, options=options) for name in names]
        self.wait_for_quorum_of(*groups)
        return groups
