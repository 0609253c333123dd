"""One of four processes between which messages are timed: rank 0 writes, the others read.

It carries out commands. All ranks get the same ones; times are of the system's monotonic clock, which all
processes of a machine share.

* {"do": "one_way", "via": v, "payload": p, "count": n, "pause": s, "works": b}: 0 sends to 1; µs from call
  to object; between two messages 0 sleeps for so many seconds, or works for as long;
* {"do": "broadcast", "via": v, "count": n}: 0 sends to all; the moments, in ns;
* {"do": "idle", "via": v, "seconds": s}: readers wait for nothing; the processor time that each used.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from benchmarks.commands import serve
from benchmarks.vllm_queue import CHUNK_BYTES, CHUNKS, queue_class
from torchft_like.message_queue import MessageQueue

LIMIT_S = 60.0
READERS = 3
RANKS = READERS + 1
SMALL_OBJECT = {"step": 12, "method": "execute", "arguments": [1, 2.5, "three"], "keywords": {"wait": True}}

PAYLOADS: dict[str, Callable[[], object]] = {
    "10 B": lambda: b"x" * 10,
    "100 B": lambda: b"x" * 100,
    "1 KB": lambda: b"x" * 1000,
    "1 MB": lambda: b"x" * 1024**2,
    "array of 1 MB": lambda: np.ones(256 * 1024, np.float32),
    "array of 16 MB": lambda: np.ones(4 * 1024**2, np.float32),
}


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    serve(Worker(options.rank, options.store, options.vllm))


class Worker:
    """Carries out the commands of the parent."""

    def __init__(self, rank: int, store: int, vllm: Path | None) -> None:
        self._rank = rank
        meeting = TCPStore("127.0.0.1", store, is_master=False, timeout=timedelta(seconds=LIMIT_S))
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS)
        self._to_all = _queue(rank, 0, [1, 2, 3])
        to_one: Any = _queue(rank, 0, [1])
        self._confirmed = [_queue(rank, reader, [0]) for reader in range(1, RANKS)]
        pipe, vllms = _pipe(rank), _vllm_queue(rank, vllm)
        # From 0 to 1: how to send, and how to receive.
        self._to_one: dict[str, tuple[Callable[[Any], object], Callable[[], Any]]] = {}
        if rank < 2:
            self._to_one["MessageQueue"] = to_one.enqueue, to_one.dequeue
            self._to_one["multiprocessing's connection"] = pipe.send, pipe.recv
            if vllms is not None:
                self._to_one["vLLM's MessageQueue"] = vllms.enqueue, vllms.dequeue

    def one_way(
        self, via: str, payload: str, count: int, pause: float = 0.0, works: bool = False
    ) -> dict[str, Any]:
        wait = _work if works else time.sleep
        if self._rank == 0:
            send, _ = self._to_one[via]
            value = PAYLOADS[payload]()
            for _ in range(count):
                if pause:  # a sleep of no time takes the system 60 µs, and the caches grow cold
                    wait(pause)
                send((time.perf_counter_ns(), value))
                self._confirmed[0].dequeue(LIMIT_S)  # type: ignore[union-attr]
        if self._rank != 1:
            return {}
        _, receive = self._to_one[via]
        found = []
        for _ in range(count):
            sent_ns, _value = receive()
            found.append((time.perf_counter_ns() - sent_ns) / 1e3)
            del _value
            self._confirm()
        return {"us": found}

    def broadcast(self, via: str, count: int) -> dict[str, Any]:
        moments = []
        for _ in range(count):
            value: list[object] = [SMALL_OBJECT if self._rank == 0 else None]
            start = time.perf_counter_ns()
            if via == "MessageQueue":
                value[0] = self._to_all.broadcast_object(value[0], LIMIT_S)  # type: ignore[union-attr]
            else:
                dist.broadcast_object_list(value, 0)
            moments.append(start if self._rank == 0 else time.perf_counter_ns())
            if value[0] != SMALL_OBJECT:
                raise RuntimeError(f"rank {self._rank} got {value[0]}")
            self._confirm()
        return {"ns": moments}

    def _confirm(self) -> None:
        """Readers say that they have it; the writer goes on when all have said so."""
        if self._rank > 0:
            self._confirmed[self._rank - 1].enqueue(None, LIMIT_S)  # type: ignore[union-attr]
            return
        for queue in self._confirmed:
            queue.dequeue(LIMIT_S)  # type: ignore[union-attr]

    def idle(self, via: str, seconds: float) -> dict[str, Any]:
        dist.barrier()
        if self._rank == 0:
            send, _ = self._to_one[via]
            time.sleep(seconds)
            send(None)
        if self._rank != 1:
            return {}
        _, receive = self._to_one[via]
        time.sleep(0.1)
        before, begin = time.process_time(), time.monotonic()
        receive()
        return {"percent": 100 * (time.process_time() - before) / (time.monotonic() - begin)}


def _queue(rank: int, writer: int, readers: list[int]) -> MessageQueue | None:
    """Return the caller's end of a queue; None for a rank that has none."""
    queue = None
    handle: list[object] = [None]
    if rank == writer:
        queue = MessageQueue(len(readers), len(readers), local_reader_ranks=readers)
        handle = [queue.export_handle()]
    dist.broadcast_object_list(handle, writer)
    if rank in readers:
        queue = MessageQueue.create_from_handle(handle[0], rank)
    if queue is not None:
        queue.wait_until_ready(LIMIT_S)
    return queue


def _vllm_queue(rank: int, source: Path | None) -> Any:
    """Return vLLM's queue from 0 to 1, as large as its workers make it; None where there is none."""
    if source is None:
        return None
    kind, queue = queue_class(source), None
    handle: list[Any] = [None]
    if rank == 0:
        queue = kind(1, 1, [1], CHUNK_BYTES, CHUNKS)
        handle = [queue.export_handle()]
    dist.broadcast_object_list(handle, 0)
    if rank == 1:
        queue = kind.create_from_handle(handle[0], 1)
    if queue is not None:
        queue.wait_until_ready()
    return queue


def _pipe(rank: int) -> Any:
    """Return multiprocessing's connection from 0 to 1, which pickles."""
    address: list[Any] = [None]
    listener = Listener(None, "AF_UNIX") if rank == 1 else None
    if listener is not None:
        address = [listener.address]
    dist.broadcast_object_list(address, 1)
    if listener is not None:
        with listener:
            return listener.accept()
    return Client(address[0], "AF_UNIX") if rank == 0 else None


def _work(seconds: float) -> None:
    """Do the work of a process that has messages to send now and then: numbers, objects, strings."""
    matrix = torch.ones(256, 256)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        matrix = matrix @ matrix / 256
        json.loads(json.dumps(SMALL_OBJECT))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--store", type=int, required=True)
    parser.add_argument("--vllm", type=Path, help="the module of vLLM's queue")
    return parser.parse_args()


if __name__ == "__main__":
    main()
