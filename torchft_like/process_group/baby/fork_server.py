"""A process that has torch loaded, and does nothing but fork.

Loading torch takes a second and 200 MB; a fork of a process that has done so takes milliseconds and shares
the memory. A trainer cannot be forked itself: its threads, and its CUDA context, would not survive. So each
trainer has a server that it starts from this module, never from the trainer's own main module: a script
without a main guard, a notebook and `python -c` are all the same to it.

INVARIANTS

* The server has one thread: a fork of a process with several threads copies locks that are never released.
* The server ends, and its forks with it, when the trainer does: it watches the trainer's pidfd, the kernel
  kills each fork when the server dies, and each fork watches the trainer, too.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import socket
import traceback
from pathlib import Path

# These modules are loaded here so that no fork has to load them.
import torch.distributed

import torchft_like.process_group
from torchft_like.process_group.baby.channel import Channel, ChannelClosedError
from torchft_like.process_group.baby.child import serve
from torchft_like.process_group.baby.protocol import FromServer

_PR_SET_PDEATHSIG = 1
# Signals for the trainer to handle: Ctrl-C in a terminal, and the SIGTERM of many launchers, reach every
# process of a group.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

__all__ = ["main"]
_loaded = (torch.distributed, torchft_like.process_group)


def main(control: int, trainer_pid: int) -> None:
    """Serve the trainer that started this process, and end the process.

    Args:
        control: the descriptor of the channel to the trainer.
        trainer_pid: the trainer's process id.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    trainer = _watch(trainer_pid)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a trainer that ignores the signal has passed that on
    code = 1
    try:
        channel = _ForkServer(Channel(socket.socket(fileno=control)), trainer).run()
        if channel is not None:
            serve(channel, trainer)
        code = 0
    except BaseException:  # noqa: BLE001 - after any error this process prints it and ends
        traceback.print_exc()
    finally:
        os._exit(code)


def _watch(pid: int) -> int:
    """Return the parent's pidfd; end this process if the parent is gone already."""
    watch = os.pidfd_open(os.getppid())
    if os.getppid() != pid:
        os._exit(0)
    return watch


class _ForkServer:
    def __init__(self, control: Channel, trainer: int) -> None:
        self._control = control
        self._trainer = trainer
        self._forks: dict[int, int] = {}  # process ids, by pidfd
        self._events = select.poll()
        for descriptor in (control.fileno(), trainer):
            self._events.register(descriptor, select.POLLIN)

    def run(self) -> Channel | None:
        """Serve until the trainer is gone; in each fork, return its channel."""
        try:
            while True:
                for descriptor, _ in self._events.poll():
                    if descriptor == self._trainer:
                        raise ChannelClosedError("the trainer is gone")
                    if descriptor == self._control.fileno():
                        if (channel := self._obey()) is not None:
                            return channel
                    else:
                        self._reap(descriptor)
        except ChannelClosedError:
            self._end_forks()
            return None

    def _obey(self) -> Channel | None:
        """Fork, which is all that the trainer asks for."""
        self._control.receive()
        server = os.getpid()
        try:
            ours = self._fork_and_tell()
        except ChannelClosedError:
            raise
        except OSError as error:
            self._control.send((FromServer.NOT_FORKED.value, 0, str(error)))
            return None
        if ours is None:
            return None
        _die_with(server)
        self._forget_server()
        return Channel(ours)

    def _fork_and_tell(self) -> socket.socket | None:
        """Fork and tell the trainer; return the fork's end of its channel in the fork only."""
        theirs, ours = Channel.pair()
        with theirs, ours:
            pid = os.fork()
            if pid == 0:
                return socket.socket(fileno=ours.detach())
            ours.close()
            watch = _watched_fork(pid)
            self._forks[watch] = pid
            self._events.register(watch, select.POLLIN)
            self._control.send((FromServer.FORKED.value, pid), [theirs.fileno(), watch])
        return None

    def _forget_server(self) -> None:
        """Close everything that belongs to the server or to another fork; runs in a fork."""
        self._control.close()
        for watch in self._forks:
            os.close(watch)
        Path("/proc/self/comm").write_text("torchft-baby")

    def _reap(self, watch: int) -> None:
        self._events.unregister(watch)
        pid = self._forks.pop(watch)
        os.close(watch)
        how = _in_words(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        self._control.send((FromServer.ENDED.value, pid, how))

    def _end_forks(self) -> None:
        for watch, pid in self._forks.items():
            signal.pidfd_send_signal(watch, signal.SIGKILL)
            os.waitpid(pid, 0)


def _watched_fork(pid: int) -> int:
    """Return the fork's pidfd; end the fork if there is none to be had."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        os.waitpid(pid, 0)
        raise


def _die_with(server: int) -> None:
    """Make the kernel kill this process when the server dies, and end it if the server has died already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(0)


def _in_words(code: int) -> str:
    return f"it exited with code {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"
