"""Process groups whose backend runs in a subprocess.

A backend that blocks for ever, corrupts its state or ends its process does so in a process that can be
killed. Such a group is aborted by a kill, and configured anew with another subprocess.

`RemoteBackend` turns calls of collectives into requests. An `Exporter` lets the subprocess see the tensors,
`requests` handles the answers, and `fork_pool` starts the subprocesses.

INVARIANT: to end the subprocess is to end every operation. No request counts as over before the process is
gone, memory, devices and all; what a process that does not die may touch is never used again.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, ClassVar, Unpack, cast

import torch
from torch._C._distributed_c10d import Work

from torchft_like.errors import (
    NotSupportedError,
    ProcessGroupAbortedError,
    ProcessGroupError,
    SubprocessLostError,
    is_refusal,
)
from torchft_like.process_group.baby.cuda_sharing import Arena, CudaExporter
from torchft_like.process_group.baby.fork_pool import Child, fork_pool
from torchft_like.process_group.baby.messages import (
    UNASKED,
    ChannelClosedError,
    Message,
    Outcome,
    ToChild,
    encode_call,
    error_from,
)
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_sharing import CpuExporter, Exporter, Staging, drop
from torchft_like.process_group.base import About
from torchft_like.process_group.collectives import BY_NAME, Call, Collective, refuse_unfit
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import Backend
from torchft_like.process_group.gloo import require_device
from torchft_like.process_group.nccl import require_nccl
from torchft_like.process_group.store import GroupMembers
from torchft_like.process_group.work import FOREVER, Operation
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup
from torchft_like.runtime.durations import seconds_of
from torchft_like.runtime.spin_wait import ask_until

# How much longer than an operation may take its subprocess may send nothing.
SILENCE_S = 5.0
GONE_S_MAX = 10.0


class ProcessGroupBaby(ReconfigurableProcessGroup):
    """The base of groups whose backend runs in a subprocess; a subclass names the backend.

    The subprocess is a fork of a process that has torch loaded; it never runs the caller's main module. A
    spare is kept ready, so only `prepare`, or else the first `configure` of a process, waits for torch to
    load, which does not count against the timeout. The subprocess ends with this process, however that ends.
    When it dies or is killed, operations under way raise SubprocessLostError at once, and the next
    `configure` uses another.

    Args:
        timeout: the limit of each operation and of `configure`, seconds or timedelta.
        check_collectives: whether the ranks compare their calls, as in ReconfigurableProcessGroup.

    Attributes:
        WORK_CLASS: the class of the works that its collectives return.
        GROUP: the class, as `module:class`, whose backend the subprocess makes.
        IMPORTER: the counterpart of the exporter, in the same form.
    """

    WORK_CLASS: ClassVar[type[Work]] = Operation
    GROUP: ClassVar[str]
    IMPORTER: ClassVar[str]

    def _set_up(self) -> None:
        self._latest: RemoteBackend | None = None
        fork_pool.start()

    def prepare(self, timeout: timedelta | float) -> None:
        """Wait until torch is loaded by the process whose forks run the backends."""
        fork_pool.wait_for_spare(seconds_of(timeout), self._warm_up())

    def errored(self) -> Exception | None:
        """Return why the group is unusable; a lost subprocess is noticed even while no call waits."""
        if (error := super().errored()) is not None or (backend := self._remote()) is None:
            return error
        return backend.lost()

    def num_active_work(self) -> int:
        backend = self._remote()
        return 0 if backend is None else backend.num_active_work()

    def _exporter(self) -> Exporter:
        """Make the exporter of the tensors of a new generation."""
        raise NotImplementedError

    def _warm_up(self) -> Message | None:
        """Return the message that a spare subprocess gets beforehand, if any."""
        return None

    def _remote(self) -> RemoteBackend | None:
        try:
            return cast("RemoteBackend", self.parent)
        except ProcessGroupError:
            return None

    def _create(self, members: GroupMembers, abort: AbortSignal) -> RemoteBackend:
        exporter = self._exporter()
        child = fork_pool.take(abort, members.timeout.total_seconds())
        self._latest = backend = RemoteBackend(child, exporter, abort)
        try:
            backend.begin(self.GROUP, self.IMPORTER, members)
        except BaseException:
            backend.close()
            raise
        fork_pool.prepare_spare(self._warm_up())
        return backend


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """Collectives over Gloo (CPU tensors) in a subprocess.

    Tensors in shared memory (`Tensor.share_memory_`) are not copied; others are staged through it. For
    most uses ProcessGroupGloo, which needs no subprocess to be aborted, is the better choice.
    """

    _backend_name = "torchft-baby-gloo"
    GROUP: ClassVar[str] = "torchft_like.process_group.gloo:ProcessGroupGloo"
    IMPORTER: ClassVar[str] = "torchft_like.process_group.baby.tensor_sharing:CpuImporter"

    def _set_up(self) -> None:
        require_device()
        super()._set_up()
        self._staging = Staging()

    def shutdown(self) -> None:
        super().shutdown()
        self._staging.close()

    def _exporter(self) -> CpuExporter:
        return CpuExporter(self._staging)


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """Collectives over NCCL (CUDA tensors) in a subprocess, on the device that is current in `configure`.

    The subprocess has a CUDA context of its own (some hundred MB of the device), and so has its spare.
    `wait` makes the current stream wait, not the thread.

    Raises:
        NotSupportedError: this torch has no NCCL, or sees no GPU.
    """

    divides = True
    _backend_name = "torchft-baby-nccl"
    _device_type = "cuda"
    GROUP: ClassVar[str] = "torchft_like.process_group.nccl:ProcessGroupNCCL"
    IMPORTER: ClassVar[str] = "torchft_like.process_group.baby.cuda_sharing:CudaImporter"

    def _set_up(self) -> None:
        require_nccl()
        super()._set_up()
        self._device: torch.device | None = None
        self._arena: Arena | None = None

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Configure the group on the device that is current now."""
        self._device = torch.device("cuda", torch.cuda.current_device())
        super().configure(store_addr, rank, world_size, **about)

    def shutdown(self) -> None:
        """Shut the group down; its memory is torch's again when the subprocess and the copies have ended."""
        super().shutdown()
        self._arena = None

    def errored(self) -> Exception | None:
        """Wait until every operation that was begun is over, then return the error that made the group
        unusable, if any.

        ProcessGroupAbortedError means that every operation was over before the abort; any other error means
        that some were not, so that the contents of their outputs are undefined.
        """
        try:
            if self._latest is not None:
                self._latest.wait_over()
        except RuntimeError as device_error:
            return device_error
        error = super().errored()
        count = 0 if self._latest is None else self._latest.cut_off()
        if isinstance(error, ProcessGroupAbortedError) and count:
            return SubprocessLostError(f"{count} operations were not over when the group ended: {error}")
        return error

    def _exporter(self) -> CudaExporter:
        if self._device is None:
            raise ProcessGroupError("the group has no device: call configure()")
        if self._arena is None or self._arena.device != self._device:
            self._arena = Arena(self._device)
        return CudaExporter(self._device, self._arena)

    def _warm_up(self) -> Message | None:
        if self._device is not None:
            device = self._device.index
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()
        else:
            return None  # a guess could make a context on another rank's device
        return (ToChild.WARM_UP.value, UNASKED, dict(os.environ), device)


