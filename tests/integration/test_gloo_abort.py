"""Abort of a Gloo group whose peer, or whose store, is another process that dies or stops.

The survivors live in this process. Timeouts are five minutes: whatever ends sooner was ended.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupNotConfiguredError
from torchft_like.process_group import ProcessGroupGloo, gloo

from .gloo_member import LIMIT_S, run_member, run_store, serve_store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_operator")]

FELT_S = 0.3  # what still blocks after this time was really blocked by the fault
_nursery = multiprocessing.get_context("forkserver")
_nursery.set_forkserver_preload(["tests.integration.gloo_member"])
T = TypeVar("T")


class Process:
    """A child that answers; killed at the end, stopped or not."""

    def __init__(self, run: Callable[[Connection], None]) -> None:
        self._commands, theirs = multiprocessing.Pipe()
        self._child = _nursery.Process(target=run, args=(theirs,), daemon=True)
        self._child.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the child."""
        assert self._child.pid is not None
        return self._child.pid

    def tell(self, command: str) -> None:
        """Give a command."""
        self._commands.send(command)

    def answer(self) -> str:
        """The next answer."""
        assert self._commands.poll(LIMIT_S)
        answer = self._commands.recv()
        assert isinstance(answer, str)
        return answer

    def ask(self, command: str) -> str:
        """Give a command and wait for the answer."""
        self.tell(command)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill()
        self._child.join(LIMIT_S)

    def stop(self) -> None:
        """SIGSTOP, and wait until it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        self.wait_stopped()

    def wait_stopped(self) -> None:
        """Until the process is stopped."""
        deadline = time.monotonic() + LIMIT_S
        while state_of(self.pid) != "T":
            assert time.monotonic() < deadline
            threading.Event().wait(0.005)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        """Whatever state it is in."""
        if self._child.is_alive():
            self.resume()
            self.kill()
        self._commands.close()
        self._child.close()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


class Scene:
    """A store process, a victim process, and survivors that are threads of this one."""

    def __init__(self, survivors: int = 2) -> None:
        self._threads = ThreadPoolExecutor(max_workers=8)
        self._processes: list[Process] = []
        self._prefixes = itertools.count()
        self.store, self.victim = self._start(run_store), self._start(run_member)
        self._port = int(self.store.answer().split()[1])
        self.victim.answer()
        self.survivors = [ProcessGroupGloo(300, check_collectives=False) for _ in range(survivors)]

    def _start(self, run: Callable[[Connection], None]) -> Process:
        process = Process(run)
        self._processes.append(process)
        return process

    def fresh_prefix(self) -> str:
        return f"127.0.0.1:{self._port}/{next(self._prefixes)}"

    def replace_store(self) -> None:
        """Another one, in good health, in this process."""
        self._healthy = serve_store()
        self._port = self._healthy.port

    def configure_survivors(self, prefix: str, world_size: int) -> list[Future[None]]:
        return [
            self.aside(group.configure, prefix, rank, world_size) for rank, group in enumerate(self.survivors)
        ]

    def configure_all(self) -> None:
        """Survivors and victim, who has the last rank."""
        prefix, world_size = self.fresh_prefix(), len(self.survivors) + 1
        configuring = self.configure_survivors(prefix, world_size)
        assert self.victim.ask(f"configure {prefix} {world_size - 1} {world_size}") == "ok configured"
        for future in configuring:
            future.result(LIMIT_S)

    def aside(self, act: Callable[..., T], *args: object) -> Future[T]:
        return self._threads.submit(act, *args)

    def reduce_on_survivors(self) -> list[Future[float]]:
        return [self.aside(allreduced, group, 1.0) for group in self.survivors]

    def abort_survivors(self) -> None:
        for group in self.survivors:
            group.abort("a member is lost")

    def assert_survivors_go_on(self) -> None:
        """They meet without the victim, and reduce."""
        for future in self.configure_survivors(self.fresh_prefix(), len(self.survivors)):
            future.result(LIMIT_S)
        sums = [future.result(LIMIT_S) for future in self.reduce_on_survivors()]
        assert sums == [float(len(self.survivors))] * len(self.survivors)

    def end(self) -> None:
        for process in self._processes:
            process.end()
        for group in self.survivors:
            group.shutdown()
        self._threads.shutdown(wait=True, cancel_futures=True)


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.end()


def reduced(group: ProcessGroupGloo) -> None:
    group.allreduce([torch.ones(1)]).wait()


def allreduced(group: ProcessGroupGloo, value: float) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait()
    return float(tensor[0])


def assert_felt(blocked: list[Future[T]]) -> None:
    for future in blocked:
        with pytest.raises(FutureTimeoutError):
            future.result(FELT_S)


def assert_aborted(ended: list[Future[T]]) -> None:
    for future in ended:
        with pytest.raises(ProcessGroupAbortedError, match="a member is lost"):
            future.result(LIMIT_S)


def test_survivors_of_a_killed_peer_fail_by_themselves_and_go_on(scene: Scene) -> None:
    scene.configure_all()
    blocked = scene.reduce_on_survivors()
    scene.victim.kill()
    for future in blocked:
        with pytest.raises(RuntimeError):
            future.result(LIMIT_S)
    assert all(group.errored() is not None for group in scene.survivors)
    scene.assert_survivors_go_on()


def test_an_abort_ends_a_collective_with_a_stopped_peer(scene: Scene) -> None:
    scene.configure_all()
    scene.victim.stop()
    blocked = scene.reduce_on_survivors()
    assert_felt(blocked)
    scene.abort_survivors()
    assert_aborted(blocked)
    scene.assert_survivors_go_on()
    scene.victim.resume()
    answer = scene.victim.ask("allreduce_and_abort")
    assert answer in ("ok ProcessGroupAbortedError", "ok RuntimeError"), "what it knows is over"


def test_an_abort_ends_a_configure_with_a_peer_that_stopped_before_it(scene: Scene) -> None:
    scene.victim.stop()
    configuring = scene.configure_survivors(scene.fresh_prefix(), 3)
    assert_felt(configuring)
    scene.abort_survivors()
    assert_aborted(configuring)
    scene.assert_survivors_go_on()


def test_an_abort_ends_a_configure_with_a_peer_that_stopped_in_the_middle_of_it(scene: Scene) -> None:
    """The peer's address is in the store; connecting to it succeeds, being connected to does not."""
    scene.victim.ask("stop_once_published")
    prefix = scene.fresh_prefix()
    scene.victim.tell(f"configure {prefix} 2 3")
    scene.victim.wait_stopped()
    configuring = scene.configure_survivors(prefix, 3)
    _, blocked = wait(configuring, timeout=FELT_S)
    if not blocked:  # both were the ones to connect: then the first collective blocks them
        blocked = {future for group in scene.survivors for future in [scene.aside(reduced, group)]}
    assert_felt(list(blocked))
    scene.abort_survivors()
    for future in blocked:
        with pytest.raises(ProcessGroupAbortedError):
            future.result(LIMIT_S)
    scene.assert_survivors_go_on()


