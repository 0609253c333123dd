"""What a lighthouse lets in: limits on what a replica group says of itself.

Each check gives the complaint as a text, or None. They stand between the wire and the quorum core, so
that one replica group, broken or hostile, cannot make a message that none of the others can receive, an
id that none of them can count on from, or a name that spoils a terminal. What a member says within
these limits is believed: see docs/security.md.

INVARIANT: every number that the core gives out, and hears again after a restart, is let in again.
"""

from __future__ import annotations

from lighthouse.config import LighthouseConfig
from lighthouse.wire import torchft_pb2 as pb

TEXT_MAX = 4096  # characters of an id, an address, or a reason
STEP_MAX = 10**15

# Quorum ids begin at the wall clock's milliseconds and, like rounds, grow by less than one in each. A
# report that is farther ahead than this is no id of any lighthouse; one that is not leaves room to count.
AHEAD_MS_MAX = 100 * 365 * 24 * 60 * 60 * 1000


def about_replica(replica_id: str) -> str | None:
    """A name."""
    if not replica_id:
        return "replica_id is empty"
    if len(replica_id) > TEXT_MAX:
        return f"replica_id is longer than {TEXT_MAX} characters"
    if not replica_id.isprintable():
        return f"replica_id {replica_id!r:.100} has characters that cannot be printed"
    return None


def about_register(register: pb.Register, config: LighthouseConfig, now_ms: int) -> str | None:
    """The first message of a session; `now_ms` is the wall clock's."""
    if complaint := about_replica(register.replica_id):
        return complaint
    for name in ("address", "store_address"):
        if len(getattr(register, name)) > TEXT_MAX:
            return f"{name} is longer than {TEXT_MAX} characters"
    for name in ("last_quorum_id", "last_quorum_round"):
        if complaint := _about_number(name, getattr(register, name), now_ms + AHEAD_MS_MAX):
            return complaint
    if len(register.last_quorum_replica_ids) > config.replicas_max:
        return f"last_quorum_replica_ids has more than {config.replicas_max} entries"
    complaints = map(about_replica, register.last_quorum_replica_ids)
    return next((f"last_quorum_replica_ids: {c}" for c in complaints if c), None)


def about_member(member: pb.QuorumMember, config: LighthouseConfig, now_ms: int) -> str | None:
    """A join; `now_ms` is the wall clock's."""
    if complaint := about_replica(member.replica_id):
        return complaint
    if (size := member.ByteSize()) > config.member_bytes_max:
        return (
            f"a member of {size} bytes, addresses and data included, is too large: each of "
            f"{config.replicas_max} replicas (--replicas_max) may have {config.member_bytes_max}"
        )
    if member.step < 0:
        return f"step {member.step} is below 0"
    return _about_number("step", member.step, STEP_MAX) or _about_number(
        "commit_quorum_id", member.commit_quorum_id, now_ms + AHEAD_MS_MAX
    )


def _about_number(name: str, number: int, highest: int) -> str | None:
    return f"{name} {number} is beyond {highest}" if number > highest else None
