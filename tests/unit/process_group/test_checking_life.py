"""The check of collectives: order, threads, sends and receives, switching it on, and why there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import AllreduceOptions, DebugLevel, ReduceOp, TCPStore, Work

from torchft_like.core.agreement import referee
from torchft_like.errors import (
    CollectiveMismatchError,
    CollectiveRefusedError,
    CollectiveTimeoutError,
    ConfigError,
    ProcessGroupError,
)
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupGloo,
)
from torchft_like.process_group.checking import CALL, CHECK_ENV, Check, CheckedBackend, Link, Request
from torchft_like.testing.processes import Processes

from .checking_calls import assert_goes_on, checking, checking_threads, error_of
from .conftest import LIMIT_S, Party, allreduced, wait_until

pytestmark = pytest.mark.usefixtures("no_operator")

STEPS = 5
EITHER_CHECK = pytest.mark.parametrize("check", [True, "new"], ids=["all", "new"])


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


@EITHER_CHECK
def test_groups_used_in_opposite_orders_do_not_wait_for_each_other(party: Party, check: Check) -> None:
    """Right with asynchronous calls: a check that blocked its callers would hang here."""
    one, other = (party.meet(2, lambda: checking(check=check)) for _ in range(2))

    def act(rank: int, _: Any) -> list[float]:
        first, second = (one, other) if rank == 0 else (other, one)
        tensor = torch.ones(1)
        started = first[rank].allreduce([tensor])
        between = allreduced(second[rank])
        started.wait()
        return [between, tensor.item()]

    for _ in range(STEPS):
        assert party.together(one, act) == [[2.0, 2.0]] * 2


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


@EITHER_CHECK
def test_what_the_backend_refuses_leaves_the_group_usable(party: Party, check: Check) -> None:
    """A call that the ranks predict is refused at once, any other by its wait."""
    groups, whole = party.meet(2, lambda: checking(check=check)), torch.ones(4)

    def overlap(_: int, group: ProcessGroup) -> Exception:
        return error_of(lambda: group.allreduce([whole[:3], whole[1:]]).wait())

    for _ in range(STEPS):
        for error in party.together(groups, overlap):
            assert isinstance(error, CollectiveRefusedError)
            assert "share memory" in str(error)
    assert_goes_on(party, groups)


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


def test_a_receive_that_nobody_waits_for_harms_nobody(party: Party) -> None:
    groups = party.meet(2, checking)
    groups[0].set_timeout(timedelta(seconds=1))
    left_open = groups[0].recv([torch.zeros(1)], 1, 9)
    groups[0].set_timeout(timedelta(seconds=LIMIT_S))
    for _ in range(3):
        assert_goes_on(party, groups)
        threading.Event().wait(0.5)  # in all longer than the timeout
    assert_goes_on(party, groups)
    sent = groups[1].send([torch.ones(1)], 0, 9)
    party.together(groups, lambda rank, _: (left_open, sent)[rank].wait())


def test_a_receive_that_nobody_sends_to_names_the_sender(party: Party) -> None:
    groups = party.meet(3, checking)
    groups[0].set_timeout(timedelta(seconds=0.3))
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


# Switching it on.


@pytest.mark.parametrize(
    ("argument", "environment", "level", "expected"),
    [
        (None, None, DebugLevel.OFF, "new"),
        (None, "0", DebugLevel.OFF, False),
        (None, "1", DebugLevel.OFF, True),
        (True, "0", DebugLevel.OFF, False),
        (False, "1", DebugLevel.OFF, True),
        (True, "", DebugLevel.OFF, True),
        (False, "", DebugLevel.OFF, False),
        (None, None, DebugLevel.DETAIL, True),
        (None, None, DebugLevel.INFO, "new"),
        ("new", None, DebugLevel.DETAIL, "new"),
        (True, "new", DebugLevel.DETAIL, "new"),
        ("new", "1", DebugLevel.OFF, True),
        ("new", "0", DebugLevel.OFF, False),
        (False, None, DebugLevel.DETAIL, False),
        (None, "0", DebugLevel.DETAIL, False),
    ],
)
def test_the_operators_variable_beats_the_argument_which_beats_torchs_debug_level(
    party: Party,
    monkeypatch: pytest.MonkeyPatch,
    argument: Check | None,
    environment: str | None,
    level: DebugLevel,
    expected: Check,
) -> None:
    monkeypatch.setenv(CHECK_ENV, environment or "")
    before = c10d.get_debug_level()
    c10d.set_debug_level(level)
    try:
        groups = party.meet(2, lambda: ProcessGroupGloo(30, check_collectives=argument))
    finally:
        c10d.set_debug_level(before)
    backend = groups[0]._generation._backend  # type: ignore[attr-defined]
    assert isinstance(backend, CheckedBackend) == bool(expected)
    if isinstance(backend, CheckedBackend):
        assert backend._predicts == (expected == "new")
    assert_goes_on(party, groups)


def test_an_environment_that_says_neither_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHECK_ENV, "yes")
    with pytest.raises(ConfigError, match=f"{CHECK_ENV} is 'yes': it must be 0, 1 or new"):
        ProcessGroupGloo(30)


def test_a_group_of_one_asks_nobody(party: Party) -> None:
    (group,) = party.meet(1, checking)
    assert allreduced(group) == 1.0
    assert checking_threads() == []


# Without the check: why there is one.


@pytest.mark.parametrize("fitting", [0, 9])
@pytest.mark.parametrize("environment", [{CHECK_ENV: "0"}, {}], ids=["no check", "the default"])
def test_another_shape_ends_the_process_and_with_the_check_it_does_not(
    processes: Processes,
    store: TCPStore,
    party: Party,
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    fitting: int,
) -> None:
    monkeypatch.delenv(CHECK_ENV, raising=False)
    script = Path(__file__).with_name("checking_member.py")
    prefix = party.prefix()
    members = [
        processes.fork(str(script), prefix, str(rank), str(fitting), env=environment) for rank in range(2)
    ]
    codes = [member.wait() for member in members]
    if environment.get(CHECK_ENV) != "0":
        assert codes == [0, 0]
        texts = {member.wait_for_output("refused: (.*)").group(1) for member in members}
        assert texts == {
            "the ranks do not agree on the shape: "
            f"rank 0: allreduce #{fitting + 1} float32[4]; rank 1: allreduce #{fitting + 1} float32[8]"
        }
    else:
        assert -6 in codes  # SIGABRT: nothing in Python could catch it
        assert any("terminate called" in member.output for member in members)


def test_silence_is_noticed_while_a_caller_is_blocked_sending(party: Party, pair: list[ProcessGroup]) -> None:
    backend = pair[0]._generation._backend  # type: ignore[attr-defined]
    with backend._lock:  # as the caller has it
        assert party.aside(backend.is_overdue).result(LIMIT_S) is False


# The check as it is by default: calls that all ranks predict start at once, the others are compared.


BUCKETS = (4, 4, 8)


def usual() -> ProcessGroup:
    return ProcessGroupGloo(60)


def step(group: ProcessGroup, *sizes: int) -> None:
    """Reduce a bucket of each size, all at once, as DDP does."""
    tensors = [torch.ones(size) for size in sizes]
    for work in [group.allreduce([tensor]) for tensor in tensors]:
        work.wait()
    for tensor in tensors:
        assert torch.equal(tensor, torch.full_like(tensor, group.size()))


def step_of(size: int, _: int, group: ProcessGroup) -> None:
    step(group, size)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What ranks tell their referees."""
    requests: list[Request] = []
    send = Link.send

    def remember(self: Link, request: Request) -> None:
        requests.append(request)
        send(self, request)

    monkeypatch.setattr(Link, "send", remember)
    return requests


