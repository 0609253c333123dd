"""A change of members, from its announcement until it has come about or is rolled back.

The new members meet on a thread of the change's own, in process groups of the new epoch, while the old
groups serve. `complete` is for the thread that makes the calls, between two of them: it votes, waits for
what is decided (see `ballot`), and only then touches the coordinator.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import Work

from torchft_like.communicator.handle import Handle
from torchft_like.devices import beside_captures
from torchft_like.errors import (
    ChangeInDoubtError,
    ChangeRolledBackError,
    GroupCoordinatorError,
    ProcessGroupError,
)
from torchft_like.group_coordinator.elastic.ballot import STORE_LOST, Ballot
from torchft_like.group_coordinator.elastic.membership import Membership, Verdict, differing
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.wrapper import as_timedelta

GRACE_S = 5.0
TELLING_S = 1.0

_logger = logging.getLogger(__name__)


class EpochGroups(NamedTuple):
    """The process groups of one epoch; both are the same where the tensors are on a CPU."""

    cpu: ProcessGroup
    device: ProcessGroup
    place: torch.device

    def each(self) -> list[ProcessGroup]:
        """Every group once."""
        return [self.cpu] if self.cpu is self.device else [self.cpu, self.device]

    def configure(self, store_address: str, rank: int, world_size: int, ends_with: AbortSignal) -> None:
        """Meet the other members, each group under a prefix of its own."""
        with beside_captures(self.place):
            for number, group in enumerate(self.each()):
                group.configure(f"{store_address}/{number}", rank, world_size, ends_with=ends_with)

    def abort(self, reason: str) -> None:
        """End what is under way, and give everything back aside."""
        for group in self.each():
            group.abort(reason)

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit of each operation from now on."""
        for group in self.each():
            group.set_timeout(timeout)


class Settling(NamedTuple):
    """What a coordinator does when a change is decided.

    Attributes:
        enter: it has these members, and groups, from now on.
        leave: it has none any more, as it is not one of them.
        lose: it has none, as it does not know who they are.
    """

    enter: Callable[[Membership, EpochGroups], None]
    leave: Callable[[Membership], None]
    lose: Callable[[ChangeInDoubtError], None]


