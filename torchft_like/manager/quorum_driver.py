"""The background work from the join to a usable quorum.

The coordination loop calls the driver with the messages to this rank (`LocalListener`), and the quorum worker
runs its jobs: the training thread goes on with the forward pass meanwhile, and the coordination loop stays
free to receive the alarm that a member died, and to abort what the worker waits for. The driver opens the
gates of the current `Attempt`; the training thread waits at them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.distributed import Work

from lighthouse.forks import Turn, left_to_parent
from torchft_like import devices
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.replica_group import (
    GroupLeftNotice,
    GroupLostNotice,
    HoldRanks,
    LeftOutNotice,
    LossNotice,
    RankJoin,
    RankQuorum,
    RankVerdict,
    ReleaseRanks,
    StepLostNotice,
    SuspectNotice,
    ToRank,
    Verdict,
)
from torchft_like.core.stall_watch import Wait
from torchft_like.core.state_comparison import UNKNOWN_RANK, Divergence
from torchft_like.core.step import IN_VAIN, Plan, StepProtocol
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.divergence.state_fingerprint import PendingFingerprint
from torchft_like.errors import (
    DivergenceError,
    FaultToleranceError,
    ForeignMemberError,
    GroupLostError,
    QuorumTimeoutError,
    ShutdownError,
    StepLostError,
    lost_by,
)
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.config import ManagerConfig
from torchft_like.manager.managed_group import Emit, ManagedGroup
from torchft_like.manager.state_exchange import StateExchange
from torchft_like.manager_server.rank_link import RankLink
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.torch_interface import abort_groups_of_torch
from torchft_like.process_group.work import DeferredOperation, FinishedOperation
from torchft_like.runtime.background import awaited_at_exit
from torchft_like.runtime.event_loop import coordination_loop

# For so long a rank that was asked to stop waits for a quorum. Schedulers often kill after 30 s, in which the
# script may have a state to save, and a quorum that comes within a step costs the others nothing.
STOP_WAIT_S = 15.0

_logger = logging.getLogger(__name__)


class QuorumDriver:
    """The driver of the current attempt, from the join until collectives can be issued.

    Attributes:
        attempt: the current attempt, or the last one.
        fatal: the error with which this Manager ended; every later wait raises it.
        over: is set once there is one.
        trouble: why the lighthouse cannot be reached at present, if so.
        divergence: the watch over differences between the replicas' states.
    """

    def __init__(
        self,
        config: ManagerConfig,
        protocol: StepProtocol,
        group: ManagedGroup,
        exchange: StateExchange,
        emit: Emit,
    ) -> None:
        self.attempt: Attempt | None = None
        self.fatal: FaultToleranceError | None = None
        self.over = AbortSignal()
        self.trouble: str | None = None
        self.divergence: DivergenceWatch = DivergenceWatch(emit)
        self._config = config
        self._protocol = protocol
        self._group = group
        self._exchange = exchange
        self._emit = emit
        self._worker = QuorumWorker()
        self._deferred = weakref.ref(DeferredOperation())  # to the last one, while it lives; to none at first
        _drivers.add(self)
        self._members: tuple[str, ...] = ()
        self._loop = coordination_loop().loop
        self._is_asked_to_stop = False
        self._end_of_group: GroupLeftNotice | GroupLostNotice | None = None  # heard while this rank leaves
        self._left_out: LeftOutNotice | None = None  # the quorum does without this group, and why
        self._suspects: dict[int, str] = {}  # by rank of this group: why it is suspected

    def begin(self, attempt: Attempt) -> RankJoin:
        """Make `attempt` the current one, in the present quorum if that stands; return its join."""
        if self._end_of_group is not None and self._protocol.farewell is None:
            self._end_with_group(self._end_of_group)  # the script goes on, and was told to leave
        with self._group.lock:
            last, self.attempt = self.attempt, attempt
            self._worker.device = attempt.device
            self._left_out = None
            attempt.is_patient = bool(self._suspects)
            if self.fatal is not None:  # it ended since the caller checked: no other event wakes this attempt
                attempt.fail(self.fatal)
            if last is not None and last.result is not None and last.result.healing_replica_ids:
                attempt.quorum_timeout_s += self._config.timeout_s  # which they may take, and are awaited
            result = None if last is None or last.allow_heal != attempt.allow_heal else last.result
            goes_on = self._protocol.goes_on and self.divergence.may_go_on
            own = self._protocol.begin()
            if goes_on and result is not None and self.fatal is None:
                self._protocol.stand()
                attempt.stand(result._replace(max_step=own.step))
            if self._protocol.verdict is not None:  # all ranks leave
                self._go_on_in_vain(attempt)
                attempt.decide(self._protocol.verdict)
            return own

    def ask(self, attempt: Attempt, join: RankJoin, link: RankLink) -> None:
        """Join, with the fingerprint of the state once the device has computed it: no thread waits for it."""
        pending = attempt.fingerprint
        if pending is None or pending.is_ready:
            self._join(attempt, join, link, pending)
        else:
            self._worker.submit(lambda: self._ask_later(attempt, join, link, pending), attempt.fail)

    def _join(
        self, attempt: Attempt, join: RankJoin, link: RankLink, pending: PendingFingerprint | None
    ) -> None:
        fingerprint = b"" if pending is None else pending.result()
        self.divergence.described(fingerprint)
        link.join(
            join._replace(fingerprint=fingerprint, may_stand=join.may_stand and self.divergence.may_stand)
        )
        attempt.why_unasked = link.why_unasked
        attempt.leave = partial(link.vote, join.group_rank, Verdict(join.step, False, stop=True))

    def wait_configured(self, attempt: Attempt) -> None:
        """Wait until collectives of the attempt may be issued, or are known to be pointless.

        Raises:
            FaultToleranceError: as `Attempt.wait_configured`.
        """
        if attempt.is_standing:
            limit_s = attempt.quorum_timeout_s
            while not self._group.enter(
                lambda: attempt.error is not None or not attempt.is_standing, limit_s
            ):
                if attempt.is_patient:
                    continue
                raise QuorumTimeoutError(
                    f"held for {limit_s:g} s, before a step in a quorum that stood: {self.why_no_quorum()}"
                )
            with self._group.lock:
                if attempt.is_standing:
                    attempt.open_configured()
        attempt.wait_configured(self.why_no_quorum)

    def defer(self, begin: Callable[[], Work], devices: Iterable[torch.device]) -> DeferredOperation:
        """Let the quorum worker begin an operation of several collectives, in the order of these calls.

        The worker configures the process group after it, so the operation meets no other members; a quorum
        for which there is something to configure ends what it waits for.
        """
        operation = DeferredOperation(devices)
        self._deferred = weakref.ref(operation)  # which keeps tensors; the worker keeps it until it has begun

        def refuse(error: Exception) -> None:
            operation.follow(FinishedOperation([], error))

        def run() -> None:
            try:
                begun = begin()
            except BaseException as error:  # noqa: BLE001 - a backend may raise anything: only the step is lost
                refuse(lost_by(error, "an operation of several collectives"))
            else:
                operation.follow(begun)

        self._worker.submit(run, refuse)
        return operation

    def wait_for_turn(self) -> None:
        """Wait until the worker has issued the collectives of what was deferred: ranks keep one order."""
        if (deferred := self._deferred()) is not None:
            deferred.wait_begun()

    def ask_instead(self, attempt: Attempt) -> None:
        """Ask for a quorum in an attempt that goes on in the present one, but has no collective with all
        members: it would be committed also where the others have gone on without this replica.
        """
        with self._group.lock:
            if attempt.error is not None or not self._protocol.ask_instead():
                return
            attempt.unstand()
        attempt.ask()

    def current(self) -> Attempt:
        """Return the attempt that has begun.

        Raises:
            RuntimeError: no attempt has begun.
            FaultToleranceError: this Manager cannot go on.
        """
        self.raise_if_over()
        if self.attempt is None:
            raise RuntimeError("no step has begun: call start_quorum (Optimizer.zero_grad) first")
        return self.attempt

    def spoil(self, attempt: Attempt | None, error: Exception) -> None:
        """Report an error in an attempt, perhaps before its quorum is known, perhaps after its end."""
        with self._group.lock:  # no other attempt begins meanwhile, to which the error would not belong
            if attempt is not None and attempt.result is not None:
                self._group.fail(attempt.result.quorum_id, error)
            elif attempt is self.attempt:
                self._group.fail_current(error)

    def raise_if_over(self) -> None:
        """Raise the error that keeps this Manager from going on, if there is one."""
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)  # it may be raised often, and frames would pile up

    def why_no_quorum(self) -> str:
        """Describe the circumstances, for the message of a QuorumTimeoutError."""
        why_unasked = "" if self.attempt is None else self.attempt.why_unasked()
        if why := "; ".join(self._suspects.values()) or why_unasked:
            return why
        lighthouse = self._config.lighthouse
        if lighthouse is None:
            return "rank 0 answered, but has no quorum; its log says why"
        if self.trouble is not None:
            return self._about_lighthouse()
        if self._left_out is not None and self._left_out.reason:
            return f"the others go on without this replica group: it {self._left_out.reason}"
        if self._left_out is not None:
            names = ", ".join(self._left_out.unreachable_replica_ids)
            return (
                f"the others go on without this replica group, as it and {names} do not reach each other; "
                "check the network between them"
            )
        return (
            f"the lighthouse at {lighthouse} answered, but not enough replica groups joined; its log says "
            "who is awaited. If these train for longer between two quorums (DiLoCo, LocalSGD), give "
            "quorum_timeout more"
        )

    def _about_lighthouse(self) -> str:
        if self.trouble is None or self._suspects:  # with a suspect this group has hung up there itself
            return ""
        return f"the lighthouse at {self._config.lighthouse} cannot be reached ({self.trouble})"

    def stop(self, error: FaultToleranceError, timeout_s: float | None) -> None:
        """Wake all waiting threads with `error`, and end what runs in the background, the worker included."""
        self._end(error)
        self._group.abort_now()
        self._worker.stop(timeout_s)

    # ------------------------------------------------- called on the coordination loop

    def hear(self, message: ToRank) -> int | None:
        match message:
            case RankQuorum(_, result):
                self.quorum(result)
            case RankVerdict(_, verdict):
                self.verdict(verdict)
            case StepLostNotice(_, quorum_id):
                error = f"another rank of this replica group voted no on its step in quorum {quorum_id}"
                self._group.fail(quorum_id, StepLostError(error))
            case LossNotice():
                self._group.member_lost(message)
                self._exchange.member_lost(message)
            case LeftOutNotice():
                self.left_out(message)
            case HoldRanks():
                return self._group.hold(message.quorum_id)
            case ReleaseRanks():
                self.released(message.quorum_id, message.ask_at)
            case SuspectNotice(group_rank, reason):
                self.suspected(group_rank, reason)
            case GroupLeftNotice() | GroupLostNotice() if self._protocol.is_leaving:
                self._end_of_group = message  # another rank of the group was quicker
            case GroupLeftNotice() | GroupLostNotice():
                self._end_with_group(message)
        return None

    def _end_with_group(self, notice: GroupLeftNotice | GroupLostNotice) -> None:
        # It may have given up because it got no quorum, and does not know why.
        why = "; ".join(filter(None, (notice.reason, self._about_lighthouse())))
        lost = GroupLostError(f"{why}; restart all ranks of this replica group")
        self.end(ForeignMemberError(notice.reason) if notice.is_foreign else lost, notice.reason)

    def quorum(self, result: QuorumResult) -> None:
        # No other attempt begins meanwhile, or its peers would wait in a quorum that only the protocol knows
        # of.
        with self._group.lock:
            attempt = self.attempt
            if attempt is None or self.fatal is not None or not self._protocol.awaits(result):
                return
            plan = self._group.agree(result, attempt.allow_heal)
            attempt.agree(result, plan)
        try:
            self._prepare_for(attempt, result, plan)
        except Exception as error:  # of a user's transport or group; the training thread would wait for ever
            attempt.fail(error)
            raise

    def _prepare_for(self, attempt: Attempt, result: QuorumResult, plan: Plan) -> None:
        if (error := self.divergence.quorum(result, attempt.allow_heal)) is not None:
            attempt.fail(error)
            return
        self._exchange.agreed(result)
        self._exchange.copy_ahead(attempt, plan)
        if plan.configure:
            deferred = self._deferred()
            if deferred is not None and not deferred.has_begun:  # the worker may wait in it for ever
                self._group.pg.abort("there is another quorum")
            self._worker.submit(lambda: self._prepare(attempt, result), attempt.fail)
        else:
            attempt.open_configured()
        if plan.heal:
            self._worker.submit(lambda: self._exchange.ask_early(attempt, result))

    def verdict(self, verdict: Verdict) -> None:
        """Handle a verdict; one on an attempt that was given up comes before the next attempt's quorum."""
        with self._group.lock:
            attempt, plan = self.attempt, self._protocol.hear(verdict)
            if attempt is None:
                return
            if plan.gives_up:
                self._go_on_in_vain(attempt)
            if plan.decides:
                attempt.decide(verdict)
        if plan.ends_behind:
            self._end_behind(verdict.step)

    def _end_behind(self, step: int) -> None:
        """End this Manager, which is a step behind the other ranks of its group, and has no time to heal."""
        reason = f"its script gave up step {step} after its vote, and the replica group committed it"
        self.end(GroupLostError(f"{reason} and leaves; restart all ranks of this replica group"), reason)

    def released(self, quorum_id: int, ask_at: int | None) -> None:
        """Go on, and ask for a quorum at this step, which may be that of the current attempt."""
        with self._group.lock:
            self._group.released(quorum_id, ask_at)
            attempt = self.attempt
            if attempt is None or attempt.error is not None or not self._protocol.is_due:
                return
            self._protocol.ask_instead()
            attempt.unstand()
        attempt.ask()

    def left_out(self, notice: LeftOutNotice) -> None:
        """Wait until a later quorum takes this replica in, however long that takes; the others go on."""
        self._left_out = notice
        self._be_patient()
        own = notice.replica_id
        links = [f"{own} - {other}" for other in notice.unreachable_replica_ids]
        reasons = [f"{own} {notice.reason}"] if notice.reason else []
        self._emit("left_out", quorum_id=notice.quorum_id, members=[own], links=links, reasons=reasons)

    def asked_to_stop(self) -> None:
        """Wait STOP_WAIT_S at most for a quorum from now on. Safe in a signal handler: it takes no lock."""
        if not self._is_asked_to_stop:
            self._is_asked_to_stop = True
            self._loop.call_soon_threadsafe(self._wait_before_stop, time.monotonic())
        self._be_patient()

    def _wait_before_stop(self, since: float) -> None:
        """Give the step up that has waited for its quorum for so long, or look again when it will have."""
        attempt = self.attempt
        if self.fatal is not None:
            return
        left_s = STOP_WAIT_S
        if attempt is not None and (self._protocol.is_waiting or self._protocol.is_held):
            left_s -= time.monotonic() - max(attempt.began, since)
            if left_s <= 0:
                self._stop_waiting(attempt)
                left_s = STOP_WAIT_S
        self._loop.call_later(left_s, self._wait_before_stop, since)

    def _stop_waiting(self, attempt: Attempt) -> None:
        """Have all ranks of the group leave, as no quorum comes."""
        with self._group.lock:
            asks = attempt is self.attempt and self._protocol.ask_instead_of_holding()
            if asks:
                attempt.unstand()
                self._group.wake()
        if asks:
            attempt.ask()
        if attempt.leave is None:  # the device computes yet what the join has to say
            return
        with self._group.lock:
            if attempt is self.attempt and self._protocol.give_up():
                self._go_on_in_vain(attempt)
        attempt.leave()  # at once: before its vote the script may have collectives with ranks that wait

    def _go_on_in_vain(self, attempt: Attempt) -> None:
        attempt.unstand()
        attempt.give_up()
        self._group.wake()
        self._emit("error", quorum_id=self._protocol.quorum_id, reason=f"StepLostError: {IN_VAIN}")

    def suspected(self, group_rank: int, reason: str) -> None:
        """Give the quorum up, and wait for the rank as long as it is suspected."""
        self._suspects.pop(group_rank, None)
        if reason:
            self._suspects[group_rank] = reason
            self._group.give_up(reason)
            self._exchange.end_fetch(reason)
        self._be_patient()

    def _be_patient(self) -> None:
        """Let the attempt wait for as long as there is a reason, beyond its timeout."""
        if self.attempt is not None:
            is_left_out = self._left_out is not None and not self._is_asked_to_stop
            self.attempt.is_patient = is_left_out or bool(self._suspects)

    def end(self, error: FaultToleranceError, reason: str) -> None:
        """End this Manager, which cannot go on; every later call of the training thread raises the error."""
        self._end(error)
        self._group.abort_now()
        abort_groups_of_torch(reason)  # a rank may wait in a group within this replica group
        self._emit("shutdown", reason=reason)

    def waits_for(self) -> Wait | None:
        """Return what the training thread waits for in its step.

        That is its preparation, the device, a state, other ranks' votes, the oldest allreduce that is not
        followed up yet, or the oldest call of a gang, a coordinator or a managed group.
        """
        attempt = self.attempt
        if attempt is None or not attempt.is_agreed or attempt.error is not None or attempt.is_standing:
            return None
        whole = {
            "preparation": not attempt.is_configured,
            "state": attempt.is_exchanging,
            "device": attempt.is_synchronizing,
            "votes": attempt.is_deciding,
        }
        for kind, is_awaited in whole.items():
            if is_awaited:
                return Wait(kind, attempt.began)
        if issued := list(attempt.pending_collectives.values()):
            return Wait("allreduce", issued[0], attempt.is_unasked)
        call = self._group.call_under_way()
        return None if call is None else Wait("call", call)

    def step_and_source(self) -> tuple[int, str]:
        """Return how many steps are committed, and the replica whose state is being taken over."""
        attempt = self.attempt
        result = None if attempt is None or attempt.error is not None else attempt.result
        if result is None or not self._protocol.healing:
            return self._protocol.step, ""
        source = result.recover_src_replica_rank
        name = self._exchange.source if source is None else result.replica_ids[source]
        return self._protocol.step, name

    def lighthouse_disconnected(self, reason: str) -> None:
        self.trouble, self._left_out = reason, None  # the lighthouse tells it again if it is still so
        self._be_patient()
        self._emit("disconnected", address=str(self._config.lighthouse), reason=reason)

    def lighthouse_connected(self) -> None:
        self.trouble = None
        self._emit("connected", address=str(self._config.lighthouse))

    # ---------------------------------------------------------- on the quorum worker

    def _ask_later(
        self, attempt: Attempt, join: RankJoin, link: RankLink, pending: PendingFingerprint
    ) -> None:
        described: PendingFingerprint | None = pending
        try:
            pending.result()
        except Exception:  # the step finds the device's failure elsewhere, and peers wait for the join
            _logger.exception("step %d: no fingerprint of the state", join.step)
            described = None
        if self.attempt is attempt and attempt.error is None:
            self._join(attempt, join, link, described)

    def _prepare(self, attempt: Attempt, result: QuorumResult) -> None:
        try:
            self._configure(attempt, result)
        except BaseException as error:  # also if a user's process group calls sys.exit
            _logger.exception("preparing quorum %d failed", result.quorum_id)
            self._group.fail(result.quorum_id, lost_by(error, "the configuration of the group"))
        finally:
            attempt.open_configured()

    def _configure(self, attempt: Attempt, result: QuorumResult) -> None:
        rank, size = self._config.group_rank, self._config.group_world_size
        prefix = result.meeting_place(f"torchft/{result.quorum_id}/{rank}")
        replica_id = result.replica_ids[result.replica_rank]
        configured = self._group.configure(result, prefix, replica_id, (rank, size))
        before, self._members = self._members, result.replica_ids
        self._emit(
            "quorum",
            members=list(result.replica_ids),
            joined=[member for member in result.replica_ids if member not in before],
            left=[member for member in before if member not in result.replica_ids],
            healing=list(result.healing_replica_ids),
            participants=self._protocol.num_participants,
            reconfigured=configured,
            seconds=time.monotonic() - attempt.began,
        )

    def _end(self, error: FaultToleranceError) -> None:
        with self._group.lock:
            self.fatal = self.fatal or error
            attempt = self.attempt
        if attempt is not None:
            attempt.fail(self.fatal)
        self._exchange.end_fetch(str(error))
        self.over.set(str(error))


