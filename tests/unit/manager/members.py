"""Members of a quorum, as the lighthouse tells of them."""

from __future__ import annotations

from typing import Any

from lighthouse.wire import torchft_pb2 as pb


def member(replica_id: str, step: int = 5, commit_quorum_id: int = 3, **more: Any) -> pb.QuorumMember:
    """Return a member that is reached, with its store, at the host of its name."""
    where = {"address": f"http://{replica_id}:1", "store_address": f"{replica_id}:2"}
    return pb.QuorumMember(
        replica_id=replica_id, step=step, commit_quorum_id=commit_quorum_id, **{**where, **more}
    )
