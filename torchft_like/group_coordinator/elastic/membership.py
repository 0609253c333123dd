"""A member of a group without a Manager, on a session of the lighthouse's, and its changes of members.

Below it is what a Manager's rank 0 has below it: a ManagerServer, of a replica group of one rank, which keeps
the session open, repeats what was asked for, hears alarms and probes links that may be broken, and a store in
which the members of a quorum can meet. What the member asks for, and what an answer means, is decided in
`core.candidate`; here it is carried out. The lock is never held while waiting.

A change lasts from the request for a quorum until it has come about or is rolled back. The members of a
proposal meet on a thread of the change's own, in process groups of the new epoch, while the old groups serve.
`Change.complete` is for the thread that makes the calls, between two of them: it votes, waits for the answer,
and only then touches the coordinator.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import BarrierOptions, TCPStore

from torchft_like.communicator.handle import Handle
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.candidate import Answer, Candidate, Request, Stage
from torchft_like.core.replica_group import LeftOutNotice, LossNotice, RankJoin, Verdict
from torchft_like.core.stall_watch import Wait
from torchft_like.devices import beside_captures
from torchft_like.errors import (
    ChangeInDoubtError,
    ChangeRolledBackError,
    GroupCoordinatorError,
    ProcessGroupError,
)
from torchft_like.manager.config import CONNECT_TIMEOUT_SEC_ENV, ManagerArguments, resolve
from torchft_like.manager.connection import connect
from torchft_like.manager_server.rank_link import RankLink
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.wrapper import as_timedelta

GRACE_S = 5.0
_VARIABLES = ("TORCHFT_LIGHTHOUSE", CONNECT_TIMEOUT_SEC_ENV)
_HEARTBEAT = timedelta(milliseconds=100)  # only for a lighthouse without sessions

_logger = logging.getLogger(__name__)


class Membership(NamedTuple):
    """The members of one epoch, the same on all of them.

    Attributes:
        epoch: the id of their quorum; later ones are larger.
        store_address: `host:port/prefix` in the store of one of them, where they met.
        members: their names, in the order of their ranks.
    """

    epoch: int
    store_address: str
    members: tuple[str, ...]

    def rank_of(self, name: str) -> int | None:
        """Return the rank of a member; None if nobody of that name is one."""
        return self.members.index(name) if name in self.members else None

    def __str__(self) -> str:
        return f"epoch {self.epoch} ({', '.join(self.members)})"


class EpochGroups:
    """The process groups of one epoch; both are the same where the tensors are on a CPU.

    Args:
        cpu, device: groups that are not configured yet.
        place: the device of the tensors.
    """

    def __init__(self, cpu: ProcessGroup, device: ProcessGroup, place: torch.device) -> None:
        self.cpu = cpu
        self.device = device
        self._place = place
        self._ending = AbortSignal()

    def _each(self) -> list[ProcessGroup]:
        return [self.cpu] if self.cpu is self.device else [self.cpu, self.device]

    def configure(self, membership: Membership, rank: int) -> None:
        """Meet the other members; each group has a prefix of its own in the store."""
        size = len(membership.members)
        with beside_captures(self._place):
            for number, group in enumerate(self._each()):
                group.configure(f"{membership.store_address}/{number}", rank, size, ends_with=self._ending)

    @property
    def ended(self) -> str | None:
        """The reason for which the groups were aborted; None if they were not."""
        return self._ending.reason

    def abort(self, reason: str) -> None:
        """Abort the groups; any thread may call this, and the first reason counts."""
        self._ending.set(reason)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each operation from now on."""
        for group in self._each():
            group.set_timeout(timeout)

    def barrier(self, timeout: timedelta) -> None:
        """Wait until all members have come.

        Raises:
            RuntimeError: they have not, within `timeout`, or one of them died.
        """
        options = BarrierOptions()
        options.timeout = timeout
        self.cpu.barrier(options).wait(timeout)


