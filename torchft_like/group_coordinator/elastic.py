"""Group coordinators whose members change while they are used.

An `ElasticCoordinator` has the members that the lighthouse names: each rank that asks for a quorum, until it
leaves or is lost. Below it is what a Manager's rank 0 has below it: a ManagerServer, of a replica group of
one rank, which keeps the session open, repeats what was asked for, hears alarms and probes links that may be
broken, and a store in which the members of a quorum can meet. What the member asks for, and what an answer
means, is decided in `core.candidate`; here it is carried out. The lock is never held while waiting.

A change lasts from the request for a quorum until it has come about, on all new members, or is rolled back,
on all of them. The members of a proposal meet on a thread of the change's own, in process groups of the new
epoch, while the old groups serve. `Change.complete` is for the thread that makes the calls, between two of
them: it votes, waits for the answer, and only then touches the coordinator. The coordinator is the same
object before and after: its epoch, rank and size change, and nothing of an old epoch, a message, a handle,
tokens that were dispatched, is ever taken for something of a new one.

The epochs of a `ManagedCoordinator` are the quorums of a Manager, which decides the members between two
steps; a replica that dies is left out of the next quorum. The coordinator asks for the quorum when it is
called, and has the members of that one. What it raises loses the step, as in `torchft_like.gang.managed`;
also what it refuses, for the other members have refused it, too. A wait whose time is up raises, and loses
nothing.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import BarrierOptions

from lighthouse.core.decisions import NO_QUORUM
from torchft_like.communicator.communicator import Communicator, CoordinatorOptions
from torchft_like.communicator.handle import Epoch, Handle
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.candidate import Answer, Candidate, Stage
from torchft_like.core.replica_group import LeftOutNotice, LossNotice, RankJoin, RankQuorum, ToRank
from torchft_like.core.stall_watch import Wait
from torchft_like.devices import beside_captures
from torchft_like.errors import (
    ChangeInDoubtError,
    ChangeRolledBackError,
    GroupCoordinatorError,
    ProcessGroupError,
    StaleEpochError,
    StillUnderWayError,
)
from torchft_like.group_coordinator.coordinator import GroupCoordinator
from torchft_like.group_coordinator.creation import ANONYMOUS, Place, unique_name
from torchft_like.manager.config import CONNECT_TIMEOUT_SEC_ENV, ManagerArguments, resolve
from torchft_like.manager.group_store import GroupStore, connect
from torchft_like.manager_server.rank_link import RankLink
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.swallowing import GroupManager
from torchft_like.runtime.background import run_in_background
from torchft_like.runtime.durations import as_timedelta, seconds_of
from torchft_like.runtime.long_waits import oldest_call

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
        """Return the rank of a member; None if no member has that name."""
        return self.members.index(name) if name in self.members else None

    def __str__(self) -> str:
        return f"epoch {self.epoch} ({', '.join(self.members)})"

    def __repr__(self) -> str:
        return f"<Membership: {self}>"  # with the prefix a reader could come to the store


class EpochGroups(AbortSignal):
    """The process groups of one epoch, which end when this signal is set; on a CPU both are the same."""

    def __init__(self, place: torch.device, timeout: timedelta) -> None:
        super().__init__()
        self.cpu: ProcessGroup = ProcessGroupGloo(timeout)
        self.device: ProcessGroup = ProcessGroupNCCL(timeout) if place.type == "cuda" else self.cpu
        self._each = list(dict.fromkeys([self.cpu, self.device]))
        self._place = place

    def configure(self, membership: Membership, rank: int) -> None:
        """Meet the other members; each group has a prefix of its own in the store."""
        size = len(membership.members)
        with beside_captures(self._place):
            for number, group in enumerate(self._each):
                group.configure(f"{membership.store_address}/{number}", rank, size, ends_with=self)

    def set_timeout(self, timeout: timedelta) -> None:
        for group in self._each:
            group.set_timeout(timeout)

    def barrier(self, timeout: timedelta) -> None:
        """Wait until all members have come; a RuntimeError says that they have not, or that one died."""
        options = BarrierOptions()
        options.timeout = timeout
        self.cpu.barrier(options).wait(timeout)


class Change:
    """A membership that is asked for and prepared beside the present one; `begin_change` makes it.

    Args:
        groups: for the members of the proposal; not configured yet, and None where the caller leaves.
        timeout: for the members to meet, and for the decision.
        shrink_only: newcomers shall wait.

    Attributes:
        membership: the one that is prepared; None while the lighthouse has not said which.
        is_over: whether it has come about, or never will, or the members stay as they are.
    """

    def __init__(
        self, member: Member, groups: EpochGroups | None, timeout: timedelta, *, shrink_only: bool = False
    ) -> None:
        self.membership: Membership | None = None
        self.is_over: bool = False
        self.shrink_only = shrink_only
        self.groups = groups
        self.timeout = timeout
        self._member = member
        self._failure: Exception | None = None
        self._reason: str | None = None  # for which it is off
        self._prepared = threading.Event()
        self._decided = threading.Event()
        self._answer: Answer | None = None
        self._is_gathering = False  # the members that have met come to `complete`
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
        return None if self.groups is None else self.groups.reason

    @property
    def awaits(self) -> Wait | None:
        """What the change waits for from its new members, if it does."""
        if self.membership is None or (self.is_ready and not self._is_gathering):
            return None
        return Wait("votes" if self.is_ready else "meeting", self.membership.epoch)

    def wait_ready(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until `is_ready`, for the timeout (seconds or timedelta) at the most; return whether it is."""
        return self._prepared.wait(None if timeout is None else seconds_of(timeout, may_be_0=True))

    def complete(self, timeout: timedelta | float | None = None) -> None:
        """Switch together with all other new members, or roll back together with them.

        Every new member calls it, and every member that leaves, between two calls to the coordinator.
        Afterwards the coordinator has the new members; handles of the old epoch are stale. Where the
        lighthouse has said that the members stay as they are, it does nothing.

        Args:
            timeout: how long to wait for the others, seconds or timedelta; that of the change if left out.
              The answer to the vote has the change's.

        Raises:
            ChangeRolledBackError: on every member; the coordinator goes on with the members it has.
            ChangeInDoubtError: the lighthouse was lost between this member's vote and the answer; the
                coordinator has no members until the next change.
            GroupCoordinatorError: it is over already.
        """
        if self.is_over and self._reason is not None:
            raise GroupCoordinatorError(f"the change is over: {self._reason}; begin another")
        limit_s = (self.timeout if timeout is None else as_timedelta(timeout)).total_seconds()
        self._complete(limit_s, answer_s=self.timeout.total_seconds())

    def _complete(self, limit_s: float, *, answer_s: float) -> None:
        """Do so within the limit; the answer to a vote may take so many seconds even beyond that."""
        deadline = time.monotonic() + limit_s
        coordinator = self._member.coordinator
        if self.groups is None:
            coordinator._leave(self)
            return
        # One that has voted was interrupted before it had the answer.
        problem = None if self._has_voted else self._vote(self.groups, deadline)
        if self.is_over and self._reason is None:
            return
        if problem is not None:
            self._member.roll_back(self, f"{self._member.name}: {problem}")
        elif not self._decided.wait(max(_left(deadline).total_seconds(), answer_s)):
            self._member.stop_waiting(self)  # unless the answer has come meanwhile
        if self._answer is Answer.SWITCH and self.membership is not None:
            try:
                coordinator._enter(self.membership, self.groups)
            finally:
                self.is_over, self._reason = True, "it has come about"
        elif problem is not None or self._answer is Answer.ROLL_BACK:
            coordinator._part(_ROLLED_BACK)
            raise ChangeRolledBackError(f"{self} was rolled back: {self._reason}") from self._failure
        else:
            doubt = f"{self._member.name} does not know whether {self} has come about: {self._reason}"
            coordinator._end_epoch(doubt)
            raise ChangeInDoubtError(doubt)

    def _vote(self, groups: EpochGroups, deadline: float) -> str | None:
        """Vote, once all members have met and come to this point; return why this member does not."""
        if not self._prepared.wait(_left(deadline).total_seconds()):
            return "has waited for the others in vain"
        if self.is_over or self.failure is not None:
            return self.failure
        self._is_gathering = True
        try:
            groups.barrier(_left(deadline))
        except Exception as error:  # noqa: BLE001 - whatever it is, this member does not vote
            self._failure = error
            return self.failure or f"has waited for the others in vain: {error}"
        finally:
            self._is_gathering = False
        self._has_voted = self._member.vote(self)
        return None if self._has_voted else self.failure or "it was rolled back"

    def roll_back(self, reason: str) -> None:
        """Let no member switch; called instead of `complete`. Does nothing if the change is over.

        Raises:
            ChangeInDoubtError: `complete` is under way in another thread, and may have voted.
        """
        self._member.roll_back(self, f"{self._member.name}: {reason}")

    # ------------------------------------------------------------- told by the member, under its lock

    def prepare(self, membership: Membership) -> None:
        """Meet the members that the lighthouse proposes, on a thread of the change's own."""
        self.membership = membership

        def meet() -> None:
            try:
                if self.groups is not None:
                    self.groups.configure(membership, membership.members.index(self._member.name))
            except Exception as error:  # noqa: BLE001 - `complete` raises it
                self._failure = error
                self.fail(f"could not meet the others: {error}")
            self._prepared.set()

        run_in_background("torchft-change", meet)

    def fail(self, reason: str) -> None:
        """Abort the groups: the change cannot come about, or its members cannot communicate any more."""
        if self.groups is not None:
            self.groups.set(reason)

    def end(self, reason: str | None, answer: Answer = Answer.ROLL_BACK) -> None:
        """End the change for a reason; without one, the members stay as they are."""
        self.is_over = True
        self._reason = reason
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
            old.set(reason)
        return
    if old is None:
        return
    waiting: Handle[object] = Handle("a change of members", all_know.wait)

    def close() -> None:
        try:
            waiting.wait(GRACE_S)
        except (GroupCoordinatorError, RuntimeError) as error:
            _logger.info("not all members have heard of the change: %s", error)
        old.set(reason)

    run_in_background("torchft-change-retire", close)


