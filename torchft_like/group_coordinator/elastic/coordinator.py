"""Group coordinators whose members change while they are used.

An `ElasticCoordinator` has the members that the lighthouse names: each rank that asks for a quorum, until it
leaves or is lost. A change is prepared beside the old members and then comes about on all new members, or on
none; how that is decided is in `candidate`. The coordinator is the same object before and after: its epoch,
rank and size change, and nothing of an old epoch, a message, a handle, tokens that were dispatched, is ever
taken for something of a new one.

The epochs of a `ManagedCoordinator` are the quorums of a Manager, which decides between two steps who is a
member; a replica that dies is left out of the next quorum. The coordinator asks for the quorum when it is
called, and has the members of that one. What it raises loses the step, as in `torchft_like.gang.managed`;
also what it refuses, for the other members have refused it, too. A wait whose time is up raises, and loses
nothing.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import torch

from torchft_like.communicator.communicator import Communicator, CoordinatorOptions
from torchft_like.communicator.epoch import Epoch
from torchft_like.errors import (
    ChangeInDoubtError,
    ChangeRolledBackError,
    GroupCoordinatorError,
    StaleEpochError,
    StillUnderWayError,
)
from torchft_like.group_coordinator.coordinator import GroupCoordinator
from torchft_like.group_coordinator.creation import ANONYMOUS, Place, unique_name
from torchft_like.group_coordinator.elastic.membership import (
    Change,
    EpochGroups,
    Member,
    Membership,
    Settle,
    retire,
)
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupNCCL
from torchft_like.process_group.swallowing import QuorumManager
from torchft_like.process_group.wrapper import as_timedelta

NAME_CHARACTERS_MAX = 200
RETRY_S = 0.05
_NOT_READY, _LEAVES, _ROLLED_BACK, _SWITCHED = 0, -1, 1, 2  # the present members say; or a quorum's id

_logger = logging.getLogger(__name__)


class EpochCoordinator(GroupCoordinator):
    """The common part of coordinators whose members come and go in epochs.

    Attributes:
        epoch: number of the present one; 0 before the first.
    """

    epoch: int = 0

    _present: Epoch | None = None

    def _have_no_members(self, device: torch.device | str, group_name: str | None) -> None:
        """Set the attributes as they are before the first epoch."""
        self.group_name = group_name or ANONYMOUS
        self.unique_name = unique_name(self.group_name)
        self.device = torch.device(device)
        self.local_rank = self.device.index or 0
        self._count_nobody()
        self._queues = []

    def _count_nobody(self) -> None:
        self.ranks, self.rank, self.rank_in_group, self.world_size = [], -1, -1, 0

    def _end_present(self, reason: str) -> None:
        """End the present epoch, with the queues that were made in it."""
        if self._present is not None:
            self._present.end(reason)
        for queue in self._queues:
            queue.shutdown()
        self._queues.clear()
        self._barriers = self.mq_broadcaster = None

    def _begin_epoch(self, epoch: Epoch, place: Place) -> None:
        """Begin an epoch with these members; the one before is over."""
        self._adopt(place, self.options, epoch)
        self._present, self.epoch = epoch, epoch.number


class ElasticCoordinator(EpochCoordinator):
    """The communication of a group whose members grow, shrink and are replaced; any of them, rank 0 too.

        coordinator = ElasticCoordinator("worker-3", lighthouse="http://10.0.0.1:29510")
        coordinator.follow()  # have members
        ...
        change = coordinator.begin_change()  # asks who is a member; prepared aside, calls go on
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
        name: as it was given.
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
        self.options = options or CoordinatorOptions()
        self._have_no_members(device, group_name)
        self._groups: EpochGroups | None = None
        settle = Settle(self._enter, lambda: self._part(_ROLLED_BACK), self._leave, self._end_epoch)
        self._session = Member(name, lighthouse, self._make_groups, settle)
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
        """Ask the lighthouse for members, and meet them aside; calls to the present ones go on.

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
        if self._is_destroyed:
            raise GroupCoordinatorError(f"{self!r} was destroyed")
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
            ConfigError, AddressError, ConnectError: see `begin_change`.
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
                self.begin_change().complete(left_s)
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
        own = _NOT_READY
        if change is not None and not change.is_over:
            if change.groups is None:
                own = _LEAVES
            elif change.has_met and change.membership is not None:
                own = change.membership.epoch
        said = self.all_gather(torch.tensor([own], device="cpu"), 0).tolist()
        who = dict(zip(self.membership.members if self.membership else (), said, strict=True))
        leaving = [name for name, each in who.items() if each == _LEAVES]
        staying = [name for name in who if name not in leaving]
        if change is not None and own > 0 and change.membership is not None:
            kept = [name for name in who if name in change.membership.members]
            if kept != staying:
                change.roll_back(f"{', '.join(sorted({*kept} ^ {*staying}))} had asked in another round")
                return False
        proposals = {who[name] for name in staying}
        is_due = len(proposals) <= 1 and _NOT_READY not in proposals
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

    def _current(self) -> Communicator:
        if self._communicator is None:
            error = StaleEpochError if self.epoch else GroupCoordinatorError
            raise error(f"{self!r} cannot communicate: {self._why_none}")
        return self._communicator

    # --------------------------------------------------------------- what becomes of a change

    def _enter(self, membership: Membership, groups: EpochGroups) -> None:
        reason = f"its members are those of epoch {membership.epoch} now"
        try:
            self._session.enter(groups, membership.members)
            self._part(_SWITCHED)
            self._end_present(reason)
            groups.set_timeout(as_timedelta(self.options.timeout))
            retire(self._groups, groups, reason)
            self._groups, self.membership = groups, membership
            rank = membership.members.index(self.name)
            everyone = list(range(len(membership.members)))
            place = Place(self.unique_name, rank, everyone, self.device, groups.cpu, groups.device)
            self._begin_epoch(Epoch(membership.epoch, mark=membership.epoch), place)
        except BaseException as error:
            # Ctrl-C: the others are in the new epoch, and need not wait for this member in it.
            interrupted = f"its switch to epoch {membership.epoch} was interrupted: {error!r}"
            groups.abort(interrupted)
            self._end_epoch(interrupted)
            raise

    def _leave(self, change: Change) -> None:
        """Leave, unless those who stay say that they have not switched, and still count on this member."""
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
        """Give up the members."""
        try:
            self._end_present(reason)
        finally:  # whatever interrupts a farewell
            if self._groups is not None:
                self._groups.abort(reason)
            self._session.end_epoch()
            self._communicator = self._groups = self.membership = None
            self._count_nobody()
            self._why_none = reason

    def _make_groups(self, timeout: timedelta) -> EpochGroups:
        cpu = ProcessGroupGloo(timeout)
        device = ProcessGroupNCCL(timeout) if self.device.type == "cuda" else cpu
        return EpochGroups(cpu, device, self.device)

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
        manager: QuorumManager,
        *,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        options: CoordinatorOptions | None = None,
    ) -> None:
        self._manager = manager
        self.options = options or CoordinatorOptions()
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
        if self._communicator is None or self.epoch != group.epoch:
            self._follow(group)
        if self._communicator is None:
            raise GroupCoordinatorError(f"{self.unique_name} has no members")
        return self._communicator

    def _follow(self, group: ProcessGroup) -> None:
        """Have the members that the group is configured for."""
        rank = self._manager.replica_rank()
        if rank is None:
            raise GroupCoordinatorError("the manager has no quorum yet: call start_quorum first")
        self._end_present(f"the quorum is another one since configuration {group.epoch}")
        everyone = list(range(self._manager.replica_world_size()))
        epoch = _ManagedEpoch(group, self._manager)
        self._begin_epoch(epoch, Place(self.unique_name, rank, everyone, self.device, group, group))


class _ManagedEpoch(Epoch):
    """One quorum. It is over when the group is configured anew, whether the coordinator has heard or not."""

    def __init__(self, group: ProcessGroup, manager: QuorumManager) -> None:
        super().__init__(group.epoch)
        self._configured = group.configuration
        self._group = group
        self._manager = manager

    def check(self, what: str) -> None:
        """Raise if the quorum is over; `what` is an object of its members."""
        self._look()
        super().check(what)

    def explained(self, what: str, error: BaseException) -> BaseException:
        """Return the error to raise for `what`; it loses the step of this quorum, not that of a later one."""
        if isinstance(error, StillUnderWayError) or not isinstance(error, Exception):  # it goes on
            return error
        self._look()
        if self.ended is not None:
            stale = self.stale(what)
            stale.__cause__ = error
            return stale
        self._manager.report_error(error)
        return error

    def _look(self) -> None:
        if self._group.configuration is not self._configured:
            self.end(f"the manager's group was configured anew, {self._group.epoch} times by now")
