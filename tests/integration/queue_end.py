"""The object that ranks of test_message_queue have: one end of a message queue."""

from __future__ import annotations

import os
import signal
import sys

import torch

from lighthouse.address import LOOPBACK
from tests.managers import outcome
from tests.waiting import soon
from torchft_like.errors import FaultToleranceError
from torchft_like.message_queue import MessageQueue

LIMIT_S = 60.0


class End:
    """One end of a queue, once `write` or `join` has made it."""

    queue: MessageQueue

    def write(self, n_readers: int, local: list[int], chunk_bytes: int, chunks: int) -> object:
        """Make the writer's end; return the queue's handle."""
        self.queue = MessageQueue(n_readers, len(local), local, chunk_bytes, chunks, LOOPBACK)
        return self.queue.export_handle()

    def join(self, handle: object, rank: int) -> None:
        self.queue = MessageQueue.create_from_handle(handle, rank)
        self.queue.wait_until_ready(LIMIT_S)

    def ready(self) -> None:
        self.queue.wait_until_ready(LIMIT_S)

    def enqueue(self, value: object, timeout: float | None = LIMIT_S) -> None:
        self.queue.enqueue(value, timeout)

    def dequeue(self, timeout: float | None = LIMIT_S) -> object:
        return self.queue.dequeue(timeout)

    def shutdown(self) -> None:
        self.queue.shutdown()

    def leave(self) -> None:
        """End the process as a script does."""
        sys.exit(0)

    def readers(self) -> tuple[list[int], list[int]]:
        """Return the readers that are there, and those that are lost."""
        return self.queue.readers, self.queue.lost_readers

    def lost(self, rank: int) -> list[int]:
        """Return the readers that are lost, once `rank` is one of them."""
        soon(lambda: rank in self.queue.lost_readers)
        return self.queue.lost_readers

    def stream(self, sizes: list[int], count: int) -> None:
        """Enqueue `count` tensors of these sizes in turn, each full of its number."""
        for number in range(count):
            self.queue.enqueue(torch.full((sizes[number % len(sizes)],), number), LIMIT_S)

    def drain(self, sizes: list[int], count: int) -> tuple[int, str]:
        """Dequeue the tensors; return how many came, whole and in order, and the error that ended it."""
        number = 0
        try:
            while number < count:
                found = self.queue.dequeue(LIMIT_S)
                assert isinstance(found, torch.Tensor)
                expected = torch.full((sizes[number % len(sizes)],), number)
                assert torch.equal(found, expected), (number, found)
                number += 1
        except FaultToleranceError as error:
            return number, type(error).__name__
        return number, ""

    def fork(self) -> tuple[int, str]:
        """Make a fork that lives on and tries to use the queue; return its process id and its error."""
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            os.write(writing, str(outcome(lambda: self.queue.dequeue(0))).encode())
            signal.pause()
            os._exit(0)
        said = os.read(reading, 100).decode()
        os.close(reading)
        os.close(writing)
        return pid, said
