"""The trainer's pool of subprocesses for Baby groups, the process that forks them, and a fork's life.

One pool serves all groups of a process. It starts the fork server, takes forks from it, and keeps
one spare, so that a group that is configured anew finds a subprocess that is ready. A fork is used by
one generation of one group and then killed: what a backend leaves behind dies with it.

The fork server is a process that has torch loaded, and does nothing but fork. Loading torch takes a second
and 200 MB; a fork of a process that has done so takes milliseconds and shares the memory. A trainer cannot be
forked itself: its threads, and its CUDA context, would not survive. The server starts from this module, never
from the trainer's own main module: a script without a main guard, a notebook and `python -c` are all the same
to it.

INVARIANTS

* The server has one thread: a fork of a process with several threads copies locks that are never released.
* The server ends, and its forks with it, when the trainer does: it watches the trainer's pidfd, the kernel
  kills each fork when the server dies, and each fork watches the trainer, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import logging
import math
import multiprocessing.spawn
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from lighthouse.forks import Turn, in_each_fork
from torchft_like.errors import SubprocessLostError
from torchft_like.process_group.baby.heartbeat import Heartbeat, echo, state_of
from torchft_like.process_group.baby.messages import (
    FORK,
    UNASKED,
    Channel,
    ChannelClosedError,
    DescriptorsLostError,
    FromServer,
    Message,
    Outcome,
    ToChild,
    answer_for,
    decode,
    decode_call,
)
from torchft_like.process_group.baby.tensor_sharing import Importer
from torchft_like.process_group.collectives import BY_NAME, POINT_TO_POINT
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import Backend
from torchft_like.process_group.store import GroupMembers, parse_store_address
from torchft_like.runtime.spin_wait import AdaptiveSpin

SERVER_EXIT_S_MAX = 5.0
HOW_ENDED_S_MAX = 5.0
LOAD_S_MAX = 300.0  # seconds for what takes 3 at rest: a machine that starts a job is busy
ENDS_KNOWN_MAX = 64

_BOOTSTRAP = (
    "import json, sys; control, trainer, sys.path[:] = json.loads(sys.argv[1]); "
    "from torchft_like.process_group.baby.fork_pool import main; main(control, trainer)"
)
_STDERR = 2
_PR_SET_PDEATHSIG = 1
# Signals for the trainer to handle: Ctrl-C in a terminal, and the SIGTERM of many launchers, reach every
# process of a group.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_logger = logging.getLogger(__name__)
# The server must have a single thread, but numpy's BLAS would start its own.
_SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Child:
    """A fork, as long as a group uses it."""

    def __init__(
        self, fork_pool: ForkPool, pid: int, watch: int, channel: Channel, heartbeat: Heartbeat
    ) -> None:
        self.pid = pid
        self.channel = channel
        self.heartbeat = heartbeat
        self._fork_pool = fork_pool
        self._lock = threading.Lock()
        self._watch: int | None = watch
        self._closing = weakref.finalize(self, os.close, watch)
        self._owner = os.getpid()

    def kill(self) -> None:
        """Kill the subprocess. Any thread may call this at any time; it returns at once."""
        with self._lock:
            if self._watch is not None and self._owner == os.getpid():
                # A fork of the trainer inherits this object, and must not kill the trainer's subprocess.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._watch, signal.SIGKILL)

    def has_ended(self) -> bool:
        return self.wait_ended(0)

    def wait_ended(self, seconds: float) -> bool:
        """Wait until the subprocess is gone; return False if it is not after `seconds`."""
        events = select.poll()
        with self._lock:
            if self._watch is None:
                return True
            events.register(self._watch, select.POLLIN)
        return bool(events.poll(seconds * 1000))

    def is_usable(self) -> bool:
        return not self.has_ended() and (state := state_of(self.pid)) is not None and not state.is_stopped

    def how_ended(self) -> str:
        return self._fork_pool.how_ended(self.pid) if self.has_ended() else "it was killed and does not end"

    def close(self) -> None:
        """Release the descriptors of a subprocess that is gone."""
        self.channel.close()
        self.heartbeat.close()
        with self._lock:
            self._watch = None
            self._closing()


class ForkPool:
    """The pool of a process. Any thread may call any method."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._server: _Server | None = None
        self._given_up: list[_Server] = []
        self._takers = 0

    def start(self) -> None:
        """Start the server if there is none; it loads torch meanwhile."""
        with self._changed:
            self._running()

    def take(self, abort: AbortSignal, timeout_s: float) -> Child:
        """Take a fork: the spare one if there is one.

        Args:
            timeout_s: the longest wait in seconds, from when the server has loaded torch, for which it has
              `LOAD_S_MAX`.

        Raises:
            SubprocessLostError: no fork was to be had in time.
            ProcessGroupAbortedError: `abort` was set during the wait.
        """
        with abort.ends(self._wake), self._changed:
            self._takers += 1
            try:
                server, since = self._running(), time.monotonic()
                asked = server.asked
                server.expect(self._takers)
                while not server.spares:
                    abort.check()
                    if server.last_refused > asked:
                        raise SubprocessLostError(f"no subprocess for a Baby group: {server.why_refused}")
                    server.expect(self._takers)  # a fork that was asked for before may have been refused
                    left_s = server.deadline(since, timeout_s) - time.monotonic()
                    if server.is_gone or not self._changed.wait(left_s):
                        server.is_given_up = True
                        raise SubprocessLostError(
                            f"the fork server of the Baby groups gave no subprocess in time; {server}. If it "
                            "left no message on stderr: is the machine out of memory, processes or file "
                            "descriptors?"
                        )
                return server.spares.popleft()
            finally:
                self._takers -= 1

    def prepare_spare(self, first_message: Message | None = None) -> None:
        """Ask for a fork for the next `take`, which gets the message at once. This does not wait."""
        with self._changed:
            if self._server is not None and not self._server.is_gone:
                self._server.expect(1, first_message)

    def wait_for_spare(self, timeout_s: float, first_message: Message | None = None) -> bool:
        """Do as `prepare_spare`, and wait until a fork is there or none can be had; return whether one is."""
        with self._changed:
            server = self._running()
            asked = server.asked

            def is_over() -> bool:
                if not (server.is_gone or server.last_refused > asked):
                    server.expect(1, first_message)  # a fork that was asked for before may have been refused
                    return bool(server.spares)
                return True

            self._changed.wait_for(is_over, timeout_s)
            return bool(server.spares)

    def how_ended(self, pid: int) -> str:
        with self._changed:
            if (server := self._server) is None:
                return "its fork server has ended"
            if not self._changed.wait_for(lambda: server.is_gone or pid in server.ends, HOW_ENDED_S_MAX):
                server.is_given_up = True  # from now on no group waits for its forks
            return server.ends.get(pid, "its fork server has ended or does not answer")

    def stop(self) -> None:
        """End the server, and with it every fork."""
        with self._changed:
            servers, self._given_up = self._given_up, []
            if self._server is not None:
                servers.append(self._server)
            self._server = None
        for server in servers:
            server.stop()

    def forget(self) -> None:
        """Forget the server and its forks, which belong to the trainer; runs in a fork of the trainer."""
        self.__init__()  # type: ignore[misc] # locks too: their owners do not exist here

    def pids(self) -> dict[str, int]:
        """Return the process ids of the server and of the spare fork, for measurements."""
        with self._changed:
            if (server := self._server) is None:
                return {}
            spares = {"spare": server.spares[0].pid} if server.spares else {}
            return {"server": server.pid, **spares}

    def _running(self) -> _Server:
        server = self._server
        if server is not None and not server.is_gone and not server.is_given_up:
            return server
        if server is not None and server.is_gone:
            server.stop()
        elif server is not None:
            self._given_up.append(server)  # it hangs; the forks in use live as long as it does
        self._server = server = _Server(self)
        return server

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