def _left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


class Member:
    """A member of quorums under a name: it joins, leaves, is lost, and hears of others that are.

    Args:
        name: unique among the members.
        lighthouse: `http://host:port`; None for TORCHFT_LIGHTHOUSE, which beats it.
        coordinator: the coordinator whose members they are; `Change.complete` has it switch.
    """

    def __init__(self, name: str, lighthouse: str | None, coordinator: ElasticCoordinator) -> None:
        self.name = name
        self.coordinator = coordinator
        self._lighthouse = lighthouse
        self._lock = threading.RLock()
        self._candidate = Candidate()
        self._change: Change | None = None
        self._link: RankLink | None = None
        self._stores: list[GroupStore] = []  # in which the present members may have met
        self._trouble: str | None = None
        self._left_out: str | None = None  # why the others go on without this member

    def begin(self, timeout: timedelta, *, shrink_only: bool = False, connect_s: float = math.inf) -> Change:
        """Ask for a quorum; return the change, or the one that is under way.

        Args:
            connect_s: the limit of the first contact with the lighthouse, where `connect_timeout` is longer.
        """
        if (departure := self._departure()) is not None:
            return departure
        if self._link is None:
            arguments = ManagerArguments(rank=0, world_size=1, lighthouse_addr=self._lighthouse)
            environment = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
            config = replace(resolve(arguments, environment), replica_id=self.name)
            config = replace(config, connect_timeout_s=min(config.connect_timeout_s, connect_s))
            self._link, store = connect(config, self, _HEARTBEAT)
            self._stores.append(store)
        with self._lock:
            change = self._change
            if change is not None and not change.is_over:
                if change.failure is not None and self._candidate.stage is not Stage.VOTED:
                    self.roll_back(change, change.failure)
                return self._change or change
            change = self._begun(timeout, shrink_only)
            self._say(self._candidate.ask(shrink_only=shrink_only))
            return change

    def vote(self, change: Change) -> bool:
        with self._lock:
            if not change.has_met:
                return False
            self._say(self._candidate.vote())
            return True

    def roll_back(self, change: Change, reason: str) -> None:
        """Let no member switch to a change, and ask for the next quorum."""
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
        with self._lock:
            if self._candidate.stage is Stage.VOTED:
                self._candidate.withdraw()
                self.end_epoch()
                why = f"the lighthouse is away ({self._trouble})" if self._trouble else "it got no answer"
                change.end(why, Answer.IN_DOUBT)

    def end_epoch(self) -> None:
        """Give up the present members; a change that is under way goes on."""
        with self._lock:
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
            # Others may be about to meet it in another quorum.
            link.leave(reason, quorum_id=self._candidate.epoch or NO_QUORUM)
        elif link is not None:
            link.close()

    @property
    def why_no_quorum(self) -> str:
        """The reason for which there is no quorum, for messages."""
        if self._trouble is not None:
            return f"the lighthouse cannot be reached ({self._trouble})"
        if self._left_out is not None:
            return self._left_out
        return "not enough members have asked for one; the lighthouse's log says who is awaited"

    def _say(self, request: RankJoin | None) -> None:
        if request is not None and self._link is not None:
            self._link.join(request)

    def _begun(self, timeout: timedelta, shrink_only: bool) -> Change:
        self._change = Change(
            self, EpochGroups(self.coordinator.device, timeout), timeout, shrink_only=shrink_only
        )
        return self._change

    def _succeed(self, change: Change) -> Change:
        """Begin the change after one that was rolled back."""
        return self._begun(change.timeout, change.shrink_only)

    # ------------------------------------------------------------- told on the coordination loop

    def hear(self, message: ToRank) -> None:
        """Handle what is of interest here: there are no other ranks, and no steps to vote on or to hold."""
        match message:
            case RankQuorum(_, result):
                self.quorum(result)
            case LossNotice():
                self.member_lost(message)
            case LeftOutNotice():
                self.left_out(message)

    def quorum(self, result: QuorumResult) -> None:
        with self._lock:
            change, self._left_out = self._change, None
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
                place = result.meeting_place(f"elastic/{result.quorum_id}")
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
            groups, membership = self.coordinator._groups, self.coordinator.membership
            if groups is None or membership is None:
                return
            is_of_epoch = notice.quorum_id == self._candidate.epoch
            # One that was late, and is told so, is still among the present members.
            is_broken = is_of_epoch and (not is_own or self._candidate.was_away)
            is_cut_off = not {*membership.members}.isdisjoint(notice.unreachable)
            if is_broken or is_cut_off or (not notice.is_alive and who in membership.members):
                groups.set(reason)

    def lighthouse_disconnected(self, reason: str) -> None:
        with self._lock:
            self._trouble, self._left_out = reason, None  # the lighthouse tells it again if it is still so
            self._say(self._candidate.disconnected())

    def lighthouse_connected(self) -> None:
        self._trouble = None

    def left_out(self, notice: LeftOutNotice) -> None:
        names = ", ".join(notice.unreachable_replica_ids)
        self._left_out = (
            f"the others go on without it, as it and {names} do not reach each other; check the network "
            "between them"
        )
        _logger.warning("%s: %s", self.name, self._left_out)

    def waits_for(self) -> Wait | None:
        """Return what is awaited from others, in a change or a call; if it takes long, a link may be bad."""
        change, groups = self._change, self.coordinator._groups
        if change is not None and (wait := change.awaits) is not None:
            return wait
        call = None if groups is None else oldest_call(groups.cpu.configuration)
        return None if call is None else Wait("call", call)

    def step_and_source(self) -> tuple[int, str]:
        """Return that it has no steps and takes over no state."""
        return 0, ""


