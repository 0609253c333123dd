"""Data parallel training over the replica groups of the current quorum.

The module has no `from __future__ import annotations`, because torch reads the annotations of the
communication hook.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import GradBucket, Work
from torch.nn import parallel
from torch.utils.weak import WeakIdKeyDictionary

from torchft_like.errors import NotSupportedError
from torchft_like.manager import Manager
from torchft_like.process_group import ProcessGroupDummy
from torchft_like.process_group.collectives import Collective


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with its buckets reduced by a Manager.

    The hook returns the future of each bucket, so the backward pass goes on while buckets reduce. An error
    does not disturb the backward pass: it makes `should_commit` return False. A parameter that one replica
    used gets a gradient on all of them.

    Unlike torch's, it does not compare or broadcast parameters at the start (the Manager's init_sync
    does) and keeps its first assignment of parameters to buckets: a rebuilt one would differ between
    replicas that joined at different times.

    Args:
        manager: the Manager of this rank.
        module: the model.
        ddp_kwargs: the arguments for torch's class; `find_unused_parameters` is always True.

    Raises:
        NotSupportedError: `static_graph`, a `process_group`, or parameters whose reduction is delayed were
          given.
    """

    def __init__(self, manager: Manager, module: nn.Module, **ddp_kwargs: Any) -> None:
        for name, problem in _UNFIT.items():
            if ddp_kwargs.get(name) is not None and ddp_kwargs[name] is not False:
                raise NotSupportedError(f"replicas that come and go cannot do with {name}: {problem}")
        ddp_kwargs.pop("find_unused_parameters", None)
        super().__init__(
            module,
            process_group=_OfReducer(manager),
            # Unless it looks for unused parameters, the reducer rebuilds its buckets after the first step.
            find_unused_parameters=True,
            **ddp_kwargs,
        )
        self.register_comm_hook(manager, _allreduce_bucket)
        self._manager = manager
        self._steps_given_up = manager.steps_given_up

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass. A backward pass that an exception ended, and the step with it, is
        forgotten.
        """
        if self._steps_given_up != self._manager.steps_given_up:
            self._steps_given_up = self._manager.steps_given_up
            self.reducer._reset_state()
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]


_UNFIT = {
    "process_group": "gradients are averaged over the Manager's, which knows the quorum",
    "static_graph": "torch assigns the parameters to buckets anew after the first step of each",
    "delay_all_reduce_named_params": "torch reduces these past the Manager",
}


class _OfReducer(ProcessGroupDummy):
    """The group of torch's reducer for its collectives other than those of buckets.

    The collectives of its constructor have one member. But the reduction of which parameters were used
    includes all members: a replica that did not use a parameter keeps its old gradient, and would take
    another step than the others. Healing replicas are included, too, since they contribute a gradient for
    each parameter that they used.
    """

    def __init__(self, manager: Manager) -> None:
        super().__init__(0, 1)
        self._manager = manager

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if collective.name == "allreduce":
            call = collective.bind(args, kwargs)
            tensors, options = call.reduction()
            if tensors[0].dtype == torch.int32:  # the only other allreduce is that of `join`, of floats
                return self._manager.group_allreduce(tensors, options, of_all_members=True)
        return super()._run(collective, args, kwargs)


def _allreduce_bucket(manager: Manager, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return manager.allreduce(bucket.buffer()).get_future()


class PureDistributedDataParallel(nn.Module):
    """A simple data parallel module that reduces every gradient by itself, as soon as it is there. It is
    slower than buckets.

    Gradients are final when the backward pass returns. It works where torch's reducer does not, such as with
    models that are changed between steps. But in each step all replicas must use the same parameters, on one
    device, so that they reduce them in the same order.
    """

    def __init__(self, manager: Manager, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._hooks: _GradientHooks | None = _GradientHooks(manager)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, such as an average of the parameters: a copy reduces nothing."""
        return {**self.__dict__, "_hooks": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        if self._hooks is not None:
            self._hooks.add_to(self.module)
        return self.module(*args, **kwargs)


class _GradientHooks:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._hooked = WeakIdKeyDictionary()

    def add_to(self, module: nn.Module) -> None:
        """Add hooks to the parameters that have none yet."""
        for parameter in module.parameters():
            if parameter.requires_grad and parameter not in self._hooked:
                hook = parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]
                self._hooked[parameter] = hook

    def _reduce(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        work = self._manager.allreduce(parameter.grad)

        def finish() -> None:
            work.wait()

        # The wait is at the end of the backward pass, because later code reads the gradient, or adds to it.
        torch.autograd.Variable._execution_engine.queue_callback(finish)
