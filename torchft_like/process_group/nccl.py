"""A reconfigurable group over NCCL, in the trainer's own process.

These are the waits, and what ends them:

* a wait for a member that never comes: the rank waits in the store, which can be aborted, before NCCL gets
  to know the group;
* NCCL connecting to members that are there: it runs on a thread of its own, with a communicator that does
  not block, and gives up after TORCH_NCCL_NONBLOCKING_TIMEOUT;
* a kernel that waits for a peer: ncclCommAbort, from another thread.

torch's own watchdog ends the process when an operation fails or takes too long: by default at once, else by
way of the flight recorder, which the monitor of *another* group of the process reads. Only the environment
can turn that off, which holds for all groups, and nothing can turn its monitor off. So these groups are made
without a watchdog, and `DeviceWatch` does its work: TORCH_NCCL_BLOCKING_WAIT, which torch reads in the
constructor, is set around that call and put back. Its other meaning, that `wait` blocks the thread, does not
come into play, because `NcclOperation` never calls torch's `wait`.

A GPU runs its operations later, in the order of a stream, and the host learns of their end only by asking. So
one thread of each generation asks, a few times a second, and only while an operation is under way. It finds
operations that failed or take too long, and reports the first of them. As in torch, a wait makes the current
stream wait, not the thread, and a future is complete at once, with tensors that are ready in the order of the
stream that uses them. Neither can know how the operation will end. The next `wait`, and the group's
`errored`, report an operation that failed.

An abort is only as good as NCCL's own. Where it has to succeed, ProcessGroupBabyNCCL runs NCCL in a
process that can be killed.

INVARIANTS
* No communicator is made before every operation of the one before is over on the device. So no kernel of an
  old generation writes to a tensor of a new one.
* An operation, with the tensors that it holds, is kept until it is over: memory that a device still writes
  must not be used for another tensor.
* Whether an operation was cut off is decided once, before anything is torn down, and for each one: an
  operation that was over is good for ever, any other one is not.
* What an operation costs the thread that issues it, which holds the lock for it, depends on no other one,
  nor does the watch keep the GIL from that thread for longer than a few operations take.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, Work
from torch._C._distributed_c10d import ProcessGroup as TorchProcessGroup
from torch.futures import Future

from lighthouse.forks import lock_of_each_process
from torchft_like.devices import beside_captures, keeping
from torchft_like.errors import NotSupportedError, ProcessGroupError
from torchft_like.futures import context_timeout
from torchft_like.process_group.base import About
from torchft_like.process_group.collectives import BY_NAME, SPLIT_SIZES, methods_of
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import CONFIGURE_GRACE_S, Backend
from torchft_like.process_group.store import GroupMembers, meet, meeting_store
from torchft_like.process_group.work import FOREVER, ExplainedOperation
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.environment import environment
from torchft_like.runtime.spin_wait import ask_until

PERIOD_S = 0.25
DECISION_S_MAX = 5.0
# After so many operations the asking thread sleeps: a thread that merely releases the GIL takes it again
# before another one is awake.
ASKED_AT_ONCE = 16
REST_S = 20e-6
TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE"
TORCHFT_TRIGGER_FR_ON_ABORT = "TORCHFT_TRIGGER_FR_ON_ABORT"
TORCH_FR_DUMP_TEMP_FILE_ENV = "TORCH_FR_DUMP_TEMP_FILE"
# Variables that torch reads in the constructor of a group: (torch's own default, the value for these groups).
_CONSTRUCTOR_ENVIRONMENT = {
    "TORCH_NCCL_BLOCKING_WAIT": ("0", "1"),
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": ("1", "0"),
    # The flight recorder queries the events of operations that only a watchdog removes from it, so they must
    # not be destroyed with the operation.
    "TORCH_NCCL_CUDA_EVENT_CACHE": ("1", "1"),
}
# torch reads this once in the life of a process.
_CONNECT_TIMEOUT_VARIABLE = "TORCH_NCCL_NONBLOCKING_TIMEOUT"

_logger = logging.getLogger(__name__)
_environment_lock = lock_of_each_process()

# Returns whether the device is done with an operation; raises if the device failed. It must not block.
IsOver = Callable[[], bool]
T = TypeVar("T")


class ProcessGroupNCCL(ReconfigurableProcessGroup):
    """Collectives over NCCL (CUDA tensors), on the device that is current when `configure` is called.

    `wait` orders the current stream after the operation and returns. Whether operations have really
    succeeded is known after the stream has come to their end: `errored` waits for that.

    Args:
        timeout: the limit of each operation and of `configure`, seconds or timedelta. An operation
            that takes longer aborts the group; the process goes on.
        check_collectives: whether the ranks compare their calls, as in ReconfigurableProcessGroup.

    Raises:
        NotSupportedError: this torch has no NCCL, or sees no GPU.
    """

    divides = True
    _backend_name = "torchft-nccl"
    _device_type = "cuda"

    def _set_up(self) -> None:
        require_nccl()
        # Every variable is set now, so that later values replace it, and none is added: a replacement leaves
        # the environment in its place, an addition moves it while native threads may be reading it.
        os.environ.setdefault(_CONNECT_TIMEOUT_VARIABLE, str(math.ceil(self._timeout.total_seconds())))
        for name, (default, _) in _CONSTRUCTOR_ENVIRONMENT.items():
            os.environ.setdefault(name, default)
        self._device: torch.device | None = None
        self._traces = os.environ.get(TORCH_FR_DUMP_TEMP_FILE_ENV)
        self._backends: list[_NcclBackend] = []  # the present one and earlier ones

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Configure the group on the device that is current now."""
        self._device = torch.device("cuda", torch.cuda.current_device())
        in_job = (about.get("global_ranks") or range(world_size))[rank]
        send_traces_to(self._traces, about.get("quorum_id"), in_job)
        limit_s = seconds_of(about.get("timeout") or self._timeout) + CONFIGURE_GRACE_S
        is_done = threading.Event()

        def give_up() -> None:
            if not is_done.is_set():
                self.abort(f"the group was not usable after {limit_s:g} s")

        with context_timeout(give_up, timedelta(seconds=limit_s)):
            super().configure(store_addr, rank, world_size, **about)
            is_done.set()

    def abort(self, reason: str = "abort() was called", *, errored: bool = True) -> None:
        """Abort; TORCHFT_TRIGGER_FR_ON_ABORT=true asks torch for a trace first."""
        is_wanted = os.environ.get(TORCHFT_TRIGGER_FR_ON_ABORT, "").lower() in ("1", "true")
        if is_wanted and (generation := self._generation) is not None:
            rank = dist.get_rank() if dist.is_initialized() else generation.members.rank
            trigger_nccl_fr_trace_through_pipe(rank)
        super().abort(reason)

    def errored(self) -> Exception | None:
        """Wait until every operation that was begun is over, then return the error that made the group
        unusable, if any.

        ProcessGroupAbortedError means that every operation was done before the abort; any other error means
        that some were not, so that their outputs are undefined. This does not wait for other work of the
        device, except for work between an operation and the stream that waits for it.
        """
        if (generation := self._generation) is None:
            return None
        for backend in tuple(self._backends):
            if backend.abort_signal is generation.configuration:
                return backend.outcome() or generation.error()
        return generation.error()

    def _create(self, members: GroupMembers, abort: AbortSignal) -> _NcclBackend:
        device = self._device or torch.device("cuda", torch.cuda.current_device())
        with beside_captures(device):
            for backend in tuple(self._backends):
                backend.wait_still(members.timeout, abort)
                with contextlib.suppress(ValueError):  # an aborted `configure` may be doing the same
                    self._backends.remove(backend)
            if members.world_size == 1:
                backend = _NcclBackend(HashStore(), members, abort, device)
            else:
                with meeting_store(members, abort) as store:
                    meet(store, members)
                    backend = _NcclBackend(store, members, abort, device)
        self._backends.append(backend)
        return backend


