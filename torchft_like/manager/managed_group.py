"""The process group, and the protocol's state of it, changed together under one lock.

The difficulty is the order of abort and configure. Invariants:

* An abort is meant for one quorum. It is carried out only while no newer quorum is agreed.
* A group whose quorum is broken before or during its configuration ends that configuration: the signal that
  ends it is made here, before `configure` is called, so no abort can come too early for it.
* A quorum counts as configured only after `configure` returned without error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from torchft_like.core.assignment import QuorumResult
from torchft_like.core.replica_group import LossNotice
from torchft_like.core.step import Plan, StepProtocol
from torchft_like.errors import MemberLostError, describe_own_error, is_own_error
from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.gloo import adopted
from torchft_like.runtime.long_waits import oldest_call

Emit = Callable[..., None]


class ManagedGroup:
    """Guards `protocol` and `pg` with one lock, which is never held during a wait.

    Args:
        timeout_s: the limit of operations; None keeps the group's own.
    """

    def __init__(
        self, pg: dist.ProcessGroup, protocol: StepProtocol, emit: Emit, timeout_s: float | None = None
    ) -> None:
        self.pg: ProcessGroup = adopted(pg)
        if timeout_s is not None:
            self.pg.set_timeout(timedelta(seconds=timeout_s))
        self.lock = threading.RLock()
        self._told = threading.Condition(self.lock)  # is notified when a rank that holds may enter
        self._protocol = protocol
        self._emit = emit
        self._ending = AbortSignal()  # the signal of the last configuration
        self._why = "it is not configured"  # of the last abort

    def agree(self, result: QuorumResult, allow_heal: bool) -> Plan:
        """Record the quorum of the current attempt, and return what has to be done before it can be used."""
        with self.lock:
            plan = self._protocol.agreed(result, allow_heal)
            if self._protocol.is_broken(result.quorum_id):  # an error came before the quorum was known
                self._abort(result.quorum_id, f"the step is lost: {self._protocol.failure!r}")
            return plan

    def enter(self, is_over: Callable[[], bool], timeout_s: float) -> bool:
        """Take part in the current attempt once this rank need not hold, or stop where the attempt `is_over`;
        return False if that takes longer than the timeout.
        """
        with self._told:
            return self._told.wait_for(lambda: is_over() or self._protocol.enter(), timeout_s)

    def hold(self, quorum_id: int) -> int:
        """Enter no further attempt in this quorum; return the first step that was not entered."""
        with self.lock:
            return self._protocol.hold(quorum_id)

    def released(self, quorum_id: int, ask_at: int | None) -> None:
        """Enter attempts again, and ask for a quorum at this step; with None, when told to."""
        with self._told:
            if ask_at is None:
                self._protocol.resume()
            elif not self._protocol.released(quorum_id, ask_at):
                self.fail(quorum_id, MemberLostError(f"the others ask for a quorum at step {ask_at} already"))
            self.wake()

    def wake(self) -> None:
        """Have a rank that holds look whether it may enter, or its attempt is over."""
        with self._told:
            self._told.notify_all()

    def configure(
        self, result: QuorumResult, store_prefix: str, replica_id: str, group: tuple[int, int]
    ) -> bool:
        """Configure the process group for a quorum; return False if that failed or the quorum broke.

        Args:
            store_prefix: the address `host:port/prefix`, unique to the quorum and group rank.
            group: this rank's number in its replica group, and the group's size.
        """
        quorum_id = result.quorum_id
        with self.lock:
            if self._protocol.is_broken(quorum_id):
                return False
            self._ending = ending = AbortSignal()
        about: About = {
            "replica_id": replica_id,
            "quorum_id": quorum_id,
            "group_rank": group[0],
            "group_world_size": group[1],
            "global_ranks": [rank * group[1] + group[0] for rank in range(result.replica_world_size)],
        }
        if isinstance(self.pg, ProcessGroup):
            about["ends_with"] = ending
        try:
            self.pg.configure(
                store_prefix,
                rank=result.replica_rank,  # by name, because a subclass may have torchft 0.2.0's order
                world_size=result.replica_world_size,
                **about,
            )
        except Exception as error:  # noqa: BLE001 - after any error this quorum is lost and the next is tried
            self.fail(quorum_id, error)
            return False
        else:
            with self.lock:
                self._protocol.configured(quorum_id)
            return True

    def fail(self, quorum_id: int, reason: Exception, *, group_broken: bool = True) -> None:
        """Record an error in a quorum, and release the peers that wait for this rank."""
        with self.lock:
            was_broken = self._protocol.is_broken(quorum_id)
            own = describe_own_error(reason) if group_broken and is_own_error(reason) else ""
            is_news = self._protocol.fail(quorum_id, reason, group_broken=group_broken, own=own)
            if group_broken and not was_broken:
                self._abort(quorum_id, f"{type(reason).__name__}: {reason}")
        if is_news:
            self._emit("error", quorum_id=quorum_id, reason=f"{type(reason).__name__}: {reason}")

    def fail_current(self, reason: Exception) -> None:
        """Record an error that the training script reports in its current step."""
        with self.lock:
            own = describe_own_error(reason) if is_own_error(reason) else ""
            is_news = self._protocol.fail_current(reason, own)
            quorum_id = self._protocol.quorum_id
            if is_news:
                self._abort(quorum_id, f"the training script reported {reason!r}")
        self._emit("error", quorum_id=quorum_id, reason=f"{type(reason).__name__}: {reason}")

    def member_lost(self, notice: LossNotice) -> None:
        """Abort: no rank can finish a collective with a member that is gone, or gave the quorum up."""
        reason = notice.describe()
        is_news = self._break(notice.quorum_id, reason)
        if notice.must_fail:
            with self.lock:
                self._protocol.fail(notice.quorum_id, MemberLostError(reason))
        if not notice.is_alive:
            self._emit("loss", quorum_id=notice.quorum_id, member=notice.replica_id, reason=notice.reason)
        if is_news:
            self._emit("abort", quorum_id=notice.quorum_id, reason=reason)

    def give_up(self, reason: str) -> None:
        """Abort: the next quorum is another one, as a rank of this replica group is silent."""
        quorum_id = self._protocol.quorum_id
        if self._break(quorum_id, reason):
            self._emit("abort", quorum_id=quorum_id, reason=reason)

    def _break(self, quorum_id: int, reason: str) -> bool:
        """Abort, and use the process group of this quorum no more; return False if that is no news."""
        with self.lock:
            is_news = self._protocol.group_broke(quorum_id)
            if is_news:
                self._abort(quorum_id, reason)
        return is_news

    def call_under_way(self) -> object | None:
        """Return the oldest call of a gang, a coordinator or a managed group over the group as it is
        configured now, by a key; None if there is none.
        """
        return oldest_call(self.pg.configuration) if isinstance(self.pg, ProcessGroup) else None

    def refuse(self) -> bool:
        """Return whether a collective must not be issued now; the step has then failed."""
        with self.lock:
            if self._protocol.can_communicate:
                return False
            quorum_id = self._protocol.quorum_id
            lost = MemberLostError(
                f"the process group of quorum {quorum_id} was aborted ({self._why}); the step is tried again"
            )
            if self._protocol.failure is None:
                self._protocol.fail(quorum_id, lost)
        return True

    def abort_now(self) -> None:
        """End what the process group does, in any quorum, because this replica stops."""
        self.pg.abort("this replica stops")
        self._ending.set("this replica stops")
        self.wake()

    def _abort(self, quorum_id: int, reason: str) -> None:
        if quorum_id < self._protocol.quorum_id:
            return
        self._why = reason
        self.pg.abort(reason)  # a user's class may have overridden `abort`
        self._ending.set(reason)
