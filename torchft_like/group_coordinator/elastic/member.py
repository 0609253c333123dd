"""A member of a group without a Manager, on a session of the lighthouse's.

Below it is what a Manager's rank 0 has below it: a ManagerServer, of a replica group of one rank, which keeps
the session open, repeats what was asked for, hears alarms and probes links that may be broken, and a store in
which the members of a quorum can meet. What the member asks for, and what an answer means, is decided in
`candidate`; here it is carried out. The lock is never held while waiting.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import TCPStore

from torchft_like.core.assignment import QuorumResult
from torchft_like.core.candidate import Answer, Candidate, Request, Stage
from torchft_like.core.replica_group import LeftOutNotice, LossNotice, RankJoin, Verdict
from torchft_like.core.stall_watch import Wait
from torchft_like.errors import ChangeInDoubtError
from torchft_like.group_coordinator.elastic.change import Change, EpochGroups, Membership
from torchft_like.manager.config import CONNECT_TIMEOUT_SEC_ENV, ManagerArguments, resolve
from torchft_like.manager.connection import connect
from torchft_like.manager_server.rank_link import RankLink

_VARIABLES = ("TORCHFT_LIGHTHOUSE", CONNECT_TIMEOUT_SEC_ENV)
_HEARTBEAT = timedelta(milliseconds=100)  # only for a lighthouse without sessions

_logger = logging.getLogger(__name__)


class Settle(NamedTuple):
    """The functions of a coordinator for each end of a change.

    Attributes:
        enter: the coordinator has these members and groups from now on.
        stay: the change was rolled back.
        leave: the coordinator has no members any more, as the caller leaves.
        lose: the coordinator has no members, for this reason.
    """

    enter: Callable[[Membership, EpochGroups], None]
    stay: Callable[[], object]
    leave: Callable[[Change], None]
    lose: Callable[[str], None]


class Member:
    """A member of quorums under a name: it joins, leaves, is lost, and hears of others that are.

    Args:
        name: unique among the members.
        lighthouse: `http://host:port`; None for TORCHFT_LIGHTHOUSE, which beats it.
        make: makes the process groups of a change, with the timeout of their operations.
        settle: called in `Change.complete`.

    Attributes:
        present: the groups of the present members; None if there are none.
    """

    def __init__(
        self, name: str, lighthouse: str | None, make: Callable[[timedelta], EpochGroups], settle: Settle
    ) -> None:
        self.name = name
        self.settle = settle
        self.present: EpochGroups | None = None
        self._members: tuple[str, ...] = ()
        self._lighthouse = lighthouse
        self._make = make
        self._lock = threading.RLock()
        self._candidate = Candidate()
        self._change: Change | None = None
        self._link: RankLink | None = None
        self._stores: list[TCPStore] = []  # in which the present members may have met
        self._trouble: str | None = None

    def begin(self, timeout: timedelta, *, shrink_only: bool = False) -> Change:
        """Ask for a quorum; return the change, or the one that is under way.

        Raises:
            ConfigError, AddressError: there is no address of a lighthouse, or it is malformed.
            ConnectError: the lighthouse was not reached, or has another member of this name.
        """
        if (departure := self._departure()) is not None:
            return departure
        self._connect()
        with self._lock:
            change = self._change
            if change is not None and not change.is_over:
                if change.failure is not None and self._candidate.stage is not Stage.VOTED:
                    self.roll_back(change, change.failure)
                return self._change or change
            self._change = change = Change(self, self._make(timeout), timeout, shrink_only=shrink_only)
            self._say(self._candidate.ask(shrink_only=shrink_only))
            return change

    def vote(self, change: Change) -> bool:
        """Vote for a change; return False if it cannot come about any more."""
        with self._lock:
            if not change.has_met:
                return False
            self._say(self._candidate.vote())
            return True

    def roll_back(self, change: Change, reason: str) -> None:
        """Have nobody switch to a change, and ask for the next quorum."""
        with self._lock:
            if change.is_over or change is not self._change:
                return
            if self._candidate.stage is Stage.VOTED or change.groups is None:
                raise ChangeInDoubtError(f"{self.name} has voted for {change} already")
            change.end(reason)
            request = self._candidate.give_up()
            self._succeed(change)
            self._say(request)

    def stop_waiting(self, change: Change) -> None:
        """Give up waiting for the answer to the vote."""
        with self._lock:
            if self._candidate.stage is Stage.VOTED:
                self._candidate.withdraw()
                self.end_epoch()
                why = f"the lighthouse is away ({self._trouble})" if self._trouble else "it got no answer"
                change.end(why, Answer.IN_DOUBT)

    def enter(self, groups: EpochGroups, members: tuple[str, ...]) -> None:
        """Take the members of a change for the present ones."""
        with self._lock:
            self.present, self._members = groups, members

    def end_epoch(self) -> None:
        """Give up the present members; a change that is under way goes on."""
        with self._lock:
            self.present, self._members = None, ()
            self._candidate.lose_members()
            del self._stores[:-1]

    def leave(self, timeout: timedelta) -> Change:
        """Say goodbye to the lighthouse; return the change by which the others go on without this member."""
        if (departure := self._departure()) is not None:
            return departure
        self.hang_up("it leaves", in_order=True)
        with self._lock:
            self._change = Change(self, None, timeout)
            return self._change

    def _departure(self) -> Change | None:
        """Return the change by which this member leaves; None if it does not."""
        change = self._change
        return change if change is not None and change.groups is None and not change.is_over else None

    def hang_up(self, reason: str, *, in_order: bool) -> None:
        """End the session; if that is not in order, the lighthouse tells the others of a loss."""
        with self._lock:
            link, self._link = self._link, None
            change, self._change = self._change, None
            self._candidate.withdraw()
            if change is not None and not change.is_over:
                change.end(reason, Answer.IN_DOUBT)
        if link is not None and in_order:
            link.leave(reason)
        elif link is not None:
            link.close()

    @property
    def why_no_quorum(self) -> str:
        """The reason for which there is no quorum, for messages."""
        if self._trouble is not None:
            return f"the lighthouse cannot be reached ({self._trouble})"
        return "not enough members have asked for one; the lighthouse's log says who is awaited"

    def _connect(self) -> None:
        if self._link is not None:
            return
        arguments = ManagerArguments(rank=0, world_size=1, lighthouse_addr=self._lighthouse)
        environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        config = replace(resolve(arguments, environment), replica_id=self.name)
        self._link, store = connect(config, self, _HEARTBEAT)
        self._stores.append(store)

    def _say(self, request: Request | None) -> None:
        if request is not None and self._link is not None:
            join = RankJoin(
                group_rank=0,
                step=0,
                checkpoint_metadata="",
                shrink_only=request.shrink_only,
                init_sync=False,
                commit_failures=int(request.broken_quorum_id > 0),
                commit_quorum_id=request.quorum_id,
                broken_quorum_id=request.broken_quorum_id,
            )
            self._link.join(join)

    def _succeed(self, change: Change) -> Change:
        """Make the change after one that was rolled back."""
        self._change = Change(
            self, self._make(change.timeout), change.timeout, shrink_only=change.shrink_only
        )
        return self._change

    # ------------------------------------------------------------- told on the coordination loop

    def quorum(self, result: QuorumResult) -> None:
        with self._lock:
            change = self._change
            is_unanimous = result.max_world_size == result.replica_world_size
            answer = self._candidate.answered(result.quorum_id, is_unanimous=is_unanimous)
            if change is None or answer is Answer.UNASKED:
                return
            if answer is Answer.OUTDATED:
                self._say(self._candidate.ask(shrink_only=change.shrink_only))
            elif answer is Answer.NOTHING_NEW:
                change.end(None)
            elif answer is Answer.SWITCH:
                change.decide()
            elif answer is Answer.SPOILED:
                change.end("not all members of it have voted")
                self._say(self._candidate.ask(shrink_only=self._succeed(change).shrink_only))
            else:
                if answer is not Answer.PROPOSAL:
                    change.end(
                        f"not all members of it have voted, and quorum {result.quorum_id} is next", answer
                    )
                    change = self._succeed(change)
                place = f"{result.store_address}/elastic/{result.quorum_id}"
                change.prepare(Membership(result.quorum_id, place, result.replica_ids))

    def member_lost(self, notice: LossNotice) -> None:
        """Abort the groups that need that member, or whose other members have gone on without this one."""
        is_own, who = notice.replica_id == self.name, notice.replica_id
        reason = f"{who} {'gave it up' if notice.is_alive else 'is gone'}: {notice.reason}"
        with self._lock:
            change = self._change
            proposal = None if change is None or change.is_over else change.membership
            if change is not None and proposal is not None and proposal.epoch == notice.quorum_id:
                change.fail(reason)
            if self.present is None:
                return
            is_of_epoch = notice.quorum_id == self._candidate.epoch
            # One that was late, and is told so, is still among the present members.
            is_broken = is_of_epoch and (not is_own or self._candidate.was_away)
            if is_broken or (not notice.is_alive and who in self._members):
                self.present.abort(reason)

    def lighthouse_disconnected(self, reason: str) -> None:
        with self._lock:
            self._trouble = reason
            self._say(self._candidate.disconnected())

    def lighthouse_connected(self) -> None:
        self._trouble = None

    def left_out(self, notice: LeftOutNotice) -> None:
        _logger.warning(
            "%s is left out, as it and %s do not reach each other; check the network between them",
            self.name,
            ", ".join(notice.unreachable),
        )

    def waits_for(self) -> Wait | None:
        """Return the meeting that is under way: if it takes long, a link may be broken."""
        change = self._change
        if change is None or change.membership is None or change.is_ready:
            return None
        return Wait("meeting", change.membership.epoch)

    def group_lost(self, reason: str) -> None:
        """Do nothing: it is this member that has hung up."""

    def verdict(self, verdict: Verdict) -> None:
        """Do nothing: there is no step to vote on."""

    def step_lost(self, quorum_id: int) -> None:
        """Do nothing: there is no other rank that could lose a step."""
