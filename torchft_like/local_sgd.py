"""Training whose replicas talk seldom: LocalSGD, DiLoCo and Streaming DiLoCo.

Every replica group trains by itself with its inner optimizer, and all average at times. A *sync* is one step
of the Manager: it has a quorum, collectives and a vote, and the inner steps between two syncs have none. So a
replica that dies between two syncs costs the others nothing, and one that dies in a sync
costs them that sync.

INVARIANT: after a committed sync all participants hold bit-identical global parameters and outer optimizer
states. They are changed in one place, after the vote, from what all of them have received; a sync that is not
committed changes neither. Both are registered with the Manager, so a replica that heals takes them over with
the rest of the state.

The names, arguments and defaults are torchft's.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed import Work
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torchft_like.checkpointing.shards import like_shard_of, local_part
from torchft_like.collectives import ErrorFeedback
from torchft_like.core.step import Share
from torchft_like.core.sync_schedule import SyncSchedule
from torchft_like.errors import CheckpointFormatError, ConfigError
from torchft_like.manager.state_registry import LoadFunction, SaveFunction
from torchft_like.quantization import format_named
from torchft_like.runtime.numbers import whole_number

USE_BUCKETIZATION_ENV = "TORCHFT_USE_BUCKETIZATION"
BUCKET_CAP_MB = 1024  # of a bucket, if none is given


class SyncManager(Protocol):
    """The methods of a Manager that a sync needs."""

    @property
    def _use_async_quorum(self) -> bool: ...
    def start_quorum(self) -> None: ...
    def allreduce(
        self, tensor: Tensor, should_quantize: bool | str = ..., *, error_feedback: ErrorFeedback | None = ...
    ) -> Work: ...
    def should_commit(self) -> bool: ...
    def current_step(self) -> int: ...
    def share_of_step(self) -> Share: ...
    def disown_state(self) -> None: ...
    def register_state_dict_fn(self, key: str, load: LoadFunction, save: SaveFunction, /) -> None: ...


class _InnerSteps(ABC):
    """An object that is called after each step of an optimizer while a `with` block lasts."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._local_optimizer = optimizer
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        self._hooks.append(self._local_optimizer.register_step_post_hook(self._on_step))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @abstractmethod
    def _on_step(self, *_: object) -> None:
        """Count the step, and sync, if it is time."""


class LocalSGD(_InnerSteps):
    """LocalSGD (Stich, 2018, arXiv:1805.09767): replicas average their parameters after every H steps.

        x_k <- x_k - lr * g_k(x_k)        in each step, for replica k
        x_k <- (x_1 + ... + x_K) / K      after every H = `sync_every` steps

    A sync that fails leaves every replica's parameters as they are: the progress stays, and the next average
    is H steps later. The state of the optimizer is the replica's own; one that heals takes over its source's.

    Args:
        manager: the Manager; its quorum may be asynchronous or not.
        model: the model whose parameters are averaged.
        optimizer: the optimizer whose steps are counted while the `with` block lasts.
        sync_every: the number of steps between two syncs.

    Raises:
        ConfigError: `sync_every` is less than 1.
    """

    def __init__(self, manager: SyncManager, model: nn.Module, optimizer: Optimizer, sync_every: int) -> None:
        super().__init__(optimizer)
        self._manager, self._model = manager, model
        self._sync_every = whole_number(sync_every, "sync_every", 1)
        self._local_step = 0

    def sync(self) -> None:
        """Average the parameters over the participants, now."""
        self._manager.start_quorum()
        with torch.no_grad():
            averages = [extract_local_tensor(parameter) for parameter in self._model.parameters()]
        for work in [self._manager.allreduce(average) for average in averages]:
            work.wait()
        if self._manager.current_step() == 0:
            # All but one may have added zeros to an average over all, which parameters must not be.
            share = self._manager.share_of_step()
            with torch.no_grad():
                for average in averages:
                    average.mul_(share.divisor / share.size)
        if self._manager.should_commit():
            with torch.no_grad(), _owned(self._manager):
                for parameter, average in zip(self._model.parameters(), averages, strict=True):
                    local_part(parameter).copy_(average)
        self._local_step = 0

    def _on_step(self, *_: object) -> None:
        self._local_step += 1
        if self._local_step >= self._sync_every:
            self.sync()


