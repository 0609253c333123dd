"""A fingerprint of the tensors that ought to be the same in every replica, a slice of them at a time.

This module knows how to read parameters, optimizer state, the local shards of a DTensor and what a tensor of
a library's own class is made of, and which part of them is read in which step. It does not know how the
results are compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from torchft_like.core.state_comparison import LAYOUT_BYTES, Piece, RankFingerprint, Slices
from torchft_like.divergence.words import word_sum
from torchft_like.dtypes import flat
from torchft_like.errors import ConfigError, NotSupportedError
from torchft_like.instances import parts_of
from torchft_like.runtime.numbers import whole_number

DEFAULT_SLICES = 32


class OnDivergence(Enum):
    """What is done about replicas that differ; an event names them in any case.

    HEAL: the minority takes over the state of the majority. In a tie, of two replicas for instance, the
    replicas that agree with the lowest replica rank are taken to be right, and the event says so.
    HEAL_UNLESS_TIED: the same, but in a tie `should_commit` raises a DivergenceError on all of them, for a
    job that would rather go back to its last checkpoint. REPORT: nothing is done.
    """

    HEAL = "heal"
    HEAL_UNLESS_TIED = "heal unless tied"
    REPORT = "report"


class OptimizerLike(Protocol):
    """An optimizer, or an `OptimizerWrapper` around one."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> Any: ...


class StateFingerprint:
    """What of this rank's state is compared with the same rank of other replica groups, and how often.

        manager.watch_divergence(StateFingerprint(model.parameters(), [optimizer]))

    Every step reads one slice of `slices`, so a difference is found within that many steps, at the price of
    one such part of the bytes per step. Pass only tensors that are the same in all replicas when a step
    begins: not the running statistics of a BatchNorm, nor parameters between two synchronisations of
    LocalSGD. Pass only tensors that the Manager's state dict holds, or healing will not mend them.

    Args:
        tensors: dense tensors of any dtype and device; of a DTensor the local shard counts, of a tensor of a
            library's own class what it is made of (`__tensor_flatten__`). The same objects must hold the
            state for as long as it is watched, as a module's parameters do.
        optimizers: the tensors of their state are watched too, as they come into being.
        slices: the number of steps in which everything is read once; 1 reads everything in every step. It
          must be the same on all replicas, like the order of the tensors.
        on_divergence: what is done about a difference; the same on all replicas.

    Raises:
        ConfigError: `slices` is no whole number from 1 on, or there is no tensor to watch.
        NotSupportedError: a tensor is sparse, quantized or on the meta device.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor],
        optimizers: Iterable[OptimizerLike] = (),
        *,
        slices: int = DEFAULT_SLICES,
        on_divergence: OnDivergence = OnDivergence.HEAL,
    ) -> None:
        self.on_divergence = on_divergence
        self._tensors = list(tensors)
        self._optimizers = list(optimizers)
        self.slices = whole_number(slices, "slices", 1)
        if not self._tensors and not self._optimizers:
            raise ConfigError("no tensor to watch for divergence: give the model's parameters")
        self._plan = self._make_plan()

    def take(self, step: int) -> PendingFingerprint:
        """Begin to read the slice of this step, after what the current streams still have to do.

        Raises:
            NotSupportedError: an optimizer has a new tensor that cannot be read.
        """
        if self._plan.n_optimizer_tensors != self._count_optimizer_tensors():
            self._plan = self._make_plan()
        sums = self._sums(step)
        if sums is None:  # the optimizer has loaded tensors of another form
            self._plan = self._make_plan()
            sums = self._sums(step) or []
        return PendingFingerprint(sums, self._plan.layout, self.on_divergence is not OnDivergence.REPORT)

    def _sums(self, step: int) -> list[Tensor] | None:
        plan = self._plan
        sums = []
        with torch.no_grad():
            for piece in plan.slices.pieces(step):
                tensor = _local(plan.parts[piece.part]())
                if _form(tensor) != plan.forms[piece.part]:
                    return None
                sums.append(word_sum(_elements(tensor, piece)))
        return sums

    def _count_optimizer_tensors(self) -> int:
        return sum(
            isinstance(value, Tensor)
            for optimizer in self._optimizers
            for entries in optimizer.state.values()
            for value in entries.values()
        )

    def _make_plan(self) -> _Plan:
        whole = [partial(_same, tensor) for tensor in self._tensors]
        for optimizer in self._optimizers:
            whole += _state_of(optimizer)
        with torch.no_grad():
            parts = [part for one in whole for part in _dense_parts(one)]
            tensors = [_local(part()) for part in parts]
        for tensor in tensors:
            _check(tensor)
        forms = [_form(tensor) for tensor in tensors]
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        layout = hashlib.blake2b(f"{self.slices} {forms}".encode(), digest_size=LAYOUT_BYTES).digest()
        return _Plan(parts, forms, Slices(sizes, self.slices), layout, self._count_optimizer_tensors())


class PendingFingerprint:
    """A fingerprint that the devices may still be computing. One thread makes it, another may wait for it."""

    def __init__(self, sums: Sequence[Tensor], layout: bytes, heals: bool) -> None:
        self._layout = layout
        self._heals = heals
        devices: dict[torch.device, list[Tensor]] = {}
        for value in sums:
            devices.setdefault(value.device, []).append(value)
        self._copies = [_copy_to_host(torch.stack(values)) for values in devices.values()]

    @property
    def is_ready(self) -> bool:
        """Whether `result` does not wait."""
        return all(done is None or done.query() for _, done in self._copies)

    def result(self) -> bytes:
        """Wait for the devices, without holding the GIL, and return the encoded fingerprint."""
        digest = hashlib.blake2b(digest_size=8)
        for sums, done in self._copies:
            if done is not None:
                done.synchronize()
            digest.update(sums.numpy().tobytes())
        value = int.from_bytes(digest.digest())
        return RankFingerprint(self._heals, self._layout, value).to_bytes()


class _Plan(NamedTuple):
    """The division of the state, for as long as it has the same tensors."""

    parts: list[partial[Tensor]]
    forms: list[str]
    slices: Slices
    layout: bytes
    n_optimizer_tensors: int


def _state_of(optimizer: OptimizerLike) -> list[partial[Tensor]]:
    """Return the tensors of an optimizer's state, in an order that saving and loading it does not change.

    Each is looked up anew at every use, because loading replaces them.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        partial(_entry, optimizer, parameter, key)
        for parameter in parameters
        for key, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _entry(optimizer: OptimizerLike, parameter: Tensor, key: str) -> Tensor:
    value = optimizer.state.get(parameter, {}).get(key)
    return value if isinstance(value, Tensor) else _nothing()