class _Server:
    """One fork server. Every method but the reading thread's needs the pool's lock."""

    def __init__(self, fork_pool: ForkPool) -> None:
        self._fork_pool = fork_pool
        self._changed = fork_pool._changed
        self.spares: deque[Child] = deque()
        self._expected = 0
        self._first_message: Message | None = None
        self.ends: dict[int, str] = {}
        self.asked = 0  # how many forks were asked for; they come, or are refused, in that order
        self.last_refused = 0  # the number of the last fork that was refused, from 1
        self.why_refused = ""
        self.is_gone = False
        self.is_given_up = False
        self._loaded_at: float | None = None
        self._late_at = time.monotonic() + LOAD_S_MAX
        self._process, self._control = _start_server()
        threading.Thread(target=self._read, name="torchft-baby-fork-pool", daemon=True).start()

    def expect(self, count: int, first_message: Message | None = None) -> None:
        """Ask for forks until `count` of them are there or on their way; new ones get the first message."""
        self._first_message = first_message
        while self.spares and not self.spares[0].is_usable():
            spare = self.spares.popleft()
            spare.kill()
            spare.close()
        while len(self.spares) + self._expected < count and not self.is_gone:
            try:
                self._control.send(FORK)
            except ChannelClosedError:
                self.is_gone = True
            else:
                self.asked += 1
                self._expected += 1

    def deadline(self, since: float, timeout_s: float) -> float:
        """Return when a caller that has waited for a fork since `since` gives up."""
        return self._late_at if self._loaded_at is None else max(since, self._loaded_at) + timeout_s

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(SERVER_EXIT_S_MAX)
        while self.spares:
            self.spares.popleft().close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def __str__(self) -> str:
        code = self._process.poll()
        if code is not None:
            return f"it exited with code {code}"
        return f"it has not loaded torch in {LOAD_S_MAX:g} s" if self._loaded_at is None else "it runs"

    def _read(self) -> None:
        try:
            while True:
                self._hear()
        except ChannelClosedError:
            pass
        except Exception:
            _logger.exception("what the fork server of the Baby groups has sent is of no use")
        finally:
            self._control.close()
            with self._changed:
                self.is_gone = True
                self._changed.notify_all()

    def _hear(self) -> None:
        kind: int = FromServer.NOT_FORKED
        try:
            (kind, pid, *rest), descriptors = self._control.receive()
        except DescriptorsLostError as error:  # the fork ends, as its channel has no other end
            pid, rest, descriptors = 0, [str(error)], []
        with self._changed:
            self._loaded_at = self._loaded_at or time.monotonic()
            match kind:
                case FromServer.FORKED:
                    self._add(pid, *descriptors)
                case FromServer.NOT_FORKED:
                    self.last_refused, self.why_refused = self.asked - self._expected + 1, rest[0]
                    self._expected -= 1
                case _:
                    self.ends[pid] = rest[0]
                    if len(self.ends) > ENDS_KNOWN_MAX:
                        del self.ends[next(iter(self.ends))]
            self._changed.notify_all()

    def _add(self, pid: int, end: int, heartbeat: int, watch: int) -> None:
        self._expected -= 1
        channel = Channel(socket.socket(fileno=end))
        child = Child(self._fork_pool, pid, watch, channel, Heartbeat(pid, socket.socket(fileno=heartbeat)))
        self.spares.append(child)
        if self._first_message is not None:
            # A fork that cannot be written to is found dead when it is taken.
            with contextlib.suppress(OSError):
                child.channel.send(self._first_message)


