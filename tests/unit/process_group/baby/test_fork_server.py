"""The fork server, in a thread: the trainer and the fork are processes that do nothing."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchft_like.process_group.baby.fork_pool import _ForkServer
from torchft_like.process_group.baby.messages import Channel, FromServer

LIMIT_S = 60.0


class Idle:
    """A process that waits to be killed."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "infinity"])
        self.pid = self._process.pid
        self.watch = os.pidfd_open(self.pid)

    def kill(self) -> None:
        """Returns when it is dead, and not reaped."""
        self._process.kill()
        events = select.poll()
        events.register(self.watch, select.POLLIN)
        assert events.poll(LIMIT_S * 1000)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def trainer() -> Iterator[Idle]:
    process = Idle()
    yield process
    process.close()
    os.close(process.watch)


@pytest.fixture
def fork() -> Iterator[Idle]:
    process = Idle()
    yield process
    process.close()  # the server closes its watch


def test_the_trainer_is_told_of_an_end_and_the_server_ends_with_the_trainer(
    trainer: Idle, fork: Idle
) -> None:
    near, far = Channel.pair()
    control = Channel(near)
    server = _ForkServer(Channel(far), trainer.watch)
    server._forks[fork.watch] = fork.pid
    server._events.register(fork.watch, select.POLLIN)
    fork.kill()
    with ThreadPoolExecutor(1) as pool:
        try:
            served = pool.submit(server.run)
            answer, _ = control.receive()
            assert answer == (FromServer.ENDED, fork.pid, "it was ended by SIGKILL")
            trainer.kill()
            assert served.result(LIMIT_S) is None
        finally:
            control.close()
    far.close()
