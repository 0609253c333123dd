"""Whether a subprocess that has sent nothing for a while still runs.

A busy subprocess is as silent as a stopped one. So a trainer whose operation waits sends a ping on a socket
of its own, and a thread of the subprocess that does nothing else echoes it. That thread may have to wait for
a call that holds Python's interpreter for seconds; therefore the processor time that the subprocess uses is a
sign of life, too, and the kernel says whether it was stopped.

Nothing is sent while no operation waits, or while answers come.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
from pathlib import Path
from typing import NamedTuple

LOOK_EVERY_S = 0.2
LATE_S = 0.2  # a trainer whose look comes later than that was stopped or starved, and begins to count anew
STOPPED_S = 0.8
HUNG_S = 5.0

_PING = b"."
_STOPPED = frozenset({b"T", b"t"})


class Silence:
    """How long a subprocess has shown no sign of life, to an observer that may be late itself. Pure."""

    def __init__(self) -> None:
        self._since = math.inf
        self._looked = -math.inf

    def look(self, now: float, *, is_alive: bool) -> float:
        """Return for how many seconds no look has found a sign of life, all looks being in time."""
        was_late = now - self._looked > LOOK_EVERY_S + LATE_S
        self._looked = now
        if was_late or is_alive:
            self._since = now
        return now - self._since


class ProcessState(NamedTuple):
    """The kernel's word on a process."""

    is_stopped: bool
    used: int  # processor time, in ticks of the kernel


def state_of(pid: int) -> ProcessState | None:
    """Return the state of a process; None if it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in brackets, may hold anything, brackets too. Fields are counted as in proc_pid_stat(5).
    third, *fields = text.rpartition(b")")[2].split()
    return ProcessState(third in _STOPPED, used=int(fields[10]) + int(fields[11]))


def why_silent(silent_s: float, *, is_stopped: bool) -> str | None:
    """Return why a subprocess that has shown no sign of life has to be ended, if it has to be."""
    if is_stopped and silent_s >= STOPPED_S:
        return (
            f"it did not answer for {silent_s:.1f} s because it was stopped (SIGSTOP, job control or a "
            "debugger), and was ended"
        )
    if silent_s >= HUNG_S:
        return (
            f"it did not answer for {silent_s:.1f} s and used no processor time, and was ended; is it "
            "frozen, or does a driver, a disk or swap space hold it up?"
        )
    return None


class Heartbeat:
    """The trainer's end; the subprocess passes the other one to `echo`. One thread at a time may use it."""

    def __init__(self, pid: int, end: socket.socket) -> None:
        self._pid = pid
        self._end = end
        self._end.setblocking(False)
        self._silence = Silence()
        self._used = -1
        self._is_asked = False

    def why_lost(self, now: float) -> str | None:
        """Return why the subprocess has to be ended, if it has to be, at the time `now` in seconds.

        The caller looks every LOOK_EVERY_S while it waits; after a pause the count begins anew.
        """
        if (state := state_of(self._pid)) is None:
            return None  # the channel says that, too
        has_run, self._used = state.used != self._used, state.used
        has_answered = self._has_answered()
        if has_answered or not self._is_asked:
            with contextlib.suppress(OSError):  # the subprocess is gone, and the channel says that, too
                self._end.send(_PING)
                self._is_asked = True
        silent_s = self._silence.look(now, is_alive=has_answered or has_run)
        return why_silent(silent_s, is_stopped=state.is_stopped)

    def close(self) -> None:
        self._end.close()

    def _has_answered(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self._end.recv(len(_PING)))
        return False


def echo(end: socket.socket, trainer: int) -> None:
    """Echo the trainer's pings; end this process when the trainer has closed its end, or is gone."""
    events = select.poll()
    for descriptor in (end.fileno(), trainer):
        events.register(descriptor, select.POLLIN)
    with contextlib.suppress(OSError):
        while all(descriptor != trainer for descriptor, _ in events.poll()) and (
            ping := end.recv(len(_PING))
        ):
            end.send(ping)
    os._exit(0)
