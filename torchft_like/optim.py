"""An optimizer that steps only when the step was committed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from torchft_like.averaged import check_averaged
from torchft_like.errors import ConfigError, NotSupportedError
from torchft_like.manager import Manager
from torchft_like.process_group import ManagedProcessGroup


class OptimizerWrapper(Optimizer):
    """An optimizer around another one: `zero_grad` begins a step with the Manager, `step` commits or drops
    it.

    Call `zero_grad` before the forward pass and `step` once after the backward pass. What else a committed
    step changes goes by what `step` returns:

        if optimizer.step():
            scheduler.step()

    A GradScaler may step it with `use_async_quorum=False`, where a replica heals before the forward pass.

    Args:
        manager: the Manager of this rank.
        optim: the optimizer of torch that a committed step updates the parameters with.

    Raises:
        ConfigError: what it is given are not these two, as where they have changed places.
        NotSupportedError: the optimizer is LBFGS, which evaluates the model several times in a step, or one
          over a ManagedProcessGroup that shares parameters out among replicas or averages them, as torch's
          ZeroRedundancyOptimizer and PostLocalSGDOptimizer.
    """

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        if isinstance(optim, torch.optim.LBFGS):
            raise NotSupportedError(
                "LBFGS evaluates the model as often as it likes in a step, each replica another number of "
                "times: take an optimizer whose step needs no closure"
            )
        if isinstance(getattr(optim, "process_group", None), ManagedProcessGroup):
            raise NotSupportedError(
                f"{type(optim).__name__} updates on each replica a part of the parameters, which nobody "
                "updates once that replica is gone: share them out within a replica group, over its own group"
            )
        if isinstance(getattr(getattr(optim, "averager", None), "process_group", None), ManagedProcessGroup):
            raise NotSupportedError(
                f"{type(optim).__name__} averages parameters in its step, after the vote: one that dies "
                "there spoils the others' parameters. Take torchft_like's LocalSGD or DiLoCo"
            )
        if not hasattr(optim, "step"):
            names = f"{type(manager).__name__} and {type(optim).__name__}"
            raise ConfigError(f"an Optimizer takes the Manager and the optimizer that it wraps, not {names}")
        # The base class is not initialized: state and parameters are the wrapped optimizer's.
        self.optim = optim
        self.manager = manager

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: ask for a quorum and clear the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Callable[[], object] | None = None) -> bool:  # type: ignore[override]
        """End the step: update the parameters if it was committed, and return whether it was.

        The Manager's `current_step` does not tell: it grows, too, where this replica has healed in a step
        that was not committed.

        If the optimizer raises, or is not called because of a Ctrl-C, the parameters may lack a committed
        step, or a part of it: a script that goes on nevertheless takes over a peer's state in its next step.

        Args:
            closure: calls `zero_grad` and evaluates the model and its gradients, as the closures of Lightning
              do. It is called once, first.

        Raises:
            NotSupportedError: a DistributedDataParallel has averaged none of the gradients, or not all
              (`averaged`). Or a GradScaler steps this optimizer, or one around it, and the quorum is
              asynchronous.
        """
        self._refuse_in(GradScaler._maybe_opt_step)
        if closure is not None:
            closure()
        check_averaged(parameter for group in self.param_groups for parameter in group["params"])
        before = self.manager.current_step()
        try:
            committed = self.manager.should_commit()
            if committed:
                self.optim.step()
        except BaseException:
            if self.manager.current_step() != before:
                self.manager.disown_state()
            raise
        return committed

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the optimizer divides the gradients itself, which a GradScaler asks before it steps it, and
        Lightning before it clips, with a scaler or without.

        A fused one does, by what a GradScaler would write into this object: it is not asked.

        Raises:
            NotSupportedError: a GradScaler asks, and the quorum is asynchronous.
        """
        self._refuse_in(GradScaler.step)
        return False

    def _refuse_in(self, of_scaler: Callable[..., object]) -> None:
        if _is_called_by(of_scaler) and self.manager._use_async_quorum:
            raise NotSupportedError(
                "a GradScaler divides gradients by this replica's scale before the vote, in which one that "
                "heals gets the peers' scale: give the Manager use_async_quorum=False, or let it step the "
                "inner optimizer after manager.should_commit()"
            )

    def replay(self, also: Callable[[], object] | None = None) -> GradientReplay:
        """Return how the steps of this optimizer are taken again, for `Manager.register_replay`.

        Args:
            also: does what a committed step does to the state beside the optimizer's step, after that:
              `scheduler.step`, for one.
        """
        return GradientReplay(self.optim, also)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters to the wrapped optimizer."""
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of the wrapped optimizer."""
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optim.state_dict()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of parameters of the wrapped optimizer."""
        return self.optim.param_groups

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optim.defaults

    def __getattr__(self, name: str) -> Any:
        """Return what else the wrapped optimizer has: its hooks, or the `train` of a schedule-free one.

        Its other private attributes are not looked up.
        """
        if name == "optim" or (name.startswith("_") and not name.startswith("_optimizer_")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.optim, name)

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied: torch would keep the parameters, and neither the optimizer nor the Manager."""
        raise NotSupportedError("this optimizer belongs to a Manager: copy or save its `optim`")

    def __repr__(self) -> str:
        return f"OptimizerWrapper({self.optim!r})"


def _is_called_by(method: Callable[..., object]) -> bool:
    frame: FrameType | None = sys._getframe()  # `walk_stack` takes three times as long, for the lines
    while frame is not None and frame.f_code is not method.__code__:
        frame = frame.f_back
    return frame is not None


class GradientReplay:
    """A replay of an optimizer's steps with the gradients that were kept: averaged, and clipped if they are.

    The kept gradients lie where the parameters' own do, on their device.

    Args:
        optim: the optimizer, which one step steps once.
        also: called after each of its steps.
    """

    def __init__(self, optim: Optimizer, also: Callable[[], object] | None = None) -> None:
        self._optim = optim
        self._also = also

    def keep(self) -> list[torch.Tensor | None]:
        """Return copies of all gradients, None where a parameter has none."""
        return [None if g is None else g.detach().clone() for g in self._gradients()]

    def take(self, steps: Sequence[object]) -> None:
        """Step the optimizer with each of these gradients; those of the present step are left as they are."""
        present = self._gradients()
        try:
            for kept in steps:
                self._set(cast("list[torch.Tensor | None]", kept))
                self._optim.step()
                if self._also is not None:
                    self._also()
        finally:
            self._set(present)

    def changed_by_steps(self) -> list[torch.Tensor]:
        """Return the parameters, and the tensors of the optimizer's state, in the order of their dicts."""
        states = [state for state in self._optim.state.values() if isinstance(state, Mapping)]
        others = [value for state in states for value in state.values()]
        return [value for value in (*self._parameters(), *others) if isinstance(value, torch.Tensor)]

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self._optim.param_groups for parameter in group["params"]]

    def _gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self._parameters()]

    def _set(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            parameter.grad = gradient
