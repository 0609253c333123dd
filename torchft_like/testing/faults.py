"""Faults at an exact place of a step, which the process itself injects.

A fault is written `act@place`, or `act@place@path` for one that waits for a trigger: it strikes the first
process that comes to the place and finds the file, which that process removes. The process then kills itself,
stops itself as SIGSTOP does, hangs until SIGUSR1, changes one bit of its state, gives its step up, or cuts or
changes what it sends to a healing peer. One that raises an OSError does so each time, for as long as its file
is there. The script calls `visit` in each place; the record of the fault is on disk before it strikes.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

from torchft_like import ProcessGroup
from torchft_like.testing.journal import Journal
from torchft_like.testing.relay import Filter, at, cut, flip_bit

P = TypeVar("P", bound=ProcessGroup)
ACTS = (
    "kill",
    "stop",
    "hang",
    "raise",
    "flip-parameter",
    "flip-optimizer",
    "flip-ballast",
    "give-up",
    "cut-answer",
    "flip-answer",
)
PLACES = (
    "step",  # before the join
    "backward",  # after the gradients, before the collective
    "configure",  # before the process group meets the others
    "sum",  # within a collective, which has begun
    "vote",  # after the sums, before the vote
    "heal",  # while a part of the state is on its way to a healing peer
)


class StepGivenUpError(Exception):
    """A planned fault wants the step to be given up; the script goes on with the next one."""


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

    @property
    def lasts(self) -> bool:
        """Whether it strikes again and again."""
        return self.act == "raise"

    def is_triggered(self) -> bool:
        """Return whether the fault strikes now; of several processes that ask, only one gets True."""
        if self.trigger is None:
            return True
        if self.lasts:
            return self.trigger.exists()
        try:
            self.trigger.unlink()
        except FileNotFoundError:
            return False
        return True


class Faults:
    """The faults that are still to come in this process.

    Attributes:
        flip: a function that changes one bit of a part of the worker's state: "parameter", "optimizer" or
          "ballast".
    """

    flip: Callable[[str], None]

    def __init__(self, plan: Iterable[str], journal: Journal) -> None:
        self._planned = [Fault.parse(text) for text in plan]
        self._journal = journal
        self._released = False
        signal.signal(signal.SIGUSR1, self._release)

    def _release(self, *_: object) -> None:
        """Release a hang. This sets no Event, which could wait for ever for a lock that the interrupted code
        holds.
        """
        self._released = True

    def visit(self, place: str, data: bytes = b"") -> bytes:
        """Let the faults strike that are due at `place`.

        Args:
            data: what is sent in this place, if something is.

        Returns:
            What to send instead.
        """
        for fault in list(self._planned):
            if fault.place == place and fault.is_triggered():
                self._planned.remove(fault)
                if fault.trigger is not None:  # it strikes again after those that wait for the same file
                    self._planned.append(fault)
                data = self._strike(fault, data)
        return data

    def in_answers(self, at_bytes: int) -> Callable[[], Filter]:
        """Return what a relay takes, to visit `heal` in each answer that has more bytes than these."""
        return lambda: at(at_bytes, lambda data: self.visit("heal", data))

    def in_configure(self, group: P) -> P:
        """Have a process group visit `configure` before it meets its members; return it."""
        configure = group.configure

        @wraps(configure)
        def visit_and_configure(*arguments: Any, **options: Any) -> None:
            self.visit("configure")
            configure(*arguments, **options)

        group.configure = visit_and_configure  # type: ignore[method-assign]
        return group

    def _strike(self, fault: Fault, data: bytes) -> bytes:
        self._journal.write("fault", act=fault.act, place=fault.place)
        match fault.act:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise OSError(errno.EIO, "the device is gone")
            case "hang":
                while not self._released:
                    time.sleep(0.01)
            case "give-up":
                raise StepGivenUpError
            case "cut-answer":
                cut(data)
            case "flip-answer":
                return flip_bit(data)
            case _:
                self.flip(fault.act.removeprefix("flip-"))
        return data
