"""A function that runs again in this process, alone."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from lighthouse.address import Address
from tests.conftest import WAIT_LIMIT_S
from tests.faults import raising
from torchft_like import GroupLostError, MaxRetriesError, Restart, restartable
from torchft_like.errors import ConfigError, HealthCheckError
from torchft_like.in_process import function
from torchft_like.in_process.function import RestartOptions
from torchft_like.in_process.meeting import RestartGroup
from torchft_like.in_process.spare import Place
from torchft_like.runtime import resources

PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


class OddError(Exception):
    """An error of the script's own."""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)


def failing_with(*errors: BaseException, options: RestartOptions | None = None) -> list[Restart]:
    """Run a function that raises these errors, one in each try, and return what it was given in each."""
    given: list[Restart] = []

    @restartable(**(options or {}))
    def main(what: str, *, restart: Restart | None = None) -> str:
        assert restart is not None
        given.append(restart)
        if len(given) <= len(errors):
            raise errors[len(given) - 1]
        return what

    assert main("done") == "done"
    return given


def test_a_function_is_told_what_has_ended_its_last_try() -> None:
    first, second, third = failing_with(MaxRetriesError("too many"), GroupLostError("rank 1 is gone"))
    assert (first.attempt, second.attempt, third.attempt) == (0, 1, 2)
    assert (first.error, second.error, third.error) == (None, MaxRetriesError, GroupLostError)
    assert second.reason == "MaxRetriesError: too many"
    assert "test_function.py" in third.trace


def test_a_function_need_not_ask_why_it_runs() -> None:
    tries: list[int] = []

    @restartable
    def main(what: str) -> str:
        tries.append(len(tries))
        if len(tries) < 3:
            raise torch.OutOfMemoryError("of a device")
        return what

    assert (main("done"), len(tries)) == ("done", 3)


@pytest.mark.parametrize("error", [OddError("x"), KeyboardInterrupt(), SystemExit(3), ConfigError("x")])
def test_other_errors_pass_as_they_are(error: BaseException) -> None:
    def main() -> None:
        kept = 7
        assert kept
        raise error

    with pytest.raises(type(error)) as raised:
        restartable(main)()
    assert raised.value is error
    assert raised.traceback[-1].locals["kept"] == 7, "a debugger finds the variables"


def test_after_as_many_restarts_as_allowed_the_error_is_raised() -> None:
    errors = OddError("the first"), OddError("the second"), OddError("the third")
    with pytest.raises(OddError, match="the third"):
        failing_with(*errors, options={"restart_on": [OddError], "max_restarts": 2})


def test_what_a_function_held_is_freed_before_its_next_try() -> None:
    held: list[weakref.ref[object]] = []

    @restartable(restart_on=[OddError])
    def main() -> None:
        assert [ref() for ref in held] == [None] * len(held)
        if len(held) == 6:
            return
        try:
            in_a_cycle()
        except ValueError as error:
            tensor = in_a_cycle()
            failure = OddError("x")
            failure.tensor = tensor  # type: ignore[attr-defined]
            raise failure from error

    def in_a_cycle() -> torch.Tensor:
        tensor = torch.ones(100 << 20, dtype=torch.uint8)
        itself: list[object] = [tensor]
        itself.append(itself)
        held.append(weakref.ref(tensor))
        if len(held) % 2:
            raise ValueError
        return tensor

    main()
    assert len(held) == 6


@pytest.mark.parametrize("is_frozen", [False, True])
def test_what_tries_have_frozen_the_collector_finds_afterwards(is_frozen: bool) -> None:
    """Where the script has frozen what it had, that stays so."""
    gc.unfreeze()
    if is_frozen:
        gc.freeze()
    try:
        restartable(lambda: None)()
        assert (gc.get_freeze_count() > 0) == is_frozen
    finally:
        gc.unfreeze()


def test_groups_of_a_try_have_the_names_of_those_of_ranks_whose_last_try_ended_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []

    @restartable(restart_on=[OddError])
    def main(restart: Restart | None = None) -> None:
        assert restart is not None
        with monkeypatch.context() as patches:
            if restart.attempt == 1:
                patches.setattr(dist.distributed_c10d, "_new_process_group_helper", raising(OddError("x")))
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        assert dist.group.WORLD is not None
        names.append(dist.group.WORLD.group_name)
        if restart.attempt == 0:
            raise OddError("x")
        dist.destroy_process_group()

    main()
    assert len(names) == 2
    assert len({*names}) == 1


def test_what_a_script_keeps_outside_of_its_function_is_freed_once_a_later_try_has_replaced_it() -> None:
    """As it refers to itself, the collector has to look at what earlier tries have left."""

    class Model:
        def __init__(self) -> None:
            self.itself = self

    kept: list[Model] = []
    made: list[weakref.ref[Model]] = []

    @restartable(restart_on=[OddError], max_restarts=4)
    def main() -> bool:
        kept[:] = [Model()]
        made.append(weakref.ref(kept[0]))
        if len(made) <= 4:
            raise OddError
        return made[2]() is None

    assert main(), "try 3 has replaced the model of try 2"