class Change:
    """A membership that is asked for and prepared beside the present one; `begin_change` makes it.

    Args:
        member: whose change it is.
        groups: for the members of the proposal; not configured yet, and None where the caller leaves.
        timeout: for the members to meet, and for the decision.
        shrink_only: newcomers shall wait.

    Attributes:
        membership: the one that is prepared; None while the lighthouse has not said which.
        is_over: whether it has come about, or never will, or the members stay as they are.
        shrink_only: as it was given.
    """

    def __init__(
        self, member: Member, groups: EpochGroups | None, timeout: timedelta, *, shrink_only: bool = False
    ) -> None:
        self.membership: Membership | None = None
        self.is_over = False
        self.shrink_only = shrink_only
        self.groups = groups
        self.timeout = timeout
        self._member = member
        self._failure: Exception | None = None
        self._reason: str | None = None  # for which it is off
        self._prepared = threading.Event()
        self._decided = threading.Event()
        self._answer: Answer | None = None
        self._has_voted = False
        if groups is None:
            self._prepared.set()

    @property
    def rank(self) -> int | None:
        """The caller's rank among the new members; None if they are not known yet, or the caller leaves."""
        return None if self.membership is None else self.membership.rank_of(self._member.name)

    @property
    def is_ready(self) -> bool:
        """Whether `complete` need not wait for the members to meet: they have, or could not."""
        return self._prepared.is_set()

    @property
    def has_met(self) -> bool:
        """Whether the members have met, and nothing has come between since."""
        is_asked_for = self.groups is not None and self.membership is not None
        return self.is_ready and is_asked_for and not self.is_over and self.failure is None

    @property
    def failure(self) -> str | None:
        """The reason for which the change cannot come about; None while it can."""
        if self._reason is not None:
            return self._reason
        return None if self.groups is None else self.groups.ended

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Wait until `is_ready`, for `timeout` seconds at the most; return whether it is."""
        return self._prepared.wait(timeout)

    def complete(self, timeout: timedelta | float | None = None) -> None:
        """Switch together with all other new members, or roll back together with them.

        Every new member calls it, and those who leave, between two calls to the coordinator. Afterwards the
        coordinator has the new members; handles of the old epoch are stale. Where the lighthouse has said
        that the members stay as they are, it does nothing.

        Args:
            timeout: how long to wait for the others, seconds or timedelta; that of the change if left out.

        Raises:
            ChangeRolledBackError: on every member; the coordinator goes on with the members it has.
            ChangeInDoubtError: the lighthouse was lost between this member's vote and the answer; the
                coordinator has no members until the next change.
            GroupCoordinatorError: it is over already.
        """
        if self.is_over and self._reason is not None:
            raise GroupCoordinatorError(f"the change is over: {self._reason}; begin another")
        limit = self.timeout if timeout is None else as_timedelta(timeout)
        deadline = time.monotonic() + limit.total_seconds()
        if self.groups is None:
            self._member.settle.leave(self)
        elif self._has_voted or self._meet(deadline):
            self._vote(deadline)
            self._settle(deadline)

    def roll_back(self, reason: str) -> None:
        """Have nobody switch, instead of `complete`. Does nothing if the change is over.

        Raises:
            ChangeInDoubtError: `complete` is under way in another thread, and may have voted.
        """
        self._member.roll_back(self, f"{self._member.name}: {reason}")

    # ------------------------------------------------------------------ what `complete` consists of

    def _meet(self, deadline: float) -> bool:
        """Wait until the members have met; return whether there is anything to decide."""
        if not self._prepared.wait(_left(deadline).total_seconds()):
            self._raise_rolled_back("has waited for the others in vain")
        if self.is_over and self._reason is None:
            return False
        if self.failure is not None:
            self._raise_rolled_back(self.failure)
        return True

    def _vote(self, deadline: float) -> None:
        """Vote, once, when all members have come to this point."""
        if self._has_voted:  # and was interrupted before it had the answer
            return
        try:
            if self.groups is not None:
                self.groups.barrier(_left(deadline))
        except Exception as error:  # noqa: BLE001 - whatever it is, this member does not vote
            self._failure = error
            self._raise_rolled_back(self.failure or f"has waited for the others in vain: {error}")
        self._has_voted = self._member.vote(self)
        if not self._has_voted:
            self._raise_rolled_back(self.failure or "it was rolled back")

    def _settle(self, deadline: float) -> None:
        if not self._decided.wait(max(_left(deadline), self.timeout).total_seconds()):
            self._member.stop_waiting(self)  # unless the answer has come meanwhile
        if self._answer is Answer.SWITCH and self.membership is not None and self.groups is not None:
            try:
                self._member.settle.enter(self.membership, self.groups)
            finally:
                self.is_over, self._reason = True, "it has come about"
            return
        if self._answer is Answer.ROLL_BACK:
            self._member.settle.stay()
            raise ChangeRolledBackError(f"{self} was rolled back: {self._reason}")
        doubt = ChangeInDoubtError(
            f"{self._member.name} does not know whether {self} has come about: {self._reason}"
        )
        self._member.settle.lose(str(doubt))
        raise doubt

    def _raise_rolled_back(self, reason: str) -> None:
        self._member.roll_back(self, f"{self._member.name}: {reason}")
        self._member.settle.stay()
        raise ChangeRolledBackError(f"{self} was rolled back: {self._reason}") from self._failure

    # ------------------------------------------------------------- told by the member, under its lock

    def prepare(self, membership: Membership) -> None:
        """Meet the members that the lighthouse proposes, on a thread of the change's own."""
        self.membership = membership
        threading.Thread(target=self._prepare, args=(membership,), name="torchft-change", daemon=True).start()

    def _prepare(self, membership: Membership) -> None:
        try:
            if self.groups is not None:
                self.groups.configure(membership, membership.members.index(self._member.name))
        except Exception as error:  # noqa: BLE001 - `complete` raises it
            self._failure = error
            self.fail(f"could not meet the others: {error}")
        self._prepared.set()

    def fail(self, reason: str) -> None:
        """Abort the groups: the change cannot come about, or its members cannot communicate any more."""
        if self.groups is not None:
            self.groups.abort(reason)

    def end(self, reason: str | None, answer: Answer = Answer.ROLL_BACK) -> None:
        """End the change for a reason; without one, the members stay as they are."""
        self.is_over, self._reason = True, reason
        if reason is not None:
            self.fail(reason)
        self._answer = answer
        self._prepared.set()
        self._decided.set()

    def decide(self) -> None:
        """Let the caller of `complete` switch: all members have voted."""
        self._answer = Answer.SWITCH
        self._decided.set()

    def __str__(self) -> str:
        return "a change that was asked for" if self.membership is None else str(self.membership)


def retire(old: EpochGroups | None, new: EpochGroups, reason: str) -> None:
    """Close the old groups, on a thread, once all new members know that they are old.

    If a member closed them at once, another one that still waits for an operation would take that for a
    death. All new members call this function, also those that have no old groups.
    """
    try:
        all_know = new.cpu.barrier()  # before any call of the new epoch
    except ProcessGroupError:  # one of them is gone
        if old is not None:
            old.abort(reason)
        return
    if old is None:
        return
    waiting = Handle("a change of members", all_know.wait, lambda _: None)

    def close() -> None:
        try:
            waiting.wait(GRACE_S)
        except (GroupCoordinatorError, RuntimeError) as error:
            _logger.info("not all members have heard of the change: %s", error)
        old.abort(reason)

    threading.Thread(target=close, name="torchft-change-retire", daemon=True).start()


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


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

    def hold(self, quorum_id: int) -> None:
        """Do nothing: it asks for every quorum."""

    def released(self, quorum_id: int, ask_at: int | None) -> None:
        """Do nothing: it asks for every quorum."""
