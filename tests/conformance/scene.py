"""The tensors and the group that a case sees, and the outcome that it leaves behind.

A case is a function of a `Scene`: a group, and tensors that are the same in every run. It runs once on the
group under test and once on torch's own; the two outcomes, values or errors, are compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import Future

from torchft_like.process_group.collectives import tensors_of

Size = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """The dtype, the shape and the layout of a case's tensors."""

    dtype: torch.dtype = torch.float32
    shape: Size = (2, 3)
    layout: str = "plain"  # or one of `LAYOUTS`, or "conjugated"

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{str(self.dtype).removeprefix('torch.')} {shape} {self.layout}"


DTYPES = (
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
SHAPES: tuple[Size, ...] = ((), (0,), (0, 4), (1,), (5,), (3, 1, 2), (70_000,))
# The whole call is in inference mode, and not the tensors alone.
IN_INFERENCE_MODE = "plain, in inference mode"
LAYOUTS = ("transposed", "strided", "offset", "negated", "leaf", "inference", IN_INFERENCE_MODE, "shared")
# Layouts with which torch's own group fails on some ranks while the others wait: plain tensors show the right
# result.
FOR_OURS_ONLY = ("negated", "conjugated", "leaf", "inference", IN_INFERENCE_MODE)

PLAIN = Kind()
KINDS = (
    PLAIN,
    *(Kind(dtype=dtype) for dtype in DTYPES),
    *(Kind(shape=shape) for shape in SHAPES),
    *(Kind(layout=layout) for layout in LAYOUTS),
)
CONJUGATED = Kind(dtype=torch.complex64, layout="conjugated")  # not for functions of torch.distributed


@dataclass
class Scene:
    """A group, and the tensors of its rank."""

    group: Any
    rank: int
    world: int
    kind: Kind = PLAIN
    mode: str = "sync"
    device: str = "cpu"
    is_reference: bool = False

    @property
    def root(self) -> int:
        """The rank that is not the first one, where there is another."""
        return min(1, self.world - 1)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    @property
    def ranks(self) -> range:
        return range(self.world)

    @property
    def following(self) -> int:
        return (self.rank + 1) % self.world

    @property
    def preceding(self) -> int:
        return (self.rank - 1) % self.world

    def tensor(self, salt: int = 0, shape: Size | None = None) -> Tensor:
        """Return a tensor of the case's kind with small whole numbers that differ by rank and salt."""
        shape = self.kind.shape if shape is None else shape
        count = int(torch.Size(shape).numel())
        values = (torch.arange(count) * 7 + self.rank * 3 + salt * 5) % 6 + 1
        if self.kind.dtype == torch.bool:
            values = values % 2
        return self._laid_out(values.to(self.kind.dtype).reshape(shape))

    def blank(self, shape: Size | None = None) -> Tensor:
        """Return a tensor to be overwritten."""
        shape = self.kind.shape if shape is None else shape
        return self._laid_out(
            torch.full(shape, 1 if self.kind.dtype == torch.bool else 99).to(self.kind.dtype)
        )

    def blanks(self) -> list[Tensor]:
        """Return one tensor to be overwritten for each rank."""
        return [self.blank() for _ in self.ranks]

    def joined(self, shape: Size | None = None) -> Size:
        """Return the shape of all ranks' tensors, one after the other."""
        shape = self.kind.shape if shape is None else shape
        return (self.world * shape[0], *shape[1:]) if shape else (self.world,)

    def easy(self) -> Scene:
        """Return a scene with the same values in plain tensors, if this one is for torch's own group."""
        if not self.is_reference:
            return self
        return replace(self, kind=Kind(self.kind.dtype, self.kind.shape or (1,)))

    def _laid_out(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device)
        if self.kind.layout == "transposed" and tensor.dim() > 1:
            return tensor.transpose(0, 1).contiguous().transpose(0, 1)
        if self.kind.layout == "strided":
            return torch.stack([tensor, tensor], -1)[..., 0]
        if self.kind.layout == "offset":
            return torch.cat([tensor.new_zeros(3), tensor.reshape(-1)])[3:].view(tensor.shape)
        if self.kind.layout == "negated" and tensor.is_floating_point():
            return torch._neg_view(tensor.neg())
        if self.kind.layout == "conjugated" and tensor.is_complex():
            return tensor.conj().resolve_conj().conj()
        return self._made_specially(tensor)

    def _made_specially(self, tensor: Tensor) -> Tensor:
        """Return a tensor that autograd watches, that was made in inference mode, or that is in shared
        memory.
        """
        if self.kind.layout == "leaf" and tensor.is_floating_point():
            return tensor.requires_grad_()
        if self.kind.layout == "inference":
            with torch.inference_mode():
                return tensor.clone()
        if self.kind.layout == "shared":
            tensor.share_memory_()  # type: ignore[no-untyped-call]
        return tensor


@dataclass
class Call:
    """A call of a function that can be asynchronous, and its outputs.

    Attributes:
        future: what the future carries, where torch's own work has none and is never completed.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    outputs: Any
    kwargs: dict[str, Any] = field(default_factory=dict)
    future: Any = None
    contents_only: bool = False  # torch's own group was given the same values in another shape

    def run(self, scene: Scene) -> Any:
        """Carry the call out in the mode of the scene, and return what was seen."""
        work = self.function(*self.args, group=scene.group, async_op=scene.mode != "sync", **self.kwargs)
        if scene.is_reference and self.future is not None and scene.mode != "sync":
            work.wait()
            seen = (True, True, True) if scene.mode == "wait" else self.future
        else:
            seen = finish(work, scene.mode)
        if self.contents_only:
            return [tensor.reshape(-1) for tensor in tensors_of(self.outputs)]
        return seen, self.outputs


MODES = ("sync", "wait", "future", "then")
Form = tuple[Kind, str]  # the mode is one of those


def finish(work: Any, mode: str) -> Any:
    """Wait for a work in one of the ways, and return what can be seen of it afterwards."""
    if mode == "sync" or work is None:
        return work
    future = work if isinstance(work, Future) else None
    if mode == "wait":
        return (work.wait() is not None) if future else (work.wait(), work.is_completed(), work.is_success())
    future = future or work.get_future()
    if mode == "then":
        future = future.then(lambda done: done.value())
    return future.wait()


@dataclass
class Outcome:
    """The value or the error with which a case ended."""

    value: Any = None
    error: BaseException | None = None

    def without_traceback(self) -> Outcome:
        """The same, to be kept: its error holds no frames, and so no tensors and works, alive."""
        if self.error is not None:
            self.error = self.error.with_traceback(None)
        return self

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {str(self.error)[:300]}"
        return f"{self.value!r}"[:600]


Case = Callable[[Scene], Any]


def outcome_of(case: Case, scene: Scene, swallowed: Callable[[], Exception | None]) -> Outcome:
    """Run a case; an error that the group swallowed counts as raised."""
    try:
        with torch.inference_mode(scene.kind.layout == IN_INFERENCE_MODE):
            value = detached(case(scene))
    except Exception as error:  # noqa: BLE001 - it is compared
        return Outcome(error=error)
    hidden = swallowed()
    return Outcome(value, getattr(hidden, "original_exception", hidden))


def detached(value: Any) -> Any:
    """Return a copy that later cases cannot change."""
    if isinstance(value, Tensor):
        return value.detach().to_dense().cpu().clone()
    if isinstance(value, list | tuple):
        return type(value)(detached(item) for item in value)
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()}
    return value


def difference(subject: Outcome, reference: Outcome) -> str | None:
    """Return the first difference in words, or None; a subclass of torch's error is no difference."""
    if reference.error is not None or subject.error is not None:
        if is_like(subject.error, reference.error):
            return None
        return f"\n  ours:  {subject}\n  torch: {reference}"
    return next(_differences(subject.value, reference.value, "result"), None)


def is_only_clearer(subject: Outcome, reference: Outcome) -> bool:
    """Return whether our group raises a clear error where torch found no function for the call."""
    is_missing = isinstance(reference.error, NotImplementedError)
    return is_missing and (subject.error is None or isinstance(subject.error, RuntimeError))


def is_like(error: BaseException | None, model: BaseException | None) -> bool:
    """Return whether code that catches `model` catches `error`."""
    return error is not None and model is not None and isinstance(error, type(model))


def _differences(subject: Any, reference: Any, place: str) -> Iterator[str]:
    if isinstance(subject, Tensor) and isinstance(reference, Tensor):
        if not _same(subject, reference):
            yield f"{place}:\n  ours:  {subject}\n  torch: {reference}"
    elif isinstance(subject, list | tuple) and isinstance(reference, list | tuple):
        if len(subject) != len(reference):
            yield f"{place} has {len(subject)} items, torch's has {len(reference)}: {subject} {reference}"
        for number, pair in enumerate(zip(subject, reference, strict=False)):
            yield from _differences(*pair, f"{place}[{number}]")
    elif isinstance(subject, dict) and isinstance(reference, dict):
        yield from _differences(sorted(subject.items()), sorted(reference.items()), place)
    elif subject != reference:
        yield f"{place} is {subject!r}, torch's is {reference!r}"


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and _bits(one) == _bits(other)


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