@pytest.mark.parametrize("where", ["between steps", "foreach_all_gather", "foreach_reduce"])
def test_torchs_groups_and_a_sharded_model_are_gone_before_the_next_try(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[object]] = []
    ports: list[str] = []
    for name, value in zip(PLACE, ("0", "1", "127.0.0.1", "1"), strict=False):
        monkeypatch.setenv(name, value)

    @restartable(restart_on=[OddError])
    def main(restart: Restart | None = None) -> None:
        assert [ref() for ref in held] == [None] * len(held)
        ports.append(os.environ["MASTER_PORT"])
        dist.init_process_group("gloo")
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("x",)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        sgd.step()
        loss = model(torch.ones(1, 4)).sum()
        held.extend(map(weakref.ref, (model, dist.group.WORLD, loss)))
        assert restart is not None
        if restart.attempt < 2:
            with monkeypatch.context() as patches:
                if where != "between steps":
                    patches.setattr(_fsdp_param_group, where, raising(OddError("x")))
                model(torch.ones(1, 4)).sum().backward()
            raise OddError("x")
        dist.destroy_process_group()

    main()
    assert len(held) == 9
    assert len({*ports, "1"}) == 4, "each try has a store of its own"
    assert os.environ["MASTER_PORT"] == "1"
    assert not dist.is_initialized()


def test_torchs_default_group_has_to_be_started_in_the_function() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match="default group"):
            restartable(lambda: None)()
    finally:
        dist.destroy_process_group()


class Thing:
    """Something that a try has to end."""

    def __init__(self, name: str, ended: list[str]) -> None:
        self.name, self.ended = name, ended
        resources.track(self)

    def shutdown(self) -> None:
        self.ended.append(self.name)
        if self.name == "broken":
            raise RuntimeError("broken")


def test_what_a_try_has_made_is_ended_the_last_first() -> None:
    ended: list[str] = []
    kept = [Thing("outer", ended)]

    @restartable(restart_on=[OddError])
    def main(restart: Restart | None = None) -> None:
        assert restart is not None
        if restart.attempt == 0:
            kept.extend(Thing(name, ended) for name in ("a", "broken", "b"))
            raise OddError("x")

    main()
    assert ended == ["b", "broken", "a"]


def test_what_threads_make_meanwhile_hinders_no_end() -> None:
    kept, is_over = [Thing("earlier", []) for _ in range(50)], threading.Event()
    interval_s, now = sys.getswitchinterval(), resources.mark()

    def make() -> None:
        while not is_over.is_set():
            Thing("later", [])

    thread = start(make, daemon=True)
    try:
        sys.setswitchinterval(1e-6)
        for _ in range(20_000):
            resources.end_since(now)
    finally:
        sys.setswitchinterval(interval_s)
        is_over.set()
        thread.join()
    assert not any(thing.ended for thing in kept)


def start(thread: Callable[[], object], *, daemon: bool) -> threading.Thread:
    started = threading.Thread(target=thread, name="stubborn", daemon=daemon)
    started.start()
    return started


def test_a_try_waits_for_its_threads_and_leaves_daemons_alone() -> None:
    release, ended = threading.Event(), threading.Event()

    def heed() -> None:
        release.wait(WAIT_LIMIT_S)
        ended.set()

    @restartable(restart_on=[OddError], health_check=release.set)
    def main(restart: Restart | None = None) -> None:
        assert restart is not None
        if restart.attempt == 0:
            start(heed, daemon=True)
            raise OddError("x")
        if restart.attempt == 1:
            assert ended.wait(WAIT_LIMIT_S), "the check was called, and the daemon has outlived its try"
            ended.clear()
            start(heed, daemon=False)
            raise OddError("x")
        assert ended.is_set()

    main()


def test_a_thread_that_does_not_end_keeps_the_rank_out() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    @restartable(restart_on=[OddError], health_timeout=0.001)
    def main() -> None:
        threads.append(start(lambda: release.wait(WAIT_LIMIT_S), daemon=False))
        raise OddError("x")

    try:
        with pytest.raises(HealthCheckError, match=r"'stubborn'.*does not end: .*threading\.py") as raised:
            main()
    finally:
        release.set()
    assert isinstance(raised.value.__cause__, OddError)
    assert len(threads) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_restarts": -1},
        {"max_restarts": True},
        {"window": 0},
        {"health_timeout": -1.0},
        {"restart_on": [OddError("x")]},
        {"restart_on": [KeyboardInterrupt]},
    ],
)
def test_a_wrong_option_is_refused_at_once(options: RestartOptions) -> None:
    with pytest.raises(ConfigError):
        restartable(**options)


def test_a_spare_has_of_the_variables_that_are_handed_over_those_of_the_group_and_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_spare = {"NUM_REPLICA_GROUPS": "9", "TORCHELASTIC_RUN_ID": "its own", "LOCAL_RANK": "3"}
    for name, value in {**of_spare, "TORCHFT_SPARE": "rank", "TORCHFT_LIGHTHOUSE": "127.0.0.1:1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "WORLD_SIZE", "REPLICA_GROUP_ID"):
        monkeypatch.setenv(name, "")  # so that it is undone
    place = Place("group", 1, 2, Address("127.0.0.1", 1), 4, {"REPLICA_GROUP_ID": "a", "HOME": "theirs"})
    group = RestartGroup(1, None, timedelta(seconds=1))

    def take_place(*_: object) -> tuple[RestartGroup, int, Place]:
        return group, 5, place

    monkeypatch.setattr(function, "take_place", take_place)

    @restartable
    def main(restart: Restart = Restart()) -> dict[str, str | None]:  # noqa: B008 - it is frozen
        assert (restart.attempt, restart.is_replacement) == (5, True)
        return {
            name: os.environ.get(name) for name in (*of_spare, "TORCHFT_SPARE", "REPLICA_GROUP_ID", "RANK")
        }

    assert {name: value for name, value in main().items() if value is not None} == {
        "LOCAL_RANK": "3",
        "REPLICA_GROUP_ID": "a",
        "RANK": "1",
    }
    assert os.environ["HOME"] != "theirs"
