"""Queues whose ends are in threads of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lighthouse.address import LOOPBACK
from torchft_like.message_queue import MessageQueue

LIMIT_S = 60.0


class Queues:
    """Makes queues with their readers, and closes them all."""

    def __init__(self) -> None:
        self._made: list[MessageQueue] = []
        self._threads = ThreadPoolExecutor(8)

    def make(
        self, n_readers: int = 1, chunk_bytes: int = 4096, chunks: int = 4, remote: Sequence[int] = ()
    ) -> tuple[MessageQueue, list[MessageQueue]]:
        """Make a writer and its readers, and wait until they have joined."""
        local = [rank for rank in range(n_readers) if rank not in remote]
        writer = MessageQueue(n_readers, len(local), local, chunk_bytes, chunks, LOOPBACK)
        self._made.append(writer)
        readers = [self.join(writer, rank) for rank in range(n_readers)]
        ready = [self.run(reader.wait_until_ready, LIMIT_S) for reader in readers]
        writer.wait_until_ready(LIMIT_S)
        for one in ready:
            one.result(LIMIT_S)
        return writer, readers

    def join(self, writer: MessageQueue, rank: int) -> MessageQueue:
        return self.keep(MessageQueue.create_from_handle(writer.export_handle(), rank))

    def keep(self, queue: MessageQueue) -> MessageQueue:
        """Have this queue closed in the end, too; return it."""
        self._made.append(queue)
        return queue

    def run(self, call: Callable[..., object], *arguments: object) -> Future[object]:
        """Run `call` in a thread of its own."""
        return self._threads.submit(call, *arguments)

    def close(self) -> None:
        for queue in reversed(self._made):  # a writer waits for remote readers that have not read all
            queue.shutdown()
        self._threads.shutdown()