def _dense_parts(whole: partial[Tensor]) -> Iterator[partial[Tensor]]:
    """Yield what a tensor of a library's own class is made of, at any depth; any other tensor itself."""
    inner, *_ = parts_of(_shard(whole())) or (None,)
    if not isinstance(inner, dict):
        yield whole
    else:
        for name in inner:
            yield from _dense_parts(partial(_inner, whole, name))


def _inner(whole: partial[Tensor], name: str) -> Tensor:
    value = getattr(_shard(whole()), name, None)
    return value if isinstance(value, Tensor) else _nothing()


def _nothing() -> Tensor:
    """Return what has another form than whatever was there."""
    return torch.empty(0, dtype=torch.bool)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor without a gradient."""
    return _shard(tensor).detach()


def _shard(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; that of a DTensor is its shard."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def _check(tensor: Tensor) -> None:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or tensor.is_quantized:
        raise NotSupportedError(
            f"a {type(tensor).__name__} of {tensor.layout} on {tensor.device} has no bytes that could be "
            "compared: leave it out of the StateFingerprint"
        )


def _form(tensor: Tensor) -> str:
    return f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)}"


def _elements(tensor: Tensor, piece: Piece) -> Tensor:
    """Return the elements of a piece, in the order of their indices, for any strides."""
    size = tensor.element_size()
    elements = tensor.resolve_conj().resolve_neg().reshape(-1)
    # One dimension keeps its stride.
    return flat(elements[piece.start // size : piece.stop // size].contiguous())


def _copy_to_host(sums: Tensor) -> tuple[Tensor, torch.Event | None]:
    """Begin to copy to the host; return the copy, and the event to wait for before it may be read."""
    if sums.device.type == "cpu":
        return sums, None
    copy = sums.to("cpu", non_blocking=True)
    done = torch.Event(sums.device, blocking=True)
    done.record(torch.accelerator.current_stream(sums.device))
    return copy, done
