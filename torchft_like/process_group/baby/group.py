"""Process groups whose backend runs in a subprocess.

The worst that a backend can do, to block for ever, to corrupt its state, to end the process, it does
to a process that can be killed. That is how such a group is aborted, and how it is configured anew.
"""

from __future__ import annotations

from datetime import timedelta
from typing import ClassVar

from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.baby.backend import RemoteBackend
from torchft_like.process_group.baby.memory import Staging
from torchft_like.process_group.baby.nursery import nursery
from torchft_like.process_group.baby.work import BabyWork
from torchft_like.process_group.generation import AbortSignal, Membership
from torchft_like.process_group.store import DEFAULT_TIMEOUT
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup


class ProcessGroupBaby(ReconfigurableProcessGroup):
    """The base of groups whose backend runs in a subprocess; a subclass names the backend.

    The subprocess is a fork of a process that has torch loaded; it never runs the caller's main module.
    A spare is kept ready, so only the first `configure` of a process waits for torch to load. It ends
    with this process, however that ends. When it dies, or is killed, what is under way raises
    SubprocessLostError at once, and the next `configure` uses another.

    Args:
        timeout: the limit of each operation and of `configure`, seconds or timedelta.

    Attributes:
        WORK_CLASS: what its collectives return.
    """

    WORK_CLASS: ClassVar[type[BabyWork]] = BabyWork
    BACKEND: ClassVar[str] = ""  # module:class of the group whose backend runs in the subprocess

    def __init__(self, timeout: timedelta | float = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._staging = Staging()
        nursery.start()

    def num_active_work(self) -> int:
        """How many operations are not over."""
        try:
            backend: RemoteBackend = self.parent
        except ProcessGroupError:
            return 0
        return backend.num_active_work()

    def shutdown(self) -> None:
        """See ProcessGroup.shutdown."""
        super().shutdown()
        self._staging.close()

    def _create(self, membership: Membership, abort: AbortSignal) -> RemoteBackend:
        child = nursery.take(abort, membership.timeout.total_seconds())
        backend = RemoteBackend(child, self._staging, abort)
        try:
            backend.begin(self.BACKEND, membership)
        except BaseException:
            backend.close()
            raise
        nursery.prepare_spare()
        return backend


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """Collectives over Gloo (CPU tensors) in a subprocess.

    Tensors in shared memory (`Tensor.share_memory_`) are not copied; others are staged through it. For
    most uses ProcessGroupGloo, which needs no subprocess to be aborted, is the better choice.
    """

    BACKEND = "torchft_like.process_group.gloo:ProcessGroupGloo"

    def getBackendName(self) -> str:  # noqa: N802
        """torchft-baby-gloo."""
        return "torchft-baby-gloo"
