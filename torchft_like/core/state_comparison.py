"""Which replica groups of a quorum hold another state than the rest. Pure: the same list gives the same
answer.

A rank describes its state in a few bytes; the ManagerServer combines the descriptions of its ranks; every
member of the quorum compares those of all members and comes to the same conclusion, without a further
message. This module does not know how a rank computes its description.

A group's ranks are combined as the check symbols of a Reed-Solomon code over a prime field: the sum
of their numbers, and the sum of their numbers times their ranks. Two groups that differ in one rank
differ by `d` in the first and by `rank * d` in the second, so 32 bytes say which rank it was, whether
the group has two or two thousand.

Rules:

* The members whose state ought to be the same are compared, and only if every one of them has described it: a
  member that has not, perhaps because it is torchft's, could not come to the conclusion that the others come
  to.
* The largest set of equal members is right. Of two that are equally large it is the one with the
  lowest replica rank (`tied`: which set is right cannot be known).
* Descriptions of different things (other tensors, another number of slices) are never compared. That is
  reported, but no replica heals: the state of a peer would not mend it.

A rank describes one slice of its state after the other. The parts of the state, each padded to a multiple of
16 bytes, make one long row, which is cut into slices of equal length. So every byte is in exactly one slice,
and a part is cut only where an element of any dtype ends.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

LAYOUT_BYTES = 8
PRIME = 2**127 - 1

UNKNOWN_RANK = -1
_GROUP_RANK_MAX = 2**20

_RANK = struct.Struct(f">?{LAYOUT_BYTES}sQ")
_GROUP = struct.Struct(f">?{LAYOUT_BYTES}s16s16s")


class DescribedMember(Protocol):
    """A member of a quorum, with the fields that are compared."""

    @property
    def replica_id(self) -> str: ...
    @property
    def fingerprint(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class RankFingerprint:
    """One rank's description of its state.

    Attributes:
        heals: whether a replica that differs is to take over the state of the others.
        layout: the digest of the list of tensors over which `value` was computed; only equal layouts can be
          compared.
        value: 64 bits that are equal if, and almost only if, the states are.
    """

    heals: bool
    layout: bytes
    value: int

    def to_bytes(self) -> bytes:
        """Encode the fingerprint for the ManagerServer."""
        return _RANK.pack(self.heals, self.layout, self.value)


@dataclass(frozen=True, slots=True)
class Divergence:
    """Members of a quorum whose states differ although they ought to be the same.

    Attributes:
        replica_ids: the members that are taken to be wrong.
        group_ranks: for each of them the one rank that differs, or UNKNOWN_RANK if there are several.
        kept: the members whose state is taken to be right.
        tied: whether another set of members is as large as `kept`, so that the lowest replica rank decided.
        comparable: whether the fingerprints are of the same tensors and slices.
        heals: whether the wrong members take over the state of the others before they contribute again.
    """

    replica_ids: tuple[str, ...]
    group_ranks: tuple[int, ...]
    kept: tuple[str, ...]
    tied: bool
    comparable: bool
    heals: bool


def combine(fingerprints: Sequence[bytes]) -> bytes:
    """Combine all ranks' fingerprints, in the order of ranks, into that of the replica group.

    The result is empty if a rank has none, or one of another form.
    """
    if b"" in fingerprints or any(len(fingerprint) != _RANK.size for fingerprint in fingerprints):
        return b""
    ranks = [RankFingerprint(*_RANK.unpack(fingerprint)) for fingerprint in fingerprints]
    layout = hashlib.blake2b(b"".join(rank.layout for rank in ranks), digest_size=LAYOUT_BYTES)
    checks = sum(rank.value for rank in ranks), sum(number * rank.value for number, rank in enumerate(ranks))
    packed = [(check % PRIME).to_bytes(16) for check in checks]
    return _GROUP.pack(all(rank.heals for rank in ranks), layout.digest(), *packed)


def is_described(fingerprint: bytes) -> bool:
    """Return whether a replica group has described its state."""
    return len(fingerprint) == _GROUP.size


def compare(members: Sequence[DescribedMember]) -> Divergence | None:
    """Find the members that differ from the others; return None if none does.

    Args:
        members: the members whose state ought to be the same, in the order of their replica ranks.
    """
    if len({member.fingerprint for member in members}) < 2:
        return None
    groups = [_Group.parse(member.fingerprint) for member in members]
    described = [group for group in groups if group is not None]
    if len(described) < len(members):
        return None
    comparable = len({group.layout for group in described}) == 1
    sets: dict[Hashable, list[int]] = {}
    for rank, group in enumerate(described):
        sets.setdefault(group.checks if comparable else group.layout, []).append(rank)
    if len(sets) == 1:
        return None
    kept, *others = sorted(sets.values(), key=lambda ranks: (-len(ranks), ranks))
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
        if not is_described(fingerprint):
            return None
        heals, layout, first, second = _GROUP.unpack(fingerprint)
        return cls(heals, layout, (int.from_bytes(first), int.from_bytes(second)))


def _locate(right: _Group, wrong: _Group, comparable: bool) -> int:
    """Return the only rank in which two groups differ, or UNKNOWN_RANK if there are several."""
    first, second = (w - r for w, r in zip(wrong.checks, right.checks, strict=True))
    if not comparable or first % PRIME == 0:
        return UNKNOWN_RANK
    rank = second * pow(first, -1, PRIME) % PRIME
    return rank if rank <= _GROUP_RANK_MAX else UNKNOWN_RANK


ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `stop` of one part of the state."""

    part: int
    start: int
    stop: int


class Slices:
    """The division of a state into `count` slices.

    Args:
        sizes: the sizes of the parts, in bytes.
        count: the number of slices, 1 or more.
    """

    def __init__(self, sizes: Sequence[int], count: int) -> None:
        self._sizes = sizes
        self._count = count
        self._offsets = [0, *accumulate(_filled(size) for size in sizes)]
        self._length = _filled(-(-self._offsets[-1] // count))

    def pieces(self, number: int) -> Iterator[Piece]:
        """Yield the pieces of slice `number` modulo `count`, without empty ones."""
        begin = number % self._count * self._length
        end = min(begin + self._length, self._offsets[-1])
        part = bisect_right(self._offsets, begin) - 1
        while part < len(self._sizes) and (offset := self._offsets[part]) < end:
            start, stop = max(begin - offset, 0), min(end - offset, self._sizes[part])
            if start < stop:
                yield Piece(part, start, stop)
            part += 1


def _filled(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
