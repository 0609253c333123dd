"""Forks of a process that has torch loaded and does nothing but fork.

Loading torch takes six seconds of a processor, and a test starts four processes or more, so the failure tests
would spend most of their time on loading torch. A fork runs a module as `python -m` does, or a script, in a
session of its own, with its own environment and output and the niceness of the process that has ordered it;
all forks share what was loaded before. What a fork starts in this way comes from the same server, and ends
with it.

Forks are for the processes of a job. A test of starting, importing or memory starts its processes cold.

A fork ends as a process does, with its threads and exit handlers, but leaves its interpreter as it is: to
take that apart is to copy all that the forks share, for up to half a second of a processor. A test of what
becomes of an interpreter sets WHOLE_END_ENV to 1.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MESSAGE_BYTES_MAX = 200_000
DESCRIPTORS_MAX = 8
ANSWER_S_MAX = 600.0  # the first answer waits until everything is loaded, on a machine that may be busy
WHOLE_END_ENV = "TORCHFT_TESTING_WHOLE_END"
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_modules = [
    "torch",
    "torch._dynamo",  # which torch loads for the first optimizer: four seconds of a processor
    "grpc",
    "torchft_like",
    "torchft_like.testing.ranks",
    "lighthouse.server",
    "lighthouse.cli",
]


def preload(*modules: str) -> None:
    """Load these modules, too, in the forks of this process; call this before the first fork."""
    _modules.extend(module for module in modules if module not in _modules)


class Fork:
    """A fork, with the part of subprocess.Popen's interface that `processes` uses; it is no child of the
    caller.

    Args:
        argv: the module to run, or the path of a script, and its arguments.
        env: the whole environment of the fork.
        descriptors: open files for the fork; the first one is its standard output and error, the numbers
            that the others have in it are added to its arguments.
        namespace: the path of a network namespace to run in; empty for that of the caller.
    """

    stdin = None

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str], descriptors: Sequence[int], namespace: str = ""
    ) -> None:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        order = {"argv": list(argv), "env": dict(env), "namespace": namespace, "nice": nice}
        self.pid, self._watch = _server().fork(order, descriptors)
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code; None while the fork runs."""
        return self._code if self._code is not None else self._ask(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the fork, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        if self._code is None and self._ask(timeout) is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout or 0)
        return self._code  # type: ignore[return-value] # the code is known by now

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone; one that has ended gets none."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._watch, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ask(self, timeout: float | None) -> int | None:
        events = select.poll()
        events.register(self._watch, select.POLLIN)
        if events.poll(None if timeout is None else timeout * 1000):
            self._code = _server().exit_code(self.pid)
            os.close(self._watch)
        return self._code


