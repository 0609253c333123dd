"""Serving and healing at the end of a step, with a dummy process group and transports that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch

from lighthouse.core.decisions import DISOWNED, NO_STATE
from tests.unit.manager.test_quorum_driver import LIMIT_S, config_of, ignore, quorum
from tests.waiting import wait_for
from torchft_like import devices
from torchft_like.checkpointing.copy_ahead import PLAIN_FROM, CopyAhead
from torchft_like.checkpointing.host_memory import KeptMemory
from torchft_like.checkpointing.transport import CheckpointTransport, Destination, Source
from torchft_like.core.replica_group import GroupLostNotice, LossNotice
from torchft_like.core.step import StepProtocol, StepRules
from torchft_like.errors import CheckpointError, ForeignStateError, GroupLostError, ShutdownError
from torchft_like.manager import kept_state, state_exchange
from torchft_like.manager.attempt import Attempt
from torchft_like.manager.managed_group import ManagedGroup
from torchft_like.manager.quorum_driver import QuorumDriver
from torchft_like.manager.state_exchange import StateExchange
from torchft_like.manager.state_registry import StateRegistry
from torchft_like.optim import GradientReplay
from torchft_like.process_group.wrapper import ProcessGroupDummy

SERVES, HEALS = {"a": 3, "b": 2}, {"a": 2, "b": 3}


class Transport(CheckpointTransport[Any]):
    """Keeps what it is told; a receive waits until it is aborted."""

    def __init__(self) -> None:
        self.offered: list[Any] = []
        self.refused: list[tuple[list[int], int, str]] = []
        self.is_receiving, self._aborted = threading.Event(), threading.Event()

    def metadata(self) -> str:
        return ""

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        self.offered.append(state_dict)

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        self.refused.append((dst_ranks, step, reason))

    def disallow_checkpoint(self) -> None:
        self.offered.clear()
        raise RuntimeError("transport broke")

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        self.is_receiving.set()
        assert self._aborted.wait(LIMIT_S)
        raise CheckpointError("aborted")

    def abort_recv(self, reason: str = "aborted") -> None:
        self._aborted.set()


class Replica:
    """Replica a, as far as an exchange of state needs one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, use_async_quorum: bool = True, asks: bool = False
    ) -> None:
        self.transport = Transport()
        self.registry = StateRegistry()
        self.protocol = StepProtocol(StepRules(1, use_async_quorum=use_async_quorum))
        config = config_of("a")
        group = ManagedGroup(ProcessGroupDummy(0, 1), self.protocol, ignore)
        self.exchange = StateExchange(config, self.protocol, group, self.registry, self.transport, ignore)
        self.driver = QuorumDriver(config, self.protocol, group, self.exchange, ignore)
        if not asks:
            monkeypatch.setattr(self.exchange, "_ask", lambda *_: [Source(1, "")])

    def begin(self, quorum_id: int, **steps: int) -> Attempt:
        """A step, until its quorum is configured."""
        attempt = Attempt(True, LIMIT_S)
        self.driver.begin(attempt)
        self.driver.quorum(quorum(quorum_id, **steps))
        attempt.wait_configured(str)
        return attempt

    def end(self, attempt: Attempt) -> bool:
        """The rest of the step."""
        self.exchange.exchange(attempt)
        vote = self.protocol.vote()
        self.protocol.decide(vote)
        return vote


@pytest.fixture
def use_async_quorum() -> bool:
    return True


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch, use_async_quorum: bool) -> Iterator[Replica]:
    replica = Replica(monkeypatch, use_async_quorum)
    yield replica
    replica.driver.stop(ShutdownError("over"), LIMIT_S)


def no_memory() -> object:
    raise RuntimeError("no memory for a copy")


@pytest.mark.at_rest
def test_a_state_is_read_by_the_thread_that_ends_the_step_once_and_not_before(replica: Replica) -> None:
    readers: list[threading.Thread] = []
    replica.registry.register("model", ignore, lambda: readers.append(threading.current_thread()))
    attempt = replica.begin(5, **SERVES)
    assert readers == []
    replica.exchange.exchange(attempt)
    replica.exchange.exchange(attempt)
    assert readers == [threading.current_thread()]


