"""A group coordinator whose members change while it is used.

A change is prepared beside the old members and then comes about on all new members, or on none; how that
is decided, and what happens to one who dies in between, is in `ballot`. The coordinator is the
same object before and after: its epoch, rank and size change, and nothing of an old epoch, a message,
a handle, tokens that were dispatched, is ever taken for something of a new one.

Who shall be a member is not decided here: a `Membership` says it, which a launcher may announce on a
`MembershipBoard`.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch

from torchft_like.communicator.communicator import Communicator
from torchft_like.communicator.options import CoordinatorOptions
from torchft_like.errors import (
    ChangeInDoubtError,
    ChangeRolledBackError,
    GroupCoordinatorError,
    StaleEpochError,
)
from torchft_like.group_coordinator.coordinator import GroupCoordinator, Place
from torchft_like.group_coordinator.creation import ANONYMOUS, unique_name
from torchft_like.group_coordinator.elastic.board import MembershipBoard
from torchft_like.group_coordinator.elastic.change import Change, EpochGroups, Settling, retire
from torchft_like.group_coordinator.elastic.epoch import Epoch
from torchft_like.group_coordinator.elastic.membership import Membership
from torchft_like.process_group import ProcessGroupGloo, ProcessGroupNCCL
from torchft_like.process_group.wrapper import as_timedelta

_DIGEST_BITS = 62

_logger = logging.getLogger(__name__)


class EpochCoordinator(GroupCoordinator):
    """What coordinators have in common whose members come and go in epochs.

    Attributes:
        epoch: number of the present one; 0 before the first.
    """

    epoch: int = 0

    _present: Epoch | None = None

    def _have_no_members(self, device: torch.device | str, group_name: str | None) -> None:
        """Before the first epoch."""
        self.group_name = group_name or ANONYMOUS
        self.unique_name = unique_name(self.group_name)
        self.device = torch.device(device)
        self.local_rank = self.device.index or 0
        self._count_nobody()
        self._queues = []

    def _count_nobody(self) -> None:
        self.ranks, self.rank, self.rank_in_group, self.world_size = [], -1, -1, 0

    def _end_present(self, reason: str) -> None:
        """The present epoch, with the queues that were made in it, is over."""
        if self._present is not None:
            self._present.end(reason)
        for queue in self._queues:
            queue.shutdown()
        self._queues.clear()
        self._barriers = self.mq_broadcaster = None

    def _begin_epoch(self, epoch: Epoch, place: Place) -> None:
        """From now on these are the members; those before have ended theirs."""
        self._adopt(place, self.options, epoch)
        self._present, self.epoch = epoch, epoch.number


class ElasticCoordinator(EpochCoordinator):
    """The communication of a group whose members grow, shrink and are replaced; any of them, rank 0 too.

        coordinator = ElasticCoordinator("worker-3")
        coordinator.follow(board)  # the first members meet
        ...
        change = coordinator.begin_change(membership)  # prepared aside; calls go on
        if coordinator.is_due(change):  # on all members, between two calls
            change.complete()

    It has no members before the first change. A change that is rolled back leaves it as it is. Calls, and
    `complete`, are for one thread at a time.

    Args:
        name: the caller's, as memberships have it.
        device: of the tensors; on a CUDA device there is a group of NCCL beside that of Gloo.
        group_name: for messages; need not be unique.
        options: the same on every member.

    Attributes:
        name: as it was given.
        membership: the present one; None if there is none.
        epoch_tried: the largest epoch that a change was begun for.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device | str = "cpu",
        group_name: str | None = None,
        options: CoordinatorOptions | None = None,
    ) -> None:
        self.name = name
        self.membership: Membership | None = None
        self.options = options or CoordinatorOptions()
        self._have_no_members(device, group_name)
        self._groups: EpochGroups | None = None
        self._change: Change | None = None
        self.epoch_tried = 0
        self._is_destroyed = False
        self._why_none = "it has no members yet: begin a change"

    def change(self, membership: Membership, timeout: timedelta | float | None = None) -> None:
        """`begin_change` and `complete` in one: blocks until it has come about.

        Raises:
            ChangeRolledBackError, ChangeInDoubtError: see Change.complete.
            ValueError: see `begin_change`.
        """
        self.begin_change(membership, timeout).complete()

    def begin_change(self, membership: Membership, timeout: timedelta | float | None = None) -> Change:
        """Begin to meet the members of `membership`, beside the present ones, with whom calls go on.

        A change that was begun before and is not over is rolled back.

        Those who are to leave begin it, too, if they can: they hear of the decision in `complete`.

        Args:
            timeout: for the members to meet, and for the decision; that of the options if left out.

        Raises:
            GroupCoordinatorError: the coordinator was destroyed.
            ValueError: its epoch is not larger than every one that was tried before, or the caller is
                neither one of these members nor of the present ones.
        """
        if membership.epoch <= self.epoch_tried:
            raise ValueError(
                f"epoch {membership.epoch} comes after {self.epoch_tried}: each change needs a new one"
            )
        if membership.rank_of(self.name) is None and self.membership is None:
            raise ValueError(f"{self.name} is not a member, and will not be: {membership}")
        if self._is_destroyed:
            raise GroupCoordinatorError(f"{self!r} was destroyed")
        self.epoch_tried = membership.epoch
        self._give_up_change(f"{self.name} goes on to {membership}")
        limit = as_timedelta(self.options.timeout if timeout is None else timeout)
        settling = Settling(self._enter, self._leave, self._lose)
        self._change = Change(self.name, membership, limit, self._make_groups, settling)
        return self._change

    def follow(self, board: MembershipBoard, timeout: timedelta | float | None = None) -> Membership:
        """Complete the change that was begun, or the next that is announced; blocks until one comes about.

        For those who have no members yet, or whose members do not answer. One that is rolled back is followed
        by the next, and an announcement that is none of the caller's business by the one after it.

        Args:
            timeout: for an announcement to come, seconds or timedelta; that of the board if left out.

        Raises:
            TimeoutError: nothing was announced in time.
            ChangeInDoubtError: see Change.complete; follow again.
            ProcessGroupError: the board's store was lost.
        """
        after = self.epoch_tried
        while True:
            if (change := self._change) is None or change.is_over:
                membership = board.wait_for(after, timeout)
                after = membership.epoch
                if membership.rank_of(self.name) is None and self.membership is None:
                    continue
                change = self.begin_change(membership)
            try:
                change.complete()
                return change.membership
            except ChangeRolledBackError as error:
                _logger.info("%s", error)

    def is_due(self, change: Change | None) -> bool:
        """Whether all present members are ready for the same change: then each calls `complete`.

        All present members call it, between the same two calls, with their change, or None. They may hear
        of an announcement at different times; this says when all have.

        Raises:
            GroupCoordinatorError: a member died. The others complete a change without it all the same.
        """
        digest = 0
        if change is not None and change.is_ready and not change.is_over:
            digest = int(change.membership.digest, 16) % 2**_DIGEST_BITS
        said = self.all_gather(torch.tensor([digest], device="cpu"), 0).tolist()
        return digest != 0 and said == [digest] * len(said)

    def destroy(self) -> None:
        """Give back the groups; from now on there are no members, and no change to come."""
        self._is_destroyed = True
        self._give_up_change(f"{self.name} was destroyed")
        self._end_epoch("it was destroyed")
        super().destroy()

    def _current(self) -> Communicator:
        if self._communicator is None:
            error = StaleEpochError if self.epoch else GroupCoordinatorError
            raise error(f"{self!r} cannot communicate: {self._why_none}")
        return self._communicator

    def _give_up_change(self, reason: str) -> None:
        """The others need not wait for this member in the change that it has begun."""
        if self._change is not None:
            try:
                self._change.roll_back(reason)
            except ChangeInDoubtError:  # `complete` was interrupted after the vote
                self._change.abandon(reason)

    def _enter(self, membership: Membership, groups: EpochGroups) -> None:
        reason = f"its members are those of epoch {membership.epoch} now"
        try:
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

    def _leave(self, membership: Membership) -> None:
        self._end_epoch(f"{self.name} has left with epoch {membership.epoch}")

    def _lose(self, error: ChangeInDoubtError) -> None:
        self._end_epoch(str(error))

    def _end_epoch(self, reason: str) -> None:
        """There are no members now."""
        try:
            self._end_present(reason)
        finally:  # whatever interrupts a farewell
            if self._groups is not None:
                self._groups.abort(reason)
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
