"""What becomes of a collective that fails, and of those after it: the same for every row of the table.

The inner group fails in the way that is asked for, after it has spoilt the outputs. Real backends,
real deaths and a real Manager are in tests/conformance.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from torchft_like.errors import (
    GroupLostError,
    NotSupportedError,
    ProcessGroupAbortedError,
    ProcessGroupNotConfiguredError,
    QuorumTimeoutError,
    ShutdownError,
)
from torchft_like.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FaultInjectingProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupGloo,
)
from torchft_like.process_group.collectives import BY_NAME, COLLECTIVES, tensors_of

from .conftest import LIMIT_S, Party
from .failing import SPOILT, OopsError, Subject
from .test_collectives import ALONE, garbage, ones

NAMES = [row.name for row in COLLECTIVES]
RETURN_WORK = [row.name for row in COLLECTIVES if not row.blocking]
IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")

KINDS = ["swallowing", "managed"]
TABLE = [
    (kind, name)
    for kind, name in itertools.product(KINDS, NAMES)
    if kind == "swallowing" or not name.startswith("allreduce")  # those are the Manager's own
]
with_work = [(kind, name) for kind, name in TABLE if name in RETURN_WORK]
every = pytest.mark.parametrize(("kind", "name"), TABLE)
every_with_work = pytest.mark.parametrize(("kind", "name"), with_work)


def assert_as_alone(name: str, outputs: list[Tensor]) -> None:
    for output, wanted in zip(outputs, tensors_of(ALONE[name][1]), strict=True):
        assert torch.equal(output, wanted), (output, wanted)


@every
def test_a_call_that_the_backend_refuses_leaves_what_a_group_of_one_would(kind: str, name: str) -> None:
    subject = Subject(kind)
    subject.inner.error_at_issue = OopsError()
    work, outputs = subject.call(name)
    assert work is None or work.wait()
    assert isinstance(subject.error(), OopsError)
    assert_as_alone(name, outputs)


NOTICE: dict[str, Callable[[Any], Any]] = {
    "wait": lambda work: work.wait(),
    "wait with a limit": lambda work: work.wait(timedelta(seconds=LIMIT_S)),
    "future": lambda work: work.get_future().wait() is not None,
    "is_completed": lambda work: work.is_completed(),
    "is_success": lambda work: work.is_success(),
}


@every_with_work
@pytest.mark.parametrize("how", NOTICE)
def test_a_failure_is_noticed_however_one_asks(kind: str, name: str, how: str) -> None:
    subject = Subject(kind)
    work, outputs = subject.call(name)
    assert not work.is_completed()
    assert not work.is_success()
    assert subject.error() is None
    subject.inner.works[0].finish(OopsError())
    NOTICE[how](work)
    assert isinstance(subject.error(), OopsError)
    assert (work.wait(), work.is_success(), work.exception()) == (True, True, None)
    assert work.source_rank() == 0, "nobody sent anything, but torch wants a member's rank"
    if name in IN_PLACE:
        assert all(torch.equal(output, torch.full((2,), SPOILT)) for output in outputs), "left alone"
    else:
        assert_as_alone(name, outputs)


@every
def test_after_an_error_calls_are_skipped_with_defined_outputs_until_configure(kind: str, name: str) -> None:
    subject = Subject(kind)
    reporter = subject.group if kind == "swallowing" else subject.manager
    reporter.report_error(OopsError())
    for _ in range(2):
        work, outputs = subject.call(name)
        assert_as_alone(name, outputs)
        if work is not None:
            assert (work.wait(), work.is_completed(), work.is_success()) == (True, True, True)
            assert (work.exception(), work.source_rank()) == (None, 0)
            assert [id(t) for t in tensors_of(work.get_future().wait())] == [id(t) for t in outputs]
            assert [id(t) for t in tensors_of(work.result())] == [id(t) for t in outputs]
    assert subject.inner.calls[name] == 0
    subject.configure()
    assert subject.error() is None
    subject.call(name)
    assert subject.inner.calls[name] == 1


@pytest.mark.no_zombie
@every_with_work
def test_a_late_error_of_an_earlier_configuration_is_no_news(kind: str, name: str) -> None:
    subject = Subject(kind)
    works = [subject.call(name)[0] for _ in range(3)]
    told = works[2].get_future()
    subject.configure()
    aborts = len(subject.inner.aborts)
    for pending in subject.inner.works:
        pending.finish(OopsError())
    assert works[0].wait()
    assert works[1].is_completed()
    told.wait()
    assert subject.error() is None
    assert len(subject.inner.aborts) == aborts, "the new configuration was not aborted"


@pytest.mark.no_zombie
def test_an_error_that_comes_as_configure_begins_is_no_news_either() -> None:
    subject = Subject("swallowing")
    work = subject.call("allgather")[0]
    begin = subject.inner.configure

    def configure(*args: Any, **kwargs: Any) -> None:
        subject.inner.works[0].finish(OopsError())
        assert work.wait(), "before the inner group knows that it is configured anew"
        begin(*args, **kwargs)

    subject.inner.configure = configure  # type: ignore[method-assign]
    subject.configure()
    assert (subject.error(), subject.inner.aborts) == (None, [])


@every
@pytest.mark.parametrize("mistake", [TypeError, ValueError, NotImplementedError, NotSupportedError])
def test_mistakes_of_the_caller_are_raised(kind: str, name: str, mistake: type[Exception]) -> None:
    subject = Subject(kind)
    subject.inner.error_at_issue = mistake("of the caller")
    with pytest.raises(mistake):
        subject.call(name)
    assert subject.error() is None
    if BY_NAME[name].output is not None:
        with pytest.raises(TypeError, match="missing"):
            getattr(subject.group, name)()


# Swallowing alone


@pytest.mark.progress
def test_an_error_releases_the_peers_by_an_abort_once() -> None:
    subject = Subject("swallowing")
    subject.group.report_error(OopsError("first"))
    subject.group.report_error(ValueError("second"))
    assert str(subject.error()) == "first"
    assert len(subject.inner.aborts) == 1
    assert "first" in subject.inner.aborts[0]


def test_an_abort_that_completes_other_works_on_the_spot_does_not_lock_up() -> None:
    subject = Subject("swallowing")
    work, other = subject.call("allgather")[0], subject.call("allgather")[0]
    future = other.get_future()
    first, second = subject.inner.works
    subject.inner.abort = lambda reason="": second.finish(OopsError("the second"))  # type: ignore[method-assign, misc, assignment]
    first.finish(OopsError("the first"))
    assert work.wait()
    future.wait()
    assert str(subject.error()) == "the first"


def test_of_many_threads_with_an_error_one_is_heard_and_none_raises(party: Party) -> None:
    subject = Subject("swallowing")
    works = [subject.call("allgather")[0] for _ in range(8)]
    for number, pending in enumerate(subject.inner.works):
        pending.finish(OopsError(str(number)))
    start = threading.Barrier(len(works))

    def ask(rank: int, work: Any) -> bool:
        start.wait(LIMIT_S)
        return bool(list(NOTICE.values())[rank % len(NOTICE)](work))

    assert all(party.together(works, ask))
    assert isinstance(subject.error(), OopsError)
    assert len(subject.inner.aborts) == 1


def test_waiting_longer_than_one_wants_to_is_an_error_and_leaves_outputs_to_the_backend() -> None:
    subject = Subject("swallowing")
    work, outputs = subject.call("allgather")
    assert work.wait(timedelta(milliseconds=1))
    assert "takes too long" in str(subject.error())
    assert not work.is_completed()
    assert outputs[0][0] == SPOILT, "the operation may still write there"


@pytest.mark.parametrize("name", NAMES)
def test_a_group_that_was_never_configured_raises_nothing_either(name: str) -> None:
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo(30))
    for _ in range(2):
        work = getattr(group, name)(*copy.deepcopy(ALONE[name][0]))
        assert work is None or work.wait()
    assert isinstance(group.error(), ProcessGroupNotConfiguredError)


MISFITS: list[tuple[str, tuple[Any, ...]]] = [
    ("alltoall_base", (garbage(1), ones(1), [], [])),  # one row for three ranks
    ("alltoall_base", (garbage(5), ones(4), [5, 0], [2, 2])),
    ("alltoall", ([garbage(2)], [ones(3)])),
    ("_allgather_base", (garbage(5), ones(2))),
    ("allgather", ([[garbage(3)]], [ones(2)])),
    ("scatter", ([garbage(2)], [[ones(3)]])),
]


@pytest.mark.parametrize(("name", "args"), MISFITS)
def test_a_skipped_call_whose_tensors_do_not_fit_leaves_zeros(name: str, args: tuple[Any, ...]) -> None:
    subject = Subject("swallowing")
    subject.group.report_error(OopsError())
    args = copy.deepcopy(args)
    assert getattr(subject.group, name)(*args).wait()
    for output in tensors_of(args[0]):
        assert torch.equal(output, torch.zeros_like(output))


def test_torchs_functions_for_messages_and_objects_go_on_after_an_error(party: Party) -> None:
    first, second = [ErrorSwallowingProcessGroupWrapper(group) for group in party.meet(2)]
    for group in (first, second):
        group.register(f"messages-{group.rank()}")
        group.report_error(OopsError())
    try:
        assert dist.recv(torch.ones(1), group=second) == 0
        assert dist.recv(torch.ones(1), group=first) == 1
        dist.send(torch.ones(1), group_dst=0, group=second)
        exchange = [
            dist.P2POp(dist.isend, torch.ones(1), group=second, group_peer=0),
            dist.P2POp(dist.irecv, torch.ones(1), group=second, group_peer=0),
        ]
        assert all(work.wait() for work in dist.batch_isend_irecv(exchange))
        objects: list[Any] = [None, None]
        dist.all_gather_object(objects, "mine", group=second)
        assert objects == ["mine", "mine"]
        with pytest.raises(EOFError):  # torch unpickles the message that did not come
            dist.scatter_object_list([None], None, group_src=0, group=second)
    finally:
        first.unregister()
        second.unregister()


def test_functional_collectives_go_on_after_an_error(party: Party) -> None:
    group: Any = ErrorSwallowingProcessGroupWrapper(party.meet(1)[0]).register("functional")
    try:
        group.report_error(OopsError())
        summed = functional.all_reduce(ones(2), "sum", group.group_name)
        sent = functional.broadcast(ones(2), 0, group.group_name)
        assert torch.equal(summed, ones(2))
        assert torch.equal(sent, ones(2))
    finally:
        group.unregister()


def test_configure_is_not_swallowed(party: Party) -> None:
    group = ErrorSwallowingProcessGroupWrapper(party.own(ProcessGroupGloo(0.2)))
    with pytest.raises(ProcessGroupNotConfiguredError):
        group.configure(party.prefix(), 0, 2)
    assert group.error() is None
    assert isinstance(group.errored(), ProcessGroupNotConfiguredError)
    tensor = ones(2)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, ones(2))
    assert group.error() is not None
    group.set_timeout(timedelta(seconds=LIMIT_S))
    group.configure(party.prefix(), 0, 1)
    assert (group.error(), group.errored()) == (None, None)


# Managed alone


@pytest.mark.no_trace
@pytest.mark.parametrize("trouble", [QuorumTimeoutError("none"), GroupLostError("restart")])
@pytest.mark.parametrize("name", NAMES)
def test_without_a_quorum_no_collective_raises_and_the_step_is_lost(name: str, trouble: Exception) -> None:
    subject = Subject("managed")
    subject.manager.trouble = trouble
    work, outputs = subject.call(name)
    assert work is None or work.wait()
    assert subject.manager.error is trouble
    assert_as_alone(name, outputs)
    assert subject.inner.calls[name] == 0
    assert (subject.group.size(), subject.group.rank()) == (3, 1), "those of the last quorum"


def test_a_manager_that_was_shut_down_is_a_mistake_of_the_caller() -> None:
    subject = Subject("managed")
    subject.manager.trouble = ShutdownError("it was shut down")
    for call in (lambda: subject.call("allreduce"), lambda: subject.call("barrier"), subject.group.size):
        with pytest.raises(ShutdownError):
            call()


# Backends: who notices an error, and what they are told


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str)
def test_torchs_ddp_over_a_group_that_raises_raises_its_error(options: dict[str, Any]) -> None:
    group = FaultInjectingProcessGroup(ProcessGroupDummy(0, 1))
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Linear(2, 2), process_group=group, init_sync=False, **options
    )
    for _ in range(2):
        group.fail("allreduce", OopsError("lost"))
        with pytest.raises(OopsError, match="lost"):
            ddp(torch.ones(2)).sum().backward()


@pytest.mark.parametrize("make", [ProcessGroupGloo, ProcessGroupBabyGloo])
@pytest.mark.parametrize("how", ["wait", "future"])
@pytest.mark.parametrize("aborts", ["the peer", "itself"])
def test_a_future_tells_of_an_error_as_a_wait_does(
    party: Party, make: Callable[[float], Any], how: str, aborts: str
) -> None:
    first, second = party.meet(2, lambda: make(30))
    work = first.allreduce([ones(2)])
    future = work.get_future() if how == "future" else None
    (first if aborts == "itself" else second).abort("on purpose")
    kind, told = (ProcessGroupAbortedError, "on purpose") if aborts == "itself" else (RuntimeError, ".")
    with pytest.raises(kind, match=told):
        future.wait() if future is not None else work.wait()
    assert isinstance(first.errored(), kind)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_about_process_groups_says_what_is_left_in_the_outputs_of(name: str) -> None:
    page = Path(__file__).parents[3] / "docs" / "process-groups.md"
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `")]
    assert len([row for row in rows if f"`{name}`" in row.split("|")[1]]) == 1
