"""The functions that test_managed_gang runs on its replicas, beside `call` of gang_job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.managers import PATIENCE_S, be_patient, manager_alone, outcome
from torchft_like import ProcessGroupGloo
from torchft_like.gang import ElasticGangs, ManagedGang, ReduceOperation, all_sum, create_parallel_gangs

Here = SimpleNamespace


def join(here: Here, rank: int, name: str, lighthouse: str, use_async_quorum: bool = False) -> None:
    """Start a replica group of one rank, whose state is one number."""
    torch.set_num_threads(1)
    be_patient()
    here.state = torch.zeros(1)
    state = {"load_state_dict": lambda got: here.state.copy_(got[0]), "state_dict": lambda: [here.state]}
    pg = ProcessGroupGloo(PATIENCE_S)
    here.manager = manager_alone(name, lighthouse, use_async_quorum=use_async_quorum, pg=pg, **state)
    here.gang = ManagedGang(here.manager)
    here.gangs = ElasticGangs(here.gang, lambda root: create_parallel_gangs(root, tp_size=2))


def step(here: Here, rank: int, number: float) -> dict[str, Any]:
    """Run one step that adds the sum of the members' numbers to the state; return what the gangs of the
    quorum gave.
    """
    here.manager.start_quorum()
    found: dict[str, Any] = {}
    try:
        total = torch.tensor([number])
        here.gang.all_reduce(total, ReduceOperation.SUM)
        gangs = here.gangs.current()
        found["tp"], found["dp"] = (int(all_sum(g, number).item()) for g in (gangs.tp, gangs.dp))
    except Exception as error:  # noqa: BLE001 - the test reads it
        found["error"] = type(error).__name__
    found["size"], found["rank"] = here.gang.size, here.gang.rank
    found["committed"] = here.manager.should_commit()
    if found["committed"]:
        here.state += total
        found["state"] = here.state.item()
    return found


def step_until(here: Here, rank: int, number: float, size: int) -> dict[str, Any]:
    """Run steps until a quorum of `size` commits one; return that step, and the errors before it."""
    errors: set[str | None] = set()
    while True:
        found = step(here, rank, number)
        if found["committed"] and found["size"] == size and "error" not in found:
            return {**found, "errors": errors}
        errors.add(found.get("error"))


def open_step(here: Here, rank: int) -> int:
    """Begin a step; `call` of gang_job is called in it."""
    here.manager.start_quorum()
    here.part = None
    return int(here.gang.size)


def open_part(here: Here, rank: int) -> int:
    """Begin a step and derive the gangs; `call` is called on the tensor parallel one."""
    here.manager.start_quorum()
    here.part = here.old = here.gangs.current().tp
    return int(here.part.rank)


def use_old_part(here: Here, rank: int) -> str:
    """Use the gang of an older quorum, and return the class of the error."""
    return outcome(here.old.barrier) or "no error"


def close_step(here: Here, rank: int) -> bool:
    here.part = None
    return bool(here.manager.should_commit())


def leave(here: Here, rank: int) -> None:
    here.manager.shutdown()
