"""What has to happen between knowing the quorum and using it, on a thread of its own.

The training thread goes on with the forward pass meanwhile; the coordination loop stays free to
hear that a member died and to abort what is being waited for here.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch

from torchft_like import devices
from torchft_like.checkpointing.shards import Shard
from torchft_like.checkpointing.transport import CheckpointTransport
from torchft_like.errors import CheckpointError
from torchft_like.manager.assignment import QuorumResult
from torchft_like.manager.client import ManagerClient

State = Mapping[str, object]
Job = Callable[[], None]
OnError = Callable[[Exception], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerState:
    """What a peer sent: the training script's state, and its Manager's counters."""

    user: State
    counters: State


class QuorumWorker:
    """A daemon thread that runs one job after the other.

    Attributes:
        device: the index of the one that is current in jobs, None where the process uses none.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, OnError] | None] = queue.SimpleQueue()
        self.device: int | None = None
        self._thread = threading.Thread(target=self._run, name="torchft-quorum", daemon=True)
        self._thread.start()

    def submit(self, job: Job, on_error: OnError = lambda _: None) -> None:
        """Run `job` after those that were submitted before. An error is logged and told to `on_error`."""
        self._jobs.put((job, on_error))

    def stop(self, timeout_s: float | None) -> None:
        """End after the jobs submitted so far, and wait for that for at most `timeout_s` (None: do not)."""
        self._jobs.put(None)
        if timeout_s is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, on_error = entry
            try:
                with devices.beside_captures(self.device):
                    job()
            except Exception as error:  # perhaps of a user's transport; later jobs have to run nevertheless
                logger.exception("a job of the quorum worker failed")
                on_error(error)
            del entry, job, on_error  # they hold attempts and their tensors


def fetch_state(
    result: QuorumResult,
    group_rank: int,
    transport: CheckpointTransport[State],
    timeout_s: float,
) -> PeerState:
    """The whole state of the up-to-date peer that the quorum assigned, verified.

    Raises:
        CheckpointError: the peer is gone, slow, or what it sent is not the state of `max_step`.
    """
    timeout = timedelta(seconds=timeout_s)
    client = ManagerClient(result.recover_src_manager_address, connect_timeout=timeout)
    try:
        metadata = client._checkpoint_metadata(group_rank, timeout)
    finally:
        client.close()
    state = transport.recv_checkpoint(
        src_rank=result.recover_src_replica_rank or 0,
        metadata=metadata,
        step=result.max_step,
        timeout=timeout,
    )
    user, counters = state.get("user"), state.get("torchft")
    if not isinstance(user, Mapping) or not isinstance(counters, Mapping):
        raise CheckpointError(
            f"{result.recover_src_manager_address} sent state of another form; every replica must run the "
            "same version"
        )
    if counters.get("step") != result.max_step:
        raise CheckpointError(
            f"{result.recover_src_manager_address} sent state that is not of step {result.max_step}"
        )
    return PeerState(user, counters)


def state_bytes(state: object) -> int:
    """Bytes of all tensors in nested containers."""
    if isinstance(state, Shard):
        return state_bytes(state.local)
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, Mapping):
        return sum(state_bytes(value) for value in state.values())
    if isinstance(state, list | tuple):
        return sum(state_bytes(value) for value in state)
    return 0