def test_the_first_step_is_compared_and_the_others_cost_no_message(party: Party, said: list[Request]) -> None:
    groups = party.meet(3, usual)
    party.together(groups, lambda _, group: step(group, *BUCKETS))
    assert len(said) >= 3 * len(BUCKETS)
    party.together(groups, lambda _, group: step(group, *BUCKETS))
    said.clear()
    for _ in range(STEPS):
        party.together(groups, lambda _, group: step(group, *BUCKETS))
    assert said == []


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_options_by_place_and_by_name_are_the_same_call(party: Party, op: ReduceOp.RedOpType) -> None:
    def reduce(by_place: int, op: ReduceOp.RedOpType, rank: int, group: ProcessGroup) -> list[float]:
        tensor, options = torch.tensor([2.0, 3.0]), AllreduceOptions()
        options.reduceOp = ReduceOp(op)
        ways: list[Callable[[], Work]] = [
            lambda: group.allreduce([tensor], opts=options),
            lambda: group.allreduce([tensor], options),
        ]
        ways[rank == by_place]().wait()
        return tensor.tolist()

    groups = party.meet(2, usual)
    expected = {ReduceOp.SUM: [4.0, 6.0], ReduceOp.MAX: [2.0, 3.0], ReduceOp.PRODUCT: [4.0, 9.0]}[op]
    for by_place in (0, 1, 0, 1):
        assert party.together(groups, partial(reduce, by_place, op)) == [expected] * 2

    def differ(rank: int, group: ProcessGroup) -> Exception:
        return error_of(lambda: reduce(rank, ReduceOp.MIN if rank else op, rank, group))

    for error in party.together(groups, differ):
        assert isinstance(error, CollectiveMismatchError)
        assert "by MIN" in str(error)


