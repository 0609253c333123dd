"""Groups that keep the errors of collectives from the training script.

A failed collective must not end a training loop that is able to drop the step and try again. Here the call
succeeds, the error is reported, and until the next `configure` no further collective is tried. A
`ManagedProcessGroup` is for code that takes a plain process group: DDP, FSDP, a device mesh. Its members are
those of the Manager's current quorum, and errors go to the Manager.

INVARIANTS
* An error counts for the configuration in which its collective was issued, and for no later one.
* After an error the inner group is aborted: this rank will take part in nothing more, and peers that wait for
  it must fail, too.
* Outputs are filled in only when the backend is done with them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn, Protocol, TypeVar, Unpack

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import AllreduceOptions
from torch.futures import Future

from torchft_like.errors import (
    CollectiveRefusedError,
    ConfigError,
    FaultToleranceError,
    GroupLostError,
    ProcessGroupError,
    ProcessGroupNotConfiguredError,
    QuorumTimeoutError,
)
from torchft_like.process_group.base import About, ProcessGroup
from torchft_like.process_group.collectives import ALLREDUCE, BY_NAME, Call, Collective, tensors_of
from torchft_like.process_group.configuration import Configuration
from torchft_like.process_group.work import (
    FOREVER,
    FinishedOperation,
    FollowingOperation,
    Operation,
    wait_until,
)
from torchft_like.process_group.wrapper import ProcessGroupWrapper
from torchft_like.runtime.long_waits import calls
from torchft_like.writing import writing_to

T = TypeVar("T")
ALLREDUCE_COALESCED = BY_NAME["allreduce_coalesced"]

# The manager has no quorum, or lost its group. Only `should_commit` raises these.
UNAVAILABLE = (QuorumTimeoutError, GroupLostError)

# Mistakes of the caller, not states of the group: another attempt would fail in the same way.
MISTAKES = (TypeError, ValueError, NotImplementedError)

_logger = logging.getLogger(__name__)


class SwallowingGroup(ProcessGroupWrapper):
    """The common part of groups that hide errors; a subclass defines what becomes of an error."""

    hides_errors = True

    def _report_of(self, configuration: Configuration, error: Exception) -> None:
        """Handle an operation's error, which counts only if `configuration` is the present one."""
        raise NotImplementedError

    def _swallow(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Work | None:
        """Run a collective on the inner group; report an error, and fill in the outputs."""
        if len(args) < len(collective.tensor_places):
            collective.bind(args, kwargs)  # it raises an error that names what is missing
        configuration, bind = self.configuration, functools.partial(collective.bind, args, kwargs)
        try:
            work = self.parent._run(collective, args, kwargs)
        except MISTAKES:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a backend is reported
            self._report_of(configuration, error)
            return skipped(bind(), self.parent)
        return None if work is None else SwallowedOperation(work, bind, self, configuration, collective.name)


class ErrorSwallowingProcessGroupWrapper(SwallowingGroup):
    """A group whose collectives always succeed; `error()` tells whether they really did.

    After the first error collectives are skipped until `configure`. A skipped collective has the result of a
    group of one: the caller's own share in its place, zeros where only a peer could have written, and tensors
    that are both input and output unchanged. So has the one that failed, except that a tensor that is both
    input and output (allreduce, broadcast, reduce) is undefined. `configure` still raises, and so do mistakes
    of the caller (TypeError, ValueError, NotImplementedError).
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg=pg)
        self._failed: tuple[Configuration, Exception] | None = None  # the last configuration with an error
        # The one that a present or former `configure` call replaces.
        self._replaced: Configuration | None = None
        self._lock = threading.RLock()  # an abort may complete futures, whose errors come back here

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Configure the inner group and forget the error. What `configure` raises is not swallowed."""
        with self._lock:  # an error of the last configuration would abort the next one
            self._failed, self._replaced = None, self.configuration
        super().configure(store_addr, rank, world_size, **about)

    def error(self) -> Exception | None:
        """Return the first error since `configure`."""
        failed = self._failed
        return failed[1] if failed is not None and failed[0] is self.configuration else None

    hidden_error = error

    def errored(self) -> Exception | None:
        return self.error() or super().errored()

    def report_error(self, e: Exception) -> None:
        """Skip collectives from now on because of `e`, the first error, and release the peers by an abort."""
        self._report_of(self.configuration, e)

    def make_alike(self) -> ProcessGroup | None:
        alike = super().make_alike()
        return None if alike is None else ErrorSwallowingProcessGroupWrapper(alike)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if self._failed is not None and self.error() is not None:
            return skipped(collective.bind(args, kwargs), self)
        return self._swallow(collective, args, kwargs)

    def _report_of(self, configuration: Configuration, error: Exception) -> None:
        with self._lock:
            is_present = configuration is self.configuration and configuration is not self._replaced
            if not is_present or self.error() is not None:
                return
            self._failed = configuration, error
            _logger.warning("collectives are skipped until the next configure: %r", error)
            self.abort(f"a collective failed: {error!r}")


def skipped(call: Call, pg: ProcessGroup) -> Work | None:
    """Skip a call, and leave its outputs in a defined state."""
    _fill_in(call, pg)
    return None if call.collective.blocking else FinishedOperation(call.result, source=_peer_in(pg))


def _peer_in(pg: ProcessGroup) -> int:
    """Return the sender of a message that was skipped: for torch, a member other than the caller."""
    rank, size = _place_in(pg)
    return 0 if rank else min(1, size - 1)


def _place_in(pg: ProcessGroup) -> tuple[int, int]:
    try:
        return pg.rank(), max(pg.size(), 1)
    except FaultToleranceError:  # the group was never configured
        return 0, 1


def _fill_in(call: Call, pg: ProcessGroup) -> None:
    """Write the result of `call` in a group of one; zeros if its tensors do not fit the group's size.

    A tensor that the call would both read and write is left as it is.
    """
    if call.collective.input is call.collective.output:
        return
    try:
        call.apply_locally(*_place_in(pg))
    except (IndexError, RuntimeError, ValueError) as error:
        _logger.debug("%s was called with tensors that do not fit: %s", call.collective.name, error)
        for output in tensors_of(call.outputs):
            with contextlib.suppress(RuntimeError), writing_to(output):  # some outputs cannot be written to
                output.zero_()


class SwallowedOperation(FollowingOperation):
    """An operation that always succeeds, with the outputs of its call; an error goes to `group`.

    The first call of `wait`, `get_future`, `is_completed` or `synchronize` notices it. `bind` reads the
    call's arguments only when its outputs are asked for, because that takes longer than most operations.

    While a thread waits for it, it is a call under way, so that a Manager looks for a link that may not work.
    """

    _has_failed = False

    def __init__(
        self,
        inner: Work,
        bind: Callable[[], Call],
        group: SwallowingGroup,
        configuration: Configuration,
        name: str,
    ) -> None:
        super().__init__()
        self.inner = inner
        self._bind = bind
        self._group = group
        self._configuration = configuration
        self._name = name
        self._filling_in = threading.Lock()

    @functools.cached_property
    def _call(self) -> Call:
        return self._bind()

    def wait_until(self, deadline: float) -> None:
        """Block until the operation is over; a passed deadline is an error like any other."""
        calls[self] = time.monotonic(), self._name, self
        try:
            self._settle(functools.partial(wait_until, self.inner, deadline))
        finally:
            calls.pop(self, None)  # another thread that waited may have deleted it

    @property
    def endings(self) -> tuple[Configuration]:
        """What ends it."""
        return (self._configuration,)

    def __str__(self) -> str:
        return str(self._group)

    is_success = Operation.is_success

    def is_completed(self) -> bool:
        """Return whether the operation is over; then the outputs are filled in."""
        is_over = self.inner.is_completed()
        if is_over and not self._has_failed:
            self.wait_until(FOREVER)
        return is_over

    def exception(self) -> None:
        """Return None: the group has the error."""

    def result(self) -> list[Any]:
        return self._call.result

    def get_future(self) -> Future[Any]:
        def settle(done: Future[Any]) -> list[Any]:
            self._settle(done.value)
            return self._call.result

        return self.inner.get_future().then(settle)

    def synchronize(self) -> None:
        self._settle(self.inner.synchronize)

    def _source_rank(self) -> int:
        """Return the sender's rank; after an error, that of another member."""
        return _peer_in(self._group.parent) if self._has_failed else self.inner._source_rank()

    def _settle(self, outcome: Callable[[], object]) -> None:
        try:
            outcome()
        except Exception as error:  # noqa: BLE001 - any error goes to the group
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Report the error, and fill in the outputs that the call does not read from, once."""
        self._group._report_of(self._configuration, error)
        with self._filling_in:
            has_failed, self._has_failed = self._has_failed, True
            if not has_failed and self.inner.is_completed():
                _fill_in(self._call, self._group.parent)


class GroupManager(Protocol):
    """The part of a Manager that managed groups, gangs, coordinators and meshes need.

    `group_allreduce` reduces in place over the participants, in one operation that never fails. That of a
    Manager takes `of_all_members`, too: whether those of a replica that heals count.
    """

    @property
    def process_group(self) -> ProcessGroup: ...
    def wait_quorum(self) -> None: ...
    def errored(self) -> Exception | None: ...
    def report_error(self, e: Exception) -> None: ...
    def current_step(self) -> int: ...
    def init_process_group(self) -> None: ...
    def replica_rank(self) -> int | None: ...
    def replica_world_size(self) -> int: ...
    def group_allreduce(
        self, tensors: list[torch.Tensor], options: AllreduceOptions, *, collective: Collective
    ) -> Work: ...
    def num_participants(self) -> int: ...
    def healing_ranks(self) -> Collection[int]: ...
    def wait_for_turn(self) -> None: ...
    def is_exchanging_state(self) -> bool: ...
    def participating_rank(self) -> int | None: ...


class ManagedProcessGroup(SwallowingGroup):
    """A group whose collectives never fail and whose size is the number of participants.

    An allreduce is `manager.allreduce`, so averages count the participants and a replica that heals adds
    zero, or another value that changes no result. Every other collective goes to the manager's group; where
    some members of it do not participate, one that shares tensors out by rank cannot have a right result: it
    is skipped and the step is lost. Once the step is lost, collectives are skipped, as in an
    ErrorSwallowingProcessGroupWrapper.

    While the Manager reads the state for a peer, or loads a peer's, this replica is alone: a broadcast or a
    reduction, such as those of `set_state_dict` on a mesh with an elastic dimension, keeps the tensors as
    they are.

    If there is no quorum within `quorum_timeout`, or the replica group is lost, the step is lost, too,
    and `should_commit` raises that.

    Raises:
        ConfigError: what it is given is no Manager.
    """

    def __init__(self, manager: GroupManager) -> None:
        if not hasattr(manager, "process_group"):
            raise ConfigError(f"a managed process group takes the Manager of this rank, not {manager!r:.100}")
        super().__init__(pg=manager.process_group)
        self._manager = manager

    supports_reconfigure = False
    counts_participants = True

    def configure(self, *args: Any, **about: Any) -> NoReturn:
        """Refuse: the Manager configures this group.

        Raises:
            ProcessGroupError: always.
        """
        raise ProcessGroupError("a managed process group is configured by its Manager")

    reconfigure = get_reconfigure_handle = configure

    def errored(self) -> Exception | None:
        return self._manager.errored()

    hidden_error = errored

    def size(self) -> int:
        """Return the number of participants in the current step.

        If there is no quorum, it is the number of all members of the last one. It is never 0, as DDP divides
        by it.
        """
        return self._ask(self._manager.num_participants, otherwise=lambda: max(len(self._member_ranks()), 1))

    def rank(self) -> int:
        """Return the place among the participants; among all members while the caller does not participate.

        It is 0 before the first quorum, because FSDP asks when it gets the group.
        """
        rank = self._ask(self._manager.participating_rank, otherwise=lambda: None)
        if rank is not None:
            return rank
        try:
            return int(self.parent.rank())
        except ProcessGroupNotConfiguredError:
            return 0

    def member_with_state(self, rank: int) -> int:
        """Return this rank or, where that member heals in the current step, the first that does not."""
        self._ask(self._manager.wait_quorum, otherwise=lambda: None)
        healing = self._ask(self._manager.healing_ranks, otherwise=frozenset)
        return next(each for each in itertools.chain([rank], itertools.count()) if each not in healing)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if collective is ALLREDUCE or collective is ALLREDUCE_COALESCED:
            return self.begin_allreduce(collective, args, kwargs)
        if self._manager.is_exchanging_state():
            if collective.everyone:
                raise CollectiveRefusedError(
                    f"{collective.name} needs other replicas, which do not read or load a state with this one"
                )
            return skipped(collective.bind(args, kwargs), self)
        self._ask(self._manager.wait_quorum, otherwise=lambda: None)
        if self._manager.errored() is None and (why := self._why_in_vain(collective, args, kwargs)):
            self._manager.report_error(ProcessGroupError(why))
        if self._manager.errored() is not None:
            return skipped(collective.bind(args, kwargs), self)
        self._manager.wait_for_turn()
        return self._swallow(collective, args, kwargs)

    def begin_allreduce(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any], **how: Any
    ) -> Work | None:
        """Begin an allreduce; `how` goes to the manager's `group_allreduce`."""
        if len(args) == 2 and type(args[0]) is list and type(args[1]) is AllreduceOptions:
            tensors, options = args[0][:], args[1]  # the form in which DDP and torch.distributed call it
        else:
            tensors, options = collective.bind(args, kwargs).reduction()
        try:
            return self._manager.group_allreduce(tensors, options, collective=collective, **how)
        except UNAVAILABLE as error:
            self._manager.report_error(error)
            return skipped(collective.bind(args, kwargs), self)

    def _report_of(self, configuration: Configuration, error: Exception) -> None:
        if self.configuration is configuration:
            self._manager.report_error(error)

    def _why_in_vain(
        self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str | None:
        """Return why a collective can have no right result in this step, if it cannot."""
        if collective.everyone:
            members, participants = self.parent.size(), self._manager.num_participants()
            if members != participants:
                return (
                    f"{collective.name} needs all {members} members of the group; {participants} participate"
                )
            if healing := self._manager.healing_ranks():  # in the first step all members are participants
                return (
                    f"{collective.name} needs the state of all members, and ranks {sorted(healing)} get "
                    "theirs in this step: pass the Manager use_async_quorum=False, or init_sync=False"
                )
        elif collective.name == "broadcast":
            root = collective.bind(args, kwargs).root
            if root in self._manager.healing_ranks():
                return f"rank {root} heals in this step: what it would broadcast is not yet the others' state"
        return None

    def _ask(self, question: Callable[[], T], otherwise: Callable[[], T]) -> T:
        """Return the manager's answer, or that of `otherwise` if the manager has no quorum."""
        try:
            return question()
        except UNAVAILABLE as error:
            self._manager.report_error(error)
            return otherwise()
