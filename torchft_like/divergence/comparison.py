"""Which replica groups of a quorum hold another state than the rest. Pure: the same list, the same answer.

A rank describes its state in a few bytes; the ManagerServer combines what its ranks say; every member
of the quorum compares what all of them said and comes to the same conclusion, so nobody has to ask
anybody. How a rank comes by its number is none of this module's business.

A group's ranks are combined as the check symbols of a Reed-Solomon code over a prime field: the sum
of their numbers, and the sum of their numbers times their ranks. Two groups that differ in one rank
differ by `d` in the first and by `rank * d` in the second, so 32 bytes say which rank it was, whether
the group has two or two thousand.

Rules:

* Compared are the members whose state ought to be the same, and only when every one of them has
  described it: a member that has not, perhaps because it is torchft's, could not come to the
  conclusion that the others come to.
* The largest set of equal members is right. Of two that are equally large it is the one with the
  lowest replica rank (`tied`: nobody can know who is right).
* Descriptions of different things (other tensors, another number of slices) are never compared. That
  is reported, but nobody heals: the state of a peer would not mend it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

LAYOUT_BYTES = 8
PRIME = 2**127 - 1

UNKNOWN_RANK = -1
_GROUP_RANK_MAX = 2**20

_RANK = struct.Struct(f">?{LAYOUT_BYTES}sQ")
_GROUP = struct.Struct(f">?{LAYOUT_BYTES}s16s16s")


class DescribedMember(Protocol):
    """A member of a quorum, as far as it matters here."""

    @property
    def replica_id(self) -> str: ...
    @property
    def fingerprint(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RankFingerprint:
    """What one rank says of its state.

    Attributes:
        heals: whether a replica that differs is to take over the state of the others.
        layout: digest of what `value` was computed over; only equal layouts can be compared.
        value: 64 bits that are the same exactly when the state is.
    """

    heals: bool
    layout: bytes
    value: int

    def to_bytes(self) -> bytes:
        """As it travels to the ManagerServer."""
        return _RANK.pack(self.heals, self.layout, self.value)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Members of a quorum whose states differ although they ought to be the same.

    Attributes:
        replica_ids: the members that are taken to be wrong.
        group_ranks: for each of them the one rank that differs, or UNKNOWN_RANK if there are several.
        kept: the members whose state is taken to be right.
        tied: another set of members is as large as `kept`; the lowest replica rank was decisive.
        comparable: False when the fingerprints are of different things.
        heals: the wrong ones take over the state of the others before they contribute again.
    """

    replica_ids: tuple[str, ...]
    group_ranks: tuple[int, ...]
    kept: tuple[str, ...]
    tied: bool
    comparable: bool
    heals: bool


def combine(fingerprints: Sequence[bytes]) -> bytes:
    """What a replica group says of its state: all ranks' fingerprints, in the order of their ranks.

    Empty when a rank has none, or one of another form.
    """
    if b"" in fingerprints or any(len(fingerprint) != _RANK.size for fingerprint in fingerprints):
        return b""
    ranks = [RankFingerprint(*_RANK.unpack(fingerprint)) for fingerprint in fingerprints]
    layout = hashlib.blake2b(b"".join(rank.layout for rank in ranks), digest_size=LAYOUT_BYTES)
    checks = _checks([rank.value for rank in ranks])
    return _GROUP.pack(all(rank.heals for rank in ranks), layout.digest(), *(c.to_bytes(16) for c in checks))


def compare(members: Sequence[DescribedMember]) -> Divergence | None:
    """Who differs from the others, or None.

    Args:
        members: those whose state ought to be the same, in the order of their replica ranks.
    """
    if len({member.fingerprint for member in members}) < 2:
        return None
    groups = [_Group.parse(member.fingerprint) for member in members]
    described = [group for group in groups if group is not None]
    if len(described) < len(members):
        return None
    comparable = len({group.layout for group in described}) == 1
    sets = _equal([group.checks if comparable else group.layout for group in described])
    if len(sets) == 1:
        return None
    kept, *others = sorted(sets, key=lambda ranks: (-len(ranks), ranks))
    wrong = sorted(rank for ranks in others for rank in ranks)
    right = described[kept[0]]
    return Divergence(
        replica_ids=tuple(members[rank].replica_id for rank in wrong),
        group_ranks=tuple(_locate(right, described[rank], comparable) for rank in wrong),
        kept=tuple(members[rank].replica_id for rank in kept),
        tied=len(others[0]) == len(kept),
        comparable=comparable,
        heals=comparable and all(group.heals for group in described),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    heals: bool
    layout: bytes
    checks: tuple[int, int]

    @classmethod
    def parse(cls, fingerprint: bytes) -> _Group | None:
        if len(fingerprint) != _GROUP.size:
            return None
        heals, layout, first, second = _GROUP.unpack(fingerprint)
        return cls(heals, layout, (int.from_bytes(first), int.from_bytes(second)))


def _checks(values: Sequence[int]) -> tuple[int, int]:
    return sum(values) % PRIME, sum(rank * value for rank, value in enumerate(values)) % PRIME


def _locate(right: _Group, wrong: _Group, comparable: bool) -> int:
    """The only rank in which two groups differ, if it is only one."""
    first, second = (w - r for w, r in zip(wrong.checks, right.checks, strict=True))
    if not comparable or first % PRIME == 0:
        return UNKNOWN_RANK
    rank = second * pow(first, -1, PRIME) % PRIME
    return rank if rank <= _GROUP_RANK_MAX else UNKNOWN_RANK


def _equal(keys: Sequence[Hashable]) -> list[list[int]]:
    """The positions of equal keys, together."""
    positions: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return list(positions.values())
