"""What the quorum core speaks of and what it decides: values without behaviour.

Decisions name sessions by the numbers that the shell gave them, and replicas by their ids.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

NO_QUORUM = -1

Link = tuple[str, str]  # between these two replicas, of which the first has the smaller id


class Verdict(enum.Enum):
    """The outcome of the rules: why there is no quorum yet, or by which rule there is one.

    Attributes:
        forms: whether there is a quorum now.
    """

    NOBODY = "nobody has joined"
    TOO_FEW = "fewer than min_replicas"
    NO_MAJORITY = "no more than half of the healthy have joined"
    STRAGGLERS = "not all of the healthy have joined"
    FAST = "every member of the last quorum has joined"
    COMPLETE = "all of the healthy have joined"
    LATE = "join_timeout is over"

    def __init__(self, _: str) -> None:
        self.forms = self.name in ("FAST", "COMPLETE", "LATE")  # asked after every event


class Member(NamedTuple):
    """A replica group as it joined: the fields of its `QuorumMember` (torchft.proto) that the rules look at.

    `message` is all of it, which the other members of the quorum get: to the core it is opaque.
    """

    replica_id: str
    step: int = 0
    shrink_only: bool = False
    commit_failures: int = 0
    commit_quorum_id: int = 0
    broken_quorum_id: int = 0
    message: object = None


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


class LeftOut(NamedTuple):
    """This quorum was formed without these, who had joined, because these links do not work: news.

    They stay joined. Tell those sessions of theirs, which have not been told since they joined. Nobody is
    left out, although there are such links, where too few would have stayed.
    """

    quorum_id: int
    replica_ids: tuple[str, ...]
    links: tuple[Link, ...]
    sessions: tuple[tuple[int, str], ...]  # with the replica of each


Decision = QuorumFormed | MemberLost | SessionSuperseded | QuorumOver | QuorumBroken | LeftOut
