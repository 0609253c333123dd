"""The part of one rank of one replica group in a quorum. Pure: the same quorum gives the same answer.

Every replica group computes this for itself from the member list that the lighthouse sends to all,
so the rules must be a function of that list alone. They are torchft's, with these differences.

* Replicas are up to date when both their step and the quorum in which they committed it are the newest.
  A step may be committed by a replica in a quorum that broke just then, and again by the survivors in
  the next one; the two states differ although their steps are equal.
* If the newest states are disowned, no two of them are equal: all take over one, as in the first step.
* If replicas report fingerprints of their state (`divergence.comparison`), those that differ from the rest
  are not up to date either.
* All ranks of a group heal from the same group, and after a step that was not committed from another one.
* Other groups that are up to date, a few of them, help the source: they offer their state, too; not where the
  state comes beside the steps: no step waits for it then, and each that offers its state has to copy it.
* A group that catches up (`catch_up.py`) goes on with that, and needs no other source, while the steps that
  it keeps lead to the newest state.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from operator import attrgetter
from typing import NamedTuple, Protocol

from lighthouse.core.decisions import DISOWNED
from torchft_like.core.catch_up import NOWHERE, Version
from torchft_like.core.quorum_secret import QuorumSecret
from torchft_like.core.state_comparison import Divergence, compare, is_described

SOURCES_MAX = 4  # of one healing member: each may copy its state, and a few fill the member's link


class QuorumMemberLike(Protocol):
    """A member of a quorum; the wire message has this interface."""

    replica_id: str
    address: str
    store_address: str
    step: int
    commit_failures: int
    commit_quorum_id: int
    fingerprint: bytes

    @property
    def reconfigure_handles(self) -> Sequence[str]: ...

    may_catch_up: bool
    reached_step: int
    reached_quorum_id: int
    has_fetched: bool


_replica_id = attrgetter("replica_id")


class NotAMemberError(ValueError):
    """The replica that was asked about is not in the quorum."""


class QuorumResult(NamedTuple):
    """One rank's view of a quorum; names and meaning as in torchft's ManagerQuorumResponse.

    Attributes:
        replica_rank: the position among all members, which is also this rank's rank in the process group.
        replica_world_size: the number of members.
        max_replica_rank: the position among the up-to-date members; None for a member that heals.
        max_world_size: the number of up-to-date members.
        max_step: the step of the up-to-date members.
        heal: whether this member must fetch state from `recover_src_manager_address`.
        recover_dst_replica_ranks: members that fetch their state from this one.
        source_ranks: the members that offer the state that this one heals to, its source first.
        source_addresses: their ManagerServers.
        helped_ranks: members that heal from another, to which this one offers its state, too.
        max_commit_quorum_id: the quorum in which the up-to-date members committed `max_step`.
        begins_to_catch_up: whether this member, which heals, does that beside the steps that follow.
        catches_up: whether this member goes on with the state that is on its way to it.
        is_awaited: whether offers of earlier steps are kept, for a member that catches up.
        store_address: host:port of the store for the process group's rendezvous.
        divergence: members whose state differs from that of others after the same step, if any.
        reconfigure_handles: for each member in the order of ranks, the handle of the process group of this
          group rank, "" if it gave none; empty if no member gave one.
        stands: whether the members go on in this quorum without asking for the next one.
        watched: whether all members watch for divergence.
        first_quorum_id: the first quorum of the job, 0 if the lighthouse does not say.
        secret: what the members of this quorum alone know.
        request: the request of this rank that the quorum answers.
    """

    quorum_id: int
    replica_rank: int
    replica_world_size: int
    recover_src_manager_address: str
    recover_src_replica_rank: int | None
    recover_dst_replica_ranks: tuple[int, ...]
    store_address: str
    max_step: int
    max_replica_rank: int | None
    max_world_size: int
    heal: bool
    commit_failures: int
    replica_ids: tuple[str, ...]
    healing_replica_ids: tuple[str, ...] = ()
    divergence: Divergence | None = None
    reconfigure_handles: tuple[str, ...] = ()
    stands: bool = False
    watched: bool = False
    first_quorum_id: int = 0
    source_ranks: tuple[int, ...] = ()
    source_addresses: tuple[str, ...] = ()
    helped_ranks: tuple[int, ...] = ()
    max_commit_quorum_id: int = 0
    begins_to_catch_up: bool = False
    catches_up: bool = False
    is_awaited: bool = False
    secret: QuorumSecret = QuorumSecret()
    request: int = 0

    def meeting_place(self, what: str) -> str:
        """Return the store address, `host:port/prefix`, at which the members meet for a purpose.

        It is torchft's where the quorum has no secret. Otherwise only its members know it.
        """
        key = self.secret.meeting_key
        return f"{self.store_address}/{what}" + (f"/secret={key}" if key else "")

    @property
    def checkpoint_key(self) -> str:
        """What the members show to be given each other's state; "" where none is asked for."""
        return self.secret.key("checkpoint")

    @property
    def healing_ranks(self) -> frozenset[int]:
        """The positions of the healing members among all."""
        return frozenset(map(self.replica_ids.index, self.healing_replica_ids))

    @property
    def late_ranks(self) -> frozenset[int]:
        """The positions, among the up-to-date members, of those that take over the state of another one, as
        all but one do in a first step.
        """
        behind = self.replica_world_size - self.max_world_size
        if len(self.healing_replica_ids) <= behind:
            return frozenset()
        source = _first_source(self.commit_failures, self.max_world_size)
        return frozenset(range(self.max_world_size)) - {source}


