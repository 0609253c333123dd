"""The exchange of a rank's state with its peers, on the training thread, between two steps.

INVARIANT: the functions that the script registered are called on the training thread and nowhere else: by the
first `start_quorum`, which looks at what they return, and then, in a step in which a replica heals, where the
step ends and the optimizer has yet to step (with a synchronous quorum: before the forward pass). A step
that a script gives up ends in its next `start_quorum`. At these places no module computes, so `state_dict`
may take modules apart. Every rank of a replica group comes to one of them, and all call it or none, so it may
use collectives of the group.

A healing rank waits, in `should_commit`, until its source comes to the end of the same step and has offered
its state. The source goes on when the state was fetched, or copied, which a receiver that is slow, or stops,
delays by no more than a copy takes; or it refuses. So do the members that help it. It cannot wait for the
healing rank in a collective: that takes part in all of the step's before it asks for the state. A rank that
never met its source in `configure` asks for nothing, as the source may wait there for it.

A source that has lost the step, or given it up, goes on offering the copy, for a rank that comes to the end
of it later. Otherwise a job whose steps are lost while somebody heals would stand still beside a newcomer
that is slower than its source.

A peer's state arrives in the tensors of the rank's own, where those are alike, once its form was found to be
the rank's. If it does not arrive whole, the rank has no state.

A rank that catches up (`core/catch_up.py`) waits for nothing: the state comes to memory of its own on another
thread, while the steps pass. It is loaded, and the kept steps are taken again, at the same place in a later
step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import cast

import torch
from torch.utils._pytree import tree_leaves

from torchft_like.checkpointing.copy_ahead import stand_ins
from torchft_like.checkpointing.transport import CheckpointTransport, Destination, Source
from torchft_like.core.assignment import QuorumResult
from torchft_like.core.catch_up import Replay, Version
from torchft_like.core.replica_group import LossNotice
from torchft_like.core.step import Plan, StepProtocol
from torchft_like.errors import (
    CheckpointError,
    FaultToleranceError,
    ForeignStateError,
    MemberLostError,
    StepLostError,
)
from torchft_like.futures import in_background
from torchft_like.manager import kept_state
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.client import ManagerClient
from torchft_like.manager.config import ManagerConfig
from torchft_like.manager.managed_group import Emit, ManagedGroup
from torchft_like.manager.state_registry import StateRegistry
from torchft_like.plain_data import Shard
from torchft_like.runtime.event_loop import coordination_loop

State = Mapping[str, object]

LINGER_S = 5.0
ABORT_REPEAT_S = 0.02
PATIENCE_WHEN_FAILED = 0.25
REACH_S = 5.0  # for a connection to a source
ASK_EARLY_S = 1.0  # seconds; so long the quorum worker is blocked if the source's host is gone

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerState:
    """A received state: that of the training script, and its Manager's counters."""

    user: State
    counters: State

    @classmethod
    def of(cls, state: State) -> PeerState:
        """Take a received state apart."""
        user, counters = state.get("user"), state.get("torchft")
        if not isinstance(user, Mapping) or not isinstance(counters, Mapping):
            raise CheckpointError(
                "a peer sent state of another form; every replica must run the same version"
            )
        return cls(user, counters)


@dataclass(frozen=True, eq=False)
class _Fetching:
    """The members that take part in a fetch: this replica, and those that offer its state, with ranks."""

    own: str
    sources: Mapping[str, int]
    began: float


Fetched = tuple[PeerState, Destination[State]]  # a state, and where it has arrived


