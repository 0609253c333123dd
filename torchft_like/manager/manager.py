"""The Manager: the interface of a training script.

It runs the step protocol (`step.StepProtocol`) on real groups, servers and states. Four threads meet here:

* the training thread calls the public methods, and serves and loads state inside of them;
* the coordination loop delivers the messages to this rank, and aborts the process group the moment a member
  is lost, even while all other threads are blocked;
* the quorum worker configures the process group;
* the process group's own threads complete collectives.

`ManagedGroup` has the one lock that they share, which is never held during a wait.
"""

from __future__ import annotations

import atexit
import logging
import traceback
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar

import torch
from torch.distributed import AllreduceOptions, ReduceOp, Work

from lighthouse.events import EventLog
from lighthouse.variables import process_variables
from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.checkpointing.transport import CheckpointTransport
from torchft_like.collectives import ErrorFeedback, check_quantizable
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.catch_up import STEPS_KEPT_MAX, Replay
from torchft_like.core.replica_group import RankJoin, Verdict
from torchft_like.core.step import Share, StepProtocol, WorldSizeMode
from torchft_like.divergence import StateFingerprint
from torchft_like.errors import (
    ConfigError,
    ForeignStateError,
    GroupLostError,
    MaxRetriesError,
    ProcessGroupAbortedError,
    ShutdownError,
    lost_by,
)
from torchft_like.futures import future_timeout
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.config import ManagerArguments, resolve, step_rules
from torchft_like.manager.group_store import connect, start_default_group
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.manager.managed_work import GroupReduction, Reducer, Reduction, options_for
from torchft_like.manager.quorum_driver import QuorumDriver
from torchft_like.manager.state_exchange import StateExchange
from torchft_like.manager.state_registry import LoadFunction, SaveFunction, StateRegistry
from torchft_like.otel import followed
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.uncompiled import uncompiled
from torchft_like.quantization import FP8, format_named
from torchft_like.runtime import resources
from torchft_like.runtime.durations import SECONDS_MAX, seconds_of
from torchft_like.runtime.numbers import whole_number

T = TypeVar("T")
_logger = logging.getLogger("torchft_like")

WORKER_STOP_S = 5.0


class ExceptionWithTraceback(Exception):  # noqa: N818 - torchft's name
    """The error that spoilt a step, and where it was raised. Raised itself, it shows that error as its cause.

    Two instances with the same error are equal, because `errored` makes one at every call.

    Attributes:
        original_exception: the error.
        stack_trace: its traceback as text.
    """

    def __init__(self, e: Exception) -> None:
        super().__init__(e)
        self.original_exception: Exception = e
        self.stack_trace: str = "".join(traceback.format_exception(e))
        self.__cause__: BaseException | None = e

    def __str__(self) -> str:
        return f"{type(self.original_exception).__name__}: {self.original_exception}"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ExceptionWithTraceback) and other.original_exception is self.original_exception
        )

    def __hash__(self) -> int:
        return hash(self.original_exception)


