"""Abort of a Gloo group that meets a peer, or store, that dies or stops (in a collective: tests/conformance).

The survivors live in this process. Timeouts are five minutes: whatever ends sooner was ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import TypeVar

import pytest
import torch

from tests.stores import serve_store
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupNotConfiguredError
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.process_group.gloo import group as gloo
from torchft_like.testing.ranks import Rank, end_all

from .gloo_member import LIMIT_S, Member, StoreHost

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_operator")]

FELT_S = 0.3  # what still blocks after this time was really blocked by the fault
T = TypeVar("T")


class Scene:
    """A store process, a victim process, and survivors that are threads of this one."""

    def __init__(self, survivors: int = 2) -> None:
        self._threads = ThreadPoolExecutor(max_workers=8)
        self._prefixes = itertools.count()
        self.store, self.victim = Rank(StoreHost), Rank(Member)
        self._port = self.store.ask(StoreHost.port)
        self.survivors = [ProcessGroupGloo(300, check_collectives=False) for _ in range(survivors)]

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
        end_all([self.store, self.victim])
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


def test_an_abort_ends_a_configure_with_a_peer_that_stopped_before_it(scene: Scene) -> None:
    scene.victim.stop()
    configuring = scene.configure_survivors(scene.fresh_prefix(), 3)
    assert_felt(configuring)
    scene.abort_survivors()
    assert_aborted(configuring)
    scene.assert_survivors_go_on()


def test_an_abort_ends_a_configure_with_a_peer_that_stopped_in_the_middle_of_it(scene: Scene) -> None:
    """The peer's address is in the store; connecting to it succeeds, being connected to does not."""
    scene.victim.ask(Member.stop_once_published)
    prefix = scene.fresh_prefix()
    scene.victim.tell(Member.configure, prefix, 2, 3)
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
    scene.victim.ask(Member.stop_once_published)
    prefix = scene.fresh_prefix()
    scene.victim.tell(Member.configure, prefix, 1, 2)
    scene.victim.wait_stopped()
    scene.victim.kill()
    configuring = scene.aside(survivor.configure, prefix, 0, 2)
    with pytest.raises(ProcessGroupNotConfiguredError, match=r"not all peers were connected|refused"):
        configuring.result(LIMIT_S)
    survivor.set_timeout(timedelta(seconds=LIMIT_S))
    scene.assert_survivors_go_on()


@pytest.mark.parametrize("store", ["is stopped", "stops", "is killed"])
def test_a_configure_whose_store_fails_ends_with_an_abort_or_by_itself(scene: Scene, store: str) -> None:
    prefix = scene.fresh_prefix()
    if store == "is stopped":
        scene.store.stop()
    configuring = scene.configure_survivors(prefix, 3)
    assert_felt(configuring)
    if store == "is killed":
        scene.store.kill()
        for future in configuring:
            with pytest.raises(RuntimeError, match="store"):
                future.result(LIMIT_S)
    else:
        if store == "stops":
            scene.store.stop()
            assert_felt(configuring)
        scene.abort_survivors()
        assert_aborted(configuring)
    scene.replace_store()
    scene.assert_survivors_go_on()