def end_all(error: FaultToleranceError) -> None:
    """End all Managers of this process, which cannot go on."""
    for driver in list(_drivers):
        if driver.fatal is None:
            driver.end(error, str(error))


def _end_in_fork(driver: QuorumDriver) -> None:
    """End the Manager in a fork, which has none of its threads, so that its shutdown at exit does nothing."""
    driver.fatal = ShutdownError(
        f"this Manager is that of process {os.getppid()}, which has forked this one: make one in the "
        "process that uses it"
    )


_drivers = left_to_parent(Turn.OBJECTS, _end_in_fork)


Job = Callable[[], None]
OnError = Callable[[Exception], None]


class QuorumWorker:
    """A daemon thread that runs one job after the other.

    Attributes:
        device: the index of the device that is current in jobs; None if the process uses none.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, OnError] | None] = queue.SimpleQueue()
        self.device: int | None = None
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="torchft-quorum", daemon=True)
        self._thread.start()

    def submit(self, job: Job, on_error: OnError = lambda _: None) -> None:
        """Run `job` after those that were submitted before. An error is logged and passed to `on_error`,
        which gets a ShutdownError where the worker has ended before.
        """
        self._jobs.put((job, on_error))
        if self._has_ended:
            self._refuse_rest()

    def stop(self, timeout_s: float | None) -> None:
        """End after the jobs submitted so far; wait for that `timeout_s` at most (None: not at all)."""
        self._jobs.put(None)
        if timeout_s is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, on_error = entry
            try:
                with awaited_at_exit(), devices.beside_captures(self.device):
                    job()
            # It may be of a user's transport, even a SystemExit, and later jobs have to run nevertheless.
            except BaseException as error:
                _logger.exception("a job of the quorum worker failed")
                on_error(lost_by(error, "a job of the quorum worker"))
            del entry, job, on_error  # these hold attempts, and attempts hold tensors
        self._has_ended = True
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Refuse what was submitted too late. Two threads may do so at the same time."""
        with contextlib.suppress(queue.Empty):
            while True:
                if (entry := self._jobs.get_nowait()) is not None:
                    entry[1](ShutdownError("the Manager was shut down"))