class StateExchange:
    """Serves this rank's state and loads a peer's; the coordination loop may end a fetch.

    Attributes:
        replay: takes the script's steps again, if there is one.
        agree: tells whether all ranks of the replica group have what this one says that it has, or not.
    """

    def __init__(
        self,
        config: ManagerConfig,
        protocol: StepProtocol,
        group: ManagedGroup,
        registry: StateRegistry,
        transport: CheckpointTransport[State],
        emit: Emit,
    ) -> None:
        _settle_vector_functions()  # the step after a heal is to be the same here as on the source
        self._config = config
        self._protocol = protocol
        self._group = group
        self._registry = registry
        self._transport = transport
        self._emit = emit
        self.replay: Replay | None = None
        self.agree: Callable[[Attempt, bool], bool] = lambda _, has_fetched: has_fetched
        self._keeper = kept_state.present()
        self._beside: Future[Fetched] | None = None  # a state on its way beside the steps
        self._is_serving = self._has_rehearsed = False
        self._is_first = False  # whether what this rank serves is fetched from it, and not with its help
        self._fetching: _Fetching | None = None  # the fetch that runs
        self._clients: list[ManagerClient] = []  # the clients that ask the sources
        self._lost: list[LossNotice] = []  # of this quorum, and of later ones

    # -------------------------------------------------------------- on the training thread

    def exchange(self, attempt: Attempt) -> None:
        """Serve and heal as the quorum of the attempt requires; a second call does nothing.

        Raises:
            ConfigError: a replica has to heal, and no state was registered.
            FaultToleranceError: the attempt has ended while a peer's state was awaited.
            ForeignStateError: a peer's state is none for this replica, which has committed no step yet: it is
              not of this job. One that has committed takes the peer for foreign, and its step has failed.
            Exception: an error of the script's load functions; the state is then neither this replica's nor
              the peer's.
        """
        if self._keeper is not None and self._protocol.has_committed:
            self._keeper.kept = None
        plan, result = attempt.take_plan(), attempt.result
        if plan is None or result is None:
            self._rehearse()
            return
        serves = self._serves(plan)
        if plan.heal or self._protocol.catch_up is None:
            self._drop_beside("it is of no use any more")
        catches_up = plan.catch_up or self._protocol.catch_up is not None
        if not (serves or plan.heal or catches_up or self._is_serving):
            self._rehearse()
            return
        if plan.heal or (plan.serve and result.max_step == 0):  # later the healing replica raises it
            self._registry.check_registered()
        if plan.heal or catches_up:
            attempt.synchronize()
        attempt.is_exchanging = attempt.has_exchanged = True
        try:
            self._serve(serves, plan.hold, attempt, result)
            if catches_up:
                self._catch_up(attempt, plan, result)
            elif plan.heal:
                self._heal(attempt, result)
        finally:
            attempt.is_exchanging = False
            attempt.drop_ahead()

    def _rehearse(self) -> None:
        """Copy once as much as this rank is to copy ahead when it serves, and nothing of its state, which the
        optimizer may change meanwhile.

        The memory for it is there then: to get it from the kernel takes longer than to copy into it.
        """
        if not self._has_rehearsed and self._protocol.has_committed and self._copied_ahead is not None:
            self._has_rehearsed = True
            try:
                tensors = stand_ins(self._copied_ahead())
            except Exception:  # the script's replay has failed, or memory has run out
                _logger.exception("no memory is kept for what is copied ahead")
            else:
                self._transport.begin_copy(lambda: tensors)

    @property
    def _copied_ahead(self) -> Callable[[], Iterable[torch.Tensor]] | None:
        return getattr(self.replay, "changed_by_steps", None)  # a replay of the script's own may lack it

    def give_up(self, attempt: Attempt) -> None:
        """Offer the state of a step that this rank has given up, or tell who waits that it does not come."""
        plan, result = attempt.take_plan(), attempt.result
        if plan is not None and result is not None:
            if self._serves(plan):
                self._offer_given_up(attempt, result)
            elif plan.heal and not plan.catch_up and result.max_step > 0:
                self._read_with_others()
        attempt.drop_ahead()

    def _offer_given_up(self, attempt: Attempt, result: QuorumResult) -> None:
        self._is_serving = True
        if self._transport.keeps_offers and self._protocol.still_has(result):
            self._offer(attempt, result)
        else:
            self._refuse(list(result.recover_dst_replica_ranks), result.max_step, "it has given its step up")
            self._read_with_others()

    def _read_with_others(self) -> None:
        """Call the script's functions for the other ranks of the group, which may have come to the end of the
        step, and be in a collective of theirs.
        """
        if self._config.group_world_size > 1:
            try:
                self._registry.own()
            except Exception:  # the script's functions may raise anything
                _logger.exception("the state of a step that was given up cannot be read")

    def _serves(self, plan: Plan) -> bool:
        return plan.serve or (plan.help and self._transport.takes_helpers)

    def _serve(self, serves: bool, holds: bool, attempt: Attempt, result: QuorumResult) -> None:
        """Offer the state to healing replicas, which hear of a failure; the failure spoils no step."""
        if serves:
            self._is_serving = True
            self._offer(attempt, result)
        elif self._is_serving and not holds:  # every member of this quorum is done with the last one
            self._is_serving = False
            try:
                self._transport.disallow_checkpoint()
            except Exception:  # it may be an error of a user's transport
                _logger.exception("the offer of the state could not be ended")

    def _offer(self, attempt: Attempt, result: QuorumResult) -> None:
        ranks = list(result.recover_dst_replica_ranks)
        self._is_first = bool(ranks)
        if self._transport.takes_helpers:
            ranks += result.helped_ranks
        try:
            attempt.synchronize()
            with self._registry.reading() as user_state:
                state = {"user": user_state, "torchft": self._protocol.counters()}
                timeout = timedelta(seconds=self._config.timeout_s)
                self._transport.send_checkpoint_with(attempt.ahead, ranks, result.max_step, state, timeout)
        except Exception as error:  # noqa: BLE001 - the script's functions may raise anything, and memory may run out
            self._emit("error", reason=f"cannot serve state to healing members: {error!r}")
            self._refuse(ranks, result.max_step, f"{type(error).__name__}: {error}")
        else:
            self._emit("heal_sent", members=[result.replica_ids[rank] for rank in ranks])

    def _refuse(self, ranks: list[int], step: int, reason: str) -> None:
        try:
            self._transport.refuse_checkpoint(ranks, step, reason)
        except Exception:  # it may be an error of a user's transport, or of the process group
            _logger.exception("healing members could not be told that there is no state for them")

    def _heal(self, attempt: Attempt, result: QuorumResult) -> None:
        """Take over the peer's state; without it this replica does not commit.

        All ranks of the group load, or none: the script's function may use collectives of theirs.

        A failure loses the others nothing where they do not count this replica, which adds zeros then; where
        they count it (`StepProtocol.is_counted_on`) no replica commits.
        """
        try:
            # Before the first step its own state is as good as the peer's, if that dies: it is kept whole.
            # Later each rank of the group asks for it, also one that cannot heal: the script's function
            # may use collectives of the group.
            own = self._registry.own() if result.max_step > 0 else None
            fetching = self._meet(attempt, result)
            timeout_s = self._config.timeout_s
            # The source may wait for this rank, whose next join releases it.
            if self._protocol.failure is not None:
                timeout_s *= PATIENCE_WHEN_FAILED
            state, destination = self._fetch(fetching, result, attempt.sources, own, timeout_s)
        except Exception as error:  # noqa: BLE001 - of a user's transport, perhaps, or a lack of memory or threads
            self.agree(attempt, False)
            self._fail(attempt, result, error, group_broken=self._protocol.is_counted_on)
            return
        if not self.agree(attempt, True):
            if destination.is_written:
                with self._group.lock:
                    self._protocol.lose_state()
            lost = StepLostError("another rank of this replica group has not fetched the state")
            self._fail(attempt, result, lost, group_broken=self._protocol.is_counted_on)
            return
        self._load(state, cast("dict[str, object]", destination.own["user"]) if destination.own else None)

    def _fail(self, attempt: Attempt, result: QuorumResult, error: Exception, *, group_broken: bool) -> None:
        """Fail the step: without the state this rank does not commit."""
        attempt.raise_error()
        self._group.fail(result.quorum_id, error, group_broken=group_broken)
        if isinstance(error, ForeignStateError) and not self._protocol.has_committed:
            raise error

    def _meet(self, attempt: Attempt, result: QuorumResult) -> _Fetching:
        """Begin a fetch, asking for nothing yet, if this rank has met its source, which comes to the end
        of the step, then, and offers its state.
        """
        names = result.replica_ids
        own, source = names[result.replica_rank], names[result.recover_src_replica_rank or 0]
        sources = {names[rank]: rank for rank in result.source_ranks}
        fetching = self._fetching = _Fetching(own, sources, time.monotonic())
        try:
            attempt.raise_error()
            lost = any(
                notice.replica_id in (source, own) and self._ends_fetch(notice, own)
                for notice in self._lost
                if notice.quorum_id == result.quorum_id
            )
            if lost or not self._protocol.may_wait_for_state:
                raise MemberLostError(f"quorum {result.quorum_id} broke before the state was fetched")
        except BaseException:
            self._fetching = None
            raise
        return fetching

    def _fetch(
        self,
        fetching: _Fetching,
        result: QuorumResult,
        sources: list[Source],
        own: dict[str, object] | None,
        timeout_s: float,
    ) -> Fetched:
        """Fetch the whole state of the up-to-date peer that the quorum assigned.

        Args:
            sources: where it can be fetched, if that is known.
            own: the state in whose tensors it may arrive.

        Raises:
            ForeignStateError: the peer's state is none for this replica.
            CheckpointError: the peer is gone or slow, or did not send the state of `max_step`.
        """
        kept = None if self._keeper is None else self._keeper.kept
        destination = Destination[State](
            None if own is None else {"user": own},
            partial(self._check, result),
            kept.leaves if kept is not None and self._protocol.takes(kept.version, result) else None,
            key=result.checkpoint_key,
        )
        try:
            state = PeerState.of(
                self._transport.recv_checkpoint_from(
                    sources or self._ask(result, timeout_s),
                    result.max_step,
                    timedelta(seconds=timeout_s),
                    destination,
                )
            )
        except BaseException:
            if destination.is_written:
                with self._group.lock:
                    self._protocol.lose_state()
            raise
        finally:
            if self._fetching is fetching:
                self._fetching = None
        seconds, nbytes = time.monotonic() - fetching.began, state_bytes(state.user)
        self._emit(
            "heal",
            source=result.replica_ids[result.recover_src_replica_rank or 0],
            bytes=nbytes,
            seconds=seconds,
            gb_per_s=nbytes / 1e9 / max(seconds, 1e-9),
            kept=destination.kept_nbytes,
            addresses=[f"{address} ({part} B)" for address, part in destination.received.items()],
            refused=[f"{address}: {reason}" for address, reason in destination.refused.items()],
        )
        return state, destination

    # -- beside the steps

    @property
    def has_fetched(self) -> bool:
        """Whether the state has come that was fetched beside the steps."""
        return self._beside is not None and self._beside.done() and self._beside.exception() is None

    @property
    def source(self) -> str:
        """The replica whose state is on its way; empty if none is."""
        return "" if (fetching := self._fetching) is None else next(iter(fetching.sources), "")

    def keep(self) -> object:
        """Return what the step that passes is to be taken again with; None if it could not be kept."""
        try:
            return self.replay.keep() if self.replay is not None else None
        except Exception:  # memory may have run out; it would again
            _logger.exception("a step cannot be kept: from now on the others wait while this replica heals")
            with self._group.lock:
                self._protocol.stop_catching_up()
                self._protocol.steps_kept_max = 0
            return None

    def _catch_up(self, attempt: Attempt, plan: Plan, result: QuorumResult) -> None:
        """Begin to fetch a state beside the steps, or load it, or do neither while it is on its way.

        A failure loses the others nothing: they do not count this replica.
        """
        protocol = self._protocol
        try:
            if plan.catch_up:
                fetching, timeout_s = self._meet(attempt, result), self._config.timeout_s
                with self._group.lock:
                    protocol.begin_to_catch_up(Version(result.max_step, result.max_commit_quorum_id))
                about = fetching, result, attempt.sources, None, timeout_s
                self._beside = in_background("torchft-fetch-beside", partial(self._fetch, *about))
            elif (under_way := self._fetching) is not None:
                for gone in under_way.sources.keys() - set(result.replica_ids):
                    self._transport.lose_source(under_way.sources[gone], f"{gone} is no member any more")
            if (beside := self._beside) is None:
                raise CheckpointError("the state that was on its way does not come")
            if beside.done():
                beside.result()  # or its error
            if not protocol.loads:
                return
            state, _ = beside.result()
            steps = protocol.steps_to_take(state.counters)
            if protocol.all_have_fetched and not self.agree(attempt, True):  # one has given the step up
                return
        except Exception as error:  # noqa: BLE001 - as in `_heal`
            with self._group.lock:
                protocol.stop_catching_up()
            if self._beside is None:  # no thread fetches it, and none will say that it is over
                self._fetching = None
            self._drop_beside("it has failed")
            self._fail(attempt, result, error, group_broken=False)
            return
        self._load(state, None, steps)
        self._beside = None

    def _drop_beside(self, reason: str) -> None:
        """End a fetch beside the steps, so that the next one is not ended in its place."""
        beside, self._beside = self._beside, None
        if beside is not None:
            self.end_fetch(reason)
            wait([beside], 2 * REACH_S)

    def _check(self, result: QuorumResult, arriving: State) -> None:
        """Check a peer's state, whose tensors may be without memory yet, before any of it is taken over."""
        source, state = result.recover_src_manager_address, PeerState.of(arriving)
        if not self._protocol.heals_to(state.counters, result):
            raise CheckpointError(f"{source} sent state that is not of step {result.max_step}")
        self._registry.check_form(state.user, source)

    def _ask(self, result: QuorumResult, timeout_s: float) -> list[Source]:
        """Ask the source and its helpers where their states can be fetched, and try to connect there; a
        helper that cannot be reached is left out.
        """
        count = len(result.source_ranks) if self._transport.takes_helpers else 1
        clients = self._clients = [ManagerClient(address) for address in result.source_addresses[:count]]

        def ask(rank: int, client: ManagerClient) -> Source:
            limit, reach = timedelta(seconds=timeout_s), timedelta(seconds=min(timeout_s, REACH_S))
            is_first = client is clients[0]  # without which there is no state
            answer = client._checkpoint_metadata(self._config.group_rank, limit if is_first else reach)
            source = Source(rank, answer)
            self._transport.check_source(source, reach)
            return source

        try:
            with ThreadPoolExecutor(count, "torchft-ask") as pool:
                first, *helpers = (
                    pool.submit(ask, rank, client)
                    for rank, client in zip(result.source_ranks, clients, strict=False)
                )
                sources = [first.result()]
                for helper in helpers:
                    try:
                        sources.append(helper.result())
                    except FaultToleranceError as error:
                        _logger.warning("the state comes from fewer replicas: %s", error)
        finally:
            self._clients = []
            for client in clients:
                client.close()
        return sources

    def _load(
        self, state: PeerState, own: dict[str, object] | None, steps: Sequence[object] | None = None
    ) -> None:
        """Load a state, and take the steps again that were kept since then, if it came beside them."""
        try:
            self._registry.load(state.user, own)
            if steps and self.replay is not None:
                self.replay.take(steps)
            with self._group.lock:
                if steps is None:
                    self._protocol.heal(state.counters)
                else:
                    self._protocol.caught_up(state.counters)
        except BaseException:  # a part of the state may be the peer's by now
            with self._group.lock:
                self._protocol.lose_state()
            raise

    def close(self) -> None:
        """Wait for the end of a fetch beside the steps, which was ended."""
        self._drop_beside("this replica stops")

    def keep_state(self) -> None:
        """Keep the state for the Manager of the next try, where there may be one, if its version is certain;
        runs on the training thread, at the end of this Manager. A second call does nothing.
        """
        keeper, self._keeper = self._keeper, None
        if keeper is None or (version := self._protocol.held) is None:
            return
        try:
            with self._registry.reading() as user_state:
                keeper.keep(version, {"user": user_state, "torchft": self._protocol.counters()})
        except Exception:  # the script's functions may raise anything, and a device may have failed
            _logger.exception("the state of step %d is not kept for the next try", version.step)

    def linger(self) -> None:
        """Wait, before this replica leaves, for one that fetches its state since the last step; one that it
        only helps does without it, and may never have come to it.
        """
        if self._is_serving and self._is_first:
            self._transport.wait_fetched(timedelta(seconds=LINGER_S))

    # ------------------------------------------------------------------ from other threads

    def agreed(self, result: QuorumResult) -> None:
        """Ask receivers for the key of this quorum; runs on the coordination loop before the members meet."""
        self._transport.use_key(result.checkpoint_key)

    def copy_ahead(self, attempt: Attempt, plan: Plan) -> None:
        """Begin to copy what this rank is to serve at the end of the step; runs on the coordination loop."""
        if not self._serves(plan) or self._copied_ahead is None:
            return
        with self._registry.held() as is_read_allowed:
            if is_read_allowed:
                attempt.ahead = self._transport.begin_copy(self._copied_ahead)

    def ask_early(self, attempt: Attempt, result: QuorumResult) -> None:
        """Ask for what a fetch has to know while the training thread computes; runs on the quorum worker."""
        try:
            attempt.sources = self._ask(result, min(self._config.timeout_s, ASK_EARLY_S))
        except Exception as error:  # noqa: BLE001 - it is asked again at the end of the step
            _logger.warning("the source of a state cannot be reached yet: %s", error)

    def member_lost(self, notice: LossNotice) -> None:
        """End a fetch that needs the lost member, even before it begins; runs on the coordination loop."""
        newest, replica_id = self._protocol.quorum_id, notice.replica_id
        self._lost = [*(lost for lost in self._lost if lost.quorum_id >= newest), notice]
        fetching, reason = self._fetching, notice.describe()
        if fetching is None or not self._ends_fetch(notice, fetching.own):
            return
        if replica_id in fetching.sources:
            self._repeat(fetching, partial(self._transport.lose_source, fetching.sources[replica_id], reason))
        elif replica_id == fetching.own:
            self.end_fetch(reason)

    def _ends_fetch(self, notice: LossNotice, own: str) -> bool:
        return not self._transport.keeps_offers or self._protocol.ends_fetch(notice, own)

    def end_fetch(self, reason: str) -> None:
        """End a fetch, as the attempt has failed: the training thread need not wait for a state."""

        def end() -> None:
            for client in self._clients:
                client.close()
            self._transport.abort_recv(reason)

        self._repeat(self._fetching, end)

    def _repeat(self, fetching: _Fetching | None, act: Callable[[], None]) -> None:
        """Act on a fetch until it is over, as the transport's part of it may not have begun."""
        if fetching is not None and fetching is self._fetching:
            act()
            loop = coordination_loop().loop
            loop.call_soon_threadsafe(loop.call_later, ABORT_REPEAT_S, self._repeat, fetching, act)


def state_bytes(state: object) -> int:
    """Return the bytes of all tensors in nested containers."""
    leaves = (leaf.local if isinstance(leaf, Shard) else leaf for leaf in tree_leaves(state))
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def _settle_vector_functions() -> None:
    """Make the first call of MKL's vector functions, with which torch computes `sqrt`, `exp` and the like on
    the CPU, in this thread alone.

    That call finds out which processor it is, and notes its number twice: as it was found, and then as the
    table of kernels counts. A thread that reads it in between takes another kernel, on a processor with
    AVX-512 one of low accuracy (pytorch/pytorch#188792; 3 of 2,300 processes on a busy machine of two cores).
    A replica's first optimizer step had weights that were wrong by 3e-5 of the step, where all others
    computed from the same state and gradients.
    """
    torch.full((1,), 0.5, dtype=torch.float32, device="cpu").sqrt()