NAME_CHARACTERS_MAX = 200
RETRY_S = 0.05
_NOT_READY, _LEAVES, _ROLLED_BACK, _SWITCHED = 0, -1, 1, 2  # the present members say; or a quorum's id


class EpochCoordinator(GroupCoordinator):
    """The common part of coordinators whose members come and go in epochs.

    Attributes:
        epoch: number of the present one; 0 before the first.
    """

    epoch: int = 0

    def _have_no_members(self, device: torch.device | str, group_name: str | None) -> None:
        """Set the attributes as they are before the first epoch."""
        self.group_name: str = group_name or ANONYMOUS
        self.unique_name: str = unique_name(self.group_name)
        self.device: torch.device = torch.device(device)
        self.local_rank: int = self.device.index or 0
        self._count_nobody()

    def _count_nobody(self) -> None:
        self.ranks, self.rank, self.rank_in_group, self.world_size = [], -1, -1, 0

    def _end_present(self, reason: str) -> None:
        """End the present epoch, with the queues that were made in it."""
        if self._communicator is not None:
            self._communicator.epoch.set(reason)
            self._communicator.end_queues()
        self._barriers = self.mq_broadcaster = None

    def _begin_epoch(self, epoch: Epoch, place: Place) -> Communicator:
        """Begin an epoch with these members; the one before is over."""
        communicator = self._adopt(place, epoch)
        self.epoch = epoch.number
        return communicator


