"""Processes for test_gloo_abort: a member of a Gloo group, and the host of a store.

They are forked from a server that has imported this module: that takes milliseconds, not seconds.
Each obeys commands from a connection and answers them, `ok ...` or `error ...`.
"""

from __future__ import annotations

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore

from torchft_like.process_group import ProcessGroupGloo
from torchft_like.process_group.abortable_store import AbortableStore

LIMIT_S = 60.0


def run_store(commands: Connection) -> None:
    """Serve a store until the connection ends; answers with the port."""
    store = serve_store()
    commands.send(f"ok {store.port}")
    commands.poll(None)


def run_member(commands: Connection) -> None:
    """Obey commands until the connection ends."""
    os.environ.pop("TORCHFT_CHECK_COLLECTIVES", None)  # groups without the check, as they say
    member = Member()
    commands.send("ok ready")
    while True:
        try:
            command, *words = commands.recv().split()
        except EOFError:
            return
        try:
            answer = f"ok {getattr(member, command)(*words)}"
        except Exception as error:  # noqa: BLE001 - it is told to the test
            answer = f"error {type(error).__name__}: {error}"
        commands.send(answer)


def serve_store() -> TCPStore:
    """A store that sees IPv4 addresses: about others it would ask the name server, and wait for it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class Member:
    """Does as it is told."""

    def __init__(self) -> None:
        self.group = ProcessGroupGloo(300, check_collectives=False)

    def configure(self, address: str, rank: str, world_size: str) -> str:
        self.group.configure(address, int(rank), int(world_size))
        return "configured"

    def allreduce(self, value: str) -> float:
        tensor = torch.tensor([float(value)])
        self.group.allreduce([tensor]).wait()
        return float(tensor[0])

    def allreduce_and_abort(self) -> str:
        """What becomes of a collective, begun over whatever the connections are by now, after an abort."""
        with ThreadPoolExecutor(1) as aside:
            blocked = aside.submit(self.allreduce, "1")
            self.group.abort()
            return type(blocked.exception(LIMIT_S)).__name__

    def stop_once_published(self) -> str:
        """The next configure stops this process when its address is in the store."""
        original = AbortableStore.wait

        def stop(store: AbortableStore, keys: list[str], timeout: timedelta | None = None) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            original(store, keys, timeout)

        setattr(AbortableStore, "wait", stop)  # noqa: B010 - on purpose
        return "will stop"