class DiLoCo(_InnerSteps):
    """DiLoCo (Douillard et al., 2023, arXiv:2311.08105) and Streaming DiLoCo (2025, arXiv:2501.18512).

    The model consists of P fragments. After every H / P inner steps, H = `sync_every`, the next fragment p is
    synced, so each is once in H steps:

        D_k <- x_p - x_p,k                        the pseudogradient of replica k; x_p: global parameters
        D   <- (D_1 + ... + D_K) / K              an allreduce, which runs beside the next tau inner steps
        x_p <- outer optimizer(x_p, D)            on every replica, from the same numbers
        x_p,k <- (1 - alpha) * x_p + alpha * x_p,k

    with tau = `fragment_sync_delay` and alpha = `fragment_update_alpha`. A sync that fails puts the fragment
    back to its global parameters, with which its inner steps begin anew: no replica trains on for long with
    parameters that the others have never seen. The next sync is of the same fragment.

    A replica that joins waits for the next sync, and begins with a copy of its source: parameters, global
    parameters, inner and outer optimizer states, as far as they are registered.

    Args:
        manager: the Manager, with `use_async_quorum=False`.
        model_fragments: the modules that are synced one after another; [model] is plain DiLoCo.
        inner_optimizer: the optimizer whose steps are counted while the `with` block lasts.
        outer_optimizer: an optimizer of the global parameters, or one for each fragment.
        sync_every: the number of inner steps in which each fragment is synced once.
        backup_device: where the global parameters are kept; None for the CPU.
        pin_memory: whether global parameters on the CPU are pinned, if there is an accelerator.
        use_bucketization: whether pseudogradients are averaged in few large collectives, and not one by one
            (TORCHFT_USE_BUCKETIZATION=True: in any case).
        bucket_cap_mb: the most MiB of such a collective; None for 1 GiB. A greater parameter has its own.
        should_quantize: whether the pseudogradients are quantized for the allreduce, "int8", or True for
            "fp8".
        fragment_sync_delay: tau, the inner steps between the begin of an allreduce and the wait for it.
        fragment_update_alpha: alpha, in [0, 1]: 0 takes the global parameters, 1 keeps the local ones.
        error_feedback: whether what quantizing leaves of a pseudogradient is added to the next one.

    Raises:
        ConfigError: the quorum is asynchronous, the fragments are no list, or a number does not fit the
            others; the text says which.
    """

    def __init__(
        self,
        manager: SyncManager,
        model_fragments: list[nn.Module],
        inner_optimizer: Optimizer,
        outer_optimizer: Optimizer | list[Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool | str = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        error_feedback: bool = False,
    ) -> None:
        if not hasattr(model_fragments, "__len__"):
            raise ConfigError(
                f"model_fragments is a {type(model_fragments).__name__}: pass a list, as [model]"
            )
        count = len(model_fragments)
        outers = outer_optimizer if isinstance(outer_optimizer, list) else [outer_optimizer] * count
        _check(manager, count, len(outers), sync_every, fragment_sync_delay, fragment_update_alpha)
        super().__init__(inner_optimizer)
        self._manager = manager
        self._schedule = SyncSchedule(count, sync_every, fragment_sync_delay)
        if should_quantize not in (True, False, ""):
            format_named(str(should_quantize))  # an unknown one is an error now, and not in the first sync
        if os.environ.get(USE_BUCKETIZATION_ENV, "False") == "True":
            use_bucketization = True
        bucket_mb = (bucket_cap_mb or BUCKET_CAP_MB) if use_bucketization else 0
        self._fragments = [
            _Fragment(module, outer, fragment_update_alpha, bucket_mb << 20, should_quantize, error_feedback)
            for module, outer in zip(model_fragments, outers, strict=True)
        ]
        for number, fragment in enumerate(self._fragments):
            fragment.keep_global(backup_device or torch.device("cpu"), pin_memory)
            # torchft's key, which its checkpoints have too
            key = f"StreamingDiLoCoFragment_{number}"
            manager.register_state_dict_fn(key, fragment.load_state_dict, fragment.state_dict)

    @property
    def is_syncing(self) -> bool:
        """Whether a fragment is sent and its average not yet taken over."""
        return self._schedule.under_way is not None

    def global_states(self) -> list[dict[str, Any]]:
        """Return the global parameters and the outer optimizer's state of each fragment: what is equal bit by
        bit on all participants after a committed sync.

        The keys are torchft's, "original_parameters" and "outer_optimizer". Where parameters are DTensors,
        so are these, and `torch.distributed.checkpoint` keeps every rank's shard. Tensors are not copied, but
        for DTensors that are kept on another device than the parameters'.
        """
        return [fragment.global_state() for fragment in self._fragments]

    def load_global_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load from a checkpoint what `global_states` returned on this rank, before the first inner step.

        Without it the global parameters are those that the model had when this object was made, and the outer
        optimizers begin anew.

        Raises:
            CheckpointFormatError: the model had other fragments; nothing was taken over.
        """
        own_forms, forms = (list(map(_form_of, each)) for each in (self.global_states(), states))
        for number, (own, other) in enumerate(itertools.zip_longest(own_forms, forms)):
            if own != other:
                raise CheckpointFormatError(
                    f"fragment {number} has the parameters {own!r:.500} here and {other!r:.500} in the "
                    "checkpoint: every start of a job cuts the same model into the same fragments and shards"
                )
        for fragment, state in zip(self._fragments, states, strict=True):
            fragment.load_state_dict(state)

    def _on_step(self, *_: object) -> None:
        schedule = self._schedule
        schedule.step()
        if schedule.is_due:
            self._manager.start_quorum()
            number = schedule.next_fragment(self._manager.current_step())
            self._fragments[number].send(self._manager)
            schedule.sent(number)
        if (over := schedule.received()) is not None:
            self._fragments[over].receive(self._manager)


class _Fragment:
    """One fragment: its global parameters, its outer optimizer, and the sync that is under way.

    Attributes:
        original_parameters: the global parameters, this rank's part of them, by name.
    """

    def __init__(
        self,
        module: nn.Module,
        outer: Optimizer,
        alpha: float,
        bucket_bytes: int,
        should_quantize: bool | str,
        error_feedback: bool,
    ) -> None:
        self._parameters = dict(module.named_parameters())
        if not self._parameters:
            raise ConfigError(f"a fragment of the model has no parameters: {module}")
        self._outer = outer
        self._alpha = alpha
        self._bucket_bytes = bucket_bytes
        self._should_quantize = should_quantize
        self._feedbacks = [ErrorFeedback() for _ in self._bucket_names()] if error_feedback else []
        self._pseudogradients: dict[str, Tensor] = {}
        self._works: list[Work] = []
        self.original_parameters: dict[str, Tensor] = {}

    @torch.no_grad()
    def keep_global(self, device: torch.device, pin_memory: bool) -> None:
        """Take the present parameters for the global ones, and keep them on the device."""
        pin = pin_memory and device.type == "cpu" and torch.accelerator.is_available()
        for name, parameter in self._parameters.items():
            local = local_part(parameter)
            kept = torch.empty(local.shape, dtype=local.dtype, device=device, pin_memory=pin)
            self.original_parameters[name] = kept.copy_(local)

    def send(self, manager: SyncManager) -> None:
        """Compute the pseudogradients, and begin to average them."""
        with torch.no_grad():
            buckets = [self._fill(names) for names in self._bucket_names()]
        quantize, options = self._should_quantize, [{"error_feedback": each} for each in self._feedbacks]
        self._works = [
            manager.allreduce(bucket, should_quantize=quantize, **own)
            for bucket, own in zip(buckets, options or [{}] * len(buckets), strict=True)
        ]

    def receive(self, manager: SyncManager) -> None:
        """Wait for the average, and take over the new global parameters if the sync is committed."""
        for work in self._works:
            work.wait()
        self._works = []
        committed = manager.should_commit()
        with torch.no_grad(), _owned(manager):
            kept = {n: local_part(p).clone() for n, p in self._parameters.items()} if self._alpha > 0 else {}
            for name, parameter in self._parameters.items():
                local_part(parameter).copy_(self.original_parameters[name])
            if committed:
                self._outer.zero_grad()  # it may have other fragments, with gradients of the inner steps
                for name, parameter in self._parameters.items():
                    parameter.grad = like_shard_of(parameter, self._pseudogradients[name])
                self._outer.step()
                self._outer.zero_grad()
                for name, parameter in self._parameters.items():
                    self.original_parameters[name].copy_(local_part(parameter))
                for name, local in kept.items():
                    local_part(self._parameters[name]).lerp_(local, self._alpha)
        self._pseudogradients.clear()

    def _bucket_names(self) -> Iterator[list[str]]:
        """Yield the names of the parameters that share a bucket: neighbours of the same dtype and device."""
        names: list[str] = []
        kind, size = None, 0
        for name, parameter in self._parameters.items():
            local = local_part(parameter)
            own_kind, own_size = (local.dtype, local.device), local.numel() * local.element_size()
            if names and (own_kind != kind or size + own_size > self._bucket_bytes):
                yield names
                names, size = [], 0
            names.append(name)
            kind, size = own_kind, size + own_size
        yield names

    def _fill(self, names: Sequence[str]) -> Tensor:
        """Return a bucket with the pseudogradients of these parameters, which are views of it."""
        locals_ = [local_part(self._parameters[name]) for name in names]
        bucket = torch.empty(
            sum(local.numel() for local in locals_), dtype=locals_[0].dtype, device=locals_[0].device
        )
        parts = torch.split(bucket, [local.numel() for local in locals_])
        for name, local, part in zip(names, locals_, parts, strict=True):
            view = self._pseudogradients[name] = part.view(local.shape)
            torch.sub(self.original_parameters[name].to(local.device), local, out=view)
        return bucket

    def state_dict(self) -> dict[str, Any]:
        """Return the global parameters and the state of the outer optimizer, for a peer."""
        return {"outer_optimizer": self._outer.state_dict(), "original_parameters": self.original_parameters}

    def global_state(self) -> dict[str, Any]:
        """Return the same for a checkpoint: the global parameters lie as the parameters do."""
        kept = self.original_parameters.items()
        placed = {name: like_shard_of(self._parameters[name], own).to(own.device) for name, own in kept}
        return {**self.state_dict(), "original_parameters": placed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over global parameters and outer optimizer state, a peer's or those of a checkpoint."""
        for name, kept in self.original_parameters.items():
            kept.copy_(local_part(state["original_parameters"][name]))
        self._outer.load_state_dict(state["outer_optimizer"])


def _form_of(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(local_part(tensor).shape) for name, tensor in state["original_parameters"].items()}


def extract_local_tensor(t: Tensor) -> Tensor:
    """Return a copy of a tensor, or of this rank's part of a DTensor, without its gradient."""
    return local_part(t).clone()


@contextmanager
def _owned(manager: SyncManager) -> Iterator[None]:
    """Disown this replica's state if carrying out a verdict raises: a part of it may be changed by then."""
    try:
        yield
    except BaseException:
        manager.disown_state()
        raise


def _check(
    manager: SyncManager, fragments: int, outers: int, sync_every: int, delay: int, alpha: float
) -> None:
    if manager._use_async_quorum:
        raise ConfigError(
            "DiLoCo needs a synchronous quorum, in which a replica heals before it sends anything: make the "
            "Manager with use_async_quorum=False"
        )
    if outers != fragments:
        raise ConfigError(
            f"{outers} outer optimizers for {fragments} model fragments: give one for each, or one"
        )
    whole_number(sync_every, "sync_every", 1)
    whole_number(delay, "fragment_sync_delay")
    if fragments < 1 or sync_every < fragments:
        raise ConfigError(f"{fragments} fragments cannot be synced in {sync_every} steps: only one at a time")
    if sync_every % fragments:
        raise ConfigError(
            f"sync_every {sync_every} must be a multiple of the number of fragments, {fragments}"
        )
    if delay >= sync_every // fragments:
        raise ConfigError(
            f"fragment_sync_delay is {delay}, must be in [0, {sync_every // fragments}): a fragment is "
            "synced before the next one is sent"
        )
    if not isinstance(alpha, int | float) or not 0 <= alpha <= 1:
        raise ConfigError(f"fragment_update_alpha is {alpha}, must be between 0 and 1")
