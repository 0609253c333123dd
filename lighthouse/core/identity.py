"""A lighthouse decides which replica groups belong to its job, and which are foreign to it. It is pure.

A replica group may identify itself: by the id of its job, if the operator gave one; the quorum in which the
training of its state began, which travels with the state and its checkpoints; the form of its state, by rank;
the protocol that its version speaks with other groups. Two replica groups are of one job if they differ in
nothing that both of them say (`why_foreign`): one whose state is yet to begin joins those that are at step
5,000, and torchft's callers, which say nothing, join any job.

The job is that of the members of the last quorum, for as long as one of them is there. A replica group that
differs from all of them is refused as soon as it says so, so no member has to wait for it. When none of them
is left, another job may begin; where those that come to its first quorum differ, the job is that of most of
them, then that of those whose state is the newest, then that of those that came first (`choose`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from lighthouse.core.decisions import Member
from lighthouse.core.state_form import StateForm, first_difference

JOB_ID_MAX = 256


@dataclass(frozen=True, slots=True)
class Identity:
    """What a replica group says of itself.

    Attributes:
        job_id: the name of its job, "" if none was given.
        first_quorum_id: the quorum in which the training of its state began, 0 if it is yet to begin.
        forms: the forms of its ranks' states, by rank; empty if it has no state to exchange.
        protocol: the number of what its ranks say to those of other replica groups, 0 if it says none.
    """

    job_id: str = ""
    first_quorum_id: int = 0
    forms: tuple[StateForm, ...] = ()
    protocol: int = 0

    def filled(self, other: Identity) -> Identity:
        """Return this identity, with what the other one says where this one says nothing."""
        return Identity(
            self.job_id or other.job_id,
            self.first_quorum_id or other.first_quorum_id,
            self.forms or other.forms,
            self.protocol or other.protocol,
        )


def about_job_id(job_id: str) -> str | None:
    """Check the name of a job; return the complaint, None if there is none."""
    if len(job_id) > JOB_ID_MAX:
        return f"it is longer than {JOB_ID_MAX} characters"
    return None if job_id.isprintable() else f"{job_id!r:.100} has characters that cannot be printed"


def why_foreign(own: Identity, job: Identity) -> str:
    """Return the first thing in which a newcomer differs from a job, "" if it may belong to it.

    States that began apart are of one job if the operator says so, by one job id.
    """
    if own.protocol and job.protocol not in (0, own.protocol):
        return (
            f"its version of torchft_like speaks protocol {own.protocol} with other replica groups, and that "
            f"of the job speaks {job.protocol}: start all replica groups of a job with one version"
        )
    if own.job_id and job.job_id and own.job_id != job.job_id:
        return (
            f"its job id is {own.job_id!r}, and that of the job is {job.job_id!r}; if both are one job, give "
            "all replicas the same job_id, else give this one its own job's lighthouse"
        )
    is_named = bool(own.job_id and job.job_id)
    if not is_named and own.first_quorum_id and job.first_quorum_id not in (0, own.first_quorum_id):
        return (
            f"the training of its state began in quorum {own.first_quorum_id}, and that of the job in "
            f"quorum {job.first_quorum_id}; if both are one job, give all replicas the same job_id"
        )
    return _why_other_state(own, job) if own.forms and job.forms else ""


def _why_other_state(own: Identity, job: Identity) -> str:
    if len(own.forms) != len(job.forms):
        return (
            f"the newcomer has {len(own.forms)} ranks, and replica groups of the job have {len(job.forms)}: "
            "all replica groups of a job have the same number of ranks (WORLD_SIZE)"
        )
    for rank, (form, others) in enumerate(zip(own.forms, job.forms, strict=True)):
        if (difference := first_difference(form, others)) is not None:
            where = f"rank {rank}: " if len(own.forms) > 1 else ""
            return where + difference.sentence("the newcomer", "the job")
    return ""


class Identities:
    """The identities of replica groups; most of them say the same.

    Args:
        job_id: the job of the lighthouse, "" if the operator gave none.
    """

    def __init__(self, job_id: str = "") -> None:
        self._job = Identity(job_id)
        self._of: dict[str, Identity] = {}

    def describe(self, replica_id: str, identity: Identity) -> None:
        """Record what a replica group says of itself now."""
        self._of[replica_id] = identity

    def forget(self, replica_id: str) -> None:
        """Forget a replica group that is gone."""
        self._of.pop(replica_id, None)

    def first_quorum_id(self, replica_ids: Iterable[str]) -> int:
        """Return where the state of these began, by the first of them that says it; 0 if none does."""
        began = (self._of[i].first_quorum_id for i in replica_ids if i in self._of)
        return next(filter(None, began), 0)

    def why_foreign(self, replica_id: str, members: Iterable[str], first_quorum_id: int) -> str:
        """Return why a replica group is foreign to the lighthouse, or to all of the running job's members
        that have said who they are; "" if it is not.

        Args:
            first_quorum_id: where the state of the members began, 0 if that is not known.
        """
        own = self._of.get(replica_id)
        if own is None:
            return ""
        if why := why_foreign(own, self._job):
            return why
        began, reasons = Identity(first_quorum_id=first_quorum_id), []
        for member in members:
            if (theirs := self._of.get(member)) is None:
                continue
            if not (why := why_foreign(own, began.filled(theirs))):
                return ""
            reasons.append((member, why))
        return min(reasons)[1] if reasons else ""

    def choose(self, joined: Sequence[Member], last: Collection[str]) -> tuple[int, dict[str, str]]:
        """Choose the job of those that have joined; return how many may stay, and why each of the others may
        not.

        Args:
            joined: the replica groups in the order in which they came.
            last: the members of the last quorum, whose job it is if one of them is there. They stay, whatever
              they say now.
        """
        parts: list[_Part] = []
        for member in joined:
            if (identity := self._of.get(member.replica_id)) is None:
                continue
            part = next((part for part in parts if not why_foreign(identity, part.identity)), None)
            if part is None:
                parts.append(part := _Part(identity))
            part.add(member, identity, is_of_the_last=member.replica_id in last)
        if len(parts) < 2:
            return len(joined), {}
        job = max(parts, key=lambda part: (part.members_of_the_last, len(part.ids), part.newest))
        others = (replica_id for part in parts if part is not job for replica_id in part.ids)
        foreign = {
            replica_id: why
            for replica_id in others
            if replica_id not in last
            if (why := why_foreign(self._of[replica_id], job.identity))  # it may be alike to several parts
        }
        return len(joined) - len(foreign), foreign


@dataclass(slots=True)
class _Part:
    """Replica groups that may be of one job."""

    identity: Identity
    ids: list[str] = field(default_factory=list)
    members_of_the_last: int = 0
    newest: tuple[int, int] = (0, 0)

    def add(self, member: Member, identity: Identity, *, is_of_the_last: bool) -> None:
        self.identity = self.identity.filled(identity)
        self.ids.append(member.replica_id)
        self.members_of_the_last += is_of_the_last
        self.newest = max(self.newest, member.version)
