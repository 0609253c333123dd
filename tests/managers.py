"""Managers of tests: a replica group of one rank, and how a call ended."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torchft_like import Manager, ProcessGroupGloo

PATIENCE_S = 300.0  # far above any limit of the tests, so that a test fails that ends by it
PATIENCE_MS = 5000  # nobody is lost for a late answer, as a busy machine may give it


def be_patient() -> None:
    """Let this process, which is a rank of a test, take nobody for dead who answers late."""
    os.environ["TORCHFT_KEEPALIVE_TIMEOUT_MS"] = str(PATIENCE_MS)


def manager_alone(name: str, lighthouse: str, **settings: Any) -> Manager:
    """Return the Manager of a replica group of one rank, which has no state unless `settings` say so."""
    given = {
        "pg": ProcessGroupGloo(PATIENCE_S, check_collectives=False),
        "load_state_dict": lambda state: None,
        "state_dict": dict,
        "min_replica_size": 1,
        "timeout": PATIENCE_S,
        "rank": 0,
        "world_size": 1,
        "hostname": "127.0.0.1",
        "init_sync": False,
    }
    return Manager(**{**given, **settings}, lighthouse_addr=lighthouse, replica_id=name)


def outcome(act: Callable[[], Any]) -> Any:
    """Return the result of a call, or the name of the error's class."""
    try:
        return act()
    except Exception as error:  # noqa: BLE001 - the test reads it
        return type(error).__name__
