"""The quorum driver and its worker, with a dummy process group."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.faults import raising
from tests.unit.manager.members import member
from tests.waiting import wait_for
from torchft_like import devices
from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.core.assignment import QuorumResult, assign
from torchft_like.core.replica_group import GroupLostNotice, StepLostNotice, SuspectNotice, Verdict
from torchft_like.core.step import StepProtocol, StepRules
from torchft_like.errors import GroupLostError, ShutdownError, StepLostError
from torchft_like.gang import ProcessGroupGang
from torchft_like.gang.group_gang import Part
from torchft_like.manager import quorum_driver
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.config import ManagerArguments, ManagerConfig, resolve
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.manager.managed_work import Reduction
from torchft_like.manager.quorum_driver import QuorumDriver, QuorumWorker
from torchft_like.manager.state_exchange import StateExchange
from torchft_like.manager.state_registry import StateRegistry
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.wrapper import ProcessGroupDummy

LIMIT_S = 30.0


def ignore(*_: object, **__: object) -> None:
    """An event that nobody reads."""


@pytest.fixture
def protocol() -> StepProtocol:
    return StepProtocol(StepRules(1))


def config_of(name: str) -> ManagerConfig:
    arguments: dict[str, Any] = dict.fromkeys(ManagerArguments.__dataclass_fields__)
    arguments |= {"timeout": LIMIT_S, "quorum_timeout": LIMIT_S, "connect_timeout": LIMIT_S, "rank": 0}
    arguments |= {"world_size": 1, "lighthouse_addr": "http://127.0.0.1:1", "replica_id": name}
    arguments |= {"hostname": "127.0.0.1"}
    return resolve(ManagerArguments(**arguments), {})


@pytest.fixture
def driver(protocol: StepProtocol) -> Iterator[QuorumDriver]:
    config, transport = config_of("a"), HTTPTransport[Any](timedelta(seconds=LIMIT_S))
    group = ManagedGroup(ProcessGroupDummy(0, 1), protocol, ignore)
    exchange = StateExchange(config, protocol, group, StateRegistry(), transport, ignore)
    driver = QuorumDriver(config, protocol, group, exchange, ignore)
    yield driver
    driver.stop(ShutdownError("over"), LIMIT_S)
    transport.shutdown()


def quorum(quorum_id: int, **steps: int) -> QuorumResult:
    here = {"address": "http://127.0.0.1:1", "store_address": "127.0.0.1:2"}
    return assign(quorum_id, [member(name, step, 1, **here) for name, step in steps.items()], "a", 0, True)


@pytest.mark.no_zombie
def test_an_error_spoils_its_own_quorum_known_or_not(driver: QuorumDriver, protocol: StepProtocol) -> None:
    early, late = Attempt(True, LIMIT_S), Attempt(True, LIMIT_S)
    given_up = Attempt(True, LIMIT_S)
    driver.begin(given_up)
    driver.begin(early)
    driver.spoil(given_up, RuntimeError("of an attempt whose quorum nobody knows"))
    assert protocol.failure is None
    error = RuntimeError("early")
    driver.spoil(early, error)
    driver.quorum(quorum(5, a=3, b=3))
    early.wait_configured(str)
    assert protocol.failure is error
    assert not protocol.vote()
    protocol.decide(committed=False)
    driver.begin(late)
    driver.quorum(quorum(6, a=3, b=3))
    late.wait_configured(str)
    driver.spoil(early, RuntimeError("of an older quorum"))
    assert protocol.vote()
    driver.spoil(late, error)
    assert not protocol.vote()


@pytest.mark.agreement
def test_another_ranks_no_spoils_the_step_in_its_quorum(driver: QuorumDriver, protocol: StepProtocol) -> None:
    attempt = Attempt(True, LIMIT_S)
    driver.begin(attempt)
    driver.quorum(quorum(5, a=3, b=3))
    attempt.wait_configured(str)
    driver.hear(StepLostNotice((0,), 4))  # of a step that was given up
    assert protocol.failure is None
    driver.hear(StepLostNotice((0,), 5))
    assert isinstance(protocol.failure, StepLostError)
    assert not protocol.can_communicate


@pytest.mark.parametrize("error", [RuntimeError("cannot prepare"), SystemExit("cannot prepare")])
def test_a_job_that_fails_is_told_and_the_next_one_runs(error: BaseException) -> None:
    worker, attempt, next_one = QuorumWorker(), Attempt(True, LIMIT_S), Attempt(True, LIMIT_S)
    worker.submit(raising(error), attempt.fail)
    worker.submit(lambda: next_one.agree(quorum(5, a=3)))
    worker.submit(next_one.open_configured)
    with pytest.raises((RuntimeError, StepLostError), match="cannot prepare"):
        attempt.wait_configured(str)
    next_one.wait_configured(str)
    worker.stop(LIMIT_S)


@pytest.mark.progress
def test_an_operation_that_does_not_begin_fails(driver: QuorumDriver) -> None:
    def exit_here() -> Any:
        raise SystemExit("in the middle of it")

    with pytest.raises(StepLostError, match="in the middle of it"):
        driver.defer(exit_here, []).wait(LIMIT_S)
    driver.stop(ShutdownError("over"), LIMIT_S)
    with pytest.raises(ShutdownError):
        driver.defer(exit_here, []).wait(LIMIT_S)


@pytest.mark.progress
def test_a_group_that_is_lost_just_before_an_attempt_begins_fails_it(driver: QuorumDriver) -> None:
    driver.raise_if_over()
    driver.hear(GroupLostNotice("rank 0 is gone"))
    attempt = Attempt(True, LIMIT_S)
    driver.begin(attempt)
    with pytest.raises(GroupLostError, match="rank 0 is gone"):
        attempt.wait_configured(str)


def test_a_rank_without_a_lighthouse_says_so_where_another_one_of_its_group_gave_up_first(
    driver: QuorumDriver,
) -> None:
    """The other one has no session with the lighthouse, and knows only that it got no quorum."""
    driver.lighthouse_disconnected("connection refused")
    driver.hear(GroupLostNotice("rank 1 is gone"))
    away = "rank 1 is gone; the lighthouse at 127.0.0.1:1 cannot be reached .connection refused.; restart all"
    with pytest.raises(GroupLostError, match=away):
        driver.raise_if_over()


def test_a_group_that_has_hung_up_for_a_suspect_does_not_blame_the_lighthouse(driver: QuorumDriver) -> None:
    driver.hear(SuspectNotice(1, "rank 1 is silent"))
    driver.lighthouse_disconnected("this replica group waits for one of its ranks")
    driver.hear(GroupLostNotice("rank 1 is gone"))
    with pytest.raises(GroupLostError, match=r"^rank 1 is gone; restart all ranks"):
        driver.raise_if_over()


def begun(driver: QuorumDriver) -> Attempt:
    attempt = Attempt(True, LIMIT_S)
    driver.begin(attempt)
    return attempt


def test_a_rank_waits_for_others_from_the_quorum_on_until_it_is_prepared(driver: QuorumDriver) -> None:
    assert driver.waits_for() is None
    attempt = begun(driver)
    assert driver.waits_for() is None, "it waits for the lighthouse"
    attempt.agree(quorum(5, a=3, b=3))
    first = driver.waits_for()
    assert first is not None
    attempt.open_configured()
    assert driver.waits_for() is None
    begun(driver).agree(quorum(5, a=3, b=3))
    assert driver.waits_for() not in (None, first), "another attempt is another wait"


def test_a_rank_waits_for_others_in_an_allreduce_until_it_was_followed_up(driver: QuorumDriver) -> None:
    attempt = begun(driver)
    attempt.agree(quorum(5, a=3, b=3))
    attempt.open_configured()
    works = [Reduction([torch.ones(1)], None, ignore, attempt.pending_collectives) for _ in range(2)]
    waits = []
    for work in works:
        waits.append(driver.waits_for())
        work.wait()
        attempt.pending_collectives.pop(work, None)
    assert None not in waits
    assert waits[0] != waits[1]
    assert driver.waits_for() is None


def test_a_rank_waits_for_others_in_a_call_of_a_gang_over_its_group(driver: QuorumDriver) -> None:
    attempt, group = begun(driver), driver._group.pg
    attempt.agree(quorum(5, a=3, b=3))
    attempt.open_configured()
    assert isinstance(group, ProcessGroup)
    of_part, of_others = ProcessGroupDummy(0, 1), ProcessGroupDummy(0, 1)
    whole, part, other = (ProcessGroupGang(pg, torch.device("cpu")) for pg in (group, of_part, of_others))
    part._part = Part(of_part, group, group.configuration)
    waits = []
    for gang in (whole, part, other):
        with gang._communicating("barrier"):
            waits.append(driver.waits_for())
        assert driver.waits_for() is None
    assert waits[2] is None, "no other replica group has to do with it"
    assert None not in waits[:2]
    assert waits[0] != waits[1]


def test_a_rank_waits_in_what_its_device_does(driver: QuorumDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = begun(driver)
    attempt.agree(quorum(5, a=3, b=3))
    attempt.open_configured()
    waits: list[object] = []
    monkeypatch.setattr(devices, "is_in_use", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(driver.waits_for()))
    attempt.synchronize()
    assert len(waits) == 1
    assert waits[0] is not None
    assert driver.waits_for() is None


def test_a_rank_that_has_voted_waits_for_others_until_the_verdict(driver: QuorumDriver) -> None:
    attempt = begun(driver)
    attempt.agree(quorum(5, a=3, b=3))
    attempt.open_configured()
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(attempt.wait_decided, LIMIT_S)
        wait_for(lambda: driver.waits_for() is not None)
        attempt.decide(Verdict(3, True, False))
        assert verdict.result(LIMIT_S) == Verdict(3, True, False)
    assert driver.waits_for() is None


def test_a_rank_that_was_told_of_an_error_waits_for_nobody(driver: QuorumDriver) -> None:
    attempt = begun(driver)
    attempt.agree(quorum(5, a=3, b=3))
    attempt.fail(RuntimeError("over"))
    assert driver.waits_for() is None


@pytest.mark.no_zombie
def test_a_verdict_on_an_attempt_given_up_is_void(driver: QuorumDriver, protocol: StepProtocol) -> None:
    begun(driver)
    driver.quorum(quorum(5, a=3, b=3))
    again = begun(driver)  # `should_commit` was left by an exception, after the vote
    driver.verdict(Verdict(protocol.step, True))
    driver.quorum(quorum(6, a=3, b=3))
    assert again.wait_decided(0) is None
    driver.verdict(Verdict(protocol.step, False))
    assert again.wait_decided(0) == Verdict(protocol.step, False)


@pytest.mark.progress
def test_a_rank_whose_group_does_not_leave_after_all_asks_again(
    driver: QuorumDriver, protocol: StepProtocol, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to stop and had waited for too long, just as there was a quorum; another rank lost its step."""
    monkeypatch.setattr(quorum_driver, "STOP_WAIT_S", 0.01)
    in_vain, left = begun(driver), threading.Event()
    in_vain.leave = left.set
    driver.asked_to_stop()
    assert left.wait(LIMIT_S)
    monkeypatch.undo()
    driver.verdict(Verdict(protocol.step, False))
    protocol.decide(committed=False)
    assert not (begun(driver) and protocol.is_given_up)


@pytest.mark.agreement
def test_a_rank_does_not_leave_with_a_step_that_it_gave_up(
    driver: QuorumDriver, protocol: StepProtocol
) -> None:
    """Its script did so after its vote. What it has begun again has no averages."""
    begun(driver)
    again = begun(driver)
    driver.verdict(Verdict(protocol.step, True, stop=True))
    for attempt in (again, begun(driver)):
        with pytest.raises(GroupLostError, match="gave up step 0"):
            attempt.wait_decided(0)
        assert attempt.verdict is None