def _start_server() -> tuple[subprocess.Popen[bytes], Channel]:
    ours, theirs = Channel.pair()
    with theirs:
        path = [entry for entry in sys.path if isinstance(entry, str)]
        # This Python's command with its options, but without the working directory.
        flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # as multiprocessing does
        interpreter = [os.fsdecode(multiprocessing.spawn.get_executable()), *flags, "-P"]
        process = subprocess.Popen(  # noqa: S603 - the server is this project's own code
            [*interpreter, "-c", _BOOTSTRAP, json.dumps([theirs.fileno(), os.getpid(), path])],
            env={**os.environ, **_SINGLE_THREADED},
            stdin=subprocess.DEVNULL,
            # NCCL's messages go to stdout, which may be a pipe with another purpose
            stdout=_STDERR if os.path.exists(f"/proc/self/fd/{_STDERR}") else subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Signals to the trainer's group, from a terminal or a scheduler, must not reach the server.
            process_group=0,
        )
    return process, Channel(ours)


fork_pool: ForkPool = ForkPool()
atexit.register(fork_pool.stop)
in_each_fork(Turn.OBJECTS, fork_pool.forget)


# -- the fork server


def main(control: int, trainer_pid: int) -> None:
    """Serve the trainer that started this process, over the channel `control`, and end the process."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    trainer = _watch(trainer_pid)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a trainer that ignores the signal has passed that on
    code = 1
    try:
        ends = _ForkServer(Channel(socket.socket(fileno=control)), trainer).run()
        if ends is not None:
            serve(*ends, trainer)
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
        # poll() fails where the process may open fewer descriptors than are watched; epoll does not.
        self._events = select.epoll()
        for descriptor in (control.fileno(), trainer):
            self._events.register(descriptor, select.EPOLLIN)

    def run(self) -> tuple[Channel, socket.socket] | None:
        """Serve until the trainer is gone; in each fork, return its channel and its heartbeat's socket."""
        try:
            while True:
                for descriptor, _ in self._events.poll():
                    if descriptor == self._trainer:
                        raise ChannelClosedError("the trainer is gone")
                    if descriptor == self._control.fileno():
                        if (ends := self._obey()) is not None:
                            return ends
                    else:
                        self._reap(descriptor)
        except ChannelClosedError:
            for watch, pid in self._forks.items():
                signal.pidfd_send_signal(watch, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None

    def _obey(self) -> tuple[Channel, socket.socket] | None:
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
        # The kernel kills this process when the server dies; the server may have died already.
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(0)
        # What belongs to the server, or to another fork, is closed.
        self._control.close()
        self._events.close()
        for watch in self._forks:
            os.close(watch)
        Path("/proc/self/comm").write_text("torchft-baby")
        channel, heartbeat = ours
        return Channel(channel), heartbeat

    def _fork_and_tell(self) -> list[socket.socket] | None:
        """Fork and tell the trainer; in the fork only, return its ends of its channel and its heartbeat."""
        with contextlib.ExitStack() as ends:
            pairs = [[ends.enter_context(end) for end in Channel.pair()] for _ in range(2)]
            pid = os.fork()
            if pid == 0:
                return [socket.socket(fileno=ours.detach()) for _, ours in pairs]
            for _, ours in pairs:
                ours.close()
            watch = _watched_fork(pid)
            self._forks[watch] = pid
            self._events.register(watch, select.EPOLLIN)
            theirs = [end.fileno() for end, _ in pairs]
            self._control.send((FromServer.FORKED.value, pid), [*theirs, watch])
        return None

    def _reap(self, watch: int) -> None:
        self._events.unregister(watch)
        pid = self._forks.pop(watch)
        os.close(watch)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        how = f"it exited with code {code}" if code >= 0 else f"it was ended by {signal.Signals(-code).name}"
        self._control.send((FromServer.ENDED.value, pid, how))


def _watched_fork(pid: int) -> int:
    """Return the fork's pidfd; end the fork if there is none to be had."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still its own
        os.waitpid(pid, 0)
        raise


# -- a fork


WATCHED_MAX = 16  # operations that are watched, of many that are asked for at once


def serve(channel: Channel, heartbeat: socket.socket, trainer: int) -> None:
    """Serve a trainer, whose pidfd is `trainer`, until it has gone; on `heartbeat` it sends its pings."""
    watch = threading.Thread(target=echo, args=(heartbeat, trainer), name="torchft-baby-watch", daemon=True)
    watch.start()
    try:
        _Fork(channel).run()
    except ChannelClosedError:
        pass
    except BaseException as error:  # the trainer is told, and the fork ends
        with contextlib.suppress(ChannelClosedError):
            channel.send((UNASKED, Outcome.FAILED.value, f"it failed with {error!r}"))
        raise


class _Fork:
    """A fork's life: the trainer tells it which backend to create, and then which collectives to run.

    It runs on three kinds of threads. One echoes the trainer's pings. The first one reads requests and starts
    operations in the order in which they come, and never sleeps until one is over. The backend's thread that
    finishes an operation sends the answer; where a backend finishes only operations that are waited for, a
    thread that waits for the operation sends it. Operations that are over soon are answered by the first
    thread: to run Python on the backend's thread takes longer than an operation on a few bytes.

    The fork ends when the trainer's end of the channel is closed, when the trainer is gone, and when its fork
    server is gone. It never runs the trainer's code, and never Python's cleanup at exit.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._methods: Mapping[str, Callable[..., Work | None]] = {}
        self._backend: Backend
        self._importer: Importer  # from BEGIN on, as the backend
        self._watched: list[tuple[int, Work]] = []
        self._spin = AdaptiveSpin()
        self._abort = AbortSignal()
        self._abort.add(self._end)

    def run(self) -> None:
        """Serve requests until the trainer's end is closed, which raises ChannelClosedError."""
        handlers: dict[int, Callable[..., None]] = {
            ToChild.RUN.value: self._run,
            ToChild.MAP.value: self._map,
            ToChild.UNMAP.value: lambda _, number: self._importer.unmap(number),
            ToChild.SET_TIMEOUT.value: lambda _, timeout_s: self._backend.set_timeout(
                timedelta(seconds=timeout_s)
            ),
            ToChild.BEGIN.value: self._begin,
            ToChild.WARM_UP.value: self._warm_up,
        }
        while True:
            self._answer_what_is_over_soon()
            (kind, request, *body), descriptors = self._channel.receive()
            handlers[kind](request, *body, *((descriptors,) if kind == ToChild.MAP else ()))

    def _begin(
        self, request: int, environment: dict[str, str], group: str, importer: str, *more: Any
    ) -> None:
        _adopt(environment)
        greeting, store, rank, world_size, timeout_s = more
        timeout = timedelta(seconds=timeout_s)
        try:
            self._importer = _load(importer)(greeting)
            members = GroupMembers(parse_store_address(store), rank, world_size, timeout)
            self._backend = _load(group)(timeout)._create(members, self._abort)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._answer(request, Outcome.FAILED, *answer_for(error))
            return
        self._methods = self._backend.methods()
        self._answer(request, Outcome.DONE, list(self._methods), self._importer.greeting())

    def _warm_up(self, _: int, environment: dict[str, str], device: int) -> None:
        _adopt(environment)
        torch.cuda.set_device(device)
        torch.ones(1, device="cuda")

    def _map(self, _: int, number: int, *details: Any) -> None:
        self._importer.map(number, details[:-1], details[-1])

    def _run(self, request: int, call: bytes, context: bytes | None = None) -> None:
        importer = self._importer
        name, args, kwargs = decode_call(call)
        has_started = False
        try:
            # Entered first, because it may free events of the trainer's even if the call is refused.
            with importer.entered(context):
                arguments = [decode(value, importer.tensor) for value in args]
                named = {key: decode(value, importer.tensor) for key, value in kwargs.items()}
                start = functools.partial(self._methods[name], *arguments, **named)
                if BY_NAME[name].blocking:
                    self._wait_in_background(request, start)
                    return
                work = start()
                has_started = True
                answer = importer.answer_when_started(work)
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            outcome = Outcome.FAILED if has_started else Outcome.REFUSED
            self._answer(request, outcome, *answer_for(error))
            return
        if answer is not None:
            self._answer(request, Outcome.DONE, *answer)
        elif work is not None and name in POINT_TO_POINT:
            self._wait_in_background(request, work.wait, work)
        elif work is not None and len(self._watched) < WATCHED_MAX:
            self._watched.append((request, work))
        elif work is not None:
            self._leave_to_backend(request, work)

    def _answer_what_is_over_soon(self) -> None:
        """Answer operations as they end, until a request comes; leave the rest to the backend's threads."""
        while self._watched:
            started = time.monotonic()
            has_news = self._spin.watch(
                lambda: any(work.is_completed() for _, work in self._watched) or self._channel.is_ready(),
                math.inf,
            )
            self._spin.learn(time.monotonic() - started)
            watched, self._watched = self._watched, []
            for request, work in watched:
                if work.is_completed():
                    self._wait(request, work.wait)
                elif has_news:
                    self._watched.append((request, work))
                else:
                    self._leave_to_backend(request, work)
            if len(self._watched) == len(watched):
                return

    def _leave_to_backend(self, request: int, work: Work) -> None:
        work.get_future().add_done_callback(lambda done: self._wait(request, done.value))

    def _wait_in_background(self, request: int, wait: Callable[[], object], work: Work | None = None) -> None:
        """Wait on a new thread: one of many receives must not keep a send from being answered."""
        threading.Thread(target=self._wait, args=(request, wait, work), daemon=True).start()

    def _wait(self, request: int, wait: Callable[[], object], work: Work | None = None) -> None:
        try:
            wait()
        except Exception as error:  # noqa: BLE001 - the trainer raises it
            self._answer(request, Outcome.FAILED, *answer_for(error))
        else:
            source: tuple[int, ...] = ()
            if work is not None:
                with contextlib.suppress(RuntimeError):  # only receives from any source know it
                    source = (work._source_rank(),)
            self._answer(request, Outcome.DONE, *source)

    def _end(self) -> None:
        """Tell the trainer why the backend gave up, and end the process with all that the backend does."""
        self._answer(UNASKED, Outcome.FAILED, str(self._abort.reason))
        os._exit(1)

    def _answer(self, request: int, outcome: Outcome, *parts: Any) -> None:
        with contextlib.suppress(ChannelClosedError):  # the thread that reads the channel finds that out, too
            self._channel.send((request, outcome.value, *parts))


def _adopt(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
