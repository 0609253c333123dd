"""The subprocess's counterpart of `cuda_exporter`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import Work

from torchft_like.process_group.baby.cuda_exporter import EVENTS_PREPARED, TORCH_CUDA, note_of, read_note
from torchft_like.process_group.baby.cuda_ipc import (
    EventMessage,
    MemoryImports,
    MirroredStreams,
    OwnEvents,
    PeerEvents,
    TorchCuda,
)
from torchft_like.process_group.baby.tensor_spec import TensorSpec, storage_of, tensor_at


class CudaImporter:
    """A `tensor_sharing.Importer` of CUDA tensors.

    Args:
        greeting: the greeting of the exporter.
    """

    def __init__(self, greeting: Any, cuda: TorchCuda = TORCH_CUDA) -> None:
        device, events = greeting
        self._cuda = cuda
        self._memory = MemoryImports(cuda)
        self._events = OwnEvents(cuda)
        self._peers = PeerEvents(cuda)
        self._streams = MirroredStreams(cuda)
        cuda.use_device(device)
        for event in events:
            self._peers.open(event)

    def greeting(self) -> list[EventMessage]:
        """Return events that the trainer opens now, while nothing runs."""
        return self._events.prepare(self._cuda.current_stream(), EVENTS_PREPARED)

    def map(self, details: tuple[Any, ...], descriptors: list[int]) -> None:
        number, device, handle, nbytes, offset = details
        self._memory.map((number, device, handle, nbytes, offset))

    def unmap(self, storage: int) -> None:
        """Do nothing: the trainer never sends this, as its arena outlives this process."""

    def tensor(self, spec: TensorSpec) -> Tensor:
        return tensor_at(self._memory.storage(storage_of(spec)), spec)

    @contextlib.contextmanager
    def entered(self, context: bytes) -> Iterator[None]:
        """Enter the counterpart of the caller's stream, after the work that the caller has queued on that
        stream.
        """
        event, (device, stream_id, priority, *freed) = read_note(context)
        stream = self._streams.get((device, stream_id, priority))
        self._events.free(freed)
        with self._cuda.on(stream):
            self._peers.open(event)
            self._peers.wait(event[0], stream)
            yield

    def answer_when_started(self, work: Work | None) -> tuple[bytes]:
        """Return the event that marks the end of the operation, and the events that the trainer may use
        again.
        """
        if work is not None:
            work.wait()
        stream = self._cuda.current_stream()
        return (note_of(self._events.record(stream), self._peers.take_passed()),)
