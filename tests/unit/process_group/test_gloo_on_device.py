"""Gloo with tensors of a GPU, which it copies back on a stream of its own; the GPU is a stand-in.

What comes after a result on the device has to come after that copy, whichever thread learns that the work is
over. Whether CUDA and torch's futures do as the stand-ins is what tests/gpu is for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp, Work
from torch.futures import Future

from torchft_like import devices
from torchft_like.errors import CollectiveRefusedError
from torchft_like.manager.managed_work import Reduction
from torchft_like.process_group.generation import Operations
from torchft_like.process_group.gloo import GlooGaps
from torchft_like.process_group.work import JointOperation


class OnDevice(torch.Tensor):
    """Says that it is on a GPU, and is not."""

    is_cpu = False
    is_cuda = True
    device = torch.device("cuda", 1)


def on_device(count: int = 2) -> OnDevice:
    return torch.ones(count).as_subclass(OnDevice)


class Gpu:
    """What happened, in its order; `stream` is the current one, None the thread's own."""

    def __init__(self) -> None:
        self.stream: str | None = None
        self.seen: list[tuple[str, str | None]] = []

    def note(self, what: str) -> None:
        self.seen.append((what, self.stream))

    @contextlib.contextmanager
    def current(self, stream: str | None) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


class GlooWork(Work):
    """Done when its future is; its result comes on a stream that `synchronize` makes wait."""

    def __init__(self, gpu: Gpu, tensors: list[Any]) -> None:
        super().__init__()
        self._gpu = gpu
        self._tensors = tensors
        self.future: Future[list[Any]] = Future()

    def get_future(self) -> Future[list[Any]]:
        return self.future

    def synchronize(self) -> None:
        self._gpu.note("copied back")

    def finish(self) -> None:
        self.future.set_result(self._tensors)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"a stream of {device}")
    monkeypatch.setattr(torch.cuda, "stream", gpu.current)
    monkeypatch.setattr(devices, "beside_captures", lambda device: contextlib.nullcontext())
    return gpu


def test_the_future_is_completed_on_a_stream_that_comes_after_the_copy(gpu: Gpu) -> None:
    work = GlooWork(gpu, [on_device()])
    own = Operations().follow(work)
    own.add_done_callback(lambda _: gpu.note("completed"))
    work.finish()
    assert gpu.seen == [("copied back", "a stream of cuda:1"), ("completed", "a stream of cuda:1")]
    assert gpu.stream is None


def test_what_is_left_to_do_with_several_results_comes_after_their_copies(gpu: Gpu) -> None:
    works = [GlooWork(gpu, [on_device()]) for _ in range(2)]

    def finish() -> list[Any]:
        gpu.note("joined")
        return []

    JointOperation(works, finish).get_future().add_done_callback(lambda _: gpu.note("completed"))
    for work in works:
        work.finish()
    assert [what for what, _ in gpu.seen] == ["copied back", "copied back", "joined", "completed"]
    assert {stream for _, stream in gpu.seen} == {"a stream of cuda:1"}


def test_an_average_is_divided_after_the_copy(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    work, operations = GlooWork(gpu, [on_device()]), Operations()
    monkeypatch.setattr(
        "torchft_like.manager.managed_work.divide", lambda tensors, divisor: gpu.note("divided")
    )
    monkeypatch.setattr(GlooWork, "get_future", lambda self: self.future)
    reduction = Reduction([on_device()], 2, lambda error: pytest.fail(str(error)))
    followed = operations.follow(work)
    reduction.follow(_Followed(followed))
    work.finish()
    assert [what for what, _ in gpu.seen] == ["copied back", "divided"]
    assert {stream for _, stream in gpu.seen} == {"a stream of cuda:1"}


class _Followed(Work):
    def __init__(self, future: Future[list[Any]]) -> None:
        super().__init__()
        self._future = future

    def get_future(self) -> Future[list[Any]]:
        return self._future


def test_an_error_needs_no_stream(gpu: Gpu) -> None:
    work = GlooWork(gpu, [])
    own, joint = Operations().follow(work), JointOperation([work], list)
    work.future.set_exception(RuntimeError("reset by peer"))  # type: ignore[arg-type]
    for future in (own, joint.get_future()):
        with pytest.raises(RuntimeError, match="reset by peer"):
            future.wait()
    assert gpu.seen == []


def test_tensors_of_a_cpu_need_no_stream(gpu: Gpu) -> None:
    work = GlooWork(gpu, [torch.ones(1), [torch.ones(1)]])
    own = Operations().follow(work)
    work.finish()
    assert own.done()
    assert gpu.seen == []


@pytest.mark.parametrize("name", ["send", "recv", "recv_anysource"])
def test_a_message_from_a_device_is_refused_with_the_cure(name: str) -> None:
    asked: list[Callable[..., Any]] = []

    class Gloo:
        def __getattr__(self, name: str) -> Any:
            return asked.append

    gloo: Any = Gloo()
    where = () if name == "recv_anysource" else (1,)
    with pytest.raises(
        CollectiveRefusedError, match=f"on cuda:1: move it to the CPU, or {name} it over NCCL"
    ):
        GlooGaps(gloo, gloo, 0, 2).methods()[name]([on_device()], *where, 0)
    assert asked == []


def test_a_reduction_of_a_device_is_left_to_gloo() -> None:
    seen: list[Any] = []

    class Gloo:
        def allreduce(self, tensors: list[torch.Tensor], *options: Any) -> str:
            seen.extend(tensors)
            return "a work"

    gloo: Any = Gloo()
    tensor = on_device()
    gaps: Any = GlooGaps(gloo, gloo, 0, 2)
    assert gaps.allreduce([tensor], ReduceOp.SUM) == "a work"
    assert seen[0].data_ptr() == tensor.data_ptr()