class ElasticCoordinator(EpochCoordinator):
    """The communication of a group whose members grow, shrink and are replaced; any of them, rank 0 too.

        coordinator = ElasticCoordinator("worker-3", lighthouse="http://10.0.0.1:29510")
        coordinator.follow()  # have members
        ...
        change = coordinator.begin_change()  # asks who is a member; prepared in the background
        if coordinator.is_due(change):  # on all members, between two calls
            change.complete()

    It has no members before the first change. A change that is rolled back leaves it as it is. Calls, and
    `complete`, are for one thread at a time.

    Args:
        name: the caller's, unlike that of every other member. Ranks are in the order of the names.
        lighthouse: `http://host:port` of the lighthouse, which is first asked when members are wanted.
            TORCHFT_LIGHTHOUSE beats it.
        device: of the tensors; on a CUDA device there is a group of NCCL beside that of Gloo.
        group_name: for messages; need not be unique.
        options: the same on every member.

    Attributes:
        membership: the present one; None if there is none.

    Raises:
        ValueError: the name is none.
    """

    def __init__(
        self,
        name: str,
        *,
        lighthouse: str | None = None,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        options: CoordinatorOptions | None = None,
    ) -> None:
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
            raise ValueError(
                f"a name has 1 to {NAME_CHARACTERS_MAX} characters, all printable: {name!r:.200}"
            )
        self.name = name
        self.membership: Membership | None = None
        self.options: CoordinatorOptions = options or CoordinatorOptions()
        self._have_no_members(device, group_name)
        self._groups: EpochGroups | None = None
        self._session = Member(name, lighthouse, self)
        self._leaving: list[str] = []  # with the change that is due
        self._is_destroyed = False
        self._why_none = "it has no members yet: call follow"

    def change(self, timeout: timedelta | float | None = None) -> None:
        """Begin a change and complete it; block until it has come about.

        Raises:
            ChangeRolledBackError, ChangeInDoubtError: see Change.complete.
            ConfigError, ConnectError: see `begin_change`.
        """
        self.begin_change(timeout).complete()

    def begin_change(
        self, timeout: timedelta | float | None = None, *, shrink_only: bool = False, leaving: bool = False
    ) -> Change:
        """Ask the lighthouse for members, and meet them in the background; calls to the present ones go on.

        The answer comes when all members have asked. A change that was begun before, and can still come
        about, is given again. The first call connects to the lighthouse; every other one returns at once.

        Args:
            timeout: for the members to meet, and for the decision; that of the options if left out.
            shrink_only: let no newcomers in.
            leaving: the caller shall be no member any more. It serves on until the change is due.

        Raises:
            GroupCoordinatorError: the coordinator was destroyed.
            ConfigError, AddressError: there is no address of a lighthouse, or it is malformed.
            ConnectError: the lighthouse was not reached, or has another member of this name.
        """
        self._require_alive()
        limit = as_timedelta(self.options.timeout if timeout is None else timeout)
        if leaving:
            return self._session.leave(limit)
        return self._session.begin(limit, shrink_only=shrink_only)

    def follow(self, timeout: timedelta | float | None = None) -> Membership:
        """Block until a change has come about; return the members.

        A caller without members, or whose members do not answer, calls this: present ones are given up.

        Args:
            timeout: seconds or timedelta; that of the options if left out.

        Raises:
            TimeoutError: no change has come about in time.
            ConfigError, AddressError, ConnectError: see `begin_change`; a lighthouse that does not answer is
              waited for no longer than the timeout.
        """
        limit = as_timedelta(self.options.timeout if timeout is None else timeout)
        deadline = time.monotonic() + limit.total_seconds()
        self._end_epoch(f"{self.name} has given its members up")
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                why = self._session.why_no_quorum
                raise TimeoutError(f"{self.name} has no members after {limit.total_seconds():g} s: {why}")
            try:
                self._require_alive()
                change = self._session.begin(as_timedelta(self.options.timeout), connect_s=round(left_s, 3))
                change._complete(left_s, answer_s=0.0)
            except (ChangeRolledBackError, ChangeInDoubtError) as error:
                _logger.info("%s", error)
                time.sleep(RETRY_S)  # what fails at once shall not keep the others busy
            if self.membership is not None:
                return self.membership

    def is_due(self, change: Change | None) -> bool:
        """Return whether all present members are ready for the same change: then each calls `complete`.

        All present members call this, between the same two calls, with their change or None. They may hear
        of a quorum at different times; this says when all have. A proposal is rolled back if it lacks a
        present member that stays, or has one that leaves.

        Raises:
            GroupCoordinatorError: a member died. The others complete a change without it all the same.
        """
        own, kept, present = _NOT_READY, list[str](), self.membership.members if self.membership else ()
        if change is not None and not change.is_over:
            if change.groups is None:
                own = _LEAVES
            elif change.has_met and change.membership is not None:
                own = change.membership.epoch
                kept = [name for name in present if name in change.membership.members]
        said = self.all_gather(torch.tensor([[own, len(kept)]], device="cpu"), 0).tolist()
        who = dict(zip(present, map(tuple, said), strict=True))
        leaving = [name for name, (each, _) in who.items() if each == _LEAVES]
        staying = [name for name in who if name not in leaving]
        if change is not None and own > 0 and kept != staying:
            change.roll_back(f"{', '.join(sorted({*kept} ^ {*staying}))} had asked in another round")
        proposals = {who[name] for name in staying}
        # Members that stay are in a proposal that all of them have. Its number of present members tells
        # those that leave, too, whether one of these is among them.
        fits = all(each != _NOT_READY and count == len(staying) for each, count in proposals)
        is_due = len(proposals) <= 1 and fits
        self._leaving = leaving if is_due else []
        return is_due

    def destroy(self) -> None:
        """Close the groups; from now on there are no members, and no change to come."""
        self._is_destroyed = True
        try:
            self._session.hang_up("the coordinator was destroyed", in_order=self._groups is None)
        finally:
            self._end_epoch("it was destroyed")
            super().destroy()

    def _require_alive(self) -> None:
        if self._is_destroyed:
            raise GroupCoordinatorError(f"{self!r} was destroyed")

    def _current(self) -> Communicator:
        if self._communicator is None:
            error = StaleEpochError if self.epoch else GroupCoordinatorError
            raise error(f"{self!r} cannot communicate: {self._why_none}")
        return self._communicator

    # --------------------------------------------------------------- what becomes of a change

    def _enter(self, membership: Membership, groups: EpochGroups) -> None:
        reason = f"its members are those of epoch {membership.epoch} now"
        # Until `Change.complete` is over a loss ends the groups of the change, which are these.
        before, self._groups, self.membership = self._groups, groups, membership
        try:
            self._part(_SWITCHED)
            self._end_present(reason)
            groups.set_timeout(as_timedelta(self.options.timeout))
            retire(before, groups, reason)
            rank = membership.members.index(self.name)
            everyone = list(range(len(membership.members)))
            place = Place(self.unique_name, rank, everyone, self.device, groups.cpu, groups.device)
            self._begin_epoch(Epoch(membership.epoch, mark=membership.epoch), place)
        except BaseException as error:
            # Ctrl-C: the others are in the new epoch, and need not wait for this member in it.
            interrupted = f"its switch to epoch {membership.epoch} was interrupted: {error!r}"
            if before is not None:
                before.set(interrupted)
            self._end_epoch(interrupted)
            raise

    def _leave(self, change: Change) -> None:
        """Leave, unless the others say that they have not switched, and still count on this member."""
        if _ROLLED_BACK in self._part(_LEAVES):
            change.end("those who stay have rolled their change back")
            raise ChangeRolledBackError(
                f"{self.name} is still a member: the change of the others was rolled back"
            )
        change.end(f"{self.name} has left")
        self._end_epoch(f"{self.name} has left")

    def _part(self, word: int) -> list[int]:
        """Tell the present members the outcome if some of them leave with the change; return what all say."""
        leaving, self._leaving = self._leaving, []
        if not leaving or self._communicator is None:
            return []
        try:
            said: list[int] = self.all_gather(torch.tensor([word], device="cpu"), 0).tolist()
        except GroupCoordinatorError as error:
            _logger.info("%s could not part with its members in order: %s", self.name, error)
            return []
        return said

    def _end_epoch(self, reason: str) -> None:
        try:
            self._end_present(reason)
        finally:  # whatever interrupts a farewell
            if self._groups is not None:
                self._groups.set(reason)
            self._session.end_epoch()
            self._communicator = self._groups = self.membership = None
            self._count_nobody()
            self._why_none = reason

    def __repr__(self) -> str:
        place = f"rank {self.rank_in_group} of {self.world_size}" if self.membership else "no members"
        return f"<{type(self).__name__} {self.unique_name}: {self.name}, epoch {self.epoch}, {place}>"


