"""The functions that test_elastic runs on members of an elastic coordinator, and on replicas with a managed
one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from torchft_like import Manager, ProcessGroupGloo
from torchft_like.group_coordinator import (
    CoordinatorOptions,
    ElasticCoordinator,
    ManagedCoordinator,
    Membership,
)
from torchft_like.group_coordinator.elastic.ballot import Ballot

Here = SimpleNamespace
PATIENCE_S = 300.0  # far above any limit of the tests, so that a test fails that ends by it


def make(here: Here, rank: int, name: str) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHFT_CHECK_COLLECTIVES"] = "1"  # on all members alike, whichever fixture started them
    here.coordinator = ElasticCoordinator(name, options=CoordinatorOptions(timeout=PATIENCE_S))


def begin(here: Here, rank: int, epoch: int, address: str, members: Sequence[str]) -> None:
    here.change = here.coordinator.begin_change(Membership(epoch, address, tuple(members)))


def begin_and_say_nothing(here: Here, rank: int, epoch: int, address: str, members: Sequence[str]) -> bool:
    """Meet the others and then stop for ever; return when the member has come so far."""
    has_met = threading.Event()

    def say_nothing(ballot: Ballot, rank: int, text: str) -> None:
        has_met.set()
        threading.Event().wait()

    setattr(Ballot, "say", say_nothing)  # noqa: B010 - on purpose
    begin(here, rank, epoch, address, members)
    return has_met.wait(50)


def wait_ready(here: Here, rank: int) -> bool:
    return bool(here.change.wait_ready(50))


def complete(here: Here, rank: int) -> str:
    """Complete the change; return the class of the error, "" if there is none."""
    try:
        here.change.complete()
    except Exception as error:  # noqa: BLE001 - the test reads it
        return type(error).__name__
    return ""


def complete_aside(here: Here, rank: int) -> None:
    threading.Thread(target=complete, args=(here, rank), daemon=True).start()


def total(here: Here, rank: int) -> float | str:
    """Return the sum of ones over the members, or the class of the error."""
    try:
        return float(here.coordinator.all_reduce(torch.ones(1)).item())
    except Exception as error:  # noqa: BLE001 - the test reads it
        return type(error).__name__


def begin_total(here: Here, rank: int) -> None:
    here.totals = []
    here.totalling = threading.Thread(target=lambda: here.totals.append(total(here, rank)), daemon=True)
    here.totalling.start()


def end_total(here: Here, rank: int) -> float | str:
    here.totalling.join(50)
    found: float | str = here.totals[0] if here.totals else "still blocked"
    return found


def place(here: Here, rank: int) -> tuple[int, int, int]:
    found = here.coordinator
    return found.epoch, found.rank_in_group, found.world_size


# --------------------------------------------------------------------------------- replicas


def join(here: Here, rank: int, name: str, lighthouse: str) -> None:
    torch.set_num_threads(1)
    here.manager = Manager(
        pg=ProcessGroupGloo(PATIENCE_S),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=1,
        use_async_quorum=False,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        replica_id=name,
        hostname="127.0.0.1",
        timeout=PATIENCE_S,
        init_sync=False,
    )
    here.coordinator = ManagedCoordinator(here.manager)
    here.old = None


def step(here: Here, rank: int) -> dict[str, Any]:
    """Run one step: tokens go to experts that return them and back; also wait for a handle of the last
    quorum.
    """
    here.manager.start_quorum()
    found: dict[str, Any] = {"error": ""}
    try:
        epoch = here.coordinator.refresh()
        tokens = torch.ones(rank + 1, 2)
        gathered, _ = here.coordinator.dispatch(tokens, tokens)
        found["combined"] = sorted(set(here.coordinator.combine(gathered).flatten().tolist()))
        found["place"] = here.coordinator.rank_in_group, here.coordinator.world_size
        found["old"] = _outcome(here.old)
        if here.old is None or here.old[0] != epoch:
            sent = {"x": torch.ones(1)} if here.coordinator.is_first_rank else None
            here.old = epoch, here.coordinator.ibroadcast_tensor_dict(sent)
    except Exception as error:  # noqa: BLE001 - the test reads it
        found["error"] = type(error).__name__
    found["committed"] = here.manager.should_commit()
    return found


def open_step(here: Here, rank: int) -> int:
    here.manager.start_quorum()
    return int(here.coordinator.refresh())


def close_step(here: Here, rank: int) -> bool:
    return bool(here.manager.should_commit())


def _outcome(old: Any) -> str:
    if old is None:
        return "none"
    try:
        return str(old[1].wait(50)["x"].item())
    except Exception as error:  # noqa: BLE001 - the test reads it
        return type(error).__name__
