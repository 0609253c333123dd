"""How the members of a new generation find out, through the store, that all of them are there.

This module knows the store and the members, and nothing of the backend that they are about to make.
"""

from __future__ import annotations

import time
from datetime import timedelta

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.abortable_store import AbortableStore
from torchft_like.process_group.generation import GroupMembers


def claim_prefix(store: AbortableStore, members: GroupMembers) -> None:
    """Make sure that this rank has not used the prefix before.

    Otherwise the addresses that an earlier group left in the store would be taken for those of this one.

    Raises:
        ProcessGroupError: this rank has used the prefix before.
    """
    if store.add(f"configured/{members.rank}", 1) > 1:
        raise ProcessGroupError(
            f"rank {members.rank} has already used the store prefix {members.store.prefix!r}; "
            "every configure needs a fresh one"
        )


def meet(store: AbortableStore, members: GroupMembers) -> None:
    """Wait until every member has come here.

    This is for a backend whose own wait for a member that never comes is hard to end: this wait ends at once
    when the store is aborted.

    Raises:
        ProcessGroupError: a member did not come within the group's timeout; the text says which.
    """
    deadline = time.monotonic() + members.timeout.total_seconds()
    store.set(f"arrived/{members.rank}", "1")
    for rank in range(members.world_size):
        left_s = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([f"arrived/{rank}"], timedelta(seconds=left_s))
        except TimeoutError as error:
            raise ProcessGroupError(
                f"rank {rank} of {members.world_size} did not come within "
                f"{members.timeout.total_seconds():g} s"
            ) from error