@pytest.mark.parametrize("attempt", range(3))
def test_a_configure_whose_peer_dies_in_the_middle_of_it_ends_by_itself(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    """The peer's address is in the store, and nobody is there.

    Their addresses say who connects. If it is the survivor, it is refused; if not, it waits, and Gloo would
    let it wait for the timeout again and again.
    """
    monkeypatch.setattr(gloo, "CONFIGURE_GRACE_S", 0.2)
    survivor = scene.survivors[0]
    survivor.set_timeout(timedelta(seconds=1))
    scene.victim.ask("stop_once_published")
    prefix = scene.fresh_prefix()
    scene.victim.tell(f"configure {prefix} 1 2")
    scene.victim.wait_stopped()
    scene.victim.kill()
    configuring = scene.aside(survivor.configure, prefix, 0, 2)
    with pytest.raises(ProcessGroupNotConfiguredError, match=r"not all peers were connected|refused"):
        configuring.result(LIMIT_S)
    survivor.set_timeout(timedelta(seconds=LIMIT_S))
    scene.assert_survivors_go_on()


def test_an_abort_ends_a_configure_that_finds_the_store_stopped(scene: Scene) -> None:
    prefix = scene.fresh_prefix()
    scene.store.stop()
    configuring = scene.configure_survivors(prefix, 2)
    assert_felt(configuring)
    scene.abort_survivors()
    assert_aborted(configuring)
    scene.replace_store()
    scene.assert_survivors_go_on()


def test_an_abort_ends_a_configure_whose_store_stops_in_the_middle_of_it(scene: Scene) -> None:
    configuring = scene.configure_survivors(scene.fresh_prefix(), 3)
    assert_felt(configuring)
    scene.store.stop()
    assert_felt(configuring)
    scene.abort_survivors()
    assert_aborted(configuring)
    scene.replace_store()
    scene.assert_survivors_go_on()


def test_a_configure_whose_store_is_killed_fails_by_itself(scene: Scene) -> None:
    configuring = scene.configure_survivors(scene.fresh_prefix(), 3)
    assert_felt(configuring)
    scene.store.kill()
    for future in configuring:
        with pytest.raises(RuntimeError, match="store"):
            future.result(LIMIT_S)
    scene.replace_store()
    scene.assert_survivors_go_on()
