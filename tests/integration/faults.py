"""Faults that must happen at an exact place of a step, injected by the process itself.

A fault is written `act@place`, or `act@place@path` for one that waits for a trigger: it strikes the
first process that comes to the place and finds the file, which it takes away. The process then
kills itself, stops itself as SIGSTOP does, or hangs until SIGUSR1. The worker calls `visit` in each
place; the record of the fault is on disk before it strikes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from torchft_like.chaos.journal import Journal

ACTS = ("kill", "stop", "hang")
PLACES = (
    "step",  # before the quorum is asked for
    "backward",  # the gradients are there, the collective has not begun
    "configure",  # before the process group meets the others
    "heal",  # some of the state is on its way to a healing peer
)


@dataclass(frozen=True)
class Fault:
    """One planned fault."""

    act: str
    place: str
    trigger: Path | None

    @classmethod
    def parse(cls, text: str) -> Fault:
        match = re.fullmatch(rf"({'|'.join(ACTS)})@({'|'.join(PLACES)})(?:@(.+))?", text)
        if match is None:
            raise ValueError(f"{text!r} is not act@place or act@place@path")
        return cls(match[1], match[2], Path(match[3]) if match[3] else None)

    def is_triggered(self) -> bool:
        """Whether it strikes now; of several processes that ask only one is told so."""
        if self.trigger is None:
            return True
        try:
            self.trigger.unlink()
        except FileNotFoundError:
            return False
        return True


class Faults:
    """The faults still to come in this process."""

    def __init__(self, plan: Iterable[str], journal: Journal) -> None:
        self._planned = [Fault.parse(text) for text in plan]
        self._journal = journal
        self._released = threading.Event()
        signal.signal(signal.SIGUSR1, lambda *_: self._released.set())

    def visit(self, place: str) -> None:
        """The process is at `place`; whatever is due there strikes now."""
        for fault in list(self._planned):
            if fault.place == place and fault.is_triggered():
                self._planned.remove(fault)
                self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self._journal.write("fault", act=fault.act, place=fault.place)
        match fault.act:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hang":
                self._released.wait()


class Relay:
    """A TCP relay in front of a server; calls back once `limit` bytes of an answer are out.

    Standing between a server and its clients it can cut a transfer in the middle, whatever
    protocol the transfer speaks.
    """

    def __init__(self, target: tuple[str, int], limit: int, callback: Callable[[], None]) -> None:
        self._target = target
        self._limit = limit
        self._callback = callback
        self._listener = socket.create_server((target[0], 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._target)
            for source, target, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(target=self._copy, args=(source, target, is_answer), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        sent = 0
        with contextlib.suppress(OSError):  # either side may hang up at any time
            while data := source.recv(64 * 1024):
                target.sendall(data)
                sent += len(data)
                if is_answer and sent - len(data) < self._limit <= sent:
                    self._callback()
            target.shutdown(socket.SHUT_WR)
