"""The vocabulary of the quorum core: its inputs and its decisions, as values without behaviour.

Decisions name sessions by the numbers that the shell gave them, and replicas by their ids.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

NO_QUORUM = -1
# In the place of the quorum in which a state was committed:
NO_STATE = -1  # there is no state, it is behind all others
DISOWNED = -2  # it is not that of the step
STEP_MAX = 10**15

Link = tuple[str, str]  # two replicas; the first has the smaller id


class QuorumState(enum.Enum):
    """The outcome of the rules: why there is no quorum yet, or by which rule there is one.

    Attributes:
        forms: whether there is a quorum now.
    """

    NOBODY = "nobody has joined"
    STARTING = "this lighthouse has just started, and members of a quorum may be about to come back"
    TOO_FEW = "fewer than min_replicas"
    NO_MAJORITY = "no more than half of the healthy have joined"
    STRAGGLERS = "not all of the healthy have joined"
    DIVIDED = "those who have joined are not of one job, and fewer than min_replicas are of any"
    BEHIND = "nobody who has joined has the steps of the last quorum, and a member of it may have them"
    FAST = "every member of the last quorum has joined"
    COMPLETE = "all of the healthy have joined"
    LATE = "join_timeout is over"

    def __init__(self, _: str) -> None:
        # A plain attribute, because it is read after every event.
        self.forms = self.name in ("FAST", "COMPLETE", "LATE")


class Member(NamedTuple):
    """A replica group as it joined: the fields of its `QuorumMember` (torchft.proto) that the rules look at.

    `may_stand` says that this replica could go on in the quorum without asking for the next one;
    `own_failure` what it spoilt its last quorum with, by itself, and `own_failures` how often it has
    (`left_out.py`); `takes_secret` that it meets and heals with the secret of the quorum; `timeout_ms` how
    long it may take to heal. `message` is the whole of it, which the other members of the quorum receive. The
    core does not look into it.
    """

    replica_id: str
    step: int = 0
    shrink_only: bool = False
    commit_failures: int = 0
    commit_quorum_id: int = 0
    broken_quorum_id: int = 0
    message: object = None
    may_stand: bool = False
    own_failure: str = ""
    own_failures: int = 0
    takes_secret: bool = False
    timeout_ms: int = 0

    @property
    def version(self) -> tuple[int, int]:
        """The version of its state: the step, and the quorum in which that was committed."""
        return self.step, self.commit_quorum_id


class Quorum(NamedTuple):
    """The replica groups that train together; participants are sorted by replica id. They go on in a quorum
    that `stands` without asking for the next one (`StandingQuorum`). `first_quorum_id` is the first quorum of
    their job (`identity.py`).
    """

    quorum_id: int
    round: int
    participants: tuple[Member, ...]
    stands: bool = False
    first_quorum_id: int = 0

    @property
    def takes_secret(self) -> bool:
        """Whether the members meet and heal with a secret: all of them, or none, as they could not meet."""
        return all(member.takes_secret for member in self.participants)


class QuorumFormed(NamedTuple):
    """Answer these sessions and these open unary calls (replica ids) with the quorum.

    `new_id` tells whether it has an id of its own; `joined` and `left` are the difference to the
    members of the last quorum; `unproven` members claim a state that nothing shows (`claims.py`).
    """

    quorum: Quorum
    sessions: tuple[int, ...]
    callers: tuple[str, ...]
    new_id: bool
    joined: tuple[str, ...]
    left: tuple[str, ...]
    unproven: tuple[str, ...] = ()


class MemberLost(NamedTuple):
    """A replica is gone without a leave: tell these sessions, all of which are in the quorum with it.

    `quorum_id` is NO_QUORUM if the replica was not in the last quorum; the sessions are those of replicas
    that cannot reach it, then.
    """

    quorum_id: int
    replica_id: str
    reason: str
    sessions: tuple[int, ...]


class SessionSuperseded(NamedTuple):
    """The replica registered anew: close this older session, which no longer speaks for it."""

    session: int
    replica_id: str


class QuorumOver(NamedTuple):
    """The quorum that the replica reports broke while it had no session: tell it so in this new session.

    The replica missed the alarm, and what it waits for in that quorum will not come. Where it `must_answer`,
    others wait until it says that it commits nothing more in that quorum.
    """

    session: int
    replica_id: str
    quorum_id: int
    must_answer: bool = False


class QuorumBroken(NamedTuple):
    """A member cannot go on in the last quorum: tell these sessions, which are in it, not to wait for it."""

    quorum_id: int
    replica_id: str
    sessions: tuple[int, ...]


class LeftOut(NamedTuple):
    """This quorum was formed without these replicas, although they had joined, because these links do not
    work, or because some, with `reasons`, spoil quorums by themselves, or are spares.

    They stay joined. Tell those of their sessions that have not been told since they joined. Where too few
    would have stayed in the quorum, `replica_ids` lacks those with a reason, and all ends of links.
    """

    quorum_id: int
    replica_ids: tuple[str, ...]
    links: tuple[Link, ...]
    sessions: tuple[tuple[int, str], ...]  # each with its replica
    reasons: tuple[tuple[str, str], ...] = ()  # replicas, each with what it has failed with, and for how long


class Refused(NamedTuple):
    """The replica is foreign to the job: end its session, and tell it why. It counts no more."""

    session: int
    replica_id: str
    reason: str


class HoldQuorum(NamedTuple):
    """Ask these sessions, which are in the quorum, to begin no further step until they are told more.

    `replica_id` is the replica for which they hold: one that wants a quorum, or has left.
    """

    quorum_id: int
    round: int
    replica_id: str
    sessions: tuple[int, ...]


class QuorumReleased(NamedTuple):
    """Tell these sessions at which step all members of the quorum ask for the next one."""

    quorum_id: int
    round: int
    ask_at: int
    sessions: tuple[int, ...]


class FindMembers(NamedTuple):
    """Find out which of these replicas' processes are gone: their quorum cannot go on, and others need not
    wait for what they have.
    """

    replica_ids: tuple[str, ...]


Decision = (
    QuorumFormed
    | MemberLost
    | SessionSuperseded
    | QuorumOver
    | QuorumBroken
    | LeftOut
    | Refused
    | HoldQuorum
    | QuorumReleased
    | FindMembers
)