class _NcclBackend(Backend):
    """One communicator, and the watch over its operations."""

    def __init__(self, store: Store, members: GroupMembers, abort: AbortSignal, device: torch.device) -> None:
        self.abort_signal = abort
        self.watch: DeviceWatch = DeviceWatch(self._failure, abort.set, lambda: beside_captures(device))
        self._members = members
        self._device = device
        self._timeout = members.timeout
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._questions = _Questions()
        self._is_in_reach = threading.Event()
        # Taken by the thread that ends the communicator, and never released.
        self._end_begins = threading.Lock()
        self._ended = threading.Event()
        self._probe: Work | None = None
        self._nccl: Any = _make_nccl(store, members)
        self._shell: Any = _shell_around(self._nccl, members, device)
        abort.add(self.break_off)
        try:
            try:  # it begins to connect, and waits for no peer; an abort of the store ends its waits
                self._nccl.eager_connect_single_device(device)
            finally:
                self._is_in_reach.set()
            self._probe = self._prove_usable()
        except BaseException:
            self.close()
            raise

    @property
    def inner(self) -> object:
        return self._nccl

    def methods(self) -> Mapping[str, Callable[..., Any]]:
        """Return the methods of NCCL, or else of torch's shell around it, watched."""
        found = methods_of(self._nccl, self._shell)
        if (alltoall_base := found.get("alltoall_base")) is not None:
            found["alltoall_base"] = naming_even_splits(alltoall_base, self._members.world_size)
        return {name: functools.partial(self._start, name, method) for name, method in found.items()}

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if (nccl := self._nccl) is not None:
            nccl.set_timeout(timeout)

    def break_off(self) -> None:
        """Abort the communicator on a thread of its own, because ncclCommAbort can take long."""
        if self._end_begins.acquire(blocking=False):
            threading.Thread(target=self._end, name="torchft-nccl-abort", daemon=True).start()

    def is_still(self) -> bool:
        with beside_captures(self._device):
            return self._ended.is_set() and self.watch.is_idle()

    def wait_still(self, timeout: timedelta, abort: AbortSignal) -> None:
        """Wait until nothing of this generation runs any more, once its end has begun.

        Raises:
            ProcessGroupAbortedError: the group was aborted during the wait.
            ProcessGroupError: an operation still runs after `timeout`.
        """
        limit_s = timeout.total_seconds()
        if not ask_until(lambda: self.is_still() or abort.reason is not None, time.monotonic() + limit_s):
            raise ProcessGroupError(
                f"NCCL did not end the operations of {self._members} within {limit_s:g} s of the abort: "
                "restart this process, or use ProcessGroupBabyNCCL, whose operations end with their "
                "subprocess"
            )
        abort.check()

    def outcome(self) -> Exception | None:
        """Wait for the operations; return an error of the device, or what `lost` returns."""
        try:
            with beside_captures(self._device):
                self.watch.wait_over()
        except RuntimeError as error:
            return error
        self.watch.look()
        return self.lost()

    def lost(self) -> Exception | None:
        """Return an error that names the operations that an abort cut off; None if there are none."""
        if self.abort_signal.reason is None:
            return None
        self.watch.wait_decided()
        if not (names := self.watch.cut_off_operations()):
            return None
        return ProcessGroupError(
            f"{', '.join(sorted(set(names)))} ({len(names)} operations) of {self._members} "
            f"cut off: {self.abort_signal.reason}"
        )

    def close(self) -> None:
        self.abort_signal.remove(self.break_off)
        self.break_off()
        self._ended.wait()
        self.is_still()  # drops the operations that the abort has ended
        self.watch.close()
        with beside_captures(self._device):
            self._probe = self._shell = self._nccl = None

    def _start(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start one operation, and watch it from now on."""
        refuse_capture(name)
        options: Any = next((value for value in (*args, *kwargs.values()) if hasattr(value, "asyncOp")), None)
        # By itself torch runs a synchronous call on the current stream and returns no work.
        is_made_asynchronous = options is not None and not options.asyncOp
        if is_made_asynchronous:
            options.asyncOp = True
        try:
            work = method(*args, **kwargs)
        finally:
            if is_made_asynchronous:
                options.asyncOp = False
        if work is None:
            return None
        tensors, own = (args, kwargs), getattr(options, "timeout", None)
        # A timeout that was not set is negative.
        limit = own if own is not None and own > timedelta(0) else self._timeout
        watched = self.watch.watch(
            name, lambda: self._is_over(work), lambda: self._settle(work, tensors), limit.total_seconds()
        )
        return NcclOperation(work, watched, self)

    def _is_over(self, work: Work) -> bool:
        """Return whether the device is done: torch calls completed, too, what NCCL gave up."""
        return self._questions.ask(
            lambda: work.is_completed() and error_of(work, self._nccl) is None, otherwise=False
        )

    def _error_of(self, work: Work) -> BaseException | None:
        return self._questions.ask(lambda: error_of(work, self._nccl), otherwise=None)

    def _settle(self, work: Work, tensors: object) -> IsOver:
        """Return a function that does as `_is_over`, without a query to NCCL.

        torch drops an operation's tensors as soon as a stream waits for it. This stream is not the one
        on which their memory would be used next, and NCCL still writes to it, so they are kept until then.
        """
        written = work.get_future()  # it holds the outputs that torch has made itself
        with torch.cuda.device(self._device), torch.cuda.stream(self._side):
            work.block_current_stream()
            return keeping((tensors, written), self._mark())

    def _mark(self) -> IsOver:
        """Return a function that tells whether the current stream has passed the point at which it is now."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event.query

    def _failure(self) -> BaseException | None:
        """Return what NCCL reports of the communicator, by way of the first operation."""
        if (probe := self._probe) is None:
            return None
        self._questions.ask(probe.is_completed, otherwise=True)
        return self._error_of(probe)

    def _prove_usable(self) -> Work:
        """Run a first operation: a communicator that does not block is connected only when that is over."""
        deadline = time.monotonic() + self._members.timeout.total_seconds()
        # The default stream is not used, because the trainer's own kernels may be there.
        with torch.cuda.stream(self._side):
            count = torch.ones(1, device=self._device)
            work: Work = self._nccl.allreduce([count])
            is_over = functools.partial(self._questions.ask, work.is_completed, otherwise=True)
            if not ask_until(lambda: is_over() or self.abort_signal.reason is not None, deadline):
                raise ProcessGroupError(f"NCCL did not connect {self._members} in time")
            self.abort_signal.check()
            if (error := self._error_of(work)) is not None:
                raise ProcessGroupError(f"NCCL did not connect {self._members}: {error}") from error
            work.block_current_stream()
            if (found := int(count.item())) != self._members.world_size:
                raise ProcessGroupError(f"NCCL connected {found} members for {self._members}")
        return work

    def _end(self) -> None:
        """Decide which operations are lost, then end the communicator; runs on a thread of its own."""
        try:
            self._is_in_reach.wait()  # an earlier abort would miss the communicator
            with beside_captures(self._device):
                self.watch.cut_off()
                self._questions.close()
                try:
                    # The shell's method releases the GIL.
                    self._shell.abort()
                finally:  # not before: a stream with a thousand waits has no room for more, and blocks
                    self.watch.settle()
        except Exception:
            _logger.exception("aborting NCCL's communicator of %s", self._members)
        finally:
            self._ended.set()


class _Questions:
    """Queries to NCCL about its operations, as long as it is not being aborted.

    torch queries under a lock that it also holds throughout ncclCommAbort, and with the GIL held: a single
    query at the wrong time would stop the whole process until the abort is done.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._are_allowed = True

    def ask(self, question: Callable[[], T], *, otherwise: T) -> T:
        """Return the answer; `otherwise` once queries are not allowed any more."""
        with self._lock:
            return question() if self._are_allowed else otherwise

    def close(self) -> None:
        """Wait for the query that is under way, and allow no other."""
        with self._lock:
            self._are_allowed = False


NCCL_SUCCESS, NCCL_IN_PROGRESS = 0, 7


def error_of(work: Work, backend: Any) -> BaseException | None:
    """Return why an operation of torch's `backend` has failed; None if it has not."""
    try:
        error: BaseException | None = work.exception()
    except TypeError:  # torch 2.11 gives Python neither an error nor that there is none: NCCL is asked
        nccl, code = ctypes.CDLL("libnccl.so.2"), ctypes.c_int()  # the one that torch has loaded
        asked = nccl.ncclCommGetAsyncError(ctypes.c_void_p(backend._comm_ptr()), ctypes.byref(code))
        failed = asked or code.value
        if failed in (NCCL_SUCCESS, NCCL_IN_PROGRESS):
            return None
        nccl.ncclGetErrorString.restype = ctypes.c_char_p
        return ProcessGroupError(f"NCCL: {nccl.ncclGetErrorString(failed).decode()} (error {failed})")
    return error


def naming_even_splits(alltoall_base: Callable[..., Any], world_size: int) -> Callable[..., Any]:
    """Return torch's method, told the sizes of even splits, too.

    Without sizes torch calls NCCL's own all-to-all since NCCL 2.28, and takes its answer that the call is in
    progress, as it is for a communicator that does not block, for an error ("NCCL Error 7").
    """

    def with_sizes(*args: Any, **kwargs: Any) -> Any:
        call = BY_NAME["alltoall_base"].bind(args, kwargs)
        rows = [tensor.shape[0] if tensor.dim() else 0 for tensor in (call.outputs, call.inputs)]
        if any(call.split_sizes) or any(count == 0 or count % world_size for count in rows):
            return alltoall_base(*args, **kwargs)
        sizes = [[count // world_size] * world_size for count in rows]
        named = {*call.collective.tensor_names, *SPLIT_SIZES}
        others = {name: value for name, value in kwargs.items() if name not in named}
        return alltoall_base(call.outputs, call.inputs, *sizes, *args[4:], **others)

    return with_sizes


def refuse_capture(name: str) -> None:
    if torch.cuda.is_current_stream_capturing():
        raise NotSupportedError(
            f"{name} cannot be captured in a CUDA graph: the communicator does not survive a "
            "configure; keep collectives of a reconfigurable group out of the capture"
        )


def require_nccl() -> None:
    if not dist.is_nccl_available():
        raise NotSupportedError(
            f"torch {torch.__version__} was built without NCCL: install a CUDA build of torch, "
            "or use ProcessGroupGloo"
        )
    if not torch.cuda.is_available():
        raise NotSupportedError(
            "NCCL needs a GPU and torch sees none: check the driver and CUDA_VISIBLE_DEVICES, "
            "or use ProcessGroupGloo"
        )


def _make_nccl(store: Store, members: GroupMembers) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL as TorchNCCL  # noqa: PLC0415 - CUDA builds only

    options = TorchNCCL.Options()
    options.config.blocking = 0
    options._timeout = members.timeout
    with _constructor_environment():
        return TorchNCCL(store, members.rank, members.world_size, options)


def _shell_around(nccl: Any, members: GroupMembers, device: torch.device) -> TorchProcessGroup:
    shell = TorchProcessGroup(members.rank, members.world_size)  # type: ignore[call-arg] # the stub lacks it
    # The device is set before the backend, which takes it over, so that a tensor on another device is
    # refused.
    shell.bound_device_id = device
    shell._set_default_backend(TorchProcessGroup.BackendType.NCCL)
    shell._register_backend(torch.device("cuda"), TorchProcessGroup.BackendType.NCCL, nccl)
    return shell


@contextlib.contextmanager
def _constructor_environment() -> Iterator[None]:
    """Make torch create groups without a watchdog, for the time of a block."""
    wanted = {name: value for name, (_, value) in _CONSTRUCTOR_ENVIRONMENT.items()}
    with _environment_lock, environment(wanted):
        yield


# -- torch's flight recorder keeps a record of a process's last collectives, and writes it when asked


def trigger_nccl_fr_trace_through_pipe(rank: int) -> bool:
    """Ask torch's monitor for a trace, through the pipe of the rank; do not wait until it is written.

    Returns:
        Whether a monitor reads that pipe: torch makes it if TORCH_NCCL_DEBUG_INFO_PIPE_FILE is set.
    """
    prefix = os.environ.get(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR)
    if not prefix:
        _logger.info("no flight recorder trace: %s is not set", TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR)
        return False
    pipe = f"{prefix}{rank}.pipe"
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)  # fails if no monitor reads the pipe
        try:
            os.write(descriptor, b"1\n")
        finally:
            os.close(descriptor)
    except OSError as error:
        _logger.warning("no flight recorder trace through %s: %s", pipe, error.strerror)
        return False
    _logger.info("asked for a flight recorder trace through %s", pipe)
    return True


def send_traces_to(prefix: str | None, quorum_id: int | None, rank: int) -> None:
    """Make torch write later traces to PREFIX_quorum_ID/RANK; log a folder that cannot be made."""
    if not prefix or quorum_id is None:
        return
    folder = Path(f"{prefix}_quorum_{quorum_id}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _logger.warning("traces stay where they are: %s: %s", folder, error.strerror)
        return
    os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] = str(folder / str(rank))


# -- the operations, and a watch over them that knows neither CUDA nor NCCL


@dataclass(eq=False)
class Watched:
    """An operation under way.

    Attributes:
        is_over: asks for the present state; may be replaced by a better way to ask, together with `settle`.
        settle: called when the operation was cut off; returns the `is_over` from then on, because a
          communicator that is being torn down must not be asked.
        started: when it was started (of `time.monotonic`).
        was_cut_off: whether it was not over when the generation was; its outputs are then undefined.
    """

    name: str
    is_over: IsOver
    settle: Callable[[], IsOver]
    limit_s: float
    started: float
    was_cut_off: bool = False


class DeviceWatch:
    """The operations of one generation.

    Args:
        failure: returns what is wrong with the communicator, None while it is fine. It must not block.
        give_up: called once, with the reason for which the generation has to end; it must lead to `cut_off`.
        within: returns the context in which the thread asks.
    """

    def __init__(
        self,
        failure: Callable[[], BaseException | None],
        give_up: Callable[[str], object],
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._failure = failure
        self._give_up = give_up
        self._within = within
        self._changed = threading.Condition()
        # By limit: of the operations with the same one, the first is the first to be late, and usually to be
        # over.
        self._under_way: dict[float, deque[Watched]] = {}
        self._cut_off: list[Watched] = []
        self._is_torn = False
        self._has_given_up = False
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, name: str, is_over: IsOver, settle: Callable[[], IsOver], limit_s: float) -> Watched:
        """Watch an operation from now on; if the end has been decided already, the operation is cut off."""
        watched = Watched(name, is_over, settle, limit_s, time.monotonic())
        with self._changed:
            is_torn = self._is_torn
            if not self._under_way:
                if self._thread is None and not self._closed.is_set():
                    self._thread = threading.Thread(
                        target=self._run, name="torchft-device-watch", daemon=True
                    )
                    self._thread.start()
                self._changed.notify()
            self._under_way.setdefault(limit_s, deque()).append(watched)
        if is_torn:
            self._mark_cut_off(watched)
            watched.is_over = _asked(watched, watched.settle, if_failed=_yes)
        return watched

    def look(self, rest_s: float = 0.0) -> None:
        """Ask for the state of all operations once; sleep for `rest_s` seconds after every few of them."""
        try:
            failure, late = self._failure(), None
            if failure is None:  # the operations that are over are dropped
                first_ones, now = self._first_ones(rest_s=rest_s), time.monotonic()
                late = next((first for first in first_ones if first.started + first.limit_s < now), None)
        except Exception as error:  # noqa: BLE001 - any error is passed on as the reason
            failure, late = error, None
        if failure is not None:
            self._end(f"the device or its communicator failed: {failure}")
        elif late is not None:
            self._end(f"{late.name} was not done within {late.limit_s:g} s")

    def wait_over(self) -> None:
        """Wait until nothing is under way, or the end has been decided. A failed device is a RuntimeError."""
        ask_until(lambda: self._is_torn or next(self._first_ones(), None) is None)

    def cut_off(self) -> None:
        """Decide at the end of the generation which operations had ended before it, and which never will."""
        with self._changed:
            if self._is_torn:
                return
            self._is_torn = True
            under_way = [watched for line in self._under_way.values() for watched in line]
        for watched in sorted(under_way, key=lambda watched: watched.started):
            if _asked(watched, watched.is_over, if_failed=False):
                watched.is_over = _yes
            else:
                self._mark_cut_off(watched)
        self._decided.set()

    def settle(self) -> None:
        """Ask the communicator, which is gone, no more for the operations that were cut off."""
        for watched in self._cut_off:
            watched.is_over = _asked(watched, watched.settle, if_failed=_yes)

    def wait_decided(self) -> None:
        """Wait until `cut_off` has decided, once the end has begun: a moment, unless the device is dead."""
        if not self._decided.wait(DECISION_S_MAX):
            _logger.error("the device does not say which operations it has finished")

    def cut_off_operations(self) -> tuple[str, ...]:
        """Return the names of the operations that were cut off, in the order in which they were started."""
        with self._changed:
            return tuple(watched.name for watched in self._cut_off)

    def is_idle(self) -> bool:
        """Return whether nothing is under way any more. A device that failed runs nothing, either."""
        return next(self._first_ones(lambda it: _asked(it, it.is_over, if_failed=True)), None) is None

    def close(self) -> None:
        """End the thread, and drop the operations that are still under way."""
        with self._changed:
            self._closed.set()
            self._changed.notify()

    def _first_ones(
        self, is_over: Callable[[Watched], bool] = lambda watched: watched.is_over(), rest_s: float = 0.0
    ) -> Iterator[Watched]:
        """Yield, for each limit, the first operation that is not over; drop those before it."""
        asked = 0
        with self._changed:
            lines = list(self._under_way.items())
        for limit_s, line in lines:
            while (first := self._first_of(line)) is not None and is_over(first):
                self._drop(first, limit_s, line)
                asked += 1
                if rest_s and asked % ASKED_AT_ONCE == 0:
                    time.sleep(rest_s)
            if first is not None:
                yield first

    def _first_of(self, line: deque[Watched]) -> Watched | None:
        with self._changed:
            return line[0] if line else None

    def _drop(self, watched: Watched, limit_s: float, line: deque[Watched]) -> None:
        watched.is_over = _yes  # later the communicator may be gone
        watched.settle = lambda: _yes  # the old one would keep the tensors as long as the work
        with self._changed:
            if line and line[0] is watched:
                line.popleft()
            if not line and self._under_way.get(limit_s) is line:
                del self._under_way[limit_s]

    def _end(self, reason: str) -> None:
        with self._changed:
            if self._is_torn or self._has_given_up:
                return
            self._has_given_up = True
        self._give_up(reason)

    def _mark_cut_off(self, watched: Watched) -> None:
        watched.was_cut_off = True
        with self._changed:
            self._cut_off.append(watched)

    def _run(self) -> None:
        with self._within():
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._under_way or self._closed.is_set())
                if self._closed.wait(PERIOD_S):
                    return
                self.look(REST_S)


def _asked(watched: Watched, ask: Callable[[], T], *, if_failed: T) -> T:
    try:
        return ask()
    except Exception:
        _logger.exception("the device failed while %s was under way", watched.name)
        return if_failed


def _yes() -> bool:
    return True


class NcclOperation(ExplainedOperation):
    """An operation on NCCL's stream, which the backend's watch keeps until it is over."""

    def __init__(self, work: Work, watched: Watched, backend: _NcclBackend) -> None:
        super().__init__()
        self._work = work
        self._watched = watched
        self._backend = backend
        self._blocks_thread = watched.name == "barrier"

    def wait_until(self, deadline: float) -> None:
        """Make the current stream wait; with a deadline, which aborts the group when it has passed, and for a
        barrier, the thread, too.
        """
        # The stream waits even if the group has failed: its next work may write to the tensors, and must come
        # after NCCL's last access to them.
        self._work.block_current_stream()
        if deadline < FOREVER or self._blocks_thread:
            # In short sleeps, which Ctrl-C ends.
            if not ask_until(
                lambda: self._watched.is_over() or self._backend.abort_signal.reason is not None, deadline
            ):
                self._backend.abort_signal.set(
                    f"{self._watched.name} was not done before the timeout of a wait for it"
                )
        else:
            # The watch drops torch's work, and with it the tensors: this stream keeps them safe now.
            is_past = self._backend._mark()
            self._watched.is_over = is_past
            self._watched.settle = lambda: is_past
        self._check()

    def is_completed(self) -> bool:
        return self._watched.is_over()

    def exception(self) -> Any:
        """Return why the operation failed, or that it was cut off."""
        try:
            self._check()
        except ProcessGroupError as error:
            return error
        return self._backend._error_of(self._work)

    def result(self) -> list[torch.Tensor]:
        return self._work.result()

    def get_future(self) -> Future[Any]:
        """Return torch's future, which is complete at once, with the list of output tensors."""
        return self._work.get_future()

    def synchronize(self) -> None:
        self._work.block_current_stream()

    def _check(self) -> None:
        if self._backend.abort_signal.reason is None:
            return
        self._backend.watch.wait_decided()
        if self._watched.was_cut_off:
            error = ProcessGroupError(
                f"{self._watched.name} was cut off: {self._backend.abort_signal.reason}"
            )
            raise self.explain(error) or error
