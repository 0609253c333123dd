"""The functions that test_elastic runs on members of an elastic coordinator, and on replicas with a managed
one.
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch

from tests.managers import PATIENCE_S, be_patient, manager_alone, outcome
from torchft_like import ProcessGroupGloo
from torchft_like.group_coordinator import (
    Change,
    CoordinatorOptions,
    ElasticCoordinator,
    ManagedCoordinator,
    Membership,
)
from torchft_like.group_coordinator.elastic import EpochGroups, Member

Here = SimpleNamespace
PAUSE_S = 0.005


def make(here: Here, rank: int, name: str, lighthouse: str) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHFT_CHECK_COLLECTIVES"] = "1"  # on all members alike, whichever fixture started them
    be_patient()
    options = CoordinatorOptions(timeout=PATIENCE_S)
    here.coordinator = ElasticCoordinator(name, lighthouse=lighthouse, options=options)


def follow(here: Here, rank: int, members: str) -> int:
    """Follow until these are the members; return the epoch."""
    while here.coordinator.follow().members != tuple(members):
        time.sleep(PAUSE_S)
    return int(here.coordinator.epoch)


def begin(here: Here, rank: int, members: str) -> None:
    """Begin the change to these members, and wait until they have met; other proposals are rolled back."""
    while True:
        here.change = here.coordinator.begin_change()
        here.change.wait_ready(PAUSE_S)
        proposed = here.change.membership
        if here.change.has_met and proposed.members == tuple(members):
            return
        if here.change.has_met:
            here.change.roll_back("the test wants others")
        time.sleep(PAUSE_S)


def ask(here: Here, rank: int) -> None:
    """Begin a change, and wait for nothing."""
    here.change = here.coordinator.begin_change()


def ask_and_meet_nobody(here: Here, rank: int) -> bool:
    """Begin a change, and stop for ever where the others are to be met; returns when it has come so far."""
    is_meeting = threading.Event()

    def meet_nobody(groups: EpochGroups, membership: Membership, rank: int) -> None:
        is_meeting.set()
        threading.Event().wait()

    setattr(EpochGroups, "configure", meet_nobody)  # noqa: B010 - on purpose
    ask(here, rank)
    return is_meeting.wait(50)


def proposed(here: Here, rank: int) -> str:
    """Wait until the lighthouse proposes members; return their letters."""
    while (found := here.coordinator.begin_change()).membership is None:
        time.sleep(PAUSE_S)
    here.change = found
    return "".join(found.membership.members)


def hold_votes(here: Here, rank: int) -> None:
    """Vote only after `release_votes`."""
    here.may_vote, vote = threading.Event(), Member.vote

    def held(member: Member, change: Change) -> bool:
        here.may_vote.wait(50)
        return vote(member, change)

    setattr(Member, "vote", held)  # noqa: B010 - on purpose


def release_votes(here: Here, rank: int) -> None:
    here.may_vote.set()


def wait_voted(here: Here, rank: int) -> bool:
    while not here.change._has_voted:
        time.sleep(PAUSE_S)
    return True


def complete(here: Here, rank: int) -> str:
    """Complete the change; return the class of the error, "" if there is none."""
    return outcome(here.change.complete) or ""


def complete_aside(here: Here, rank: int) -> None:
    here.completed = []
    here.completing = threading.Thread(
        target=lambda: here.completed.append(complete(here, rank)), daemon=True
    )
    here.completing.start()


def completed(here: Here, rank: int) -> str:
    here.completing.join(50)
    return str(here.completed[0]) if here.completed else "still blocked"


def total(here: Here, rank: int) -> float | str:
    """Return the sum of ones over the members, or the class of the error."""
    found: float | str = outcome(lambda: here.coordinator.all_reduce(torch.ones(1)).item())
    return found


def place(here: Here, rank: int) -> tuple[int, int, int]:
    found = here.coordinator
    return found.epoch, found.rank_in_group, found.world_size


# --------------------------------------------------------------------------------- replicas


def join(here: Here, rank: int, name: str, lighthouse: str) -> None:
    torch.set_num_threads(1)
    be_patient()
    pg = ProcessGroupGloo(PATIENCE_S)
    here.manager = manager_alone(name, lighthouse, use_async_quorum=False, pg=pg)
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
        found["old"] = "none" if here.old is None else outcome(lambda: str(here.old[1].wait(50)["x"].item()))
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
