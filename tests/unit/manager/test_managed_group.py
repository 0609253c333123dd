"""The order of abort and configure, driven step by step with a process group that blocks on command."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.manager.test_step import quorum
from torchft_like.core.replica_group import LossNotice
from torchft_like.core.step import StepProtocol, StepRules
from torchft_like.errors import MemberLostError, ProcessGroupAbortedError
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.process_group import ProcessGroupDummy

LIMIT_S = 30.0


class BlockingGroup(ProcessGroupDummy):
    """`configure` waits until it is released, aborted, or to end with its signal; aborts are counted.

    A deaf one hears no abort: those come before it has begun to listen.
    """

    def __init__(self, is_deaf: bool = False) -> None:
        super().__init__(0, 1)
        self.entered = threading.Event()
        self.proceed = threading.Event()
        self.aborts: list[str] = []
        self._aborted = threading.Event()
        self._is_deaf = is_deaf

    def configure(self, *_args: Any, **about: Any) -> None:
        about["ends_with"].add(self._aborted.set)
        self.entered.set()
        while not self.proceed.wait(0.001):
            if self._aborted.is_set():
                raise ProcessGroupAbortedError(self.aborts[-1])

    def abort(self, reason: str = "") -> None:
        self.aborts.append(reason)
        if not self._is_deaf:
            self._aborted.set()


class Setting:
    def __init__(self, pg: BlockingGroup) -> None:
        self.pg = pg
        self.protocol = StepProtocol(StepRules(1))
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.group = ManagedGroup(pg, self.protocol, self._record)
        self.configured: bool | None = None

    def agree(self, quorum_id: int) -> None:
        self.protocol.begin()
        self.group.agree(quorum(quorum_id), allow_heal=True)

    def configure(self, quorum_id: int) -> None:
        self.configured = self.group.configure(quorum(quorum_id), "s:1/p", "a:1", (0, 1))

    def is_ready_in(self, quorum_id: int) -> None:
        self.pg.proceed.set()
        self.agree(quorum_id)
        self.configure(quorum_id)

    def _record(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting(BlockingGroup())
    yield setting
    setting.pg.proceed.set()


@pytest.mark.progress
@pytest.mark.parametrize("is_deaf", [False, True], ids=["it listens", "before it listens"])
def test_a_loss_during_configure_ends_it(is_deaf: bool) -> None:
    setting = Setting(BlockingGroup(is_deaf))
    setting.agree(1)
    thread = threading.Thread(target=setting.configure, args=(1,))
    thread.start()
    assert setting.pg.entered.wait(LIMIT_S)
    setting.group.member_lost(LossNotice(1, "b:1", "connection closed"))
    thread.join(LIMIT_S)
    assert setting.configured is False
    assert setting.pg.aborts == ["lost b:1: connection closed"]
    assert setting.group.refuse()
    assert setting.kinds()[:2] == ["loss", "abort"]


@pytest.mark.progress
def test_a_quorum_that_broke_before_configure_is_not_configured(setting: Setting) -> None:
    setting.agree(1)
    setting.group.member_lost(LossNotice(1, "b:1", "gone"))
    setting.configure(1)
    assert setting.configured is False
    assert not setting.pg.entered.is_set()


@pytest.mark.no_zombie
def test_an_abort_for_an_old_quorum_does_not_touch_the_new_one(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.is_ready_in(2)
    setting.group.fail(1, RuntimeError("late callback"))
    setting.group.member_lost(LossNotice(1, "b:1", "late notice"))
    assert setting.pg.aborts == []
    assert not setting.group.refuse()
    assert setting.protocol.vote()


@pytest.mark.progress
def test_a_local_error_releases_the_peers_at_once(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.group.fail_current(ValueError("loss is nan"))
    assert len(setting.pg.aborts) == 1
    assert not setting.protocol.vote()
    assert setting.kinds() == ["error"]


def test_an_error_that_only_this_replica_has_does_not_disturb_the_peers(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.group.fail(1, RuntimeError("heal failed"), group_broken=False)
    assert setting.pg.aborts == []
    assert not setting.group.refuse()
    assert not setting.protocol.vote()


def test_a_collective_in_a_broken_quorum_spoils_the_step_with_a_clear_reason(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.group.member_lost(LossNotice(1, "b:1", "gone"))
    assert setting.protocol.vote(), "its collectives may all have succeeded"
    assert setting.group.refuse()
    assert isinstance(setting.protocol.failure, MemberLostError)
    assert not setting.protocol.vote()


def test_a_configure_that_fails_is_told_and_spoils_the_step(setting: Setting) -> None:
    def fail(*_args: Any, **_about: Any) -> None:
        raise OSError("Too many open files")

    setting.pg.configure = fail  # type: ignore[method-assign]
    setting.agree(1)
    setting.configure(1)
    assert setting.configured is False
    assert setting.events == [("error", {"quorum_id": 1, "reason": "OSError: Too many open files"})]
    assert not setting.protocol.vote()


@pytest.mark.progress
def test_an_error_reported_before_the_quorum_is_known_releases_the_peers_in_it(setting: Setting) -> None:
    setting.is_ready_in(1)
    setting.protocol.decide(committed=True)
    setting.protocol.begin()
    setting.group.fail_current(ValueError("a bad batch"))
    assert setting.pg.aborts == []
    setting.group.agree(quorum(1), allow_heal=True)
    assert len(setting.pg.aborts) == 1
    assert setting.group.refuse()
