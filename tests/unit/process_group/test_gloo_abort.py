"""Abort, reconfiguration and cleanup, with members that are threads of this process."""

from __future__ import annotations

import gc
import math
import resource
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from tests.descriptors import descriptors_left, left_open_since, open_descriptors
from tests.managers import error_of
from tests.versions import NEEDS_A_GLOO_THAT_IS_SILENCED
from torchft_like.errors import ProcessGroupAbortedError, ProcessGroupError, ProcessGroupNotConfiguredError
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, generation
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.gloo import GlooDevice
from torchft_like.process_group.store import AbortableStore, parse_store_address

from .conftest import LIMIT_S, Party, allreduced, wait_until

pytestmark = pytest.mark.progress


def monitored_barrier(group: Any) -> None:
    group.monitored_barrier()


Operate = Callable[[Any], Any]


def blocked_operations() -> list[tuple[str, Operate]]:
    """What rank 0 can do that needs rank 1, which does nothing; tests/conformance has each collective."""
    return [
        ("large allreduce", lambda g: g.allreduce([torch.ones(4_000_000)]).wait()),
        ("recv", lambda g: g.recv([torch.ones(4)], 1, 0).wait()),
        ("recv_anysource", lambda g: g.recv_anysource([torch.ones(4)], 0).wait()),
        ("large send", lambda g: g.send([torch.ones(20_000_000)], 1, 0).wait()),
        ("monitored_barrier", monitored_barrier),
        ("future", lambda g: g.allreduce([torch.ones(4)]).get_future().wait()),
    ]


@pytest.mark.parametrize(("name", "operate"), blocked_operations())
def test_an_abort_ends_a_blocked(party: Party, name: str, operate: Operate) -> None:
    group, _ = party.meet(2)
    blocked = party.aside(operate, group)
    with pytest.raises(TimeoutError):
        blocked.result(0.2)  # it is felt: the operation does not end by itself
    group.abort("the test says so")
    with pytest.raises(RuntimeError if name == "future" else ProcessGroupAbortedError):
        blocked.result(LIMIT_S)
    assert isinstance(group.errored(), ProcessGroupAbortedError)
    with pytest.raises(ProcessGroupAbortedError, match="the test says so"):
        group.allreduce([torch.ones(1)])


@pytest.mark.usefixtures("no_operator")
def test_a_receive_from_any_rank_ends_as_another_operation_of_the_group_fails(party: Party) -> None:
    group, other = party.meet(2, lambda: ProcessGroupGloo(100 * LIMIT_S, check_collectives=False))
    blocked = party.aside(lambda: group.recv_anysource([torch.ones(4)], 0).wait())
    with pytest.raises(TimeoutError):
        blocked.result(0.2)
    other.abort("it leaves")
    with pytest.raises(RuntimeError):
        group.allreduce([torch.ones(4)]).wait()
    with pytest.raises(RuntimeError):
        blocked.result(LIMIT_S)


@pytest.mark.usefixtures("no_operator")
def test_an_abort_needs_no_descriptor_that_is_free(party: Party) -> None:
    group, _ = party.meet(2, unchecked)
    blocked = party.aside(lambda g: g.allreduce([torch.ones(4)]).wait(), group)
    with pytest.raises(TimeoutError):
        blocked.result(0.2)
    with descriptors_left(0):
        group.abort("the test says so")
        with pytest.raises(ProcessGroupAbortedError, match="the test says so"):
            blocked.result(LIMIT_S)


@pytest.mark.usefixtures("no_operator")
def test_an_abort_ends_an_operation_once_the_limit_of_descriptors_is_raised_again(party: Party) -> None:
    """Here and at the peer, which no abort helps. Both only receive: Gloo may forget who sends in vain."""
    group, other = party.meet(2, lambda: ProcessGroupGloo(10 * LIMIT_S, check_collectives=False))
    done = threading.Event()
    future = group.broadcast_one(torch.ones(4), 1).get_future()
    future.add_done_callback(partial(set_event, done))
    theirs = party.aside(lambda: other.recv([torch.ones(1)], 0, 0).wait())
    with no_descriptor_allowed():
        group.abort("the test says so")
        assert not done.wait(0.2)  # it is felt: no socket can be looked at
    wait_until(done)
    with pytest.raises(ProcessGroupAbortedError):
        group.allreduce([torch.ones(1)])
    with pytest.raises(RuntimeError):
        theirs.result(LIMIT_S)


