"""Managers and lighthouses of tests: a replica group of one rank, and how a call ended."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from torchft_like import LighthouseServer, Manager, ProcessGroupGloo

T = TypeVar("T")

PATIENCE_S = 300.0  # far above any limit of the tests, so that a test fails that ends by it
PATIENCE_MS = 5000  # nobody is lost for a late answer, as a busy machine may give it


def be_patient() -> None:
    """Let this process, which is a rank of a test, take nobody for dead who answers late."""
    os.environ["TORCHFT_KEEPALIVE_TIMEOUT_MS"] = str(PATIENCE_MS)


def manager_alone(name: str, lighthouse: str | None = None, model: Any = None, **settings: Any) -> Manager:
    """Return the Manager of a replica group of one rank; without a `model` it has no state, unless `settings`
    say so. The environment names the lighthouse if nobody else does.
    """
    given = {
        "pg": ProcessGroupGloo(PATIENCE_S, check_collectives=False),
        "load_state_dict": model.load_state_dict if model else lambda state: None,
        "state_dict": model.state_dict if model else dict,
        "min_replica_size": 1,
        "timeout": PATIENCE_S,
        "rank": 0,
        "world_size": 1,
        "hostname": "127.0.0.1",
        "init_sync": False,
    }
    return Manager(**{**given, **settings}, lighthouse_addr=lighthouse, replica_id=name)


@contextmanager
def lighthouse_here(**settings: Any) -> Iterator[LighthouseServer]:
    """Yield a lighthouse in this process; with other `settings`, a quorum waits for two replicas."""
    server = LighthouseServer(**{"min_replicas": 2, "join_timeout_ms": 60_000, **settings})
    try:
        yield server
    finally:
        server.shutdown()


def each_in_a_thread(names: str, script: Callable[[str], T]) -> list[T]:
    """Run `script` for each of the names, which are letters, all at once; return what they return."""
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(script, names))


def outcome(act: Callable[[], Any]) -> Any:
    """Return the result of a call, or the name of the error's class."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - the test reads it
        return type(error).__name__


def error_of(act: Callable[[], object]) -> Exception | None:
    """Return the error that a call ends with, if any."""
    try:
        act()
    except Exception as error:  # noqa: BLE001 - the test reads it
        return error
    return None