class RemoteBackend(Backend):
    """A backend that runs collectives in a subprocess of its own, which the signal ends."""

    def __init__(self, child: Child, exporter: Exporter, abort: AbortSignal) -> None:
        self._child = child
        self._exporter = exporter
        self._abort = abort
        self._requests = Requests(child.channel, self._end_lost, self._end_silent, self._await_end)
        self._sending = threading.Lock()  # a request follows what the subprocess has to map for it
        self._timeout_s = 0.0
        self._why_ended: str | None = None
        self._offered: frozenset[str] = frozenset()
        self._ending = threading.Lock()
        self._cut_off: int | None = None
        exporter.send = self._send
        abort.add(self._kill)

    def begin(self, group: str, importer: str, members: GroupMembers) -> None:
        """Make the subprocess create its backend; a ProcessGroupError says why it could not."""
        self._timeout_s = members.timeout.total_seconds()
        place = (str(members.store), members.rank, members.world_size, self._timeout_s)
        how = (group, importer, self._exporter.greeting())
        with self._sending:
            request = self._requests.add(self._patience_s(None))
            self._send((ToChild.BEGIN.value, request.number, dict(os.environ), *how, *place))
        self._requests.wait(request, FOREVER)
        if request.outcome is not Outcome.DONE:
            raise self._describe(request)
        offered, greeting = request.answer
        self._exporter.greeted(greeting)
        self._offered = frozenset(offered)

    @property
    def inner(self) -> object:
        """This object: the group that moves the bytes is in the subprocess."""
        return self

    def methods(self) -> Mapping[str, Callable[..., Work | None]]:
        return {name: functools.partial(self._run, BY_NAME[name]) for name in self._offered}

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        with self._sending:
            self._send((ToChild.SET_TIMEOUT.value, UNASKED, self._timeout_s))

    def break_off(self) -> None:
        self._end("it was ended because an operation had failed")

    def is_still(self) -> bool:
        return self._child.has_ended()

    def close(self) -> None:
        self._abort.remove(self._kill)
        self._kill()
        self._await_end()
        self._requests.end()
        self._exporter.close()
        self._exporter.send = drop  # it would keep this object
        self._child.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    def num_active_work(self) -> int:
        self._requests.look()
        return self._requests.count()

    def wait_over(self) -> None:
        """Wait until no operation is under way, or the subprocess is gone. A device may raise an error."""
        ask_until(lambda: self._child.has_ended() or not self._is_busy())

    def _is_busy(self) -> bool:
        if self.num_active_work():
            return True
        with self._sending:
            return self._exporter.is_busy()

    def lost(self) -> Exception | None:
        """Return the error that the subprocess is gone, if it is."""
        return self._gone() if self._child.has_ended() else None

    def cut_off(self) -> int:
        """Return how many operations were not over when this side killed the subprocess."""
        with self._ending:
            return self._cut_off or 0

    def _describe(self, request: Request) -> Exception:
        return self._gone() if request.outcome is None else error_from(request.answer)

    def _run(self, collective: Collective, *args: Any, **kwargs: Any) -> Work | None:
        call = collective.bind(args, kwargs)
        refuse_unfit(call)  # the subprocess may work on copies, in which an overlap would be lost
        with self._sending:
            call_tensors = self._exporter.export(call)
            try:
                data = encode_call(call.collective.name, call.args, call.kwargs, call_tensors.locate)
                context = call_tensors.context()
            except BaseException as error:
                call_tensors.settle(Request(UNASKED))
                if not isinstance(error, Exception) or is_refusal(error):
                    raise
                # The peers may have begun it, and would meet the next call in it.
                self._end(f"a call could not be handed to it ({error}), and it was ended")
                raise self._gone() from error.with_traceback(None)
            details = (data,) if context is None else (data, context)
            request = self._requests.add(self._patience_s(call), call_tensors.settle)
            self._send((ToChild.RUN.value, request.number, *details))
        operation = self._exporter.OPERATION(
            self._requests, request, call.result, self._describe, call_tensors
        )
        if not collective.blocking:
            return operation
        operation.wait()
        return None

    def _send(self, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Send a message; if only a part of it can be sent, end the subprocess, and the requests with it."""
        deadline = time.monotonic() + self._timeout_s + SILENCE_S
        try:
            self._child.channel.send(message, descriptors, deadline, self._requests.look)
        except ChannelClosedError:
            pass  # the thread that reads the channel finds that out, too, and settles the request
        except TimeoutError:
            self._end_silent()
        except BaseException as error:
            self._end(f"a message to it could not be sent ({error!r}), and it was ended")
            raise

    def _patience_s(self, call: Call | None) -> float:
        """Return for how long the subprocess may send nothing: longer than the operation may take."""
        own = None if call is None else call.timeout
        return (self._timeout_s if own is None else own.total_seconds()) + SILENCE_S

    def _end_lost(self) -> None:
        if (why := self._child.heartbeat.why_lost(time.monotonic())) is not None:
            self._end(why)

    def _end_silent(self) -> None:
        silent = f"it said nothing for {SILENCE_S:g} s longer than an operation may take, and was ended"
        self._end(self._requests.last_words or silent)

    def _end(self, why: str) -> None:
        if not self._child.has_ended():
            self._why_ended = self._why_ended or why
            self._kill()

    def _kill(self) -> None:
        with self._ending:
            if self._cut_off is None:
                self._cut_off = self._exporter.cut_off() + self._requests.count()
        self._child.kill()

    def _await_end(self) -> None:
        """Wait until nothing of the subprocess, which was killed or has ended, can touch a tensor."""
        if not self._child.wait_ended(GONE_S_MAX):
            self._exporter.abandon()

    def _gone(self) -> SubprocessLostError:
        why = self._why_ended or self._requests.last_words or self._child.how_ended()
        self._why_ended = why
        return SubprocessLostError(
            f"the backend's subprocess {self._child.pid} is gone: {why}; configure() starts another"
        )


class ProcessGroupXCCL(ReconfigurableProcessGroup):
    """A placeholder: a script may import the name and choose another group.

    Raises:
        NotSupportedError: always.
    """

    def __init__(self, *_args: object, **_options: object) -> None:
        raise NotSupportedError(
            "torchft_like has no process group over XCCL yet; ProcessGroupGloo moves CPU tensors"
        )


class ProcessGroupBabyXCCL(ProcessGroupXCCL, ProcessGroupBaby):  # type: ignore[misc] # as in ProcessGroup
    """A placeholder, as `ProcessGroupXCCL` is."""
