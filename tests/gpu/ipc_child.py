"""The subprocess of the CUDA IPC tests: it adds to the trainer's tensors, as a Baby group's would reduce.

It speaks over a pipe of multiprocessing: what travels is what `cuda_ipc` says, nothing else.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from torchft_like.process_group.cuda_ipc import (
    EventMessage,
    MemoryExports,
    MemoryImports,
    MemoryMessage,
    MirroredStreams,
    OwnEvents,
    PeerEvents,
    StreamMessage,
    stream_message,
)

LIMIT_S = 60.0
POLL_S = 0.005
EVENTS_PREPARED = 8


@dataclass
class Child:
    """The trainer's view of it."""

    pipe: Connection
    process: BaseProcess
    exports: MemoryExports = field(default_factory=MemoryExports)
    events: OwnEvents = field(default_factory=OwnEvents)
    done_events: PeerEvents = field(default_factory=PeerEvents)

    @classmethod
    def start(cls, exports: MemoryExports | None = None) -> Child:
        """A new one; with the exports that another one left behind, if given."""
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there,), daemon=True)
        process.start()
        there.close()
        child = cls(here, process, exports or MemoryExports())
        prepared = child.events.prepare(torch.cuda.current_stream(), EVENTS_PREPARED)
        for message in child.ask("hello", prepared):
            child.done_events.open(message)
        return child

    def ask(self, *request: Any) -> Any:
        """One request and its answer."""
        self.pipe.send(request)
        assert self.pipe.poll(LIMIT_S), "the subprocess does not answer"
        return self.pipe.recv()

    def map(self, tensor: torch.Tensor) -> int:
        """Tell it of a tensor's memory."""
        number, message = self.exports.map(tensor.untyped_storage())
        if message is not None:
            assert self.ask("map", message)
        return number

    def add(self, tensor: torch.Tensor, value: float, cycles: int = 0) -> int:
        """Have `value` added, after `cycles` of idling on the device; gives the event that follows."""
        stream = torch.cuda.current_stream()
        number = self.map(tensor)
        event = self.events.record(stream)
        free = self.done_events.take_passed()
        done, passed = self.ask(
            "add", number, tensor.numel(), value, cycles, event, stream_message(stream), free
        )
        self.events.free(passed)
        self.done_events.open(done)
        return int(done[0])

    def unmap_dead(self) -> list[int]:
        """Have it unmap what has died here."""
        numbers = self.exports.take_dead()
        for number in numbers:
            unmapped = self.ask("unmap", number)
            self.exports.unmapped(unmapped)
        return numbers

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self.process.kill()
        self.process.join(LIMIT_S)
        self.pipe.close()


class _Server:
    def __init__(self) -> None:
        self.imports = MemoryImports()
        self.streams = MirroredStreams()
        self.events = OwnEvents()
        self.peer_events = PeerEvents()

    def hello(self, prepared: list[EventMessage]) -> list[EventMessage]:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        for message in prepared:
            self.peer_events.open(message)
        return self.events.prepare(torch.cuda.current_stream(), EVENTS_PREPARED)

    def map(self, message: MemoryMessage) -> bool:
        self.imports.map(message)
        return True

    def add(
        self,
        number: int,
        count: int,
        value: float,
        cycles: int,
        event: EventMessage,
        stream: StreamMessage,
        free: list[int],
    ) -> tuple[EventMessage, list[int]]:
        """Nothing in here waits for the device."""
        self.events.free(free)
        self.peer_events.open(event)
        counterpart = self.streams.get(stream)
        self.peer_events.wait(event[0], counterpart)
        with torch.cuda.stream(counterpart):
            if cycles:
                torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            tensor = torch.empty(0, dtype=torch.float32, device="cuda")
            tensor.set_(self.imports.storage(number), 0, (count,), (1,)).add_(value)
        return self.events.record(counterpart), self.peer_events.take_passed()

    def unmap(self, number: int) -> list[int]:
        self.imports.unmap(number, self.streams.mark())
        deadline = time.monotonic() + LIMIT_S
        while not (unmapped := self.imports.take_unmapped()):
            assert time.monotonic() < deadline
            time.sleep(POLL_S)
        return unmapped


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