@NEEDS_A_GLOO_THAT_IS_SILENCED
@pytest.mark.usefixtures("no_operator")
def test_an_abort_ends_a_wait_behind_a_lost_message(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo reads no further on the connection, and never notices that it is cut."""
    monkeypatch.setattr(generation, "LOOKS_S_MAX", math.inf)
    # Gloo lets go of all when the operation times out, which is what the end of the test waits for.
    group, other = party.meet(2, lambda: ProcessGroupGloo(5, check_collectives=False))
    group.recv([torch.ones(4)], 1, 0)  # nobody holds it: the message comes for one that is gone
    gc.collect()
    other.send([torch.ones(4)], 0, 0).wait()
    work = group.allreduce([torch.ones(4)])
    of_gloo = work.inner  # type: ignore[attr-defined] # torch's own, which the group's operation follows
    blocked = party.aside(work.wait)
    theirs = other.allreduce([torch.ones(4)])
    with pytest.raises(TimeoutError):
        blocked.result(0.2)
    group.abort("the test says so")
    with pytest.raises(ProcessGroupAbortedError, match="the test says so"):
        blocked.result(LIMIT_S)
    assert not of_gloo.is_completed(), "it was given up before it timed out"
    with pytest.raises(RuntimeError):
        theirs.wait()


@pytest.mark.usefixtures("no_operator")
def test_an_abort_silences_a_message_for_nobody(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or Gloo's thread would turn round it until the operation's timeout."""
    silenced = threading.Event()
    silence = GlooDevice.silence

    def spy(device: GlooDevice) -> None:
        silence(device)
        silenced.set()

    monkeypatch.setattr(GlooDevice, "silence", spy)
    group, other = party.meet(2, unchecked)
    group.recv([torch.ones(4)], 1, 0)  # nobody holds it
    gc.collect()
    other.send([torch.ones(4)], 0, 0).wait()
    group.abort("the test says so")
    assert silenced.wait(LIMIT_S)


def unchecked() -> ProcessGroup:
    """Waits in Gloo, not in the check of its collectives."""
    return ProcessGroupGloo(30, check_collectives=False)


@contextmanager
def no_descriptor_allowed() -> Iterator[None]:
    """No descriptor may be opened, nor one be put in the place of another."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_abort_ends_many_blocked_operations_and_their_callbacks(party: Party) -> None:
    group, _ = party.meet(2)
    works = [group.allreduce([torch.ones(8)]) for _ in range(20)]
    told = [threading.Event() for _ in works]
    for work, event in zip(works, told, strict=True):
        work.get_future().add_done_callback(partial(set_event, event))
    group.abort()
    assert all(event.wait(LIMIT_S) for event in told)


def set_event(event: threading.Event, _: object) -> None:
    event.set()


def test_an_abort_without_a_group_does_nothing() -> None:
    group = ProcessGroupGloo(30)
    group.abort()
    assert group.errored() is None
    with pytest.raises(ProcessGroupNotConfiguredError, match="configure"):
        group.allreduce([torch.ones(1)])
    for ask in (group.size, group.rank, lambda: group.parent):
        with pytest.raises(ProcessGroupNotConfiguredError):
            ask()


def test_abort_and_shutdown_may_be_repeated_in_any_order_and_configure_follows(party: Party) -> None:
    group = party.meet(1)[0]
    for action in (group.abort, group.abort, group.shutdown, group.shutdown, group.abort):
        action()
        assert isinstance(group.errored(), ProcessGroupAbortedError)
    party.configure([group])
    assert allreduced(group, 2.0) == 2.0


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_the_callers_signal_ends_a_configuration_whenever_it_is_set(party: Party, when: str) -> None:
    group, signal = party.own(ProcessGroupGloo(LIMIT_S)), AbortSignal()
    if when == "after":
        group.configure(party.prefix(), 0, 1, ends_with=signal)
        assert group.errored() is None
        signal.set("the caller has enough")
    else:
        late = threading.Timer(0.0 if when == "before" else 0.2, signal.set, ["the caller has enough"])
        late.start()
        if when == "before":
            late.join()
        with pytest.raises(ProcessGroupAbortedError, match="the caller has enough"):
            group.configure(party.prefix(), 0, 2, ends_with=signal)  # the other one never comes
        late.join()
    assert isinstance(group.errored(), ProcessGroupAbortedError)
    group.configure(party.prefix(), 0, 1)
    assert group.errored() is None, "the signal was for the configuration that it was given to"


def test_a_signal_keeps_nothing_of_a_configuration_that_is_over(party: Party) -> None:
    group, signal = party.own(ProcessGroupGloo(LIMIT_S)), AbortSignal()
    for end in (group.abort, group.shutdown, lambda: party.configure([group])):
        group.configure(party.prefix(), 0, 1, ends_with=signal)
        assert len(signal._hooks) == 1
        end()
        assert signal._hooks == []


def test_a_signal_of_one_part_leaves_the_others_alone(party: Party) -> None:
    whole, part, other = (party.own(ProcessGroupGloo(LIMIT_S)) for _ in range(3))
    whole.configure(party.prefix(), 0, 1)
    for each in (part, other):
        each.configure(party.prefix(), 0, 1, ends_with=whole.configuration)
    part.abort()
    assert (whole.errored(), other.errored()) == (None, None)
    whole.abort()
    assert isinstance(other.errored(), ProcessGroupAbortedError)


def test_works_that_are_done_keep_their_result_after_an_abort(party: Party) -> None:
    group = party.meet(1)[0]
    work = group.allreduce([torch.ones(1)])
    work.wait()
    group.abort()
    assert work.wait()
    assert work.get_future().wait()[0].item() == 1.0


# While the group is being configured.


class Stage:
    """Stops configurations at a call of theirs and says when they have reached it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.reached = threading.Event()
        original = getattr(owner, name)

        def stop(this: Any, *args: Any) -> Any:
            self.reached.set()
            return original(this, *args)

        monkeypatch.setattr(owner, name, stop)


def configuring(party: Party, group: ProcessGroup, prefix: str, rank: int, world: int) -> Future[None]:
    return party.aside(lambda: group.configure(prefix, rank, world))


def test_a_new_configure_ends_the_one_under_way(party: Party, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage(monkeypatch, AbortableStore, "wait")
    group = party.own(ProcessGroupGloo(300))
    first = configuring(party, group, party.prefix(), 0, 2)
    wait_until(stage.reached)
    group.configure(party.prefix(), 0, 1)
    with pytest.raises(ProcessGroupAbortedError, match="anew"):
        first.result(LIMIT_S)
    assert group.errored() is None
    assert allreduced(group, 1.0) == 1.0


def test_a_configure_that_fails_leaves_a_group_that_says_why_and_can_be_configured(party: Party) -> None:
    group = party.own(ProcessGroupGloo(0.2))
    with pytest.raises(ProcessGroupError, match=r"ranks \[1, 2\] did not come within 0.2 s"):
        group.configure(party.prefix(), 0, 3)
    assert "did not come" in str(group.errored())
    with pytest.raises(ProcessGroupNotConfiguredError, match="did not come"):
        group.allreduce([torch.ones(1)])
    group.set_timeout(timedelta(seconds=LIMIT_S))
    party.configure([group])
    assert group.errored() is None


@pytest.mark.no_zombie
def test_a_prefix_that_was_used_before_is_refused(party: Party) -> None:
    groups = [party.own(ProcessGroupGloo(30)) for _ in range(2)]
    prefix = party.prefix()
    party.together(groups, lambda rank, g: g.configure(prefix, rank, 2))
    with pytest.raises(ProcessGroupError, match="fresh"):
        groups[0].configure(prefix, 0, 2)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_a_value_error(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank}"):
        ProcessGroupGloo(30).configure("127.0.0.1:1/x", rank, world_size)


def test_bad_arguments_are_value_errors_and_leave_the_group_as_it_was(party: Party) -> None:
    group = party.meet(1)[0]
    for address in ("nowhere", "127.0.0.1:notaport/x"):
        with pytest.raises(ValueError, match="host:port/prefix"):
            group.configure(address, 0, 1)
    with pytest.raises(ValueError, match="global ranks"):
        group.configure(party.prefix(), 0, 1, global_ranks=[1, 2])
    with pytest.raises(ValueError, match="timeout"):
        ProcessGroupGloo(timeout=0)
    assert allreduced(group, 1.0) == 1.0


def test_the_timeout_bounds_an_operation_and_can_be_changed(party: Party) -> None:
    group, _ = party.meet(2)
    group.set_timeout(timedelta(milliseconds=200))
    with pytest.raises(RuntimeError, match=r"(?i)tim"):
        group.allreduce([torch.ones(1)]).wait()
    assert group.errored() is not None
    assert not isinstance(group.errored(), ProcessGroupAbortedError)


# Aborts touch nothing of others, and nothing of a group stays behind.


@pytest.mark.no_leak
def test_aborts_break_no_other_connection_of_the_process(party: Party) -> None:
    """Other threads open, use and close connections like mad, to the same store among others."""
    stop, served = threading.Event(), threading.Event()
    exchanged = [0, 0]
    with socket.create_server(("127.0.0.1", 0)) as server:
        echo = party.aside(serve_echo, server, served)
        others = [
            party.aside(use_sockets, server.getsockname(), stop, exchanged),
            party.aside(use_store, party.store.port, stop, exchanged),
        ]
        groups = [party.own(ProcessGroupGloo(30)) for _ in range(2)]
        rounds = 0
        while rounds < 15 or min(exchanged) <= 15:
            rounds += 1
            party.configure(groups)
            blocked = party.aside(lambda: groups[0].allreduce([torch.ones(4)]).wait())
            groups[0].abort()
            with pytest.raises(RuntimeError):
                blocked.result(LIMIT_S)
        stop.set()
        for other in others:
            other.result(LIMIT_S)
        served.set()
        echo.result(LIMIT_S)


def serve_echo(server: socket.socket, stop: threading.Event) -> None:
    server.settimeout(0.1)
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        with connection:
            connection.settimeout(LIMIT_S)
            while data := connection.recv(100):
                connection.sendall(data)


def use_sockets(address: Any, stop: threading.Event, exchanged: list[int]) -> None:
    while not stop.is_set():
        with socket.create_connection(address, timeout=LIMIT_S) as connection:
            for _ in range(5):
                connection.sendall(b"hello")
                assert connection.recv(100) == b"hello"
                exchanged[0] += 1
        with socket.create_server(("127.0.0.1", 0)):
            pass


def use_store(port: int, stop: threading.Event, exchanged: list[int]) -> None:
    torchs = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    while not stop.is_set():
        with closing(
            AbortableStore(parse_store_address(f"127.0.0.1:{port}/busy"), timedelta(seconds=LIMIT_S))
        ) as ours:
            ours.connect()
            for client in (torchs, ours):
                client.set("busy", "yes")
                assert client.get("busy") == b"yes"
                exchanged[1] += 1


@pytest.mark.no_leak
def test_a_kept_error_keeps_no_connection(party: Party) -> None:
    groups = party.meet(2)
    shut_down(groups)
    before = open_descriptors()
    party.configure(groups)
    groups[0].abort()
    kept = [(error_of(partial(allreduced, group)), group.errored()) for group in groups]
    assert all(isinstance(error, RuntimeError) for error, _ in kept)
    shut_down(groups)
    assert not left_open_since(before)


@pytest.mark.no_leak
def test_a_group_keeps_nothing_of_configurations_that_failed(
    party: Party, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each error has frames, of its causes, too, and these what was made, and the configuration before."""
    made, group = weakref.WeakSet[threading.Event](), ProcessGroupGloo(LIMIT_S)
    party.own(group)

    def fail(*_: object) -> None:
        made.add(part := threading.Event())
        try:
            raise RuntimeError(f"nobody has come: {part}")
        except RuntimeError as error:
            raise TimeoutError("not all have come") from error

    monkeypatch.setattr(ProcessGroupGloo, "_create", fail)
    generations = weakref.WeakSet[object]()
    for _ in range(3):
        error = error_of(partial(group.configure, party.prefix(), 0, 1))
        assert "not all have come" in str(error)
        generations.add(group._generation)
    error = None
    gc.collect()
    assert "not all have come" in str(group.errored())
    assert not made
    assert [*generations] == [group._generation]


def shut_down(groups: list[ProcessGroup]) -> None:
    for group in groups:
        group.shutdown()
    gc.collect()
