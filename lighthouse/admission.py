"""What a lighthouse accepts: limits on what a replica group says of itself.

Each check returns the complaint as a text, or None. The checks stand between the wire and the quorum core, so
that one replica group, broken or hostile, cannot make a message that none of the others can receive, an
id that none of them can count on from, or a name that spoils a terminal. What a member says within
these limits is believed: see docs/security.md.

INVARIANT: what the core gives out is let in again. Otherwise one replica that reports a number at the limit
would shut out all others, which are given one beyond it. After a restart of the lighthouse, which remembers
nothing, that holds once as much time has gone by as the numbers had been ahead of the limit: they grow by
less than one in a millisecond, and leap by seconds or minutes where a clock was set back.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from lighthouse.address import parse_address
from lighthouse.core.config import LighthouseConfig
from lighthouse.core.decisions import STEP_MAX
from lighthouse.core.hosts import HostList
from lighthouse.core.identity import about_job_id
from lighthouse.core.left_out import REPORTED_CHARACTERS_MAX, REPORTED_MAX
from lighthouse.core.membership import QuorumNumber
from lighthouse.core.trust import is_token
from lighthouse.errors import AddressError
from lighthouse.wire import torchft_pb2 as pb

TEXT_MAX = 4096  # characters of an id, an address or a reason
IDENTITY_BYTES_MAX = 256 * 1024
VACANCY_BYTES_MAX = 64 * 1024
HOSTS_MAX = 1024  # of one replica group
_GROUP_BEGINS = 3  # protobuf's wire type

# Quorum ids begin at the wall clock's milliseconds. A report that is farther ahead of it than this is no id
# of any lighthouse; one that is not leaves room to count on from.
AHEAD_MS_MAX = 100 * 365 * 24 * 60 * 60 * 1000


def about_replica(replica_id: str) -> str | None:
    """Check the name of a replica."""
    if not replica_id:
        return "replica_id is empty"
    if len(replica_id) > TEXT_MAX:
        return f"replica_id is longer than {TEXT_MAX} characters"
    if not replica_id.isprintable():
        return f"replica_id {replica_id!r:.100} has characters that cannot be printed"
    return None


def believable(now_ms: int, highest: QuorumNumber) -> QuorumNumber:
    """Return the highest numbers that a replica may report: ahead of the wall clock by the limit, or
    `highest`.

    Args:
        now_ms: the wall clock, in milliseconds since the Unix epoch.
        highest: the numbers that this lighthouse has used up.
    """
    ahead_ms = now_ms + AHEAD_MS_MAX
    return QuorumNumber(max(ahead_ms, highest.quorum_id), max(ahead_ms, highest.round))


def about_addresses(config: LighthouseConfig, caller: str, *addresses: str) -> str | None:
    """Check where a replica says that it serves, since others connect there: length, form and host.

    Args:
        caller: the IP address from which the replica calls.
        addresses: what it says; an empty one says nothing.
    """
    for text in filter(None, addresses):
        if len(text) > TEXT_MAX:
            return f"an address is longer than {TEXT_MAX} characters"
        try:
            host = parse_address(text.removeprefix("tls://").rstrip("/")).host
        except AddressError as error:
            return str(error)
        if config.hosts and not HostList.parse(config.hosts).admits(host, caller):
            return f"address {text!r:.200} is neither at the caller's {caller} nor at one of --hosts"
    return None


def about_register(
    register: pb.Register, config: LighthouseConfig, limit: QuorumNumber, caller: str = ""
) -> str | None:
    """Check the first message of a session; `limit` is what `believable` returned."""
    addresses = register.address, register.store_address
    if complaint := about_replica(register.replica_id) or about_addresses(config, caller, *addresses):
        return complaint
    if register.kill_token and not is_token(register.kill_token):
        return "kill_token is no token"
    for name, highest in zip(("last_quorum_id", "last_quorum_round"), limit, strict=True):
        if complaint := _about_number(name, getattr(register, name), highest):
            return complaint
    if len(register.last_quorum_replica_ids) > config.replicas_max:
        return f"last_quorum_replica_ids has more than {config.replicas_max} entries"
    complaints = map(about_replica, register.last_quorum_replica_ids)
    return next((f"last_quorum_replica_ids: {c}" for c in complaints if c), None)


def about_links(links: pb.BrokenLinks) -> str | None:
    """Check a report of links that do not work."""
    ids = links.unreachable_replica_ids
    if len(ids) > REPORTED_MAX:
        return f"unreachable_replica_ids has more than {REPORTED_MAX} entries"
    if sum(map(len, ids)) > REPORTED_CHARACTERS_MAX:
        return f"unreachable_replica_ids is longer than {REPORTED_CHARACTERS_MAX} characters"
    return next((f"unreachable_replica_ids: {c}" for c in map(about_replica, ids) if c), None)


def about_identity(identity: pb.Identity, limit: QuorumNumber) -> str | None:
    """Check what a replica group says of itself; `limit` is what `believable` returned."""
    if (size := identity.ByteSize()) > IDENTITY_BYTES_MAX:
        return f"an identity of {size} bytes is too large: {IDENTITY_BYTES_MAX} are the most"
    if complaint := about_job_id(identity.job_id):
        return f"job_id: {complaint}"
    return _about_number("first_quorum_id", identity.first_quorum_id, limit.quorum_id)


def about_member(
    member: pb.QuorumMember, config: LighthouseConfig, limit: QuorumNumber, caller: str = ""
) -> str | None:
    """Check a join; `limit` is what `believable` returned."""
    if complaint := about_replica(member.replica_id):
        return complaint
    if (size := member.ByteSize()) > config.member_bytes_max:
        return (
            f"a member of {size} bytes, addresses and data included, is too large: each of "
            f"{config.replicas_max} replicas (--replicas_max) may have {config.member_bytes_max}"
        )
    unknown: Any = UnknownFieldSet(member)
    if any(field.wire_type == _GROUP_BEGINS for field in unknown):
        return "a member with a protobuf group: in a quorum it may be nested too deep to be read"
    if len(member.rank_addresses) > HOSTS_MAX:
        return f"rank_addresses has more than {HOSTS_MAX} entries"
    of_ranks = (each.address for each in member.rank_addresses)
    if complaint := about_addresses(config, caller, member.address, member.store_address, *of_ranks):
        return complaint
    return about_step(member.step) or _about_number(
        "commit_quorum_id", member.commit_quorum_id, limit.quorum_id
    )


def about_spare(register: pb.SpareRegister, spares: int, config: LighthouseConfig) -> str | None:
    """Check the first message of a spare rank; so many others are there."""
    if spares >= config.replicas_max:
        return f"this lighthouse has its {config.replicas_max} spare ranks (--replicas_max)"
    if not register.spare_id or not register.spare_id.isprintable():
        return f"spare_id {register.spare_id!r:.100} is empty, or has characters that cannot be printed"
    return _about_lengths(spare_id=register.spare_id, host=register.host)


def about_vacancy(
    vacancy: pb.Vacancy, callers: int, config: LighthouseConfig, caller: str = ""
) -> str | None:
    """Check a place for which a spare is asked; so many other callers wait."""
    if callers >= config.replicas_max:
        return f"{config.replicas_max} ranks ask for spares already (--replicas_max)"
    if not vacancy.group_id or not 0 <= vacancy.group_rank < vacancy.world_size:
        return "a vacancy without a group, or without a rank of it"
    if (size := vacancy.ByteSize()) > VACANCY_BYTES_MAX:
        return f"a vacancy of {size} bytes is too large: {VACANCY_BYTES_MAX} are the most"
    too_long = _about_lengths(group_id=vacancy.group_id, host=vacancy.host)
    return too_long or about_addresses(config, caller, vacancy.store_address)


def _about_lengths(**texts: str) -> str | None:
    too_long = (name for name, text in texts.items() if len(text) > TEXT_MAX)
    return next((f"{name} is longer than {TEXT_MAX} characters" for name in too_long), None)


def about_step(step: int) -> str | None:
    """Check the number of a step."""
    return f"step {step} is below 0" if step < 0 else _about_number("step", step, STEP_MAX)


def _about_number(name: str, number: int, highest: int) -> str | None:
    return f"{name} {number} is beyond {highest}" if number > highest else None
