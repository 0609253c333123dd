"""The members of a coordinator decide by two quorums, all alike, whether they switch to new members.

A member

1. asks the lighthouse for a quorum. The answer has the id of the present members where nothing has changed,
   or a new id: a proposal, whose members meet in new process groups beside the old ones;
2. votes: once it has met them it asks a second time, with `shrink_only`, so that no newcomer is let in;
3. reads the answer. The id of the proposal means that all its members switch, if all have voted for it;
   another id means that none does, and is that of the next proposal.

The lighthouse decides by the rule by which it keeps the id of a quorum: every member has asked again, none of
them with a failure, and none was lost since the id was given. Each request says which quorum it comes from,
as a replica's says which one its state is of, and the answer brings what all have said: an old request that
was late does not pass for a vote. A member that gives a proposal up asks with a failure, which names the
proposal: the others are told not to wait for it.

INVARIANTS
* A member that has not voted on a proposal knows that nobody has switched to it, or will.
* Whoever is answered after its vote is bound by the answer, which is the same for all. One that lost its line
  to the lighthouse in between, and is answered with another id, is in doubt: the others may have switched,
  heard that it was gone, and asked anew. It has no members until the next change.
* Ids only grow. The answer to a request that was replaced since has an id that was given up: it is not taken.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from torchft_like.core.replica_group import RankJoin


class Stage(enum.Enum):
    """The state of a member between two answers of the lighthouse."""

    IDLE = "it asks for nothing"
    ASKED = "it waits for a quorum"
    MEETING = "it meets the members of a proposal, or has met them"
    VOTED = "it waits for the answer to its vote"


class Answer(enum.Enum):
    """The meaning of a quorum for the member that is told of it."""

    UNASKED = "it waits for none"
    OUTDATED = "an earlier request was answered: ask again"
    NOTHING_NEW = "the present members are still the members"
    PROPOSAL = "meet its members"
    SWITCH = "the members of the proposal are the members"
    SPOILED = "the proposal is off, as not all have voted for it: ask again"
    ROLL_BACK = "the proposal is off, and this is the next one: meet its members"
    IN_DOUBT = "the same, and whether the others have switched is not known"


def request(shrink_only: bool, quorum_id: int, broken_quorum_id: int) -> RankJoin:
    """Return the request for a quorum of a replica group of one rank, which has no state.

    Args:
        shrink_only: newcomers shall wait.
        quorum_id: the id of the quorum whose members this one has, or votes for; 0 for none.
        broken_quorum_id: the last quorum, if this member can use it no more; 0 if it can.
    """
    return RankJoin(
        group_rank=0,
        step=0,
        checkpoint_metadata="",
        shrink_only=shrink_only,
        init_sync=False,
        commit_failures=int(broken_quorum_id > 0),
        commit_quorum_id=quorum_id,
        broken_quorum_id=broken_quorum_id,
        takes_secret=True,
    )


@dataclass
class Candidate:
    """The part of one member in all changes, one after the other.

    Attributes:
        epoch: the id of the quorum whose members it has; 0 for none.
        proposed: the id of the proposal; 0 for none.
        stage: what it is doing.
        was_away: whether its line to the lighthouse was lost since the last answer, or its vote.
    """

    epoch: int = 0
    proposed: int = 0
    stage: Stage = Stage.IDLE
    was_away: bool = False
    _last: int = 0  # id that it was told
    _given_up: int = 0  # the newest id that it can use no more

    def ask(self, *, shrink_only: bool = False) -> RankJoin:
        """Ask for the next quorum; return what the member says, which it may say again.

        Args:
            shrink_only: newcomers shall wait; one that has no members is a newcomer itself.
        """
        self.stage = Stage.ASKED
        broken_quorum_id = self._last if self._last <= self._given_up else 0
        return request(shrink_only and self.epoch > 0, self.epoch, broken_quorum_id)

    def vote(self) -> RankJoin:
        """Vote for the proposal, whose members this one has met."""
        self.stage, self.was_away = Stage.VOTED, False
        return request(True, self.proposed, 0)

    def disconnected(self) -> RankJoin | None:
        """Note that the line to the lighthouse is lost; return what the member says when the line is back.

        The others may go on without this member: a request to shrink would then keep it out.
        """
        self.was_away = True
        if self.stage is Stage.VOTED:
            return request(False, self.proposed, 0)
        return self.ask() if self.stage is Stage.ASKED else None

    def answered(self, quorum_id: int, *, is_unanimous: bool = True) -> Answer:
        """Take up a quorum with this member, of which the lighthouse tells.

        Args:
            is_unanimous: whether all members of it have asked for it with the same quorum_id.
        """
        stage, was_away = self.stage, self.was_away
        self._last = max(self._last, quorum_id)
        if stage in (Stage.IDLE, Stage.MEETING):
            self._given_up = max(self._given_up, quorum_id)
            return Answer.UNASKED
        if stage is Stage.ASKED and quorum_id <= self._given_up:
            return Answer.OUTDATED
        self.was_away = False
        if stage is Stage.VOTED:
            return self._counted(quorum_id, is_unanimous=is_unanimous, was_away=was_away)
        if quorum_id == self.epoch:
            self.stage = Stage.IDLE
            return Answer.NOTHING_NEW
        self.proposed, self.stage = quorum_id, Stage.MEETING
        return Answer.PROPOSAL

    def _counted(self, quorum_id: int, *, is_unanimous: bool, was_away: bool) -> Answer:
        """Take up the answer to the vote."""
        if quorum_id == self.proposed:
            if is_unanimous:
                self.epoch, self.proposed, self.stage = quorum_id, 0, Stage.IDLE
                return Answer.SWITCH
            self.withdraw()
            return Answer.SPOILED
        self._given_up = max(self._given_up, self.proposed)
        self.proposed, self.stage = quorum_id, Stage.MEETING
        if was_away:
            self.lose_members()
        return Answer.IN_DOUBT if was_away else Answer.ROLL_BACK

    def give_up(self) -> RankJoin | None:
        """Give up the proposal, on which this member has not voted, and ask for the next quorum.

        Returns:
            What the member says; None if it has asked already and was not answered yet.
        """
        if self.stage is Stage.ASKED:
            return None
        self._given_up, self.proposed = max(self._given_up, self.proposed), 0
        return self.ask()

    def withdraw(self) -> None:
        """Take no part in a change until the member asks again."""
        self._given_up, self.proposed, self.stage = max(self._given_up, self.proposed), 0, Stage.IDLE

    def lose_members(self) -> None:
        """Give up the present members, whatever becomes of a proposal."""
        self._given_up, self.epoch = max(self._given_up, self.epoch), 0
