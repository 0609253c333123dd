"""The check of collectives when ranks do not come, leave, are ended, or are strangers."""

from __future__ import annotations

import gc
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.descriptors import left_open_since, open_descriptors
from torchft_like.core.agreement.referee import NO_TICKET, Missing, Ruling
from torchft_like.core.agreement.statements import Statement, encode
from torchft_like.errors import (
    CollectiveTimeoutError,
    PeerLostError,
    ProcessGroupAbortedError,
    ProcessGroupError,
)
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo
from torchft_like.process_group.checking import (
    ANSWER,
    CALL,
    CALLERS_MAX,
    CHECK_ENV,
    REQUEST,
    WHY,
    CheckedBackend,
    Hub,
    Request,
    decode_problem,
    encode_answer,
)
from torchft_like.process_group.store import AbortableStore
from torchft_like.runtime import connecting

from .checking_calls import assert_goes_on, checking, checking_threads, error_of
from .conftest import LIMIT_S, Party, allreduced

pytestmark = pytest.mark.usefixtures("no_operator")

FELT_S = 0.2  # what still waits after this time really waited

# Ranks that do not come, leave, or are ended.


def test_a_rank_that_does_not_come_is_named_on_all_others(party: Party) -> None:
    groups = party.meet(3, checking)
    for group in groups:
        group.set_timeout(timedelta(seconds=0.5))
    errors = [
        error_of(work.wait)
        for work in party.together(groups[:2], lambda _, group: group.allreduce([torch.ones(4, 2)]))
    ]
    assert len({str(error) for error in errors}) == 1
    for error, group in zip(errors, groups, strict=False):
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (2,)
        assert str(error).endswith("rank 2 did not come; waiting: ranks 0, 1: allreduce #1 float32[4, 2]")
        assert isinstance(group.errored(), CollectiveTimeoutError)
    error_of(lambda: allreduced(groups[2]))  # it comes too late
    for group in groups:
        group.set_timeout(timedelta(seconds=LIMIT_S))
    party.configure(groups)
    assert_goes_on(party, groups)


def test_a_monitored_barrier_has_its_own_timeout(party: Party, pair: list[ProcessGroup]) -> None:
    group: Any = pair[1]
    error = error_of(lambda: group.monitored_barrier(timedelta(seconds=0.3)))
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (0,)


@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_a_member_that_ends_is_noticed_by_those_who_wait(party: Party, leaver: int) -> None:
    groups = party.meet(3, checking)
    stayers = [group for rank, group in enumerate(groups) if rank != leaver]
    works = party.together(stayers, lambda _, group: group.allreduce([torch.ones(1)]))
    groups[leaver].shutdown()
    for group, work in zip(stayers, works, strict=True):
        error = error_of(work.wait)
        assert isinstance(error, PeerLostError)
        assert leaver in error.lost
        assert group.errored() is not None
    party.configure(stayers)
    assert_goes_on(party, stayers)


@pytest.mark.parametrize("loser", [0, 1])
def test_a_rank_for_which_no_thread_can_be_started_is_lost_to_the_others(
    party: Party, monkeypatch: pytest.MonkeyPatch, loser: int
) -> None:
    start = threading.Thread.start

    def start_if_there_is_room(thread: threading.Thread) -> None:
        about = getattr(thread, "_args", ())
        if about and isinstance(about[0], CheckedBackend) and about[0]._rank == loser:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_if_there_is_room)
    groups = [party.own(checking()) for _ in range(2)]
    prefix = party.prefix()
    met = [party.aside(group.configure, prefix, rank, 2) for rank, group in enumerate(groups)]
    assert "can't start new thread" in str(met[loser].exception(LIMIT_S))
    met[1 - loser].result(LIMIT_S)
    error = error_of(lambda: allreduced(groups[1 - loser]))
    assert isinstance(error, PeerLostError)
    assert error.lost == (loser,)


