"""Processes with one end of a message queue each, which carry out a test's commands.

Run as a module it loads torch once, prints a port, and forks for every connection to it. The messages on a
connection are plain data: a dict with `do` and its arguments, answered by `ok` or by an error's name.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from lighthouse.address import LOOPBACK
from torchft_like.errors import FaultToleranceError
from torchft_like.message_queue import MessageQueue
from torchft_like.plain_data import assemble, disassemble
from torchft_like.testing.forks import end_with

LIMIT_S = 60.0
_LENGTH = struct.Struct("<I")


class Peer:
    """A test's view of one such process."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), LIMIT_S)
        self._has_begun = True
        self.pid = int(self._receive()["ok"])

    def ask(self, do: str, **arguments: object) -> Any:
        """Send a command and return its result; an error of the other process fails the test."""
        self.begin(do, **arguments)
        return self.result()

    def fails(self, do: str, **arguments: object) -> str:
        """Send a command and return the name and the text of the error that it ends with."""
        self.begin(do, **arguments)
        return self.error()

    def begin(self, do: str, **arguments: object) -> None:
        """Send a command; `result` or `error` returns the answer later."""
        send(self._connection, {"do": do, **arguments})
        self._has_begun = False

    def wait_for_begin(self) -> None:
        """Wait until the other process is about to carry out the command."""
        if not self._has_begun:
            assert self._receive() == {"begin": True}
            self._has_begun = True

    def result(self) -> Any:
        answer = self.answer()
        assert "ok" in answer, answer
        return answer["ok"]

    def error(self) -> str:
        answer = self.answer()
        assert "error" in answer, answer
        return str(answer["error"])

    def answer(self) -> dict[str, Any]:
        self.wait_for_begin()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        answer = receive(self._connection)
        assert answer is not None, "the process is gone"
        return answer

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process with SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Wait until the process is gone."""
        while True:
            try:
                if receive(self._connection) is None:
                    break
            except ConnectionError:
                break

    def close(self) -> None:
        self._connection.close()


def send(connection: socket.socket, value: object) -> None:
    structure, _ = disassemble(value)
    connection.sendall(_LENGTH.pack(len(structure)) + structure)


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Receive a message; None at the end of the connection."""
    head = _exactly(connection, _LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    return assemble(_exactly(connection, *_LENGTH.unpack(head)), [])  # type: ignore[return-value]


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return data


# ----------------------------------------------------------------------------- the other side


class Worker:
    """One end of a queue, once a command has said which."""

    def __init__(self) -> None:
        self.queue: MessageQueue | None = None

    def do_write(self, arguments: list[int], local: list[int]) -> object:
        n_readers, chunk_bytes, chunks = arguments
        self.queue = MessageQueue(n_readers, len(local), local, chunk_bytes, chunks, LOOPBACK)
        return self.queue.export_handle()

    def do_join(self, handle: object, rank: int) -> None:
        self.queue = MessageQueue.create_from_handle(handle, rank)
        self.queue.wait_until_ready(LIMIT_S)

    def do_ready(self) -> None:
        self._queue().wait_until_ready(LIMIT_S)

    def do_enqueue(self, value: object, timeout: float | None = None) -> None:
        self._queue().enqueue(value, timeout)

    def do_dequeue(self, timeout: float | None = None) -> object:
        return self._queue().dequeue(timeout)

    def do_shutdown(self) -> None:
        self._queue().shutdown()

    def do_readers(self) -> object:
        return [self._queue().readers, self._queue().lost_readers]

    def do_lost(self, rank: int) -> object:
        """Return the readers that are lost, once `rank` is one of them."""
        deadline = time.monotonic() + LIMIT_S
        while rank not in self._queue().lost_readers and time.monotonic() < deadline:
            time.sleep(0.002)
        return self._queue().lost_readers

    def do_stream(self, sizes: list[int], count: int) -> None:
        """Enqueue `count` tensors of these sizes in turn, each full of its number."""
        for number in range(count):
            self._queue().enqueue(torch.full((sizes[number % len(sizes)],), number), LIMIT_S)

    def do_drain(self, sizes: list[int], count: int) -> object:
        """Dequeue the tensors; return how many came, whole and in order, and the error that ended it."""
        number = 0
        try:
            while number < count:
                found = self._queue().dequeue(LIMIT_S)
                assert isinstance(found, torch.Tensor)
                expected = torch.full((sizes[number % len(sizes)],), number)
                assert torch.equal(found, expected), (number, found)
                number += 1
        except FaultToleranceError as error:
            return [number, type(error).__name__]
        return [number, None]

    def do_fork(self) -> object:
        """Make a fork that lives on and tries to use the queue; return its process id and the error that it
        got.
        """
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                self._queue().dequeue(0)
            except FaultToleranceError as error:
                os.write(writing, type(error).__name__.encode())
            signal.pause()
            os._exit(0)
        said = os.read(reading, 100).decode()
        os.close(reading)
        os.close(writing)
        return [pid, said]

    def _queue(self) -> MessageQueue:
        assert self.queue is not None
        return self.queue


def _serve(connection: socket.socket) -> None:
    """Carry out commands until the connection ends, or a command says to exit."""
    worker = Worker()
    send(connection, {"ok": os.getpid()})
    while (order := receive(connection)) is not None:
        do = order.pop("do")
        if do == "exit":
            return
        call: Callable[..., object] = getattr(worker, f"do_{do}")
        send(connection, {"begin": True})
        try:
            send(connection, {"ok": call(**order)})
        except (FaultToleranceError, ValueError) as error:
            send(connection, {"error": f"{type(error).__name__}: {error}"})


def _main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that forks end without being waited for
    host = os.getpid()
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(f"port {server.getsockname()[1]}", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                end_with(host)
                server.close()
                _serve(connection)
                sys.exit(0)
            connection.close()


if __name__ == "__main__":
    _main()
