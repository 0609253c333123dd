"""A quorum that stands: its members go on in it from step to step and ask for nothing.

A quorum stands if all of its members can go on by themselves: they hold the same state, and the last step of
each had a collective that no member could complete without all others. It stands until something is news. A
loss, a broken link or a failed step ends it at once, by the alarm that these are in any quorum. News that can
wait (a newcomer, a member that leaves or that asks for a quorum by itself) ends it between two steps, so that
no member loses one:

1. the lighthouse asks the members to hold;
2. each answers with the first step that it has not begun, and begins no step until it is told more. A member
   that has asked for a quorum has answered with the step for which it asked, one that has left with the step
   before which it left;
3. the lighthouse names the greatest step of those that hold, and every member asks for a quorum at that step.

INVARIANT: a member begins no step at which another one asks. Whoever answered in 2 begins none before 3, and
no step that a member has begun is named in 3. Only one that asks by itself, or leaves, be it after 3, cannot
do as it is told; where another member has begun a step that it will not do, or it asks at a later step than
others have come to, the quorum is broken, as by a failed step.

A member whose session ends has been told nothing and promised nothing: it goes on. So what it promised in one
session is asked again in the next one, and a step that was named is named again.
"""

from __future__ import annotations

from collections.abc import Collection


class StandingQuorum:
    """The lighthouse's view of the quorum that stands.

    Attributes:
        members: the replica ids.
        since: the time at which it was formed.
        held_for: the replica for which the members were asked to hold; None if they were not.
        ask_at: the step at which all members ask for a quorum; None if it was not named yet.
    """

    def __init__(self, members: Collection[str], since: float) -> None:
        self.members = frozenset(members)
        self.since = since
        self.held_for: str | None = None
        self.ask_at: int | None = None
        self._not_begun: dict[str, int] = {}  # by member that holds: the first step that it has not begun
        self._not_done: dict[str, int] = {}  # by member that has asked or left: the first that it will not do
        self._ends: set[int] = set()  # all of these steps

    def hold(self, replica_id: str) -> list[str]:
        """Begin to hold for a replica; return the members to be asked, none if they were asked before."""
        if self.held_for is not None:
            return []
        self.held_for = replica_id
        return sorted(self.members.difference(self._not_done, self._not_begun))

    def holds(self, member: str, step: int) -> None:
        """Record that a member has not begun this step, and waits before it, unless it has asked by now."""
        if member not in self._not_done:
            self._not_begun[member] = step

    def ends_at(self, member: str, step: int) -> None:
        """Record that a member has asked for a quorum at this step, or has left before it."""
        self._not_begun.pop(member, None)
        self._not_done[member] = step
        self._ends.add(step)

    def came_back(self, member: str) -> None:
        """Forget what a member promised in a session that has ended."""
        self._not_begun.pop(member, None)

    def describe(self, now: float) -> str:
        """Describe since when it stands, or what ends it."""
        if self.held_for is None:
            return f"the quorum stands since {now - self.since:.3f} s: its members ask for no other"
        if self.ask_at is not None:
            return f"the quorum stood; all members ask at step {self.ask_at}, because of {self.held_for}"
        awaited = " ".join(sorted(self.members.difference(self._not_begun, self._not_done)))
        return f"the quorum stood; it is held because of {self.held_for}, still to answer: {awaited}"

    @property
    def holding(self) -> list[str]:
        """The members that wait to be told the step."""
        return sorted(self._not_begun)

    @property
    def is_settled(self) -> bool:
        """Whether every member has answered."""
        return len(self._not_begun) + len(self._not_done) == len(self.members)

    def settle(self) -> None:
        """Name the step at which all ask."""
        self.ask_at = max((self._not_begun or self._not_done).values())

    def not_ended_at(self, step: int) -> str | None:
        """Return a member, if there is one, that has asked or left before a step which others do, or at a
        later one, to which it has not come with them: by a state that it loaded.
        """
        if self._ends <= {step}:  # as a rule: each member that asks comes here
            return None
        others = {member: ended for member, ended in self._not_done.items() if ended != step}
        return min(others, key=others.__getitem__, default=None)