HEALS_IN_VAIN_MAX = 3


class DivergenceWatch:
    """This rank's part in the watch for divergence: it sends fingerprints of its state, and learns which
    replicas differ.

    All members decide alike, from the quorum, which replicas differ and which heal (`assignment`). Here that
    is reported, and decided whether this replica can go on. The training thread calls `take`, the
    coordination loop `quorum`; they share `fingerprint`.

    In a quorum that stands no fingerprint goes to the lighthouse. Each rank compares its own with those of
    the same rank of the other members in an allreduce of two numbers, beside the gradients. It tells only
    whether they differ, all members alike: the step is then lost, as after any error, and in the next attempt
    at it all ask, with the same fingerprints.

    Attributes:
        fingerprint: the fingerprint of the state; None while nothing is watched, and then nothing is
          computed.
    """

    def __init__(self, emit: Emit) -> None:
        self.fingerprint: StateFingerprint | None = None
        self._has_described = False  # the state, when this rank asked for the last quorum
        self._is_left = False  # a divergence was found, about which nothing is done
        self._emit = emit
        self._last: Divergence | None = None
        self._heals = 0
        self._healed_at = -1

    @property
    def may_go_on(self) -> bool:
        """Whether the next step may be made in a quorum that stands.

        Members that do not watch have told so with their join. Replicas that are left to differ would lose
        every step in which that is found: they ask instead.
        """
        return self.may_stand and self._has_described == (self.fingerprint is not None)

    @property
    def may_stand(self) -> bool:
        """Whether a quorum of this rank may stand."""
        return not self._is_left

    def take(self, step: int) -> PendingFingerprint | None:
        """Begin to compute the fingerprint of the state with which this step begins."""
        return None if self.fingerprint is None else self.fingerprint.take(step)

    def described(self, fingerprint: bytes) -> None:
        """Record what this rank's join says of its state."""
        self._has_described = bool(fingerprint)

    def quorum(self, result: QuorumResult, allow_heal: bool) -> DivergenceError | None:
        """Report the replicas that differ in a new quorum; return the error if this replica cannot go on."""
        self._tell(result.divergence)
        if self.fingerprint is None:
            return None
        if (error := self._undecidable(result, self.fingerprint)) is not None:
            return error
        return self._incurable(result, self.fingerprint) if allow_heal else None

    def _tell(self, divergence: Divergence | None) -> None:
        """Report a divergence; one that nothing is done about is not repeated in every step."""
        last, self._last = self._last, divergence
        if divergence is None or (divergence == last and not divergence.heals):
            return
        self._is_left = not divergence.heals
        self._emit(
            "divergence",
            members=list(divergence.replica_ids),
            ranks=["several" if rank == UNKNOWN_RANK else str(rank) for rank in divergence.group_ranks],
            kept=list(divergence.kept),
            tied=divergence.tied,
            comparable=divergence.comparable,
            heals=divergence.heals,
        )

    def _undecidable(self, result: QuorumResult, fingerprint: StateFingerprint) -> DivergenceError | None:
        divergence = result.divergence
        if divergence is None or not divergence.tied or not divergence.heals:
            return None
        if fingerprint.on_divergence is not OnDivergence.HEAL_UNLESS_TIED:
            return None
        return DivergenceError(
            f"after step {result.max_step} {', '.join(divergence.replica_ids)} and "
            f"{', '.join(divergence.kept)} hold different states, and nobody can know who is right; go back "
            "to a checkpoint, or let OnDivergence.HEAL go on with the state of the latter"
        )

    def _incurable(self, result: QuorumResult, fingerprint: StateFingerprint) -> DivergenceError | None:
        """Return an error for a replica that heals again and again, which costs its peers too much."""
        divergence, own_id = result.divergence, result.replica_ids[result.replica_rank]
        if divergence is None or not divergence.heals or own_id not in divergence.replica_ids:
            return None
        last, self._healed_at = self._healed_at, result.max_step
        if result.max_step == last:  # the step was not committed, and is tried again
            return None
        is_relapse = self._heals > 0 and result.max_step - last <= fingerprint.slices
        self._heals = self._heals + 1 if is_relapse else 1
        if self._heals <= HEALS_IN_VAIN_MAX:
            return None
        return DivergenceError(
            f"{own_id} has taken over its peers' state {HEALS_IN_VAIN_MAX} times, and each time it differed "
            f"again within a round of {fingerprint.slices} steps: either its memory or its device is broken, "
            "or its StateFingerprint watches tensors that the Manager's state dict does not hold"
        )