def test_every_configuration_is_compared_anew(party: Party, said: list[Request]) -> None:
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        assert_goes_on(party, groups)
    said.clear()
    party.configure(groups)
    assert_goes_on(party, groups)
    assert [request.kind for request in said] == [CALL, CALL]


def test_another_shape_in_the_first_step_is_refused_and_the_group_stays_usable(party: Party) -> None:
    groups = party.meet(3, usual)
    errors = party.together(
        groups, lambda rank, group: error_of(group.allreduce([torch.ones(4 + rank // 2)]).wait)
    )
    assert {str(error) for error in errors} == {
        "the ranks do not agree on the shape: "
        "ranks 0, 1: allreduce #1 float32[4]; rank 2: allreduce #1 float32[5]"
    }
    assert all(group.errored() is None for group in groups)
    assert_goes_on(party, groups)


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("other", [8, 16, 2], ids=["a known shape", "a larger shape", "a smaller shape"])
def test_another_shape_later_reaches_no_backend_and_ends_the_configuration_on_all_ranks(
    party: Party, odd: int, other: int
) -> None:
    """Two ranks are in the backend already, as predicted; it would end their process."""
    groups = party.meet(3, usual)
    for _ in range(STEPS):
        party.together(groups, lambda _, group: step(group, *BUCKETS))

    def act(rank: int, group: ProcessGroup) -> Exception:
        tensor = torch.full((other if rank == odd else BUCKETS[0],), float(rank))
        error = error_of(group.allreduce([tensor]).wait)
        assert rank != odd or torch.equal(tensor, torch.full_like(tensor, rank))
        return error

    errors = party.together(groups, act)
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    assert len({str(error) for error in errors}) == 1
    assert f"rank {odd}: allreduce #16 float32[{other}]" in str(errors[0])
    for group in groups:
        assert isinstance(group.errored(), CollectiveMismatchError)
    party.configure(groups)
    party.together(groups, lambda _, group: step(group, *BUCKETS))


def test_a_predicted_call_that_times_out_names_the_rank_that_did_not_come(party: Party) -> None:
    groups = party.meet(3, usual)
    for _ in range(STEPS):
        party.together(groups, lambda _, group: step(group, *BUCKETS))

    def act(rank: int, group: ProcessGroup) -> Exception | None:
        group.set_timeout(timedelta(seconds=1))
        return None if rank == 1 else error_of(group.allreduce([torch.ones(BUCKETS[0])]).wait)

    errors = party.together(groups, act)
    for error in errors[::2]:
        assert isinstance(error, CollectiveTimeoutError)
        assert str(error) == "timed out after 1 s: rank 1 did not come; waiting: ranks 0, 2: collective #16"
        assert error.__cause__ is not None, "the backend's error"
    party.configure(groups)
    party.together(groups, lambda _, group: step(group, *BUCKETS))


def test_a_future_of_a_call_under_way_gets_the_mismatch(party: Party) -> None:
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        assert_goes_on(party, groups)
    future = groups[0].allreduce([torch.ones(1)]).get_future()
    error_of(groups[1].allreduce([torch.ones(3)]).wait)
    with pytest.raises(CollectiveMismatchError):
        party.aside(future.wait).result(LIMIT_S)


def test_ranks_that_run_ahead_and_ranks_that_wait_agree(party: Party) -> None:
    """Rank 0 begins everything at once, so it cannot predict; rank 1 waits for each, so it can."""
    groups = party.meet(2, usual)

    def act(rank: int, group: ProcessGroup) -> list[float]:
        tensors = [torch.full((1 + number % 2,), float(number)) for number in range(40)]
        works = []
        for tensor in tensors:
            works.append(group.allreduce([tensor]))
            if rank == 1:
                works[-1].wait()
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in tensors]

    for _ in range(STEPS):
        assert party.together(groups, act) == [[2.0 * number for number in range(40)]] * 2


def test_an_operation_of_its_own_on_one_rank_is_found_whatever_came_before(party: Party) -> None:
    """A rank gives a step up in its middle and begins the next one: all its calls are known ones."""
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        party.together(groups, lambda _, group: step(group, *BUCKETS))
    party.together(groups, lambda _, group: step(group, *BUCKETS[:2]))
    errors = party.together(
        groups, lambda rank, group: error_of(lambda: step(group, BUCKETS[2] if rank else BUCKETS[0]))
    )
    assert {type(error) for error in errors} == {CollectiveMismatchError}


def test_messages_between_two_ranks_are_not_compared(party: Party, said: list[Request]) -> None:
    groups = party.meet(2, usual)

    def act(rank: int, group: ProcessGroup) -> float:
        tensor = torch.full((2,), float(rank))
        (group.recv([tensor], 0, 7) if rank else group.send([tensor], 1, 7)).wait()
        return float(tensor[0])

    assert party.together(groups, act) == [0.0, 0.0]
    assert said == []


def test_after_enough_comparisons_nothing_is_compared(
    party: Party, said: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(referee, "COMPARED_MAX", 10)
    groups = party.meet(2, usual)
    for size in range(1, 13):
        party.together(groups, partial(step_of, size))
    said.clear()
    for size in range(20, 30):
        party.together(groups, partial(step_of, size))
    assert said == []


@pytest.mark.parametrize("later", [False, True], ids=["first", "later"])
def test_a_baby_group_is_checked_in_front_of_its_subprocess(party: Party, later: bool) -> None:
    groups = party.meet(2, lambda: ProcessGroupBabyGloo(60))
    for _ in range(STEPS if later else 0):
        assert_goes_on(party, groups)
    errors = party.together(
        groups, lambda rank, group: error_of(lambda: group.allreduce([torch.ones(1 + rank)]).wait())
    )
    assert {type(error) for error in errors} == {CollectiveMismatchError}
    party.configure(groups)
    assert_goes_on(party, groups)


@pytest.mark.parametrize("whole", [0, 1])
def test_ranks_that_check_in_different_ways_are_told(party: Party, whole: int) -> None:
    ways: list[Callable[[], Any]] = [usual, lambda: ProcessGroupGloo(60, check_collectives=True)]
    groups = [party.own(ways[rank == whole]()) for rank in range(2)]
    prefix = party.prefix()
    attempts = [party.aside(lambda r=rank: groups[r].configure(prefix, r, 2)) for rank in range(2)]
    for attempt in attempts:
        with pytest.raises(ProcessGroupError, match="ranks 0 and 1 check collectives differently"):
            attempt.result(LIMIT_S)


def test_the_referee_is_not_needed_for_calls_that_are_predicted(party: Party) -> None:
    groups = party.meet(2, usual)
    for _ in range(STEPS):
        assert_goes_on(party, groups)
    for group in groups:
        backend = group._generation._backend  # type: ignore[attr-defined]
        assert isinstance(backend, CheckedBackend)
        backend._link.cut()
        backend._link.join()
    assert_goes_on(party, groups)