@pytest.mark.heal_is_clean
def test_a_state_is_read_when_the_device_is_done(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(devices, "is_in_use", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: seen.append("synchronized"))
    replica.registry.register("model", ignore, lambda: seen.append("read"))
    attempt = replica.begin(5, **SERVES)
    replica.exchange.exchange(attempt)
    assert seen == ["synchronized", "read"]


class TransportAhead(Transport):
    """Keeps whether the copies ahead were good for anything when the state was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[CopyAhead] = []
        self.of_use: list[bool] = []

    def begin_copy(self, tensors: Callable[[], Iterable[torch.Tensor]]) -> CopyAhead | None:
        self.begun.append(ahead := CopyAhead(tensors, KeptMemory()))
        wait_for(lambda: ahead._begun)
        return ahead

    def send_checkpoint_with(
        self, ahead: CopyAhead | None, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta
    ) -> None:
        tensor = state_dict["user"]["model"]
        self.of_use.append(ahead is not None and bool(ahead.take([tensor])))
        self.send_checkpoint(dst_ranks, step, state_dict, timeout)


@pytest.fixture
def ahead(replica: Replica) -> TransportAhead:
    """The transport of the replica, which has a state of one parameter and a replay of its optimizer."""
    parameter = torch.nn.Parameter(torch.ones(PLAIN_FROM))  # smaller ones are not copied ahead
    transport = replica.exchange._transport = TransportAhead()
    replica.exchange.replay = GradientReplay(torch.optim.SGD([parameter]))
    replica.registry.register("model", ignore, parameter.detach)
    return transport


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("reading", ["allowed", "ended", "not allowed in between", "not allowed at first"])
def test_a_source_copies_ahead_while_its_state_may_be_read(
    replica: Replica, ahead: TransportAhead, reading: str
) -> None:
    if reading == "not allowed at first":
        replica.registry.disallow_read()
    attempt = replica.begin(5, **SERVES)
    assert len(ahead.begun) == (reading != "not allowed at first")
    if reading == "not allowed in between":
        replica.registry.disallow_read()
        attempt.drop_ahead()  # as the Manager does
    replica.registry.allow_read()
    if reading == "ended":
        replica.exchange.give_up(attempt)
        assert ahead.begun[0].take([]) == {}
        attempt = replica.begin(6, **SERVES)
    assert replica.end(attempt)
    assert ahead.of_use == [reading in ("allowed", "ended")]
    assert attempt.ahead is None


def test_who_does_not_serve_copies_ahead_once_after_its_first_step(
    replica: Replica, ahead: TransportAhead
) -> None:
    for begun in (0, 1, 1):
        assert replica.end(replica.begin(5, a=3, b=3))
        assert len(ahead.begun) == begun
    assert isinstance(replica.exchange.replay, GradientReplay)
    assert ahead.begun[0].take(replica.exchange.replay.changed_by_steps()) == {}, (
        "the optimizer steps meanwhile"
    )


@pytest.mark.parametrize("step", [0, 3])
def test_a_replica_that_cannot_serve_commits_and_tells_who_asks(replica: Replica, step: int) -> None:
    replica.registry.register("model", ignore, no_memory)
    assert replica.end(replica.begin(5, a=step, b=0))
    assert replica.transport.refused == [([1], step, "RuntimeError: no memory for a copy")]


@pytest.mark.progress
def test_a_replica_that_gives_a_step_up_tells_who_waits_for_its_state(replica: Replica) -> None:
    replica.registry.register("model", ignore, dict)
    given_up = replica.begin(5, **SERVES)
    replica.exchange.give_up(given_up)
    assert replica.transport.refused == [([1], 3, "it has given its step up")]
    served = replica.begin(6, **SERVES)
    assert replica.end(served)
    replica.exchange.give_up(served)
    assert len(replica.transport.refused) == 1


@pytest.mark.progress
@pytest.mark.heal_is_clean
@pytest.mark.parametrize("use_async_quorum", [True, False])
@pytest.mark.parametrize("is_restored", [False, True])
def test_it_offers_the_state_if_that_is_as_it_was_and_goes_on_offering_it(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, use_async_quorum: bool, is_restored: bool
) -> None:
    """With a synchronous quorum the script may have changed it since the last commit."""
    monkeypatch.setattr(Transport, "keeps_offers", True)
    replica.registry.register("model", ignore, dict)
    replica.protocol.restore({"step": 3, "batches_committed": 3, "commit_quorum_id": 1})
    given_up = replica.begin(5, **SERVES)
    if is_restored:
        replica.protocol.restore({"step": 2, "batches_committed": 2})
    replica.exchange.give_up(given_up)
    replica.exchange.give_up(given_up)
    is_as_it_was = use_async_quorum and not is_restored
    assert [offer["torchft"]["step"] for offer in replica.transport.offered] == [3] * is_as_it_was
    assert len(replica.transport.refused) == (not is_as_it_was)


def test_whatever_a_transport_raises_in_a_refusal_does_not_lose_the_step(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica.transport, "refuse_checkpoint", lambda *_: no_memory())
    replica.registry.register("model", ignore, no_memory)
    assert replica.end(replica.begin(5, **SERVES))
    assert "could not be told" in caplog.text


def test_an_offer_ends_when_nobody_heals_any_more(replica: Replica, caplog: pytest.LogCaptureFixture) -> None:
    replica.registry.register("model", ignore, dict)
    assert replica.end(replica.begin(5, **SERVES))
    assert [offer["torchft"]["step"] for offer in replica.transport.offered] == [0]
    assert replica.end(replica.begin(6, a=3, c=3))
    assert replica.transport.offered == []
    assert "transport broke" in caplog.text
    caplog.clear()
    assert replica.end(replica.begin(6, a=3, c=3))
    assert caplog.text == "", "once"


@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_whatever_a_fetch_raises_the_group_breaks_for_the_others_only_if_they_count_this_replica(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, use_async_quorum: bool
) -> None:
    replica.registry.register("model", ignore, dict)
    monkeypatch.setattr(replica.transport, "recv_checkpoint", lambda **_: no_memory())
    attempt = replica.begin(5, **HEALS)
    replica.exchange.exchange(attempt)
    assert not replica.protocol.vote()
    assert replica.protocol.can_communicate is use_async_quorum


def test_nothing_is_asked_of_a_source_that_was_lost_before_the_end_of_the_step(replica: Replica) -> None:
    replica.registry.register("model", ignore, dict)
    attempt = replica.begin(5, **HEALS)
    replica.exchange.member_lost(LossNotice(4, "a", "it died"))  # of an older quorum
    replica.exchange.member_lost(LossNotice(5, "b", "it died"))
    assert not replica.end(attempt)
    assert not replica.transport.is_receiving.is_set()
    assert "broke before the state was fetched" in str(replica.protocol.failure)


@pytest.mark.progress
@pytest.mark.parametrize("keeps_offers", [True, False])
@pytest.mark.parametrize("who", ["its source", "this replica"])
def test_the_state_comes_from_a_source_that_is_alive_and_has_given_its_step_up(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, who: str, keeps_offers: bool
) -> None:
    def receive(**_: object) -> object:
        replica.exchange.member_lost(notice)
        return {"user": {"model": {}}, "torchft": {"step": 3, "commit_quorum_id": 1}}

    ended: list[object] = []
    for end in ("lose_source", "abort_recv"):
        monkeypatch.setattr(replica.transport, end, lambda *told: ended.append(told))
    monkeypatch.setattr(replica.transport, "recv_checkpoint", receive)
    monkeypatch.setattr(Transport, "keeps_offers", keeps_offers)
    replica.registry.register("model", ignore, dict)
    notice = LossNotice(5, "b" if who == "its source" else "a", "it gave the quorum up", is_alive=True)
    is_offered = keeps_offers and who == "its source"
    attempt = replica.begin(5, **HEALS)
    replica.exchange.member_lost(notice)
    replica.exchange.exchange(attempt)
    assert (replica.protocol.step == 3) == is_offered
    assert ended == []


def test_a_rank_asks_for_its_own_state_whatever_it_knows_of_the_source(replica: Replica) -> None:
    """Another rank of its group may not know it yet, and the script's function may use their collectives."""
    asked: list[str] = []

    def own_state() -> dict[str, object]:
        asked.append("asked")
        return {}

    replica.registry.register("model", ignore, own_state)
    attempt = replica.begin(5, **HEALS)
    replica.exchange.member_lost(LossNotice(5, "b", "it died"))
    assert not replica.end(attempt)
    assert asked == ["asked"]


@pytest.mark.progress
@pytest.mark.at_rest
@pytest.mark.parametrize("keeps_offers", [True, False])
@pytest.mark.parametrize("steps", [SERVES, HEALS])
def test_a_rank_that_gives_a_step_up_reads_its_state_as_the_others_of_its_group_do(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, steps: dict[str, int], keeps_offers: bool
) -> None:
    """The script's function may use collectives of the group: the others waited in one for this rank, which
    waited for the next quorum.
    """
    monkeypatch.setattr(Transport, "keeps_offers", keeps_offers)
    monkeypatch.setattr(replica.exchange, "_config", replace(config_of("a"), group_world_size=2))
    asked: list[str] = []
    replica.registry.register("model", ignore, lambda: asked.append("asked"))
    attempt = replica.begin(5, **steps)
    replica.exchange.give_up(attempt)
    replica.exchange.give_up(attempt)
    assert asked == ["asked"]
    replica.registry.register("optim", ignore, no_memory)
    replica.exchange.give_up(replica.begin(6, **steps))
    assert asked == ["asked", "asked"]


@pytest.mark.progress
@pytest.mark.parametrize("beside", [{"begins_to_catch_up": True}, {"heal": False, "catches_up": True}])
def test_a_rank_that_gives_a_step_up_reads_no_state_where_one_comes_beside_the_steps(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, beside: dict[str, Any]
) -> None:
    """The others of its group do not: it waited for them in the script's function."""
    monkeypatch.setattr(replica.exchange, "_config", replace(config_of("a"), group_world_size=2))
    asked: list[str] = []
    replica.registry.register("model", ignore, lambda: asked.append("asked"))
    attempt = Attempt(True, LIMIT_S)
    replica.driver.begin(attempt)
    replica.driver.quorum(quorum(5, **HEALS)._replace(**beside))
    attempt.wait_configured(str)
    replica.exchange.give_up(attempt)
    assert not asked


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("counters", [{"step": 2, "commit_quorum_id": 1}, {"step": 3, "commit_quorum_id": 4}])
def test_a_state_that_is_not_that_of_the_quorum_is_refused(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, counters: dict[str, int]
) -> None:
    """One of the same step may be from before the peer has loaded a checkpoint."""
    loaded = list[Any]()
    sent = {"user": {"model": {}}, "torchft": counters}
    monkeypatch.setattr(replica.transport, "recv_checkpoint", lambda **_: sent)
    replica.registry.register("model", loaded.append, dict)
    assert not replica.end(replica.begin(5, **HEALS))
    assert (loaded, replica.protocol.step) == ([], 0)
    assert "not of step 3" in str(replica.protocol.failure)


@pytest.mark.parametrize("arrives", [True, False])
def test_a_state_is_loaded_by_all_ranks_of_a_group_or_by_none(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """The script's function may use collectives of the group."""
    loaded, said = list[Any](), list[bool]()

    def receive(**_: object) -> object:
        if not arrives:
            raise CheckpointError("its source is gone")
        return {"user": {"model": {}}, "torchft": {"step": 3, "commit_quorum_id": 1}}

    def agree(_: Attempt, has_fetched: bool) -> bool:
        said.append(has_fetched)
        return False

    monkeypatch.setattr(replica.transport, "recv_checkpoint", receive)
    monkeypatch.setattr(replica.exchange, "agree", agree)
    replica.registry.register("model", loaded.append, dict)
    assert not replica.end(replica.begin(5, **HEALS))
    assert (said, loaded, replica.protocol.step) == ([arrives], [], 0)


def test_a_step_that_has_failed_heals_all_the_same(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script whose steps fail for as long as somebody heals would never get on; it waits less long."""
    replica.registry.register("model", ignore, dict)
    waited: list[float] = []

    def receive(timeout: timedelta, **_: object) -> object:
        waited.append(timeout.total_seconds())
        return {"user": {"model": {}}, "torchft": {"step": 3, "commit_quorum_id": 1}}

    monkeypatch.setattr(replica.transport, "recv_checkpoint", receive)
    attempt = replica.begin(5, **HEALS)
    replica.driver.spoil(attempt, RuntimeError("of the training script"))
    assert not replica.end(attempt)
    assert replica.protocol.step == 3
    assert waited[0] < LIMIT_S


@pytest.mark.progress
@pytest.mark.parametrize("lost", ["a", "b", ""], ids=["this replica", "its source", "a rank of the group"])
def test_a_fetch_ends_when_who_takes_part_in_it_is_lost_in_the_quorum(replica: Replica, lost: str) -> None:
    replica.registry.register("model", ignore, dict)
    attempt = replica.begin(5, **HEALS)

    def lose() -> None:
        assert replica.transport.is_receiving.wait(LIMIT_S)
        assert replica.driver.waits_for() is not None
        replica.exchange.member_lost(LossNotice(5, "c", "it died"))
        if lost:
            replica.exchange.member_lost(LossNotice(5, lost, "it died"))
        else:
            replica.driver.hear(GroupLostNotice("rank 1 is gone"))

    thread = threading.Thread(target=lose)
    thread.start()
    if lost:
        assert not replica.end(attempt)
    else:
        with pytest.raises(GroupLostError, match="rank 1 is gone"):  # the script is told of it
            replica.exchange.exchange(attempt)
    thread.join(LIMIT_S)
    assert not attempt.is_exchanging


@pytest.mark.parametrize("takes_helpers", [False, True])
def test_a_replica_helps_the_source_if_its_transport_can(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, takes_helpers: bool
) -> None:
    monkeypatch.setattr(Transport, "takes_helpers", takes_helpers)
    replica.registry.register("model", ignore, dict)
    replica.end(replica.begin(5, a=3, b=2, Z=3))  # Z is the source
    assert len(replica.transport.offered) == takes_helpers


def test_who_leaves_waits_for_who_fetches_its_state_and_not_for_who_may_fetch_a_part(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small state has all come from the source before a helper is asked, which it is not told."""
    waits: list[timedelta] = []
    monkeypatch.setattr(Transport, "takes_helpers", True)
    monkeypatch.setattr(replica.transport, "wait_fetched", waits.append)
    replica.registry.register("model", ignore, dict)
    replica.end(replica.begin(5, a=3, b=2, Z=3))
    replica.exchange.linger()
    assert waits == []
    replica.end(replica.begin(6, **SERVES))
    replica.exchange.linger()
    assert len(waits) == 1


@pytest.mark.progress
def test_a_helper_that_cannot_be_reached_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Client:
        def __init__(self, address: str) -> None:
            self.close = ignore

        def _checkpoint_metadata(self, _: int, limit: timedelta) -> str:
            limits_s.append(limit.total_seconds())
            return "there"

    def check(self: Transport, source: Source, _: timedelta) -> None:
        if source.rank in unreachable:
            raise CheckpointError("set TORCHFT_HOSTNAME")

    limits_s: list[float] = []

    monkeypatch.setattr(state_exchange, "ManagerClient", Client)
    monkeypatch.setattr(Transport, "check_source", check)
    monkeypatch.setattr(Transport, "takes_helpers", True)
    replica = Replica(monkeypatch, asks=True)
    result, unreachable = quorum(5, a=2, b=3, c=3), {2}
    assert replica.exchange._ask(result, LIMIT_S) == [Source(1, "there")]
    assert "fewer replicas: set TORCHFT_HOSTNAME" in caplog.text
    assert sorted(limits_s) == [state_exchange.REACH_S, LIMIT_S], "a helper that is silent is waited for less"
    unreachable.add(1)
    with pytest.raises(CheckpointError, match="TORCHFT_HOSTNAME"):
        replica.exchange._ask(result, LIMIT_S)
    replica.driver.stop(ShutdownError("over"), LIMIT_S)


@pytest.mark.progress
def test_a_fetch_goes_on_without_a_helper_that_is_lost(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica.registry.register("model", ignore, dict)
    lost: list[tuple[int, str]] = []
    monkeypatch.setattr(replica.transport, "lose_source", lambda *told: lost.append(told))

    def receive(*_: object) -> object:
        replica.exchange.member_lost(LossNotice(5, "c", "it died"))
        return {"user": {"model": {}}, "torchft": {"step": 3, "commit_quorum_id": 1}}

    monkeypatch.setattr(replica.transport, "recv_checkpoint_from", receive)
    assert replica.end(replica.begin(5, a=2, b=3, c=3))
    assert lost[0] == (2, "lost c: it died")


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("is_written", [False, True])
def test_a_replica_whose_state_is_partly_a_peers_has_none(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    own = {"w": torch.zeros(2)}
    replica.registry.register("model", ignore, lambda: own)
    replica.protocol.commit_quorum_id = 4

    def receive(_: Any, __: int, ___: timedelta, destination: Destination[Any]) -> object:
        assert destination.own == {"user": {"model": own}}
        destination.is_written = is_written
        raise CheckpointError("truncated")

    monkeypatch.setattr(replica.transport, "recv_checkpoint_from", receive)
    assert not replica.end(replica.begin(5, **HEALS))
    assert replica.protocol.begin().commit_quorum_id == (NO_STATE if is_written else 4)
    replica.protocol.disown_state()
    assert replica.protocol.commit_quorum_id == (NO_STATE if is_written else DISOWNED)


def offers(replica: Replica, monkeypatch: pytest.MonkeyPatch, size: int) -> list[object]:
    """Let the replica have two parameters, and its peer so many; return what is loaded."""
    loaded: list[object] = []
    replica.registry.register("model", loaded.append, lambda: {"w": torch.zeros(2)})
    replica.registry.look(ignore)
    sent = {"user": {"model": {"w": torch.ones(size)}}, "torchft": {"step": 3, "commit_quorum_id": 1}}
    monkeypatch.setattr(replica.transport, "recv_checkpoint", lambda **_: sent)
    return loaded


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("use_async_quorum", [True, False])
def test_a_newcomer_to_which_its_peer_sends_a_foreign_state_is_told_the_difference_and_loads_nothing(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = offers(replica, monkeypatch, 4)
    attempt = replica.begin(5, **HEALS)
    with pytest.raises(ForeignStateError, match=r"w is float32 \[2\] in this replica and float32 \[4\] in"):
        replica.exchange.exchange(attempt)
    assert loaded == []
    assert not replica.protocol.vote()


def test_a_tensor_that_is_made_later_needs_a_place_from_the_beginning() -> None:
    sent = {"default": {"w": torch.ones(2), "ema": torch.ones(2)}}
    own: dict[str, object] = {"w": torch.zeros(2)}
    without = StateRegistry(ignore, own.copy)
    with_a_place = StateRegistry(ignore, lambda: own | {"ema": None})
    without.look(ignore)
    with pytest.raises(ForeignStateError, match=r"ema is missing .* is None in the state"):
        without.check_form(sent, "a peer")
    with_a_place.look(ignore)
    with_a_place.check_form(sent, "a peer")


@pytest.mark.heal_is_clean
def test_a_replica_that_has_committed_takes_the_sender_of_a_foreign_state_for_foreign(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = offers(replica, monkeypatch, 4)
    assert replica.end(replica.begin(4, a=2, b=2))
    assert not replica.end(replica.begin(5, **HEALS))
    assert loaded == []


@pytest.mark.heal_is_clean
def test_a_manager_that_ends_leaves_its_state_to_the_next_one_if_its_version_is_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.full((3,), 7.0)
    asked: list[Any] = []

    def receive(sources: object, step: int, timeout: object, destination: Destination[Any]) -> Any:
        asked.append(destination.kept)
        return {"user": {"model": weight}, "torchft": {"step": 3, "commit_quorum_id": 1}}

    def try_once(last: Callable[[Replica], object]) -> None:
        replica = Replica(monkeypatch)
        replica.registry.register("model", ignore, weight.detach)
        monkeypatch.setattr(replica.transport, "recv_checkpoint_from", receive)
        attempt = replica.begin(5, **HEALS)
        replica.exchange.exchange(attempt)
        last(replica)
        replica.driver.stop(ShutdownError("over"), LIMIT_S)
        replica.exchange.keep_state()
        replica.registry.forget()
        replica.exchange.keep_state()  # a Manager may be shut down twice

    with kept_state.keeping():
        try_once(lambda replica: replica.protocol.decide(committed=True))  # and no step begins
        try_once(lambda replica: None)
        try_once(lambda replica: replica.registry.disallow_read())
        assert (asked[:2], len(asked)) == ([None, None], 3)
        ((kept,),) = asked[2:]
        assert kept.data_ptr() == weight.data_ptr(), "it was not copied"
        keeper = kept_state.present()
        assert keeper is not None
        assert keeper.kept is not None, "the state of the last try but one"

        replica = Replica(monkeypatch)
        replica.registry.register("model", ignore, weight.detach)
        assert replica.end(replica.begin(6, a=3, b=3))
        replica.exchange.exchange(replica.begin(6, a=3, b=3))
        assert keeper.kept is None, "it is of no use any more"
        replica.driver.stop(ShutdownError("over"), LIMIT_S)
    assert kept_state.present() is None
