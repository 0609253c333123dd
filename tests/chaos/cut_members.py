"""The functions that test_cut_members runs on its hosts."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import torch

from lighthouse.address import Address
from tests.managers import PATIENCE_S, error_of, manager_alone
from torchft_like import ProcessGroupGloo
from torchft_like.gang import ManagedGang
from torchft_like.group_coordinator import CoordinatorOptions, ElasticCoordinator, ManagedCoordinator
from torchft_like.process_group.store_server import StoreServer

Here = SimpleNamespace
PAUSE_S = 0.005
CONFIGURE_S = 5.0


def serve_store(here: Here, host: str) -> str:
    here.store = StoreServer(Address(host, 0))
    return f"{here.store.address}/cut"


def configure(here: Here, store: str, number: int, size: int, checks: bool = False) -> str:
    """Configure a group; return the text of the error."""
    here.group = ProcessGroupGloo(CONFIGURE_S, check_collectives=checks)
    return str(error_of(lambda: here.group.configure(store, number, size)) or "")


def reduce(here: Here) -> str:
    """Add up a tensor once; return the text of the error."""
    return str(error_of(lambda: here.group.allreduce([torch.ones(1)]).wait()) or "")


def make_member(here: Here, name: str, lighthouse: str) -> None:
    torch.set_num_threads(1)
    options = CoordinatorOptions(timeout=PATIENCE_S)
    here.coordinator = ElasticCoordinator(name, lighthouse=lighthouse, options=options)


def follow(here: Here, members: str) -> None:
    """Follow until these are the members."""
    while here.coordinator.follow().members != tuple(members):
        time.sleep(PAUSE_S)


def serve(here: Here) -> str:
    """Make calls until one fails; return the text of its error."""
    while (error := error_of(lambda: here.coordinator.all_gather(torch.ones(1), 0))) is None:
        time.sleep(PAUSE_S)
    return str(error)


def serve_until(here: Here, members: str) -> None:
    """Make calls until these are the members, and all have met."""
    while here.coordinator.membership.members != tuple(members):
        change = here.coordinator.begin_change()
        if here.coordinator.is_due(change):
            change.complete()


def make_replica(here: Here, name: str, lighthouse: str) -> None:
    torch.set_num_threads(1)
    pg, host = ProcessGroupGloo(PATIENCE_S), os.environ["TORCHFT_HOSTNAME"]
    here.manager = manager_alone(name, lighthouse, use_async_quorum=False, pg=pg, hostname=host)
    here.faces = {"gang": ManagedGang(here.manager), "coordinator": ManagedCoordinator(here.manager)}


def train(here: Here, face: str, size: int) -> list[str]:
    """Run steps with an all-gather until one of so many members is committed; return the errors before it."""
    errors = list[str]()
    while True:
        here.manager.start_quorum()
        error = error_of(lambda: _gather(here, face))
        is_committed = here.manager.should_commit()
        if error is not None:
            errors.append(str(error))
        elif is_committed and here.manager.replica_world_size() == size:
            return errors


def _gather(here: Here, face: str) -> None:
    if face == "coordinator":
        here.faces[face].all_gather(torch.ones(1), 0)
    else:
        here.faces[face].all_gather(torch.zeros(here.faces[face].size), torch.ones(1))
