"""Process groups whose backend runs in a subprocess.

A backend that blocks for ever, corrupts its state or ends its process does so in a process that can be
killed. Such a group is aborted by a kill, and configured anew with another subprocess.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import ClassVar, Unpack, cast

import torch
from torch._C._distributed_c10d import Work

from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupError, SubprocessLostError
from torchft_like.process_group.baby.backend import Recipe, RemoteBackend
from torchft_like.process_group.baby.channel import Message
from torchft_like.process_group.baby.cpu_memory import Staging
from torchft_like.process_group.baby.cpu_sharing import CpuExporter
from torchft_like.process_group.baby.cuda_exporter import TORCH_CUDA, CudaExporter
from torchft_like.process_group.baby.cuda_memory import Arena
from torchft_like.process_group.baby.fork_pool import fork_pool
from torchft_like.process_group.baby.protocol import UNASKED, ToChild
from torchft_like.process_group.baby.tensor_sharing import Exporter
from torchft_like.process_group.base import About
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import GroupMembers
from torchft_like.process_group.nccl.group import require_nccl
from torchft_like.process_group.store import DEFAULT_TIMEOUT
from torchft_like.process_group.work import OperationWork
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup


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
    """

    WORK_CLASS: ClassVar[type[Work]] = OperationWork
    RECIPE: ClassVar[Recipe]

    def __init__(
        self, timeout: timedelta | float = DEFAULT_TIMEOUT, *, check_collectives: bool | None = None
    ) -> None:
        super().__init__(timeout, check_collectives=check_collectives)
        self._latest: RemoteBackend | None = None
        fork_pool.start()

    def prepare(self, timeout: timedelta) -> None:
        """Wait until torch is loaded by the process whose forks run the backends."""
        fork_pool.wait_for_spare(timeout.total_seconds(), self._warm_up())

    def errored(self) -> Exception | None:
        """Return why the group is unusable, if it is; a subprocess that is gone is noticed even while no call
        waits.
        """
        if (error := super().errored()) is not None or (backend := self._remote()) is None:
            return error
        return backend.lost()

    def num_active_work(self) -> int:
        """Return how many operations are not over."""
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
            backend.begin(self.RECIPE, members)
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

    RECIPE = Recipe(
        group="torchft_like.process_group.gloo.group:ProcessGroupGloo",
        importer="torchft_like.process_group.baby.cpu_sharing:CpuImporter",
    )

    def __init__(
        self, timeout: timedelta | float = DEFAULT_TIMEOUT, *, check_collectives: bool | None = None
    ) -> None:
        super().__init__(timeout, check_collectives=check_collectives)
        self._staging = Staging()

    def shutdown(self) -> None:
        """Shut the group down, and release the staging memory."""
        super().shutdown()
        self._staging.close()

    def getBackendName(self) -> str:  # noqa: N802
        """Return `torchft-baby-gloo`."""
        return "torchft-baby-gloo"

    def _exporter(self) -> CpuExporter:
        return CpuExporter(self._staging)


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """Collectives over NCCL (CUDA tensors) in a subprocess, on the device that is current in `configure`.

    The subprocess has a CUDA context of its own (some hundred MB of the device), and so has its spare.
    `wait` makes the current stream wait, not the thread.

    Args:
        timeout, check_collectives: as in ProcessGroupBaby.

    Raises:
        NotSupportedError: this torch has no NCCL, or sees no GPU.
    """

    divides = True
    RECIPE = Recipe(
        group="torchft_like.process_group.nccl.group:ProcessGroupNCCL",
        importer="torchft_like.process_group.baby.cuda_importer:CudaImporter",
    )

    def __init__(
        self, timeout: timedelta | float = DEFAULT_TIMEOUT, *, check_collectives: bool | None = None
    ) -> None:
        require_nccl()
        super().__init__(timeout, check_collectives=check_collectives)
        self._device: torch.device | None = None
        self._arena: Arena | None = None

    def configure(self, store_addr: str, rank: int, world_size: int, **about: Unpack[About]) -> None:
        """Configure the group on the device that is current now."""
        self._device = torch.device("cuda", torch.cuda.current_device())
        super().configure(store_addr, rank, world_size, **about)

    def shutdown(self) -> None:
        """Shut the group down. Its memory is torch's again when the subprocess is dead and the copies are
        over.
        """
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

    def getBackendName(self) -> str:  # noqa: N802
        """Return `torchft-baby-nccl`."""
        return "torchft-baby-nccl"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda")]

    def _exporter(self) -> CudaExporter:
        if self._device is None:
            raise ProcessGroupError("the group has no device: call configure()")
        if self._arena is None or self._arena.device != self._device:
            self._arena = Arena(self._device, TORCH_CUDA)
        return CudaExporter(self._device, self._arena)

    def _warm_up(self) -> Message | None:
        if self._device is not None:
            device = self._device.index
        elif torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            device = torch.cuda.current_device()
        else:
            return None  # a guess could make a context on another rank's device
        return (ToChild.WARM_UP.value, UNASKED, dict(os.environ), device)
