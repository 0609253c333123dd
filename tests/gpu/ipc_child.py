"""The subprocess of the CUDA IPC tests: it adds to the trainer's tensors, as a Baby group's would reduce.

It speaks over a pipe of multiprocessing: only the messages of `cuda_sharing` travel.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from torchft_like.process_group.baby.cuda_sharing import EventMessage, OwnEvents, PeerEvents
from torchft_like.shared_memory import Export, TorchCuda

LIMIT_S = 60.0
POLL_S = 0.005
EVENTS_PREPARED = 8


@dataclass
class Child:
    """The trainer's view of the subprocess."""

    pipe: Connection
    process: BaseProcess
    exports: dict[int, Export] = field(default_factory=dict)  # by the address of the storage
    told: set[int] = field(default_factory=set)
    events: OwnEvents = field(default_factory=OwnEvents)
    done_events: PeerEvents = field(default_factory=PeerEvents)

    @classmethod
    def start(cls, exports: dict[int, Export] | None = None) -> Child:
        """Start a subprocess; with the exports that another one left behind, if given."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there,), daemon=True)
        process.start()
        there.close()
        child = cls(here, process, {} if exports is None else exports)
        prepared = child.events.prepare(torch.cuda.current_stream(), EVENTS_PREPARED)
        for message in child.ask("hello", prepared):
            child.done_events.open(message)
        return child

    def ask(self, *request: Any) -> Any:
        """Send one request and return its answer."""
        self.pipe.send(request)
        assert self.pipe.poll(LIMIT_S), "the subprocess does not answer"
        return self.pipe.recv()

    def map(self, tensor: torch.Tensor) -> int:
        """Tell the subprocess of a tensor's memory, and return the number of the memory."""
        storage = tensor.untyped_storage()
        if (export := self.exports.get(storage.data_ptr())) is None:
            export = self.exports[storage.data_ptr()] = Export(storage)
        if export.number not in self.told:
            self.told.add(export.number)
            assert self.ask("map", (export.number, *export.details))
        return export.number

    def add(self, tensor: torch.Tensor, value: float, cycles: int = 0) -> int:
        """Have the subprocess add `value`, after `cycles` of idling on the device; return the event that
        follows.
        """
        stream = torch.cuda.current_stream()
        number = self.map(tensor)
        event = self.events.record(stream)
        free = self.done_events.take_passed()
        place = stream.device_index, stream.stream_id, stream.priority
        done, passed = self.ask("add", number, tensor.numel(), value, cycles, event, place, free)
        self.events.free(passed)
        self.done_events.open(done)
        return int(done[0])

    def kill(self) -> None:
        """Kill the subprocess with SIGKILL, and reap it."""
        self.process.kill()
        self.process.join(LIMIT_S)
        self.pipe.close()

    def release(self) -> None:
        """Release all exports: the subprocess is dead, and there will be no next one."""
        while self.exports:
            self.exports.popitem()[1].release()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call] # of storages that have died before


class _Server:
    def __init__(self) -> None:
        self.mapped: dict[int, torch.UntypedStorage] = {}
        self.counterpart = functools.cache(
            lambda device, _, priority: TorchCuda().new_stream(device, priority)
        )
        self.events = OwnEvents()
        self.peer_events = PeerEvents()

    def hello(self, prepared: list[EventMessage]) -> list[EventMessage]:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for message in prepared:
            self.peer_events.open(message)
        return self.events.prepare(torch.cuda.current_stream(), EVENTS_PREPARED)

    def map(self, message: tuple[int, int, bytes, int, int]) -> bool:
        number, device, handle, nbytes, offset = message
        self.mapped[number] = TorchCuda().open(device, handle, nbytes, offset)
        return True

    def add(
        self,
        number: int,
        count: int,
        value: float,
        cycles: int,
        event: EventMessage,
        stream: tuple[int, int, int],
        free: list[int],
    ) -> tuple[EventMessage, list[int]]:
        """Add on the stream that mirrors the trainer's; nothing in here waits for the device."""
        self.events.free(free)
        self.peer_events.open(event)
        counterpart = self.counterpart(*stream)
        self.peer_events.wait(event[0], counterpart)
        with torch.cuda.stream(counterpart):
            if cycles:
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            tensor = torch.empty(0, dtype=torch.float32, device="cuda")
            tensor.set_(self.mapped[number], 0, (count,), (1,)).add_(value)
        return self.events.record(counterpart), self.peer_events.take_passed()


def serve(pipe: Connection) -> None:
    """Answer until the trainer is gone."""
    server = _Server()
    while True:
        try:
            name, *arguments = pipe.recv()
        except EOFError:
            return
        method: Callable[..., Any] = getattr(server, name)
        pipe.send(method(*arguments))
