"""Abort of a Gloo group that meets a peer, or store, that dies or stops (in a collective: tests/conformance).

The survivors live in this process. Timeouts are five minutes: whatever ends sooner was ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Work

from tests.unit.process_group.conftest import Party, allreduced, wait_until
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupNotConfiguredError
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, gloo
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.testing.forks import WHOLE_END_ENV
from torchft_like.testing.processes import Processes
from torchft_like.testing.ranks import Rank

from .gloo_member import LIMIT_S, Member, StoreHost

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("no_operator")]

LARGE = 20_000_000  # numbers: more than the buffers of a connection hold
FELT_S = 0.3  # what still blocks after this time was really blocked by the fault
Groups = list[ProcessGroup]


@pytest.fixture
def victim() -> Iterator[Rank]:
    rank = Rank(Member)
    yield rank
    rank.end()


@pytest.fixture
def survivors(party: Party) -> Groups:
    return [party.own(ProcessGroupGloo(300, check_collectives=False)) for _ in range(2)]


class Begun(AbortSignal):
    """A signal that is never set. It tells when a configuration that would end with it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def add(self, hook: Callable[[], object]) -> None:
        super().add(hook)
        self.event.set()


def configuring(
    party: Party, survivors: Groups, prefix: str, world_size: int, then: Callable[[ProcessGroup], Any] = id
) -> list[Future[Any]]:
    """Let the survivors configure, and use the group then; return when `abort` would end it."""

    def configure(rank: int, group: ProcessGroup, begun: Begun) -> Any:
        group.configure(prefix, rank, world_size, ends_with=begun)
        return then(group)

    signals = [Begun() for _ in survivors]
    futures = [
        party.aside(configure, rank, group, begun)
        for rank, (group, begun) in enumerate(zip(survivors, signals, strict=True))
    ]
    for begun in signals:
        wait_until(begun.event)
    return futures


def abort(survivors: Groups) -> None:
    for group in survivors:
        group.abort("a member is lost")


def assert_go_on(party: Party, survivors: Groups) -> None:
    """They meet without the victim, and reduce."""
    party.configure(survivors)
    sums = party.together(survivors, lambda _, group: allreduced(group))
    assert sums == [float(len(survivors))] * len(survivors)


def assert_felt(blocked: list[Future[Any]]) -> None:
    for future in blocked:
        with pytest.raises(TimeoutError):
            future.result(FELT_S)


def assert_aborted(ended: list[Future[Any]]) -> None:
    for future in ended:
        with pytest.raises(ProcessGroupAbortedError, match="a member is lost"):
            future.result(LIMIT_S)


def test_an_abort_ends_a_configure_with_a_peer_that_stopped_before_it(
    party: Party, victim: Rank, survivors: Groups
) -> None:
    victim.stop()
    blocked = configuring(party, survivors, party.prefix(), 3)
    assert_felt(blocked)
    abort(survivors)
    assert_aborted(blocked)
    assert_go_on(party, survivors)


@pytest.mark.parametrize(
    ("ends_by", "send"),
    [
        ("an abort", lambda group, tensors: group.send(tensors=tensors, dstRank=1, tag=0)),
        ("the receiver's end", lambda group, tensors: group.send(tensors, 1, 0)),
    ],
    ids=["an abort", "the receiver's end"],
)
def test_a_large_message_that_is_on_its_way_is_given_up_with_the_group(
    party: Party, victim: Rank, survivors: Groups, ends_by: str, send: Callable[..., Work]
) -> None:
    """Gloo forgets it when its connection ends."""
    sender, prefix = survivors[0], party.prefix()
    victim.tell(Member.configure, prefix, 1, 2)
    sender.configure(prefix, 0, 2)
    victim.answer()
    victim.tell(Member.receive_and_stop, LARGE)
    victim.wait_stopped()
    blocked = party.aside(lambda: send(sender, [torch.ones(LARGE)]).wait())
    assert_felt([blocked])
    if ends_by != "an abort":
        victim.kill()
    sender.abort("a member is lost")
    assert_aborted([blocked])
    assert_go_on(party, survivors)


def test_an_abort_ends_a_configure_with_a_peer_that_stopped_in_the_middle_of_it(
    party: Party, victim: Rank, survivors: Groups
) -> None:
    """The peer's address is in the store; connecting to it succeeds, being connected to does not."""
    prefix = party.prefix()
    victim.ask(Member.stop_once_published)
    victim.tell(Member.configure, prefix, 2, 3)
    victim.wait_stopped()
    # One that was to connect itself has met the peer, and the first collective blocks it.
    blocked = configuring(party, survivors, prefix, 3, then=allreduced)
    assert_felt(blocked)
    abort(survivors)
    assert_aborted(blocked)
    assert_go_on(party, survivors)


@pytest.mark.parametrize("attempt", range(3))
def test_a_configure_whose_peer_dies_in_the_middle_of_it_ends_by_itself(
    party: Party, victim: Rank, survivors: Groups, monkeypatch: pytest.MonkeyPatch, attempt: int
) -> None:
    """The peer's address is in the store, and nobody is there.

    Their addresses say who connects. If it is the survivor, it is refused; if not, it waits, and Gloo would
    let it wait for the timeout again and again.
    """
    monkeypatch.setattr(gloo, "CONFIGURE_GRACE_S", 0.2)
    survivor, prefix = survivors[0], party.prefix()
    survivor.set_timeout(timedelta(seconds=1))
    victim.ask(Member.stop_once_published)
    victim.tell(Member.configure, prefix, 1, 2)
    victim.wait_stopped()
    victim.kill()
    with pytest.raises(ProcessGroupNotConfiguredError, match=r"not all peers were connected|refused"):
        party.aside(survivor.configure, prefix, 0, 2).result(LIMIT_S)
    survivor.set_timeout(timedelta(seconds=LIMIT_S))
    assert_go_on(party, survivors)


@pytest.mark.parametrize("fate", ["is stopped", "stops", "is killed"])
def test_a_configure_whose_store_fails_ends_with_an_abort_or_by_itself(
    party: Party, survivors: Groups, fate: str
) -> None:
    store = Rank(StoreHost)
    try:
        prefix = f"127.0.0.1:{store.ask(StoreHost.port)}/first"
        if fate == "is stopped":
            store.stop()
        blocked = configuring(party, survivors, prefix, 3)
        assert_felt(blocked)
        if fate == "is killed":
            store.kill()
            for future in blocked:
                with pytest.raises(RuntimeError, match="store"):
                    future.result(LIMIT_S)
        else:
            if fate == "stops":
                store.stop()
                assert_felt(blocked)
            abort(survivors)
            assert_aborted(blocked)
        assert_go_on(party, survivors)
    finally:
        store.end()


ENDS = """
import time
import torch.distributed as dist
from torchft_like.process_group import ProcessGroupGloo
from torchft_like.process_group import gloo

close = gloo._GlooBackend.close

def close_late(backend):
    time.sleep(3)
    close(backend)
    print("closed", flush=True)

gloo._GlooBackend.close = close_late
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
group = ProcessGroupGloo()
group.configure(f"127.0.0.1:{store.port}/ends", 0, 1)
"""


def test_a_process_that_ends_waits_for_its_groups(processes: Processes, tmp_path: Path) -> None:
    """One that came out of Gloo's destructor in a finished interpreter would be aborted."""
    (script := tmp_path / "ends.py").write_text(ENDS)
    process = processes.fork(str(script), env={WHOLE_END_ENV: "1"})
    process.wait_for_output("closed")
    assert process.wait() == 0
