"""The check of collectives over the life of a group: order, threads, silence, death, abort, no check."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore, Work
from torch.distributed import ReduceOp

from tests.conftest import Processes
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    CollectiveTimeoutError,
    ConfigError,
    PeerLostError,
    ProcessGroupAbortedError,
    ProcessGroupError,
)
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupGloo,
)
from torchft_like.process_group.abortable_store import AbortableStore
from torchft_like.process_group.checking.backend import CHECK_ENV, CheckedBackend
from torchft_like.process_group.checking.messages import REQUEST

from .conftest import LIMIT_S, Party, wait_until

FELT_S = 0.2  # what still waits after this time really waited


def checking(timeout: float = 60) -> ProcessGroup:
    return ProcessGroupGloo(timeout, check_collectives=True)


@pytest.fixture
def pair(party: Party) -> list[ProcessGroup]:
    return party.meet(2, checking)


def summed(group: ProcessGroup, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor]).wait()
    return float(tensor[0])


def assert_goes_on(party: Party, groups: list[ProcessGroup]) -> None:
    assert party.together(groups, lambda _, group: summed(group)) == [float(len(groups))] * len(groups)


def error_of(act: Callable[[], Any]) -> Exception:
    with pytest.raises(RuntimeError) as raised:
        act()
    return raised.value


# Order.


def test_calls_return_at_once_and_run_in_their_order(party: Party, pair: list[ProcessGroup]) -> None:
    def issue(rank: int, group: ProcessGroup) -> list[float]:
        tensors = [torch.tensor([float(n)]) for n in range(200)]
        works = [
            group.allreduce([tensor]) if n % 3 else group.broadcast_one(tensor, n % 2)
            for n, tensor in enumerate(tensors)
        ]
        if rank == 0:
            everything_issued.set()
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in tensors]

    everything_issued = threading.Event()
    ahead = party.aside(issue, 0, pair[0])
    wait_until(everything_issued)  # nobody else has called anything yet
    expected = [float(n * (2 if n % 3 else 1)) for n in range(200)]
    assert issue(1, pair[1]) == ahead.result(LIMIT_S) == expected


def test_groups_used_in_opposite_orders_do_not_wait_for_each_other(party: Party) -> None:
    """Right with asynchronous calls: a check that blocked its callers would hang here."""
    one, other = party.meet(2, checking), party.meet(2, checking)

    def act(rank: int, _: Any) -> None:
        first, second = (one, other) if rank == 0 else (other, one)
        started = first[rank].allreduce([torch.ones(1)])
        second[rank].allreduce([torch.ones(1)]).wait()
        started.wait()

    party.together(one, act)


def test_a_refused_call_does_not_shift_what_follows(party: Party, pair: list[ProcessGroup]) -> None:
    def issue(rank: int, group: ProcessGroup) -> list[Any]:
        sizes = [4, 4 + 4 * rank, 4]
        works = [group.allreduce([torch.ones(size)]) for size in sizes]
        return [outcome(work) for work in works]

    def outcome(work: Work) -> str:
        try:
            return str(work.wait())
        except CollectiveMismatchError as error:
            return str(error)

    first, second = party.together(pair, issue)
    assert first == second
    assert [first[0], first[2]] == ["True", "True"]
    assert "rank 0: allreduce #2 float32[4]; rank 1: allreduce #2 float32[8]" in first[1]


def test_several_threads_may_use_one_group(party: Party, pair: list[ProcessGroup]) -> None:
    """With an order between them that is the same on every rank, as without the check."""
    turns = [[threading.Event() for _ in range(40)] for _ in pair]

    def act(rank: int, parity: int) -> None:
        for number in range(parity, 40, 2):
            if number:
                wait_until(turns[rank][number - 1])
            work = pair[rank].allreduce([torch.full((number + 1,), 1.0)])
            turns[rank][number].set()
            work.wait()

    for future in [party.aside(act, rank, parity) for rank in range(2) for parity in range(2)]:
        future.result(LIMIT_S)


def test_futures_carry_results_and_refusals(party: Party, pair: list[ProcessGroup]) -> None:
    def of_size(size: int, _: int, group: ProcessGroup) -> list[torch.Tensor]:
        future = group.allreduce([torch.ones(size)]).get_future()
        then = future.then(lambda done: [tensor + 1 for tensor in done.value()])
        result: list[torch.Tensor] = then.wait()
        return result

    assert [r[0].tolist() for r in party.together(pair, partial(of_size, 2))] == [[3.0, 3.0]] * 2
    futures = party.together(pair, lambda rank, group: group.allreduce([torch.ones(1 + rank)]).get_future())
    for future in futures:
        error = error_of(future.wait)
        assert "rank 0: allreduce #2 float32[1]; rank 1: allreduce #2 float32[2]" in str(error)


def test_a_work_tells_its_state(party: Party, pair: list[ProcessGroup]) -> None:
    work = pair[0].allreduce([torch.ones(1)])
    assert not work.is_completed()
    assert not work.is_success()
    works = [work, pair[1].allreduce([torch.ones(1)])]
    party.together(pair, lambda rank, _: works[rank].wait())
    assert work.is_completed()
    assert work.is_success()
    assert work.result()[0].item() == 2.0
    refused = party.together(pair, lambda rank, group: group.allreduce([torch.ones(1 + rank)]))
    for each in refused:
        error_of(each.wait)
        error_of(each.wait)  # as often as one asks
        assert each.is_completed()
        assert not each.is_success()
    assert_goes_on(party, pair)


def test_what_the_backend_refuses_leaves_the_group_usable(party: Party, pair: list[ProcessGroup]) -> None:
    def wrong_root(_: int, group: ProcessGroup) -> Exception:
        return error_of(lambda: group.broadcast_one(torch.ones(1), 7).wait())

    for error in party.together(pair, wrong_root):
        assert isinstance(error, CollectiveRefusedError)
        assert "root" in str(error)
    assert_goes_on(party, pair)


def test_an_argument_that_is_missing_is_a_type_error_at_once(pair: list[ProcessGroup]) -> None:
    with pytest.raises(TypeError):
        pair[0].allreduce()  # type: ignore[call-overload] # on purpose
    assert pair[0].errored() is None


def test_a_swallowing_group_hears_of_the_mismatch(party: Party) -> None:
    groups = party.meet(2, lambda: ErrorSwallowingProcessGroupWrapper(checking()))
    party.together(groups, lambda rank, group: group.allreduce([torch.ones(1 + rank)]).wait())
    for group in groups:
        assert isinstance(group.error(), CollectiveMismatchError)  # type: ignore[attr-defined]


# Sends and receives.


def test_both_ranks_may_send_before_they_receive(party: Party, pair: list[ProcessGroup]) -> None:
    def swap(rank: int, group: ProcessGroup) -> float:
        received = torch.zeros(3)
        sent = group.send([torch.full((3,), float(rank))], 1 - rank, 0)
        group.recv([received], 1 - rank, 0).wait()
        sent.wait()
        return float(received[0])

    assert party.together(pair, swap) == [1.0, 0.0]


def test_tags_may_be_received_in_another_order_and_around_collectives(
    party: Party, pair: list[ProcessGroup]
) -> None:
    def act(rank: int, group: ProcessGroup) -> list[float]:
        tensors = {tag: torch.full((tag,), float(tag) if rank == 0 else 0.0) for tag in (1, 2, 3)}
        if rank == 0:
            works = [group.send([tensors[tag]], 1, tag) for tag in (1, 2, 3)]
            summed(group)
        else:
            group.recv([tensors[3]], 0, 3).wait()
            summed(group)
            works = [group.recv([tensors[tag]], 0, tag) for tag in (2, 1)]
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in tensors.values()]

    assert party.together(pair, act) == [[1.0, 2.0, 3.0]] * 2


def test_a_receive_from_any_rank_says_whom_it_got(party: Party) -> None:
    groups = party.meet(3, checking)

    def act(rank: int, group: Any) -> list[tuple[int, float]]:
        if rank:
            group.send([torch.full((2,), float(rank))], 0, 4).wait()
            return []
        got = []
        for _ in range(2):
            tensor = torch.zeros(2)
            work = group.recv_anysource([tensor], 4)
            work.wait()
            got.append((work._source_rank(), float(tensor[0])))
        return got

    assert sorted(party.together(groups, act)[0]) == [(1, 1.0), (2, 2.0)]


def test_a_receive_that_nobody_waits_for_harms_nobody(party: Party) -> None:
    groups = party.meet(2, lambda: checking(1.0))
    left_open = groups[0].recv([torch.zeros(1)], 1, 9)
    for _ in range(3):
        assert_goes_on(party, groups)
        threading.Event().wait(0.5)  # in all longer than the timeout
    assert_goes_on(party, groups)
    sent = groups[1].send([torch.ones(1)], 0, 9)
    party.together(groups, lambda rank, _: (left_open, sent)[rank].wait())


def test_a_receive_that_nobody_sends_to_names_the_sender(party: Party) -> None:
    groups = party.meet(3, lambda: checking(0.3))
    waiting = groups[2].allreduce([torch.ones(1)], timeout_options(60))
    error = error_of(lambda: groups[0].recv([torch.zeros(2)], 1, 5).wait())
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (1,)
    assert error.waiting[0] == ("recv from rank 1, tag 5, float32[2]",)
    assert error.waiting[2] == ("allreduce #1 float32[1]",)
    assert "timed out" in str(error)
    assert str(error_of(waiting.wait)) == str(error)


def timeout_options(seconds: float) -> Any:
    options = torch.distributed.AllreduceOptions()
    options.timeout = timedelta(seconds=seconds)
    return options


# Ranks that do not come, leave, or are ended.


def test_a_rank_that_does_not_come_is_named_on_all_others(party: Party) -> None:
    groups = party.meet(3, lambda: checking(0.5))
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
    error_of(lambda: summed(groups[2]))  # it comes too late
    party.configure(groups)
    assert_goes_on(party, groups)


def test_a_monitored_barrier_has_its_own_timeout(party: Party, pair: list[ProcessGroup]) -> None:
    group: Any = pair[1]
    error = error_of(lambda: group.monitored_barrier(timedelta(seconds=0.3)))
    assert isinstance(error, CollectiveTimeoutError)
    assert error.missing == (0,)


def test_ranks_in_different_operations_are_told_of_each_other(party: Party) -> None:
    """An allreduce here, a receive there: it may still become right, so only time can tell."""
    groups = party.meet(2, lambda: checking(0.5))
    works = [groups[0].allreduce([torch.ones(1)]), groups[1].recv([torch.ones(1)], 0, 0)]
    texts = {str(error_of(work.wait)) for work in works}
    assert len(texts) == 1
    assert "rank 0: allreduce #1 float32[1]; rank 1: recv from rank 0, tag 0, float32[1]" in texts.pop()


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


OPERATIONS: list[Callable[[Any], Any]] = [
    lambda g: g.allreduce([torch.ones(4)]).wait(),
    lambda g: g.allreduce([torch.ones(4)]).get_future().wait(),
    lambda g: g.send([torch.ones(4)], 1, 0).wait(),
    lambda g: g.recv([torch.ones(4)], 1, 0).wait(),
    lambda g: g.recv_anysource([torch.ones(4)], 0).wait(),
    lambda g: g.monitored_barrier(),
]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_an_abort_ends_a_call_that_waits_for_the_others(
    party: Party, pair: list[ProcessGroup], number: int, rank: int
) -> None:
    if rank == 1 and number in (2, 3):
        pytest.skip("rank 1 has no peer 1")
    blocked = party.aside(OPERATIONS[number], pair[rank])
    with pytest.raises(TimeoutError):
        blocked.result(FELT_S)
    pair[rank].abort("the test says so")
    error = error_of(lambda: blocked.result(LIMIT_S))
    assert number == 1 or (isinstance(error, ProcessGroupAbortedError) and "the test says so" in str(error))
    with pytest.raises(ProcessGroupAbortedError):
        summed(pair[rank])


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
    with pytest.raises(ProcessGroupError, match=f"is check_collectives .{CHECK_ENV}. on for every rank"):
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


def test_nothing_is_left_of_the_check_after_reconfigurations(party: Party) -> None:
    groups = party.meet(2, checking)
    for group in groups:
        group.shutdown()
    gc.collect()
    before = open_sockets()
    for number in range(10):
        party.configure(groups)
        if number % 3 == 0:
            groups[0].allreduce([torch.ones(1)])  # one that waits
        else:
            assert_goes_on(party, groups)
    for group in groups:
        group.shutdown()
    assert_no_checking_threads()
    gc.collect()
    assert open_sockets() == before


def open_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except FileNotFoundError:
            continue
    return count


def checking_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("torchft-checking")]


def assert_no_checking_threads() -> None:
    for thread in checking_threads():
        thread.join(LIMIT_S)
    assert checking_threads() == []


# Strangers.


@pytest.fixture
def referee_place(party: Party, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """Where referees listened, as they told the store."""
    places: list[tuple[str, int, str]] = []
    original = AbortableStore.set

    def remember(store: AbortableStore, key: str, value: str | bytes) -> None:
        if key == "referee":
            host, port, token = json.loads(value)
            visit(host, port)
            places.append((host, port, token))
        original(store, key, value)

    def visit(host: str, port: int) -> None:
        for hello in (b"", b"x" * 20, b"\0" * 20):
            with socket.create_connection((host, port)) as stranger:
                stranger.sendall(hello)

    monkeypatch.setattr(AbortableStore, "set", remember)
    return places


def test_strangers_are_not_let_in_and_later_the_door_is_closed(
    party: Party, referee_place: list[tuple[str, int, str]]
) -> None:
    groups = party.meet(2, checking)
    assert_goes_on(party, groups)
    host, port, _ = referee_place[0]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))


def test_a_rank_that_sends_nonsense_is_lost(party: Party, pair: list[ProcessGroup]) -> None:
    waiting = pair[0].allreduce([torch.ones(1)])
    backend = pair[1]._generation._backend  # type: ignore[attr-defined]
    assert isinstance(backend, CheckedBackend)
    backend._link._socket.sendall(REQUEST.pack(77, 0, 0.0, 0))
    error = error_of(waiting.wait)
    assert isinstance(error, PeerLostError)
    assert error.lost == (1,)


# Switching it on.


@pytest.mark.parametrize(
    ("argument", "environment", "expected"),
    [
        (None, None, False),
        (None, "0", False),
        (None, "1", True),
        (True, "0", True),
        (False, "1", False),
    ],
)
def test_the_argument_beats_the_environment(
    party: Party,
    monkeypatch: pytest.MonkeyPatch,
    argument: bool | None,
    environment: str | None,
    expected: bool,
) -> None:
    monkeypatch.delenv(CHECK_ENV, raising=False)
    if environment is not None:
        monkeypatch.setenv(CHECK_ENV, environment)
    groups = party.meet(2, lambda: ProcessGroupGloo(30, check_collectives=argument))
    backend = groups[0]._generation._backend  # type: ignore[attr-defined]
    assert isinstance(backend, CheckedBackend) == expected
    assert_goes_on(party, groups)


def test_an_environment_that_says_neither_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_ENV, "yes")
    with pytest.raises(ConfigError, match=f"{CHECK_ENV} is 'yes': it must be 0 or 1"):
        ProcessGroupGloo(30)


def test_a_group_of_one_asks_nobody(party: Party) -> None:
    (group,) = party.meet(1, checking)
    assert summed(group) == 1.0
    assert checking_threads() == []


# Without the check: why there is one.


def unchecked(party: Party) -> list[ProcessGroup]:
    return party.meet(2, lambda: ProcessGroupGloo(30, check_collectives=False))


def test_without_the_check_other_dtypes_are_silent_garbage(party: Party) -> None:
    def act(rank: int, group: ProcessGroup) -> list[float]:
        tensor = torch.ones(4, dtype=torch.int32 if rank else torch.float32)
        group.allreduce([tensor]).wait()
        return [float(value) for value in tensor]

    assert [2.0] * 4 not in party.together(unchecked(party), act)


def test_without_the_check_another_reduction_is_silent_garbage(party: Party) -> None:
    def act(rank: int, group: ProcessGroup) -> list[float]:
        tensor = torch.full((4,), rank + 2.0)
        options = torch.distributed.AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.MAX if rank else ReduceOp.SUM)
        group.allreduce([tensor], options).wait()
        return tensor.tolist()

    assert party.together(unchecked(party), act)[0] == [5.0, 5.0, 3.0, 3.0]


def test_without_the_check_a_longer_target_is_half_filled(party: Party) -> None:
    def act(rank: int, group: ProcessGroup) -> list[float]:
        tensor = torch.full((2 + 2 * rank,), float(rank))
        group.broadcast_one(tensor, 0).wait()
        return tensor.tolist()

    assert party.together(unchecked(party), act)[1] == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("check", [False, True])
def test_another_shape_ends_the_process_and_with_the_check_it_does_not(
    processes: Processes, store: TCPStore, party: Party, check: bool
) -> None:
    script = Path(__file__).with_name("checking_member.py")
    prefix = party.prefix()
    members = [
        processes.start(sys.executable, str(script), prefix, str(rank), env={CHECK_ENV: str(int(check))})
        for rank in range(2)
    ]
    codes = [member.wait() for member in members]
    if check:
        assert codes == [0, 0]
        texts = {member.wait_for_output("refused: (.*)").group(1) for member in members}
        assert texts == {
            "the ranks do not agree on the shape: "
            "rank 0: allreduce #1 float32[4]; rank 1: allreduce #1 float32[8]"
        }
    else:
        assert -6 in codes  # SIGABRT: nothing in Python could catch it
        assert any("terminate called" in member.output for member in members)
