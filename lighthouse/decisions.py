"""What the quorum core speaks of and what it decides: values without behaviour.

Decisions name sessions by the numbers that the shell gave them, and replicas by their ids.
"""

from __future__ import annotations

from typing import NamedTuple

NO_QUORUM = -1


class Member(NamedTuple):
    """A replica group as it joined; the fields are those of `QuorumMember` in torchft.proto."""

    replica_id: str
    address: str = ""
    store_address: str = ""
    step: int = 0
    world_size: int = 1
    shrink_only: bool = False
    data: str = ""
    commit_failures: int = 0
    commit_quorum_id: int = 0
    fingerprint: bytes = b""
    broken_quorum_id: int = 0


class Quorum(NamedTuple):
    """The replica groups that train together; participants are sorted by replica id."""

    quorum_id: int
    round: int
    participants: tuple[Member, ...]


class QuorumFormed(NamedTuple):
    """Answer these sessions and these open unary calls (replica ids) with the quorum.

    `new_id` tells whether it has an id of its own; `joined` and `left` are the difference to the
    members of the last quorum.
    """

    quorum: Quorum
    sessions: tuple[int, ...]
    callers: tuple[str, ...]
    new_id: bool
    joined: tuple[str, ...]
    left: tuple[str, ...]


class MemberLost(NamedTuple):
    """A replica is gone without a leave: tell these sessions, all of them in the quorum with it.

    `quorum_id` is NO_QUORUM, and nobody is to be told, if it was not in the last quorum.
    """

    quorum_id: int
    replica_id: str
    reason: str
    sessions: tuple[int, ...]


class SessionSuperseded(NamedTuple):
    """The replica registered anew: close this older session of it, which speaks for it no more."""

    session: int
    replica_id: str


class QuorumOver(NamedTuple):
    """The quorum that the replica reports broke while it had no session: tell it, in this new one.

    It missed the alarm, and what it waits for in that quorum will not come.
    """

    session: int
    replica_id: str
    quorum_id: int


class QuorumBroken(NamedTuple):
    """A member cannot go on in the last quorum: tell these sessions, all in it, not to wait for it."""

    quorum_id: int
    replica_id: str
    sessions: tuple[int, ...]


Decision = QuorumFormed | MemberLost | SessionSuperseded | QuorumOver | QuorumBroken