class Change:
    """A membership that is prepared beside the present one; `ElasticCoordinator.begin_change` makes it.

    Attributes:
        membership: the one that is prepared.
        rank: the caller's among its members; None if it leaves.
        is_over: whether it has come about, or never will.
    """

    def __init__(
        self,
        name: str,
        membership: Membership,
        timeout: timedelta | float,
        make: Callable[[timedelta], EpochGroups],
        settling: Settling,
    ) -> None:
        self.membership = membership
        self.rank = membership.rank_of(name)
        self._name = name
        self._timeout = as_timedelta(timeout)
        self._settling = settling
        self._ballot = Ballot(membership.store, len(membership.members), self._timeout)
        self._groups = make(self._timeout) if self.rank is not None else None
        self._prepared = threading.Event()
        self._ending = AbortSignal()
        self._failure: Exception | None = None
        self.is_over = False
        threading.Thread(target=self._prepare, name="torchft-change", daemon=True).start()

    @property
    def is_ready(self) -> bool:
        """Whether `complete` need not wait for the members to meet: they have, or could not."""
        return self._prepared.is_set()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Until `is_ready`, for `timeout` seconds at the most; whether it is."""
        return self._prepared.wait(timeout)

    def complete(self, timeout: timedelta | float | None = None) -> None:
        """Switch together with all other new members, or roll back together with them.

        Every new member calls it, and those who leave, between two calls to the coordinator. Afterwards the
        coordinator has the new members; handles of the old epoch are stale.

        Args:
            timeout: how long to wait for the others, seconds or timedelta; that of the change if left out.

        Raises:
            ChangeRolledBackError: on every member; the coordinator goes on with the members it has.
            ChangeInDoubtError: the store was lost between this member's vote and the decision; the
                coordinator has no members until the next change.
            GroupCoordinatorError: it is over already.
        """
        if self.is_over:
            raise GroupCoordinatorError(f"the change to {self.membership} is over: begin another")
        limit = self._timeout if timeout is None else as_timedelta(timeout)
        deadline = time.monotonic() + limit.total_seconds()
        try:
            verdict = self._decided(deadline)
        except ChangeInDoubtError as error:
            self._give_up(str(error))
            self._settling.lose(error)
            raise
        if not verdict.switches:
            self._give_up(f"rolled back: {verdict.reason}")
            raise ChangeRolledBackError(
                f"epoch {self.membership.epoch} was rolled back: {verdict.reason}"
            ) from self._failure
        self.is_over = True
        self._ballot.close()
        if self._groups is None:
            self._settling.leave(self.membership)
        else:
            self._settling.enter(self.membership, self._groups)

    def roll_back(self, reason: str) -> None:
        """Instead of `complete`: nobody switches. Does nothing if it is over, or decided otherwise.

        Raises:
            ChangeInDoubtError: `complete` is under way in another thread, and may have voted.
        """
        if self.is_over:
            return
        if self._ballot.has_voted:
            raise ChangeInDoubtError(f"{self._name} has voted for epoch {self.membership.epoch} already")
        self._tell(f"{self._name}: {reason}")
        self._give_up(reason)

    def abandon(self, reason: str) -> None:
        """Instead of `complete`, after the vote: the others, if they switch, find this member gone."""
        if not self.is_over:
            self._give_up(reason)

    # ------------------------------------------------------------- meeting, on a thread aside

    def _prepare(self) -> None:
        try:
            self._ballot.listen()
            self._ballot.verdict.add_done_callback(self._end_meeting)
            if self._groups is not None and self.rank is not None:
                self._meet(self._groups, self.rank)
        except Exception as error:  # noqa: BLE001 - `complete` raises it
            self._failure = error
            self._tell(f"{self._name} could not meet the others: {error}")
            if self._groups is not None:  # after the reason, or the others would take it for a death
                self._groups.abort(f"epoch {self.membership.epoch} could not be prepared")
        self._prepared.set()

    def _meet(self, groups: EpochGroups, rank: int) -> None:
        members = len(self.membership.members)
        groups.configure(self.membership.store_address, rank, members, self._ending)
        met = self._watched_barrier(groups)  # before `hear`, which a member that dies now would keep waiting
        self._ballot.say(rank, self.membership.digest)
        if (reason := differing(self.membership, self._ballot.hear())) is not None:
            raise ValueError(reason)
        met.wait()

    def _end_meeting(self, verdict: Future[Verdict]) -> None:
        """It was decided, or the store lost, before the members have met: nobody has to wait for that."""
        if self._groups is not None and not self._prepared.is_set():
            self._ballot.close()
            self._ending.set(f"epoch {self.membership.epoch} will not come about: {_told(verdict)}")

    # -------------------------------------------------------------------------- the decision

    def _decided(self, deadline: float) -> Verdict:
        """What binds this member.

        Raises:
            ChangeInDoubtError: nobody can tell.
        """
        self._prepared.wait(_left_s(deadline))
        try:
            is_ready = self._failure is None and self._prepared.is_set()
            if self.rank is not None and is_ready and not self._ballot.has_voted:
                self._vote(self.rank)
            return self._read(deadline)
        except STORE_LOST as error:
            if self.rank is not None and not self._ballot.has_voted:
                return Verdict(False, f"{self._name} lost the store before it voted: {error}")
            raise ChangeInDoubtError(
                f"{self._name} lost the store while epoch {self.membership.epoch} was decided: {error}"
            ) from error

    def _vote(self, rank: int) -> None:
        """Ready; a member that dies from now on is noticed by a barrier, and not by a timeout only."""
        if self._groups is None:
            return
        try:
            self._watched_barrier(self._groups)  # here, so that it comes before any call of the new epoch
        except ProcessGroupError as error:
            self._ballot.refuse(f"{self._name} has lost the others after it had met them: {error}")
            return
        self._ballot.vote(rank)

    def _watched_barrier(self, groups: EpochGroups) -> Work:
        """Have the change rolled back if a member dies before all have come to it."""
        met = groups.cpu.barrier()
        threading.Thread(target=self._watch, args=(met,), name="torchft-change-watch", daemon=True).start()
        return met

    def _watch(self, met: Work) -> None:
        try:
            met.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the members cannot meet
            is_told = self._ballot.verdict.done() or self.is_over or self._failure is not None
            if not is_told:
                self._ballot.try_to_refuse(f"a member died after the others had met: {error}")

    def _read(self, deadline: float) -> Verdict:
        verdict = self._ballot.verdict
        if self._failure is not None and not (verdict.done() and verdict.exception() is None):
            if self.rank is None:
                raise self._failure  # who leaves cannot reach the store
            return Verdict(False, f"{self._name} could not meet the others: {self._failure}")
        if not _is_done(verdict, deadline):
            self._ballot.refuse(f"{self._name} has waited for the others in vain")
            if not _is_done(verdict, time.monotonic() + self._timeout.total_seconds()):
                raise TimeoutError("the store did not say what was decided")
        return verdict.result()

    def _tell(self, reason: str) -> None:
        """Refuse. This vote is missing, so it is certain already: a silent store is not waited for."""
        telling = threading.Thread(
            target=self._ballot.try_to_refuse, args=(reason,), name="torchft-change-refuse", daemon=True
        )
        telling.start()
        telling.join(TELLING_S)

    def _give_up(self, reason: str) -> None:
        self.is_over = True
        if self._groups is not None:
            self._groups.abort(reason)
        self._ballot.close()


def retire(old: EpochGroups | None, new: EpochGroups, reason: str) -> None:
    """Give the old groups back, aside, once all new members know that they are old.

    Were they closed at once, what another member still waits for would look like a death to it. All new
    members call it, those who have no old groups, too.
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


def _is_done(verdict: Future[Verdict], deadline: float) -> bool:
    try:
        verdict.exception(_left_s(deadline))
    except TimeoutError:
        return verdict.done()
    return True


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _told(verdict: Future[Verdict]) -> str:
    if (error := verdict.exception()) is not None:
        return f"the store was lost: {error}"
    return verdict.result().reason