@uncompiled  # a step in compiled code ends its graph at each call
class Manager:
    """Keeps one rank of one replica group in step with its peers. A TORCHFT_* variable overrides its
    argument.

    Args:
        pg: the group of this rank of every replica group, which the Manager configures: one of this package,
          or torch's Gloo with `enable_reconfigure=True`.
        load_state_dict, state_dict: functions that load and save the training script's state (model,
            optimizer, ...).
        min_replica_size: the smallest number of participants with which a step commits.
        use_async_quorum: whether the quorum overlaps with the forward pass; a healing replica then
            contributes zeros to its first step. Otherwise `start_quorum` waits and heals, as
            it must where gradients are divided by a number of the state before the vote.
        timeout, quorum_timeout, connect_timeout: timedelta or seconds, 60, 180 and 60 s (TORCHFT_TIMEOUT_SEC,
            TORCHFT_QUORUM_TIMEOUT_SEC, TORCHFT_CONNECT_TIMEOUT_SEC). The first bounds collectives, votes and
            state transfers, the second a wait for a quorum, the third the first contact with the lighthouse,
            the store and rank 0.
        rank, world_size: the rank in the replica group, and its size (RANK, WORLD_SIZE; 0 of 1 when unset).
        world_size_mode: how many members take part where there are more than `min_replica_size`: all of them
            (DYNAMIC), or exactly that many, and the others add zeros (FIXED_WITH_SPARES).
        store_addr, store_port: the group's TCPStore (MASTER_ADDR, MASTER_PORT); a group of one rank
            makes its own when none is given.
        lighthouse_addr: `http://host:port` (TORCHFT_LIGHTHOUSE); read on rank 0.
        replica_id: a name for the replica group; made unique for each start.
        port, hostname: where rank 0's ManagerServer listens (TORCHFT_MANAGER_PORT) and is reached, and where
            peers fetch the state (TORCHFT_HOSTNAME): a name, an address or an interface such as eth0. By
            default any free port on the interface that leads to the lighthouse.
        heartbeat_interval: the time between heartbeats to torchft's own lighthouse, which knows no sessions.
        checkpoint_transport: how state reaches healing peers; HTTP by default.
        init_sync: whether all replicas take the state of one of them at step 0.
        max_retries: how many failed steps in a row are allowed, any number by default; after one more
            `should_commit` raises.
        quorum_retries: how many further `quorum_timeout` periods to wait, 0 (TORCHFT_QUORUM_RETRIES).
        lighthouse_absence: what a quorum that stands does while rank 0 has no connection to the lighthouse:
            "continue", for as long as no member is lost, or "wait" (TORCHFT_LIGHTHOUSE_ABSENCE).
        job_id: the name of the job (TORCHFT_JOB_ID): a lighthouse refuses replica groups of another one.
            Without it, the job is told by its first quorum, which the Manager's `state_dict` has.
        dead_after: how long a rank of this replica group may be silent, timedelta or seconds, 30 s
            (TORCHFT_DEAD_AFTER_SEC). Until it answers again the group does no step. After that time the other
            ranks raise GroupLostError; where its process has ended, at once.
        spare: True for a replica group that waits, ready, in its first step, until fewer other groups are
            there than the lighthouse's `--replicas` (TORCHFT_SPARE, 1 or 0). It then takes the free place,
            and heals in that step; for spares that have the state before, use
            `WorldSizeMode.FIXED_WITH_SPARES`. The same on all ranks; read on rank 0.

    Raises:
        ConfigError, AddressError, BindError: a setting is wrong; the message names it.
        ConnectError: the lighthouse (rank 0) or rank 0 (others) was not reached in `connect_timeout`.
    """

    # What may keep this rank from voting yes.
    _checks: list[weakref.WeakMethod[Callable[[], Exception | None]]]
    _stop_wanted = _stop_agreed = False

    def __init__(
        self,
        pg: torch.distributed.ProcessGroup,
        load_state_dict: LoadFunction | None,
        state_dict: SaveFunction | None,
        min_replica_size: int,
        use_async_quorum: bool = True,
        timeout: timedelta | float | None = None,
        quorum_timeout: timedelta | float | None = None,
        connect_timeout: timedelta | float | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        checkpoint_transport: CheckpointTransport[Any] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int | None = None,
        lighthouse_absence: str | None = None,
        job_id: str | None = None,
        dead_after: timedelta | float | None = None,
        spare: bool = False,
    ) -> None:
        arguments = ManagerArguments(
            timeout=timeout,
            quorum_timeout=quorum_timeout,
            connect_timeout=connect_timeout,
            rank=rank,
            world_size=world_size,
            store_addr=store_addr,
            store_port=store_port,
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            port=port,
            hostname=hostname,
            quorum_retries=quorum_retries,
            lighthouse_absence=lighthouse_absence,
            job_id=job_id,
            dead_after=dead_after,
            spare=spare,
        )
        self._config = config = resolve(arguments, process_variables())
        self._rules = rules = step_rules(min_replica_size, use_async_quorum, world_size_mode, max_retries)
        self._replica_id, self._init_sync, self._checks = config.replica_id, init_sync, []
        self._protocol = protocol = StepProtocol(rules)
        self._state = state = StateRegistry(load_state_dict, state_dict)
        self.events: EventLog = followed(EventLog("manager", _logger))
        self._group = group = ManagedGroup(pg, protocol, self._emit, config.given_timeout_s)
        self._transport = _transport_of(checkpoint_transport, config.timeout_s)
        self._transport.use_host(config.host)
        self._exchange = StateExchange(config, protocol, group, state, self._transport, self._emit)
        self._driver = QuorumDriver(config, protocol, group, self._exchange, self._emit)
        self._reducer, self._exchange.agree = Reducer(protocol, group, self._driver), self._all_have_fetched
        try:
            # The group is prepared first: as soon as the lighthouse knows this replica, others wait for it.
            self._group.pg.prepare(timedelta(seconds=config.timeout_s))
            self._link, self._store = connect(config, self._driver, heartbeat_interval)
        except BaseException:
            self._driver.stop(ShutdownError("the Manager did not start"), WORKER_STOP_S)
            self._transport.shutdown(wait=False)
            raise
        self._replica_id = self._link.replica_id
        self._emit("settings", settings=list(config.sources))
        atexit.register(resources.track(self).shutdown, wait=False)

    # ------------------------------------------------------------------ the user's state

    def register_state_dict_fn(
        self, key: str, load_state_dict: LoadFunction, state_dict: SaveFunction
    ) -> None:
        """Add one part of the training script's state; every replica registers the same keys.

        It does so before its first step: in that one a replica that comes later takes over a state that has
        all of them.

        Raises:
            ConfigError: the key is taken, or what is given is no function.
        """
        self._state.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: LoadFunction, state_dict: SaveFunction) -> None:
        """Register functions under the key `set_state_dict_fns` (torchft's older name)."""
        self.register_state_dict_fn("set_state_dict_fns", load_state_dict, state_dict)

    def register_replay(self, replay: Replay, steps_max: int = STEPS_KEPT_MAX) -> None:
        """Let the others train on while this replica heals; all ranks of the group do it, before the first
        step.

        The state then comes beside the steps. This replica takes part in them with zeros, `should_commit`
        returns False and keeps what `replay` needs to take the step again later. Once the state has come it
        is loaded, and the kept steps are taken, in a `should_commit` that returns True. docs/healing.md says
        what that needs of a script.

        Args:
            replay: takes the script's steps again: `OptimizerWrapper.replay()`.
            steps_max: how many steps pass; in one more the others wait for the state.

        Raises:
            ConfigError: there is another one, the quorum is synchronous, or the transport keeps no snapshots.
        """
        if self._exchange.replay is not None:
            raise ConfigError("a replay is registered already: register one that takes all of a step again")
        if not self._rules.use_async_quorum:
            raise ConfigError(
                "a replay needs use_async_quorum=True: the others wait for a synchronous quorum"
            )
        if not self._transport.keeps_offers:
            name = type(self._transport).__name__
            raise ConfigError(f"a replay needs a transport that keeps snapshots (HTTPTransport), not {name}")
        self._protocol.steps_kept_max = whole_number(steps_max, "steps_max", 1)
        self._exchange.replay = replay

    def allow_state_dict_read(self) -> None:
        """Declare the state consistent again; peers may be served at the end of a step."""
        self._state.allow_read()

    def disallow_state_dict_read(self) -> None:
        """Refuse peers from now on, because the state is about to change outside `step()`."""
        self._state.disallow_read()
        if (attempt := self._driver.attempt) is not None:
            attempt.drop_ahead()

    def state_dict(self) -> dict[str, int]:
        """Return the Manager's own counters, to be saved in periodic checkpoints beside the model."""
        return self._protocol.counters()

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Restore the counters from a periodic checkpoint.

        Raises:
            ValueError: they are not what `state_dict` returned, here or in torchft; nothing was restored.
        """
        self._protocol.restore(state_dict)

    def disown_state(self) -> None:
        """Take over a peer's state in the next step, after a committed step that could not be carried out.

        `Optimizer.step` calls this when the optimizer raises. Without a peer this replica goes on as it is.
        """
        with self._group.lock:
            self._protocol.disown_state()

    def watch_divergence(self, fingerprint: StateFingerprint) -> None:
        """Compare this replica's state with its peers' in every step, as docs/divergence.md describes."""
        self._driver.divergence.fingerprint = fingerprint

    # ------------------------------------------------------------------------- one step

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | float | None = None
    ) -> None:
        """Begin a step: ask for a quorum. `Optimizer.zero_grad` calls this.

        Args:
            allow_heal: whether this replica may fetch a peer's state in this step; the same on all. One that
              is behind and may not goes on with its own state, and heals in a later step.
            shrink_only: whether to let no new replicas in; a quorum that stands lets none in anyway.
            timeout: the limit of the wait for this quorum, instead of `quorum_timeout`.

        Raises:
            QuorumTimeoutError: there was no quorum within `quorum_timeout`. This waits only with
              `use_async_quorum=False`, and for the quorum of a step that was given up before its quorum was
              known.
            GroupLostError: another rank of this replica group is gone.
            CheckpointFormatError: the registered state cannot be sent; the text names the path and the type.
            ForeignMemberError: this replica group is not of the job that it has come to.
        """
        self._protocol.settle()
        self._driver.raise_if_over()
        last = self._driver.attempt
        if last is not None and last.error is None and not (last.is_overdue or last.is_standing):
            # This waits also for a step that was given up: a second join could miss the quorum that answers
            # the first, and be taken for a join of the step after.
            last.wait_configured(self._driver.why_no_quorum)
        limit_s = self._config.quorum_timeout_s if timeout is None else seconds_of(timeout, "timeout")
        self._state.look(self._transport.check_state, has_stepped=self._protocol.has_committed)
        limit_s = min(limit_s * (1 + self._config.quorum_retries), SECONDS_MAX)
        attempt = Attempt(allow_heal, limit_s)
        try:
            own = self._driver.begin(attempt)
            attempt.fingerprint = self._driver.divergence.take(own.step)
            attempt.ask = partial(self._ask, attempt, own, shrink_only)
            if not attempt.is_standing and not self._protocol.is_given_up:
                attempt.ask()
        except BaseException as error:  # the next step would wait for a quorum that was never asked for
            attempt.fail(lost_by(error, "start_quorum"))
            raise
        finally:
            if last is not None:  # whether or not this step begins, the last one is over
                self._exchange.give_up(last)
        if not self._rules.use_async_quorum:
            self._driver.wait_configured(attempt)
            self._exchange_state(attempt)

    def _ask(self, attempt: Attempt, own: RankJoin, shrink_only: bool) -> None:
        join = own._replace(
            group_rank=self._config.group_rank,
            checkpoint_metadata=self._transport.metadata(),
            shrink_only=shrink_only,
            init_sync=self._init_sync,
            form=self._state.take_news(),
            takes_secret=True,
        )
        self._driver.ask(attempt, join, self._link)

    def wait_quorum(self) -> None:
        """Wait until collectives can be issued, or are known to be pointless in this step.

        Raises:
            QuorumTimeoutError: there was no quorum within `quorum_timeout`.
            GroupLostError: another rank of this replica group is gone.
        """
        self._driver.wait_configured(self._driver.current())

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool | str = False,
        reduce_op: ReduceOp.RedOpType | ReduceOp = ReduceOp.AVG,
        error_feedback: ErrorFeedback | None = None,
    ) -> Work:
        """Reduce a tensor over the participants, in place; peers' errors are never raised.

        The tensor of a replica that heals, or is a spare, does not count: it adds zeros, and has no part in a
        minimum, maximum or product. Of a DTensor each rank reduces its local part, with the same rank of the
        other groups. After an error the work still succeeds, the content of the tensor is
        undefined, and the step will not be committed.

        Args:
            tensor: what is reduced; the result is in it once the work is done.
            reduce_op: the operation; AVG is the sum, divided by the number of participants.
            should_quantize: whether a byte is sent for each number (`collectives`): "fp8", "int8", or True
              for "fp8". All replicas get the same bits. The quorum worker does it, and the caller goes on
              meanwhile, until it issues another collective.
            error_feedback: what quantizing has left of this tensor in earlier steps, which is added to it.
              What it leaves in this step counts if that is committed.

        Raises:
            ValueError: an average of a tensor that is neither floating point nor complex, or a quantized sum
              of such a tensor.
            NotSupportedError: another operation than SUM or AVG is to be quantized.
        """
        quantize_to = None
        if should_quantize:
            quantize_to = FP8 if should_quantize is True else format_named(str(should_quantize))
            check_quantizable([tensor], reduce_op)
        return self._reducer.start(
            [tensor],
            options_for(reduce_op),
            Reduction,
            quantize_to=quantize_to,
            error_feedback=error_feedback,
        )

    def group_allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions, **how: Any) -> Work:
        """Do as `allreduce`, for a ManagedProcessGroup, whose works are those of a process group.

        Args:
            how: the keyword arguments of `Reducer.start`.
        """
        return self._reducer.start(tensors, options, GroupReduction, **how)

    def wait_for_turn(self) -> None:
        """Wait until another collective may be issued on the group: ranks issue them in one order."""
        self._driver.wait_for_turn()

    def report_error(self, e: Exception) -> None:
        """Declare the current step spoilt: it will not be committed, and peers are released.

        Raises:
            ConfigError: `e` is no error.
        """
        self._group.fail_current(_error_given(e, "report_error"))

    def interrupt(self, e: Exception) -> None:
        """End what the training thread waits for in this step; called from another thread.

        Its collectives end, and `should_commit` raises `e`.

        Raises:
            ConfigError: `e` is no error.
        """
        self._group.fail_current(_error_given(e, "interrupt"))
        attempt = self._driver.attempt
        if attempt is not None:
            attempt.fail(e)
        self._exchange.end_fetch(f"interrupted: {e!r}")

    def request_stop(self) -> None:
        """Make this replica group leave after its current step, all ranks after the same one.

        A rank that left while another has begun the next step would spoil that step. So the wish goes into
        the next vote, and the verdict, which every rank gets, stops all of them at the same place in the
        script. A rank without others need not wait for a vote. Where the quorum of a step does not come
        within 15 s, that step is not committed, and all ranks leave after it. It is safe in a signal handler.
        """
        self._stop_wanted = True
        self._driver.asked_to_stop()
        self._stop_agreed = self._stop_agreed or self._is_alone

    @property
    def _is_alone(self) -> bool:
        """Whether this rank is the whole replica group, so that its vote is the verdict."""
        return self._config.group_world_size == 1

    @property
    def stop_agreed(self) -> bool:
        """Whether the ranks of this replica group leave now; the script reads it between two steps."""
        return self._stop_agreed

    def errored(self) -> ExceptionWithTraceback | None:
        """Return why the current step will not be committed, if so."""
        return ExceptionWithTraceback(error) if (error := self._protocol.failure) else None

    def wrap_future(
        self, fut: torch.futures.Future[T], default: T, timeout: timedelta | float | None = None
    ) -> torch.futures.Future[T]:
        """Return a future that gives `default`, and spoils the step, if `fut` fails or takes too long."""
        bound_s = self._config.timeout_s if timeout is None else seconds_of(timeout, "timeout")
        attempt = self._driver.attempt

        def settle(done: torch.futures.Future[T]) -> T:
            try:
                return done.value()
            except Exception as error:  # noqa: BLE001 - the caller's future may carry anything
                self._driver.spoil(attempt, error)
                return default

        return future_timeout(fut, timedelta(seconds=bound_s)).then(settle)

    def check_before_vote(self, check: Callable[[], Exception | None]) -> None:
        """Call a bound method at the start of every `should_commit`, for as long as its object lives.

        An error that it returns spoils the step.
        """
        self._checks.append(weakref.WeakMethod(check))

    def should_commit(self, timeout: timedelta | float | None = None) -> bool:
        """End a step; return True if the optimizer may be stepped, the same on all ranks of this group.

        `Optimizer.step` calls this once after the backward pass.

        Args:
            timeout: how long the other ranks of this group may take to vote, beside their collectives; that
                of the Manager if left out.

        Raises:
            RuntimeError: the step has ended already: begin the next one first.
            QuorumTimeoutError: there was no quorum within `quorum_timeout`.
            MaxRetriesError: more than `max_retries` steps in a row were not committed.
            GroupLostError: another rank of this replica group is gone.
            DivergenceError: this replica's state differs from its peers', and healing cannot mend that.
            ForeignMemberError: as in `start_quorum`.
        """
        votes_s = self._config.timeout_s if timeout is None else seconds_of(timeout, "timeout")
        attempt = self._driver.current()
        if not self._protocol.in_step:
            raise RuntimeError("the step has ended: should_commit (Optimizer.step) is called once in each")
        for reference in self._checks:
            if (check := reference()) is not None and (error := check()) is not None:
                self.report_error(error)
        if self._protocol.needs_asking:
            self._driver.ask_instead(attempt)
        self._driver.wait_configured(attempt)
        for reduction in list(attempt.pending_collectives):
            reduction.wait()
        attempt.synchronize()
        self._reducer.compare(attempt)
        self._check_process_group()
        self._exchange_state(attempt)
        protocol, is_alone = self._protocol, self._is_alone
        has_fetched = self._exchange.has_fetched
        with self._group.lock:
            verdict = Verdict(
                protocol.step,
                committed=protocol.vote(),
                passed=protocol.passes,
                has_fetched=has_fetched,
                went_well=protocol.failure is None,
            )
            # In one piece: the server may give the quorum up at any other time.
            if is_alone and verdict.committed:
                protocol.decide(verdict.committed)
        if not is_alone:
            verdict = self._verdict_of_all(attempt, verdict, votes_s)
            self._stop_agreed = verdict.stop
        committed = verdict.committed
        if not (is_alone and committed):
            averages = self._exchange.keep() if verdict.passed else None
            with self._group.lock:
                protocol.decide(committed, averages, verdict.has_fetched)
        for feedback in attempt.error_feedbacks if committed else ():
            feedback.accept()
        if verdict.passed and protocol.catch_up is not None:
            self._emit("kept", steps=len(protocol.catch_up.kept))
        else:
            self._emit("commit", committed=committed, participants=protocol.num_participants)
        if self._protocol.out_of_retries and not self._stop_agreed:
            reason = self._protocol.objection or "another rank of this replica group voted no on it"
            raise MaxRetriesError(
                f"{self._protocol.commit_failures} steps in a row were not committed, max_retries is "
                f"{self._rules.max_retries}; the last one failed with: {reason}"
            )
        return committed

    # ------------------------------------------------------------------------ questions

    def current_step(self) -> int:
        """Return the number of steps committed so far, by this replica or the one it healed from."""
        return self._protocol.step

    @property
    def quorum_id(self) -> int:
        """The number of the last quorum that this rank knows of; another one follows each failed step."""
        return self._protocol.quorum_id

    @property
    def steps_given_up(self) -> int:
        """How often a step began while the last one had no `should_commit`, as after an exception."""
        return self._protocol.steps_given_up

    @property
    def has_reduced(self) -> bool:
        """Whether an allreduce was begun in this step."""
        return self._protocol.is_bound

    def batches_committed(self) -> int:
        """Return the sum over the committed steps of the number of participants."""
        return self._protocol.batches_committed

    def participating_rank(self) -> int | None:
        """Return this replica group's rank among the participants; None for a spare or one that heals."""
        if self._driver.attempt is None:
            return None
        self.wait_quorum()
        return self._protocol.participating_rank

    def num_participants(self) -> int:
        """Return how many replica groups' gradients count in the current step; waits for the quorum.

        In the very first step these are all members, though all but one add zeros (`init_sync`). It is 0
        before that step, and never in a step: one that ends without a quorum has as many as the last one had.
        """
        if self._driver.attempt is None:
            return 0
        self.wait_quorum()
        return self._protocol.share.divisor

    def share_of_step(self) -> Share:
        """Return this replica group's part of the step that has begun, which is the same until its end.

        This waits for the quorum, and takes part in the step: a death after it costs the step.

        Raises:
            RuntimeError: no step has begun.
        """
        attempt = self._driver.current()
        if not self._protocol.in_step:
            raise RuntimeError("the step has ended: begin the next one (Optimizer.zero_grad) before")
        self._driver.wait_configured(attempt)
        return self._protocol.share

    def is_participating(self) -> bool:
        """Return whether this replica group's gradients count in the current step."""
        return self._protocol.is_participating

    def replica_rank(self) -> int | None:
        """Return this replica group's rank among all members of the quorum, healing and spare ones too."""
        result = self._last_result()
        return None if result is None else result.replica_rank

    def replica_world_size(self) -> int:
        """Return the number of members of the quorum, healing ones and spares included."""
        result = self._last_result()
        return 0 if result is None else result.replica_world_size

    def healing_ranks(self) -> frozenset[int]:
        """Return the members of the quorum, by rank, that compute this step with another state."""
        result = self._last_result() if self._rules.use_async_quorum else None
        return frozenset() if result is None else result.healing_ranks

    def is_exchanging_state(self) -> bool:
        """Return whether this replica reads its state for a peer or loads a peer's, in which it is alone."""
        attempt = self._driver.attempt
        return attempt is not None and attempt.is_exchanging

    def replica_id(self) -> str:
        """Return the replica group's name, unique for this start."""
        return self._replica_id

    @property
    def _use_async_quorum(self) -> bool:  # torchft's name, which scripts of its users read
        return self._rules.use_async_quorum

    @property
    def process_group(self) -> ProcessGroup:
        """The group that the Manager configures for every new quorum."""
        return self._group.pg

    def init_process_group(self, backend: str | None = None) -> None:
        """Start torch's default group over this replica group.

        The group meets in a part of the store that no earlier start of the replica group has used.

        Raises:
            GroupLostError: another rank of this replica group has ended, in this call or before.
            ProcessGroupError: another rank did not call this within torch's timeout.
        """
        self._driver.raise_if_over()
        config, over = self._config, self._driver.over
        try:
            start_default_group(self._store.shared, self._replica_id, config, backend, over)
        except Exception:
            self._driver.raise_if_over()  # the error only says how this rank noticed it
            raise

    # ------------------------------------------------------------------------- the end

    def shutdown(self, wait: bool = True) -> None:
        """Leave: in good order between two steps, without notice in the middle of one. Safe to call again.

        Peers lose no step to a shutdown between steps of which they hear before they enter the next one. A
        shutdown of which they hear later, in the middle of a step, or after one that was not committed, looks
        like a death to them, which releases them at once.
        """
        if isinstance(self._driver.fatal, ShutdownError):
            return
        between_steps = self._driver.fatal is None and self._protocol.leaves_in_order
        self._emit("shutdown", reason="between steps" if between_steps else "in the middle of a step")
        if between_steps:
            self._exchange.linger()
            self._link.leave("shutdown", self._protocol.step, self._protocol.quorum_id)
        else:
            self._link.close()
        self._driver.stop(ShutdownError("the Manager was shut down"), WORKER_STOP_S if wait else None)
        if wait:
            self._exchange.close()
        self._group.pg.shutdown()
        self._transport.shutdown(wait=wait)
        self._exchange.keep_state()
        # A gradient may refer to a mesh, that to this Manager, and this to the gradient by the script's
        # functions, or the replay. Python's collector does not see that cycle.
        self._state.forget()
        self._exchange.replay = None
        if (attempt := self._driver.attempt) is not None:
            attempt.drop_ahead()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        protocol = self._protocol
        return (
            f"<Manager [{self._replica_id}/{self._config.group_rank} | step {protocol.step} | "
            f"quorum {protocol.quorum_id}: {protocol.num_participants} participants]>"
        )

    # ---------------------------------------------------------------------- inside a step

    def _last_result(self) -> QuorumResult | None:
        return None if self._driver.attempt is None else self._driver.attempt.result

    def _exchange_state(self, attempt: Attempt) -> None:
        try:
            self._exchange.exchange(attempt)
        except ForeignStateError as error:
            self._driver.end(error, f"it is not of this job: {error}")
            raise

    def _all_have_fetched(self, attempt: Attempt, has_fetched: bool) -> bool:
        """Vote on whether the state can be loaded, before the vote on the step."""
        if self._is_alone:
            return has_fetched
        vote = self._protocol.vote_on_state(has_fetched)
        verdict = self._verdict_of_all(attempt, vote, self._config.timeout_s)
        with self._group.lock:
            self._protocol.reopen()
            attempt.reopen()
        return verdict.has_fetched

    def _verdict_of_all(self, attempt: Attempt, vote: Verdict, bound_s: float) -> Verdict:
        """Vote; return the replica group's verdict on the step, which is the same on every rank."""
        self._link.vote(self._config.group_rank, vote._replace(stop=self._stop_wanted))
        # Another rank may be in a collective that fails after the timeout, and votes then, or heals first.
        bound_s += self._config.timeout_s * (1 + attempt.has_exchanged)
        verdict = attempt.wait_decided(bound_s)
        if verdict is None:
            # The others may have been told either verdict; a guess could make the ranks of this group differ.
            error = GroupLostError(
                f"not all ranks of replica group {self._replica_id} voted on step {vote.step} within "
                f"{bound_s:g} s; restart all ranks of this replica group"
            )
            self._driver.stop(error, None)
            raise error
        return verdict

    def _check_process_group(self) -> None:
        error = self._group.pg.errored()
        # An abort alone does not spoil a step whose collectives had all succeeded before.
        if isinstance(error, Exception) and not isinstance(error, ProcessGroupAbortedError):
            self._group.fail(self._protocol.quorum_id, error)

    def _emit(self, kind: str, **fields: Any) -> None:
        fields.setdefault("quorum_id", self._protocol.quorum_id)
        self.events.emit(
            kind,
            replica_id=self._replica_id,
            group_rank=self._config.group_rank,
            step=self._protocol.step,
            **fields,
        )


def _transport_of(given: CheckpointTransport[Any] | None, timeout_s: float) -> CheckpointTransport[Any]:
    if given is None:
        return HTTPTransport(timedelta(seconds=timeout_s))
    if not isinstance(given, CheckpointTransport):
        what = "it must be an HTTPTransport, a PGTransport, or another CheckpointTransport"
        raise ConfigError(f"checkpoint_transport is {given!r:.100}: {what}")
    return given


def _error_given(e: Exception, method: str) -> Exception:
    if not isinstance(e, Exception):
        raise ConfigError(f"{method} takes the error that has spoilt the step, not {e!r:.100}")
    return e