class _Server:
    """The client's side of the process that forks.

    Args:
        control: the connection to a process that forks; None starts one.
    """

    def __init__(self, control: socket.socket | None = None) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control = control or self._start()
        self._control.settimeout(ANSWER_S_MAX)
        atexit.register(self.stop)

    def _start(self) -> socket.socket:
        ours, theirs = _pair()
        with theirs:
            command = [sys.executable, "-m", __name__, str(theirs.fileno()), *_modules]
            path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            environment = {**os.environ, **threads, "PYTHONPATH": path}
            # In a group of its own: Ctrl-C is for its starter, which needs it to end the forks.
            passed = [theirs.fileno()]
            self._process = subprocess.Popen(command, env=environment, pass_fds=passed, process_group=0)  # noqa: S603
        return ours

    def fork(self, order: Mapping[str, object], descriptors: Sequence[int]) -> tuple[int, int]:
        """Fork a process that carries out the order; return its process id and its pidfd."""
        with self._lock:
            socket.send_fds(self._control, [json.dumps(order).encode()], list(descriptors))
            answer, watches, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES_MAX, 1)
        return int(self._read(answer)), watches[0]

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a process that has ended."""
        with self._lock:
            self._control.send(json.dumps({"ended": pid}).encode())
            return int(self._read(self._control.recv(MESSAGE_BYTES_MAX)))

    def stop(self) -> None:
        """End the server, and with it all its forks."""
        self._control.close()
        if self._process is not None:
            self._process.wait()

    def _read(self, answer: bytes) -> str:
        if not answer:
            code = self._process and self._process.poll()
            raise RuntimeError(f"the process that forks has ended with {code}")
        return answer.decode()


_servers: list[_Server] = []
_exit_codes: list[int] = []  # of this process, a fork, once its program is over


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


# ------------------------------------------------------------------------------- the other side


def main(control: socket.socket, modules: Sequence[str]) -> None:
    """Load everything, then fork on demand. This returns in a fork, which then runs its order, and at the
    end.
    """
    atexit.register(_end_at_once)  # the first that is registered is the last that runs
    # Where there is a GPU a fork loads everything itself: it could not use what this process has asked.
    for module in () if any(Path("/dev").glob("nvidia*")) else modules:
        with contextlib.suppress(ImportError):  # the fork that needs the module raises the error
            importlib.import_module(module)
    if (threads := threading.active_count()) != 1:
        raise RuntimeError(f"{threads} threads: a fork would have locks that nobody releases")
    # Otherwise each fork, when it ends, looks at all that was loaded and copies it page by page. But Triton,
    # which comes with torch for CUDA, would report all that as leaked.
    if "triton" not in sys.modules:
        gc.freeze()
    server = os.getpid()
    clients: dict[socket.socket, set[int]] = {control: set()}  # by client, its forks that run
    while True:
        for client in select.select(list(clients), [], [])[0]:
            order, descriptors = _receive(client)
            if order is None and client is control:
                return  # and with this process all forks
            if order is None:
                _end(client, clients.pop(client))
            elif "ended" in order:
                clients[client].remove(order["ended"])
                _answer(client, os.waitstatus_to_exitcode(os.waitpid(order["ended"], 0)[1]))
            else:
                ours, theirs = _pair()
                if (pid := os.fork()) == 0:
                    for other in (ours, *clients):
                        other.close()
                    _carry_out(order, descriptors, server, theirs)
                    return
                clients[ours] = set()
                clients[client].add(pid)
                theirs.close()
                for descriptor in descriptors:
                    os.close(descriptor)
                watch = os.pidfd_open(pid)
                _answer(client, pid, watch)
                os.close(watch)


def _receive(client: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next order of a client and the open files that came with it; None if the client is gone."""
    try:
        message, descriptors, _, _ = socket.recv_fds(client, MESSAGE_BYTES_MAX, DESCRIPTORS_MAX)
    except ConnectionResetError:
        return None, []
    return (json.loads(message) if message else None), descriptors


def _answer(client: socket.socket, number: int, *descriptors: int) -> None:
    with contextlib.suppress(OSError):  # it may be gone
        socket.send_fds(client, [str(number).encode()], descriptors)


def _end(client: socket.socket, running: set[int]) -> None:
    """End the forks of a client that is gone."""
    client.close()
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _carry_out(order: dict[str, Any], descriptors: list[int], server: int, control: socket.socket) -> None:
    """Be the fork that was ordered."""
    os.nice(max(0, order["nice"] - os.getpriority(os.PRIO_PROCESS, 0)))
    _become(order["env"], descriptors[0], server)
    if order["namespace"]:  # before there is any other thread: threads that start later inherit it
        with open(order["namespace"], "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), order["namespace"])
    from torchft_like.testing import forks  # noqa: PLC0415, PLW0406 - this module is the main one here

    forks._servers[:] = [forks._Server(control)]  # this fork has forks of the same server
    try:
        _run(*order["argv"], *map(str, descriptors[1:]))
        _exit_codes.append(0)
    except SystemExit as error:
        _exit_codes.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except Exception:
        _exit_codes.append(1)
        raise


def _end_at_once() -> None:
    if _exit_codes and os.environ.get(WHOLE_END_ENV) != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_codes[0] & 0xFF)


def _pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def end_with(parent: int) -> None:
    """Make the kernel kill this process when its parent ends, or at once if it has ended; runs in a fork."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(env: Mapping[str, str], output: int, server: int) -> None:
    """Give this process a session, an environment and an output of its own, and end it with the server."""
    os.setsid()
    end_with(server)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    os.environ.clear()
    os.environ.update(env)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True, write_through=True)  # type: ignore[union-attr]


def _run(module: str, *arguments: str) -> None:
    sys.argv = [module, *arguments]
    if module.endswith(".py"):
        sys.path.insert(0, os.path.dirname(os.path.abspath(module)))
        runpy.run_path(module, run_name="__main__")
        return
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