def _first_source(commit_failures: int, up_to_date: int) -> int:
    """Return the position among the up-to-date members of the first source: after a failed step another one
    may work.
    """
    return commit_failures % up_to_date


def assign(
    quorum_id: int,
    participants: Sequence[QuorumMemberLike],
    replica_id: str,
    group_rank: int,
    init_sync: bool,
) -> QuorumResult:
    """Compute the part of `group_rank` of replica group `replica_id` in a quorum.

    Args:
        init_sync: whether all members heal from one at step 0, when no state is newer than another.

    Raises:
        NotAMemberError: the quorum does not contain `replica_id`.
    """
    members = sorted(participants, key=_replica_id)
    replica_ids = tuple([member.replica_id for member in members])
    if replica_id not in replica_ids:
        raise NotAMemberError(f"replica {replica_id} is not in quorum {quorum_id}: {', '.join(replica_ids)}")
    replica_rank = replica_ids.index(replica_id)

    versions = [Version(member.step, member.commit_quorum_id) for member in members]
    newest = max(versions)
    up_to_date = [rank for rank, version in enumerate(versions) if version == newest]
    is_first = (init_sync and newest[0] == 0) or newest[1] == DISOWNED
    divergence = None if is_first else compare([members[rank] for rank in up_to_date])
    if divergence is not None and divergence.heals:
        wrong = set(divergence.replica_ids)
        up_to_date = [rank for rank in up_to_date if replica_ids[rank] not in wrong]
    commit_failures = max([member.commit_failures for member in members])
    first = _first_source(commit_failures, len(up_to_date))
    sources = up_to_date[first:] + up_to_date[:first]
    if is_first:
        del sources[1:]
    healing = sorted(set(range(len(members))).difference(sources))
    beside = {rank for rank in healing if members[rank].may_catch_up and not is_first}
    # The steps that these keep lead to the newest state.
    reached = {rank: Version(members[rank].reached_step, members[rank].reached_quorum_id) for rank in beside}
    catching_up = [rank for rank in healing if reached.get(rank, NOWHERE) == newest != NOWHERE]
    sources_of = _share_out([rank for rank in healing if rank not in catching_up], sources, beside)
    own_sources = sources_of.get(replica_rank, ())
    source = own_sources[0] if own_sources else None
    return QuorumResult(
        quorum_id=quorum_id,
        replica_rank=replica_rank,
        replica_world_size=len(members),
        recover_src_manager_address="" if source is None else members[source].address,
        recover_src_replica_rank=source,
        recover_dst_replica_ranks=tuple(
            [dst for dst, (src, *_) in sources_of.items() if src == replica_rank]
        ),
        store_address=members[up_to_date[group_rank % len(up_to_date)]].store_address,
        max_step=newest[0],
        max_replica_rank=up_to_date.index(replica_rank) if replica_rank in up_to_date else None,
        max_world_size=len(up_to_date),
        heal=source is not None,
        commit_failures=commit_failures,
        replica_ids=replica_ids,
        healing_replica_ids=tuple([replica_ids[rank] for rank in healing]),
        divergence=divergence,
        reconfigure_handles=none_if_empty([_handle(member, group_rank) for member in members]),
        watched=all(is_described(member.fingerprint) for member in members),
        source_ranks=own_sources,
        source_addresses=tuple([members[rank].address for rank in own_sources]),
        helped_ranks=tuple([dst for dst, (_, *helpers) in sources_of.items() if replica_rank in helpers]),
        max_commit_quorum_id=newest.commit_quorum_id,
        begins_to_catch_up=source is not None and replica_rank in beside,
        catches_up=replica_rank in catching_up,
        is_awaited=not all(members[rank].has_fetched for rank in catching_up),
    )


def none_if_empty(handles: Sequence[str]) -> tuple[str, ...]:
    """Return the handles of process groups, or an empty tuple if each of them is empty."""
    return tuple(handles) if any(handles) else ()


def _handle(member: QuorumMemberLike, group_rank: int) -> str:
    handles = member.reconfigure_handles
    return handles[group_rank] if group_rank < len(handles) else ""


def _share_out(
    healing: Sequence[int], sources: Sequence[int], beside: Container[int]
) -> dict[int, tuple[int, ...]]:
    """Spread the healing members over the sources, in the same way for all ranks of a group.

    Tensor parallel ranks hold copies of the same tensor, which must come from one group, and code that
    gathers the state of a group from its ranks needs all of them. The source of a member is the first of
    those that are returned; the others help it, unless the member is one of those `beside`.
    """
    count = len(sources)
    return {
        rank: tuple(
            [sources[(i + k) % count] for k in range(1 if rank in beside else min(count, SOURCES_MAX))]
        )
        for i, rank in enumerate(healing)
    }