def test_an_abort_ends_a_configure_that_waits_for_the_referee(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 does not check, so rank 0 waits for it in vain."""
    group, other = party.own(checking()), party.own(ProcessGroupGloo(60, check_collectives=False))
    waiting = configure_both(party, group, other)
    with pytest.raises(TimeoutError):
        waiting.result(FELT_S)
    group.abort("nobody comes")
    with pytest.raises(ProcessGroupAbortedError, match="nobody comes"):
        waiting.result(LIMIT_S)
    group.shutdown()
    assert_no_checking_threads()


def configure_both(party: Party, group: ProcessGroup, other: ProcessGroup, rank: int = 0) -> Future[None]:
    prefix = party.prefix()
    waiting = party.aside(lambda: group.configure(prefix, rank, 2))
    other.configure(prefix, 1 - rank, 2)
    return waiting


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_agree_to_check_are_told(party: Party, rank: int) -> None:
    group = party.own(checking(1.0))
    waiting = configure_both(party, group, party.own(ProcessGroupGloo(60, check_collectives=False)), rank)
    with pytest.raises(ProcessGroupError, match=f"is check_collectives .{CHECK_ENV}. the same on every rank"):
        waiting.result(LIMIT_S)
    assert_no_checking_threads()


def test_a_reconfigured_group_checks_anew_with_fewer_and_with_more(party: Party) -> None:
    groups = party.meet(3, checking)
    for count in (2, 3, 1, 2):
        party.configure(groups[:count])
        assert_goes_on(party, groups[:count])
        if count > 1:
            act: Any = lambda rank, group: error_of(group.allreduce([torch.ones(1 + rank)]).wait)  # noqa: E731
            errors = party.together(groups[:count], act)
            assert all("allreduce #2" in str(error) for error in errors)


@pytest.mark.no_leak
def test_nothing_is_left_of_the_check_after_reconfigurations(party: Party) -> None:
    groups = party.meet(2, checking)
    for group in groups:
        group.shutdown()
    gc.collect()
    before = open_descriptors()
    for number in range(10):
        party.configure(groups)
        if number % 3 == 0:
            groups[0].allreduce([torch.ones(1)])  # one that waits
        else:
            assert_goes_on(party, groups)
    for group in groups:
        group.shutdown()
    assert_no_checking_threads()
    assert not left_open_since(before)


def assert_no_checking_threads() -> None:
    for thread in checking_threads():
        thread.join(LIMIT_S)
    assert checking_threads() == []


# Strangers.


@pytest.fixture
def referee_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, str]]]:
    """Where referees listened, as they told the store; strangers have come, and most of them stay."""
    places: list[tuple[str, int, str]] = []
    silent: list[socket.socket] = []
    original = AbortableStore.set

    def remember(store: AbortableStore, key: str, value: str | bytes) -> None:
        if key == "referee":
            host, port, token, _ = json.loads(value)
            visit(host, port)
            places.append((host, port, token))
        original(store, key, value)

    def visit(host: str, port: int) -> None:
        for hello in (b"", b"x" * 20, struct.pack("<16xI?", 1, False)):
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(hello)
        # More than are kept: the oldest of them have to make room.
        silent.extend(socket.create_connection((host, port)) for _ in range(CALLERS_MAX + 8))
        for stranger in silent[::2]:
            stranger.sendall(b"x")

    monkeypatch.setattr(AbortableStore, "set", remember)
    yield places
    for stranger in silent:
        stranger.close()


def test_strangers_are_not_let_in_and_later_the_door_is_closed(
    party: Party, referee_place: list[tuple[str, int, str]]
) -> None:
    groups = party.meet(2, checking)
    assert_goes_on(party, groups)
    host, port, _ = referee_place[0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


@pytest.mark.parametrize("has_called", [False, True])
def test_a_rank_that_sends_nonsense_is_lost_after_its_calls_were_judged(
    party: Party, pair: list[ProcessGroup], has_called: bool
) -> None:
    waiting = pair[0].allreduce([torch.ones(1)])
    backend = pair[1]._generation._backend  # type: ignore[attr-defined]
    call = encode(Statement("allreduce", inputs=("float32[2]",), reduce_op="SUM"))
    said = Request(CALL, 10**6, 1, 30.0, call).encode() if has_called else b""
    backend._link._socket.sendall(said + REQUEST.pack(77, 0, 0, 0.0, 0))
    error = error_of(waiting.wait)
    if has_called:
        assert "rank 1: allreduce #1 float32[2]" in str(error)
    else:
        assert isinstance(error, PeerLostError)
        assert error.lost == (1,)
    assert isinstance(error_of(lambda: pair[1].allreduce([torch.ones(1)]).wait()), PeerLostError)


def test_a_rank_that_called_and_died_is_gone_before_the_last_rank_calls() -> None:
    """All comes at once. If the backend began, Gloo might forget the one that writes to who is gone."""
    call = Request(CALL, 5, 1, 30.0, encode(Statement("barrier"))).encode()
    pairs = [socket.socketpair() for _ in range(3)]
    for ours, _ in pairs:
        ours.sendall(call)
    pairs[2][0].close()
    hub = Hub([theirs for _, theirs in pairs])
    try:
        for ours, _ in pairs[:2]:
            _, ticket, _, length = ANSWER.unpack(ours.recv(ANSWER.size))
            problem = decode_problem(ours.recv(length))
            assert ticket == 5
            assert isinstance(problem, Missing)
            assert problem.lost
            assert problem.ranks == (2,)
    finally:
        hub.cut()
        hub.thread.join(LIMIT_S)
        for ours, _ in pairs:
            ours.close()


def test_a_rank_that_calls_a_thousand_times_before_it_reads_is_answered_each_time() -> None:
    """A script that waits for nothing sends with the lock that the thread which reads its answers needs."""
    calls = 1000
    pairs = [socket.socketpair() for _ in range(2)]
    hub = Hub([theirs for _, theirs in pairs])
    try:
        for ticket in range(calls):
            request = Request(CALL, ticket, ticket + 1, LIMIT_S, encode(Statement("barrier"))).encode()
            for ours, _ in pairs:
                ours.settimeout(LIMIT_S)
                ours.sendall(request)
        for ours, _ in pairs:
            with ours.makefile("rb") as answers:
                for ticket in range(calls):
                    _, of, _, length = ANSWER.unpack(answers.read(ANSWER.size))
                    assert (of, decode_problem(answers.read(length))) == (ticket, None)
    finally:
        hub.cut()
        hub.thread.join(LIMIT_S)
        for ours, _ in pairs:
            ours.close()


def test_ranks_with_thousands_of_calls_hear_who_is_lost_though_they_read_late() -> None:
    """Each call of a rank is refused with a text: one that named all of them grew with their square."""
    calls = 2000
    pairs = [socket.socketpair() for _ in range(3)]
    hub = Hub([theirs for _, theirs in pairs])
    try:
        for number in range(1, calls + 1):
            request = Request(CALL, number, number, LIMIT_S, encode(Statement("barrier"))).encode()
            for ours, _ in pairs[:2]:
                ours.settimeout(LIMIT_S)
                ours.sendall(request)
        for ours, _ in pairs[:2]:  # once this is answered, all calls are in
            ours.sendall(Request(WHY).encode())
            assert ours.recv(ANSWER.size, socket.MSG_WAITALL) == encode_answer(Ruling(0, NO_TICKET))
        lost = 2
        pairs[lost][0].close()
        named = tuple(f"barrier #{number}" for number in range(1, 5))
        for ours, _ in pairs[:2]:
            for problem in _problems(ours, calls):
                assert problem.ranks == (lost,)
                assert problem.waiting[0] == (*named, f"and {calls - len(named)} more")
    finally:
        hub.cut()
        hub.thread.join(LIMIT_S)
        for ours, _ in pairs:
            ours.close()


def _problems(connection: socket.socket, count: int) -> Iterator[Missing]:
    with connection.makefile("rb") as answers:
        for _ in range(count):
            _, _, _, length = ANSWER.unpack(answers.read(ANSWER.size))
            problem = decode_problem(answers.read(length))
            assert isinstance(problem, Missing)
            yield problem


def test_a_rank_0_that_ends_calls_no_other_rank_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own cut ends the connections one after another; the later ones must not hear of the earlier."""
    call = Request(CALL, 5, 1, 30.0, encode(Statement("barrier"))).encode()
    pairs = [socket.socketpair() for _ in range(3)]
    hub = Hub([theirs for _, theirs in pairs])
    shut_down = connecting.shut

    def shut_down_slowly(one: socket.socket) -> None:
        shut_down(one)
        time.sleep(FELT_S)  # the hub sees the end of this connection while the next one is still open

    monkeypatch.setattr("torchft_like.process_group.checking.shut", shut_down_slowly)
    hub._sockets._sockets.reverse()  # rank 0's own connection comes last
    for ours, _ in pairs[1:]:
        ours.sendall(call)
    hub.cut()
    hub.thread.join(LIMIT_S)
    assert [ours.recv(ANSWER.size) for ours, _ in pairs] == [b"", b"", b""]
    for ours, _ in pairs:
        ours.close()


def test_a_timeout_of_weeks_is_one(party: Party) -> None:
    groups = party.meet(2, lambda: checking(20.0 * 86400))
    waiting = groups[0].allreduce([torch.ones(1)])
    with pytest.raises(TimeoutError):
        party.aside(waiting.wait).result(FELT_S)
    groups[1].allreduce([torch.ones(1)]).wait()
    waiting.wait()
