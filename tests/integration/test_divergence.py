"""One bit of one replica's state changes: it is found, named, and mended before it does more harm.

The first half runs real processes, whose parameters are compared after every committed step; the second
half some Managers in this process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from lighthouse.events import Event
from tests.integration.cluster import CHECKED, Cluster
from tests.integration.options import WorkerOptions
from tests.integration.sharded import GROUP_SIZE
from tests.managers import each_in_a_thread, lighthouse_here, manager_alone
from torchft_like import LighthouseServer
from torchft_like.core.replica_group import RankJoin
from torchft_like.divergence import OnDivergence, StateFingerprint
from torchft_like.divergence.state_fingerprint import PendingFingerprint
from torchft_like.errors import DivergenceError
from torchft_like.testing.cluster import Group
from torchft_like.testing.journal import Record

pytestmark = [pytest.mark.integration, *CHECKED]

T = TypeVar("T")

SLICES = 4
SHARDED_LIMIT_S = 100.0  # four processes import all of torch.distributed, two at a time on a small machine


# ------------------------------------------------------------------ real processes


def test_a_flipped_bit_is_mended_before_the_replica_contributes_again(tmp_path: Path) -> None:
    """That no step was committed with different parameters, the cluster checks in the end."""
    parts = ("parameter", "optimizer", "ballast")
    with Cluster(tmp_path) as cluster:
        flips = tuple(cluster.plan(f"flip-{part}", "step") for part in parts)
        a = cluster.start("a", options=WorkerOptions(slices=1, ballast_mb=1, faults=flips))
        b, c = (cluster.start(name, options=WorkerOptions(slices=1, ballast_mb=1)) for name in "bc")
        cluster.wait_for_quorum_of(a, b, c)
        for _ in parts:
            pull_and_wait_for_heals(cluster, a)
        cluster.wait_for_quorum_of(a, b, c)

        assert [fault["act"] for fault in a.faults()] == [f"flip-{part}" for part in parts]
        for group in (a, b, c):
            assert [verdict_of(event) for event in group.events("divergence")] == [
                ({a.replica_id}, {b.replica_id, c.replica_id}, ["0"], False, True)
            ] * len(parts)
        for event in a.events("divergence"):
            assert contributors(a, event) == contributors(b, event) == (False, 2)


def test_one_rank_s_shards_are_compared_with_the_same_rank_of_the_other_group(tmp_path: Path) -> None:
    """Of two groups nobody knows which is right; the one with the lower replica rank is believed."""
    with Cluster(tmp_path, limit_s=SHARDED_LIMIT_S) as cluster:
        flips = tuple(cluster.plan(f"flip-{part}", "step") for part in ("parameter", "optimizer"))
        a = cluster.start(
            "a", size=GROUP_SIZE, options=WorkerOptions(reduce="sharded", pause_s=0.3, slices=1)
        )
        options = WorkerOptions(reduce="sharded", pause_s=0.3, slices=1, faults=flips)
        b = cluster.start("b", size=GROUP_SIZE, options=options)
        cluster.wait_for_quorum_of(a, b)
        for _ in flips:
            pull_and_wait_for_heals(cluster, b)
        cluster.wait_for_quorum_of(a, b)

        struck = [str(rank) for _, rank in sorted(fault_times(b))]
        assert len(struck) == len(flips)
        for rank in (*a.ranks, *b.ranks):
            assert [verdict_of(event) for event in rank.events("divergence")] == [
                ({b.replica_id}, {a.replica_id}, [other], True, True) for other in struck
            ]


def pull_and_wait_for_heals(cluster: Cluster, group: Group) -> None:
    """The next planned fault strikes the group, and all of its ranks heal from it."""
    healed = [len(rank.events("heal")) for rank in group.ranks]
    cluster.pull_trigger()
    cluster.wait_until(
        lambda: all(len(r.events("heal")) > n for r, n in zip(group.ranks, healed, strict=True)),
        f"{group.name} heals from the fault",
    )


def fault_times(group: Group) -> list[tuple[float, int]]:
    return [(fault["time"], rank) for rank, process in enumerate(group.ranks) for fault in process.faults()]


def verdict_of(event: Record) -> tuple[set[str], set[str], list[str], bool, bool]:
    return set(event["members"]), set(event["kept"]), event["ranks"], event["tied"], event["heals"]


def contributors(group: Group, event: Record) -> tuple[bool, int]:
    """Whether the odd one took part in the step in which it was found, and how many did."""
    (commit,) = [c for c in group.ranks[0].commits() if c.step == event["step"] + 1]
    return bool(commit.ledger & 1), commit.participants


# --------------------------------------------------------- Managers in this process


class Replica:
    """A replica group of one rank: one tensor, to which every step adds one."""

    def __init__(
        self,
        lighthouse: LighthouseServer,
        name: str,
        fingerprint: dict[str, Any] | None,
        use_async_quorum: bool,
    ) -> None:
        self.tensor = torch.zeros(1000)
        self.events: list[Event] = []
        how = {"init_sync": True, "use_async_quorum": use_async_quorum}
        self.manager = manager_alone(name, lighthouse.address(), self, **how)
        self.manager.events.subscribe(self.events.append)
        if fingerprint is not None:
            self.manager.watch_divergence(StateFingerprint([self.tensor], **fingerprint))

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensor.copy_(state["tensor"])

    def train_to(self, step: int) -> None:
        while self.manager.current_step() < step:
            self.attempt()

    def attempt(self) -> bool:
        self.manager.start_quorum()
        return self.finish()

    def finish(self) -> bool:
        gradient = torch.ones(1000)
        self.manager.allreduce(gradient).wait()
        committed = self.manager.should_commit()
        if committed:
            self.tensor += gradient
        return committed

    def watch(self, pending: PendingFingerprint) -> None:
        """Have every fingerprint be this one."""
        fingerprint = StateFingerprint([self.tensor])
        fingerprint.take = lambda step: pending  # type: ignore[method-assign]
        self.manager.watch_divergence(fingerprint)

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event.kind == kind]


class Job:
    """Replicas that train together, a thread for each."""

    def __init__(self, lighthouse: LighthouseServer, names: str) -> None:
        self._lighthouse = lighthouse
        self._names = names

    def run(
        self, script: Callable[[Replica, str], T], use_async_quorum: bool = True, **fingerprint: Any
    ) -> list[T]:
        """Run `script` for each. A dict has an option for each name; `slices=0` does not watch."""

        def run_one(name: str) -> T:
            options = {k: v[name] if isinstance(v, dict) else v for k, v in fingerprint.items()}
            watched = options if options.get("slices", 1) else None
            replica = Replica(self._lighthouse, name, watched, use_async_quorum)
            with replica.manager:
                return script(replica, name)

        return each_in_a_thread(self._names, run_one)


@pytest.fixture(params=["ab"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with lighthouse_here(min_replicas=len(request.param)) as server:
        yield Job(server, request.param)


def corrupt(tensor: torch.Tensor) -> None:
    """Change one bit of the first number, so little that no sum hides it."""
    tensor.view(torch.int32)[0] ^= 1 << 12


@pytest.mark.parametrize("job", ["abc"], indirect=True)
@pytest.mark.parametrize("use_async_quorum", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("odd_one", ["a", "c"])
def test_a_flipped_bit_is_found_within_one_round(job: Job, odd_one: str, use_async_quorum: bool) -> None:
    def script(replica: Replica, name: str) -> tuple[Event, list[float]]:
        replica.train_to(5)
        if name == odd_one:
            corrupt(replica.tensor)
        replica.train_to(5 + 3 * SLICES)
        assert len(replica.told("heal")) == (name != "a") + (name == odd_one)
        (event,) = replica.told("divergence")
        return event, replica.tensor.tolist()

    results = job.run(script, use_async_quorum, slices=SLICES)
    for event, values in results:
        assert 5 <= event.step < 5 + SLICES
        assert [member[0] for member in as_list(event.fields["members"])] == [odd_one]
        assert values == results[0][1]
        assert len(set(values)) == 1


@pytest.mark.parametrize("begins", [{"a": 0, "b": 0}, {"a": 0, "b": 6}, {"a": 8, "b": 6}])
def test_where_a_quorum_stands_a_flipped_bit_costs_a_step(job: Job, begins: dict[str, int]) -> None:
    """Also where the replicas begin to watch while it stands, one after the other, which may cost a step
    each, as they ask by themselves.
    """
    flips_at, ends_at = 30, 40

    def script(replica: Replica, name: str) -> tuple[list[int], list[int], set[float]]:
        asked: list[int] = []
        link = replica.manager._link
        join = link.join

        def count(asks: RankJoin) -> None:
            asked.append(asks.step)
            join(asks)

        link.join = count  # type: ignore[method-assign, assignment]
        failed: list[int] = []
        flips = name == "b"
        while (step := replica.manager.current_step()) < ends_at:
            if step == begins[name] and replica.manager._driver.divergence.fingerprint is None:
                replica.manager.watch_divergence(StateFingerprint([replica.tensor], slices=1))
            if step == flips_at and flips:
                corrupt(replica.tensor)
                flips = False
            if not replica.attempt():
                failed.append(step)
        (event,) = replica.told("divergence")
        assert event.step == flips_at
        return failed, asked, set(replica.tensor.tolist())

    quiet = range(max(begins.values()) + 3, ends_at)
    (*one, values), (*other, the_same) = job.run(script, slices=0)
    for failed, asked in (one, other):
        assert [step for step in failed if step in quiet] == [flips_at]
        assert {step for step in asked if step in quiet} <= {flips_at, flips_at + 1, flips_at + 2}
    assert values == the_same
    assert len(values) == 1


def as_list(field: object) -> list[str]:
    assert isinstance(field, list)
    return field


def test_in_a_tie_a_job_may_rather_stop(job: Job) -> None:
    def script(replica: Replica, name: str) -> str:
        replica.train_to(3)
        if name == "b":
            corrupt(replica.tensor)
        with pytest.raises(DivergenceError, match=r"after step 3 b:.* and a:.* nobody can know") as raised:
            replica.train_to(4)
        (event,) = replica.told("divergence")
        assert event.fields["tied"]
        return str(raised.value)

    one, other = job.run(script, slices=1, on_divergence=OnDivergence.HEAL_UNLESS_TIED)
    assert one == other


def test_a_job_that_only_wants_reports_gets_one_and_goes_on(job: Job) -> None:
    def script(replica: Replica, name: str) -> list[float]:
        replica.train_to(3)
        if name == "a":
            corrupt(replica.tensor)
        replica.train_to(6)
        (event,) = replica.told("divergence")
        assert event.step == 3
        assert not event.fields["heals"]
        assert all(vote.fields["participants"] == 2 for vote in replica.told("commit"))
        return replica.tensor.tolist()

    one, other = job.run(script, slices=1, on_divergence=OnDivergence.REPORT)
    assert one != other


def test_replicas_that_watch_different_things_say_so_once_and_go_on(job: Job) -> None:
    def script(replica: Replica, name: str) -> None:
        replica.train_to(5)
        (event,) = replica.told("divergence")
        assert not event.fields["comparable"]
        assert len(replica.told("heal")) == (name != "a"), "nobody but at the beginning"

    job.run(script, slices={"a": 2, "b": 3})


def test_one_that_does_not_watch_switches_the_comparison_off(job: Job) -> None:
    def script(replica: Replica, name: str) -> list[Event]:
        replica.train_to(3)
        if name == "a":
            corrupt(replica.tensor)
        replica.train_to(5)
        return replica.told("divergence")

    assert job.run(script, slices={"a": 1, "b": 0}) == [[], []]


def test_nothing_is_computed_where_nothing_is_watched(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    take = StateFingerprint.take

    def spy(self: StateFingerprint, step: int) -> PendingFingerprint:
        taken.append(step)
        return take(self, step)

    monkeypatch.setattr(StateFingerprint, "take", spy)
    job.run(lambda replica, _: replica.train_to(3), slices=0)
    assert taken == []
    job.run(lambda replica, _: replica.train_to(3), slices=1)
    assert sorted(taken) == [0, 0, 1, 1, 2, 2]


class SlowFingerprint(PendingFingerprint):
    """One that a device is still computing."""

    def __init__(self, gate: threading.Event, error: Exception | None = None) -> None:
        super().__init__([torch.zeros((), dtype=torch.int64)], b"layout 1", heals=True)
        self._gate = gate
        self._error = error

    @property
    def is_ready(self) -> bool:
        return False

    def result(self) -> bytes:
        self._gate.wait()
        if self._error is not None:
            raise self._error
        return super().result()


def test_nobody_waits_for_the_device_when_a_step_begins(job: Job) -> None:
    def script(replica: Replica, name: str) -> bool:
        gate = threading.Event()
        replica.watch(SlowFingerprint(gate))
        replica.manager.start_quorum()
        gate.set()
        return replica.finish()

    assert job.run(script) == [True, True]


def test_a_device_that_fails_keeps_nobody_waiting(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    def script(replica: Replica, name: str) -> bool:
        gate = threading.Event()
        gate.set()
        replica.watch(SlowFingerprint(gate, RuntimeError("the device is lost") if name == "b" else None))
        return replica.attempt()

    assert job.run(script) == [True, True]
    assert "no fingerprint of the state" in caplog.text
    assert "the device is lost" in caplog.text