class ManagedCoordinator(EpochCoordinator):
    """The communication of a Manager's quorum: this rank of every replica group, healing ones included.

    It is usable from the first `start_quorum` on. After a GroupCoordinatorError go on to the next one: the
    same object then has its members. `epoch` counts the configurations of the Manager's group; rank and size
    are up to date after a call, or `refresh`.

    Args:
        manager: the Manager of this rank. `destroy` leaves it, and its group, alone.
        device: the device of the tensors; the manager's group takes it.
    """

    def __init__(
        self,
        manager: GroupManager,
        *,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        options: CoordinatorOptions | None = None,
    ) -> None:
        self._manager = manager
        self.options: CoordinatorOptions = options or CoordinatorOptions()
        self._have_no_members(device, group_name)
        self._is_destroyed = False

    def refresh(self) -> int:
        """Have the members of the current quorum, and wait for it; gives the epoch.

        Raises:
            GroupCoordinatorError: there is no quorum, or the step is lost already.
        """
        self._current()
        return self.epoch

    def destroy(self) -> None:
        """End the present epoch; from now on there are no members."""
        self._is_destroyed = True
        self._end_present("the coordinator was destroyed")
        super().destroy()

    def _current(self) -> Communicator:
        if self._is_destroyed:
            raise GroupCoordinatorError(f"the coordinator {self.unique_name} was destroyed")
        try:
            self._manager.wait_quorum()
        except Exception as error:
            raise GroupCoordinatorError(f"{self.unique_name} has no quorum: {error}") from error
        if (lost := self._manager.errored()) is not None:
            raise GroupCoordinatorError(f"the step is lost already: {lost}") from lost
        group = self._manager.process_group
        if self._communicator is not None and self.epoch == group.epoch:
            return self._communicator
        rank = self._manager.replica_rank()
        if rank is None:
            raise GroupCoordinatorError("the manager has no quorum yet: call start_quorum first")
        self._end_present(f"the quorum is another one since configuration {group.epoch}")
        everyone = list(range(self._manager.replica_world_size()))
        epoch = _ManagedEpoch(group, self._manager)
        return self._begin_epoch(epoch, Place(self.unique_name, rank, everyone, self.device, group, group))


class _ManagedEpoch(Epoch):
    """One quorum. It is over when the group is configured anew, whether the coordinator has heard or not."""

    def __init__(self, group: ProcessGroup, manager: GroupManager) -> None:
        super().__init__(group.epoch)
        self._configured = group.configuration
        self._group = group
        self._manager = manager

    def require_present(self, what: str) -> None:
        self._look()
        super().require_present(what)

    def explained(self, what: str, error: BaseException) -> BaseException:
        """Return the error to raise for `what`; it loses the step of this quorum, not that of a later one."""
        if isinstance(error, StillUnderWayError) or not isinstance(error, Exception):  # it goes on
            return error
        self._look()
        if self.reason is not None:
            return self.stale(what, error)
        self._manager.report_error(error)
        return error

    def _look(self) -> None:
        if self._group.configuration is not self._configured:
            self.set(f"the manager's group was configured anew, {self._group.epoch} times by now")
