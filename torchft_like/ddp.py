"""Data parallel training over the replica groups of the current quorum.

The module has no `from __future__ import annotations`, because torch reads the annotations of the
communication hook.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C._distributed_c10d import (
    _DEFAULT_FIRST_BUCKET_BYTES,
    GradBucket,
    Work,
)
from torch.futures import Future
from torch.nn import parallel
from torch.utils.weak import WeakIdKeyDictionary

from torchft_like.averaged import Witnesses, check_updates
from torchft_like.checkpointing.shards import is_dtensor
from torchft_like.errors import ConfigError, NotSupportedError, UnusedParametersError
from torchft_like.manager import Manager
from torchft_like.manager.managed_work import SUM
from torchft_like.process_group import ProcessGroupDummy
from torchft_like.process_group.buckets import NO_JOIN, fix_buckets
from torchft_like.process_group.collectives import Collective
from torchft_like.process_group.uncompiled import uncompiled_function

MB = 1 << 20
DEFAULT_CAP_MB = 25.0


class DistributedDataParallel(parallel.DistributedDataParallel):
    """torch's DistributedDataParallel with its buckets reduced by a Manager.

    The hook returns the future of each bucket, so the backward pass goes on while buckets reduce. An error
    does not disturb the backward pass: it makes `should_commit` return False. A parameter that one replica
    used gets a gradient on all of them.

    Each rank averages with the same rank of the other replica groups, and not with those of its own group.
    Where each rank has the whole model, let each be a group: `Manager(rank=0, world_size=1)`.

    Buffers, such as the running statistics of BatchNorm, are each replica's own between two heals, as in
    torchft: torch's class broadcasts those of rank 0 before each forward pass, when here the quorum may not
    be known yet. So evaluate on one replica, or use a normalization without them.

    Unlike torch's, it does not compare or broadcast parameters at the start (the Manager's init_sync
    does) and keeps its first assignment of parameters to buckets: a rebuilt one would differ between
    replicas that joined at different times.

    Where a backward pass leaves a parameter out, the step is not committed, and from then on this replica
    looks for unused parameters in every step, and all replicas tell each other which ones they used. That
    costs a walk through the graph and one more allreduce, which models that use all of their parameters are
    spared.

    As with torch's, gradients that `torch.autograd.grad` or `torch.func` returns are not reduced, nor what a
    second backward pass through the same graph adds: an `Optimizer` refuses to step with such alone. Reduce
    the former with `manager.allreduce`. A parameter that is unfrozen later is reduced from then on.

    Args:
        manager: the Manager of this rank.
        module: the model.
        find_unused_parameters: whether to look for unused parameters from the first step on.
        bucket_cap_mb, bucket_cap_mb_list: the size of buckets, as in torch's class.
        ddp_kwargs: the further arguments for torch's class.

    Raises:
        ConfigError: what it is given are not a Manager and a module, as where they have changed places.
        NotSupportedError: `static_graph`, a `process_group`, or parameters whose reduction is delayed were
          given, a parameter is a DTensor, or torch is to use its reducer in Python.
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        *,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        bucket_cap_mb_list: Sequence[float] | None = None,
        **ddp_kwargs: Any,
    ) -> None:
        _check_order(manager, module)
        for name, problem in _UNFIT.items():
            if ddp_kwargs.get(name) is not None and ddp_kwargs[name] is not False:
                raise NotSupportedError(f"replicas that come and go cannot do with {name}: {problem}")
        if torch._dynamo.utils.get_optimize_ddp_mode() == "python_reducer":
            raise NotSupportedError(
                "torch's reducer in Python, for compiled autograd, reduces past the Manager: use "
                "PureDistributedDataParallel, which compiled autograd takes"
            )
        for name, parameter in module.named_parameters():
            if is_dtensor(parameter):
                raise NotSupportedError(
                    f"{name} is a DTensor, which torch's reducer cannot take: call fully_shard with a mesh "
                    "of ft_init_device_mesh, or use PureDistributedDataParallel"
                )
        caps_mb = list(bucket_cap_mb_list or _caps_mb(module, bucket_cap_mb))
        self._reducers_group = _OfReducer(manager, find_unused_parameters)
        self._manager = manager
        self._steps_given_up = manager.steps_given_up
        super().__init__(
            module,
            process_group=self._reducers_group,
            find_unused_parameters=find_unused_parameters,
            bucket_cap_mb_list=caps_mb,  # type: ignore[arg-type] # torch takes fractions, too
            **ddp_kwargs,
        )
        self._set_reducer_up()
        manager.check_before_vote(self._check_all_were_used)
        check_updates(self._check_averaged)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass. A backward pass that an exception ended is forgotten."""
        self._begin_pass()
        return super().forward(*args, **kwargs)  # type: ignore[no-untyped-call]

    @uncompiled_function  # it goes by what changes from step to step, and each change would compile it anew
    def _begin_pass(self) -> None:
        _adopt_stages()
        if self._steps_given_up != self._manager.steps_given_up:
            self._steps_given_up = self._manager.steps_given_up
            self.reducer._reset_state()
            fix_buckets(self)
        is_searched = self.find_unused_parameters or not torch.is_grad_enabled()
        error = None if is_searched else self._check_all_were_used()  # in the pass before, of this step
        if error is not None:  # torch would raise it
            self._manager.report_error(error)
        if any(parameter.requires_grad for parameter in self._frozen):
            self._make_reducer_anew()
        self._witnesses.called(self.require_backward_grad_sync)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Refuse a communication hook: the Manager's is registered.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(
            "gradients are reduced by the Manager's own communication hook, and a reducer has one: to send "
            "fewer bytes, reduce them with manager.allreduce(gradient, should_quantize=True)"
        )

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse `join` and torch's `Join`.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError(NO_JOIN)

    def __getstate__(self) -> NoReturn:
        """Refuse to be copied.

        Raises:
            NotSupportedError: always.
        """
        raise NotSupportedError("this model's reducer belongs to a Manager: copy or save its `module`")

    def _check_all_were_used(self) -> Exception | None:
        """Return an error if the last backward pass left parameters out; look for such ones from now on."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            if self.find_unused_parameters:  # as with `backward(inputs=...)`: the next forward pass raises it
                return error
            self.find_unused_parameters = self._reducers_group.searches = True
            self._make_reducer_anew()
            return UnusedParametersError(
                "a backward pass has left parameters out, so this step cannot be committed; they are looked "
                "for from now on, as find_unused_parameters=True does from the first step on; torch says: "
                f"{error}"
            )
        return None

    def _check_averaged(self, updated: Collection[int]) -> None:
        """Refuse an update by gradients that were not averaged, where backward passes came to their end."""
        if self._witnesses.are_among(updated):  # otherwise another thread may be in the reducer, for long
            try:
                self.reducer._check_reducer_finalized()
            except RuntimeError:  # `_check_all_were_used` returns it
                return
            self._witnesses.check(updated)

    def _make_reducer_anew(self) -> None:
        """Make the reducer for the parameters that are trained now."""
        parameters, are_sparse = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = self._build_debug_param_to_name_mapping(parameters)  # type: ignore[no-untyped-call]
        self._ddp_init_helper(parameters, are_sparse, names, False)  # type: ignore[no-untyped-call]
        self._comm_hooks.clear()
        self._set_reducer_up()

    def _set_reducer_up(self) -> None:
        """Make a new reducer reduce its buckets over the replicas."""
        parameters, _ = self._build_params_for_reducer()  # type: ignore[no-untyped-call]
        self._reducers_group.n_parameters = len(parameters)
        self._witnesses = self._reducers_group.witnesses = Witnesses(self._manager, parameters)
        self._frozen = [parameter for parameter in self._module_parameters if not parameter.requires_grad]
        super().register_comm_hook(self._reducers_group, _allreduce_bucket)


def _caps_mb(module: nn.Module, bucket_cap_mb: float | None) -> list[float]:
    """Return the sizes of buckets that are filled in the order in which gradients come.

    torch fills them in the forward pass's order, from the first size on, and reduces the last one first.
    """
    next_limits = MB * (DEFAULT_CAP_MB if bucket_cap_mb is None else bucket_cap_mb)
    limit = _DEFAULT_FIRST_BUCKET_BYTES if bucket_cap_mb is None else next_limits
    sizes = [0]
    for parameter in reversed([one for one in module.parameters() if one.requires_grad]):
        if sizes[-1] >= limit:
            sizes.append(0)
            limit = next_limits
        sizes[-1] += parameter.nbytes
    return [*(size / MB for size in reversed(sizes)), next_limits / MB]


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

    INVARIANT: either all members of a quorum reduce which parameters were used, in every backward pass, or
    none does. They tell each other once in each quorum whether one of them searches.

    Attributes:
        searches: whether this replica looks for unused parameters.
        n_parameters: how many parameters the model has.
        witnesses: tell whether gradients were averaged.
    """

    def __init__(self, manager: Manager, searches: bool) -> None:
        super().__init__(0, 1)
        self._manager = manager
        self.searches = searches
        self.n_parameters = 0
        self.witnesses: Witnesses
        self._asked_in: int | None = None  # the quorum
        self._answer: tuple[torch.Tensor, Work] | None = None  # the sums of `_ask`, under way
        self._some_search = False
        # The buckets of this backward pass, whose futures are not completed yet.
        self._begun: list[tuple[Work, Future[torch.Tensor], torch.Tensor]] = []

    def allreduce_bucket(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Reduce a bucket, and with the first and the last one what the replicas tell each other.

        With the last bucket nothing is left to compute. This thread then waits for all of them, as the
        reducer would do next, and no Python runs on the backend's thread, which takes longer than a small
        allreduce.
        """
        tensor = bucket.buffer()
        if bucket.index() == 0:
            self._begun = []
        future: Future[torch.Tensor] = Future(devices=None if tensor.is_cpu else [tensor.device])
        self._begun.append((self._manager.allreduce(tensor), future, tensor))
        if self._asked_in != self._manager.quorum_id:
            self._ask(tensor.device)
        if bucket.is_last():
            if self._is_search_on() and not self.searches:
                ones = torch.ones(self.n_parameters, dtype=torch.int32, device=tensor.device)
                self._sum_over_all(ones)
            for work, done, reduced in self._begun:
                work.wait()
                done.set_result(reduced)
            self._begun = []
            self.witnesses.averaged()
        return future

    def _ask(self, device: torch.device) -> None:
        """Begin to ask all members of the quorum whether one of them searches."""
        self._asked_in = self._manager.quorum_id
        sums = torch.tensor([1, self.searches], dtype=torch.int32, device=device)
        self._answer = sums, self._sum_over_all(sums)

    def _is_search_on(self) -> bool:
        if self._answer is not None:
            (sums, work), self._answer = self._answer, None
            work.wait()
            members, searching = sums.tolist()
            if members != self._manager.replica_world_size():
                self._asked_in = None  # this step is without the others
            self._some_search = searching > 0
        return self._some_search

    def _sum_over_all(self, tensor: torch.Tensor) -> Work:
        return self._manager.group_allreduce([tensor], SUM, of_all_members=True)

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Work | None:
        if collective.name == "allreduce":
            call = collective.bind(args, kwargs)
            tensors, options = call.reduction()
            if tensors[0].dtype == torch.int32:  # the only other allreduce is that of `join`, of floats
                return self._manager.group_allreduce(tensors, options, of_all_members=True)
        return super()._run(collective, args, kwargs)


def _allreduce_bucket(group: _OfReducer, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    return group.allreduce_bucket(bucket)


class PureDistributedDataParallel(nn.Module):
    """A simple data parallel module that reduces every gradient by itself, as soon as it is there. It is
    slower than buckets.

    Gradients are final when the backward pass returns. It works where torch's reducer does not, such as with
    models that are changed between steps. But in each step all replicas must use the same parameters, on one
    device, so that they reduce them in the same order.

    Args:
        manager: the Manager of this rank.
        module: the model.

    Raises:
        ConfigError: what it is given are not these two, as where they have changed places.
    """

    def __init__(self, manager: Manager, module: nn.Module) -> None:
        _check_order(manager, module)
        super().__init__()
        self.module = module
        self._hooks: _GradientHooks | None = _GradientHooks(manager)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, such as an average of the parameters: a copy reduces nothing."""
        return {**self.__dict__, "_hooks": None}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward pass."""
        self._begin_pass()
        return self.module(*args, **kwargs)

    @uncompiled_function
    def _begin_pass(self) -> None:
        _adopt_stages()
        if self._hooks is not None:
            self._hooks.add_to(self.module)


def _check_order(manager: object, module: object) -> None:
    if isinstance(manager, nn.Module) or not isinstance(module, nn.Module):
        names = f"{type(manager).__name__} and {type(module).__name__}"
        raise ConfigError(f"a DistributedDataParallel takes the Manager and the module, not {names}")


_hooked = WeakIdKeyDictionary()  # by parameter: whose hook it has, and the hook


class _GradientHooks:
    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._witnesses: Witnesses | None = None

    def add_to(self, module: nn.Module) -> None:
        """Add hooks to the parameters, in the place of those of another wrapper: both would reduce."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        if self._witnesses is None and trained:
            self._witnesses = Witnesses(self._manager, trained)
            check_updates(self._witnesses.check)
        if self._witnesses is not None:
            self._witnesses.called()
        for parameter in trained:
            owner, hook = _hooked.get(parameter, (None, None))  # type: ignore[no-untyped-call]
            if owner is not None and owner() is self:
                continue
            if hook is not None:
                hook.remove()
            hook = parameter.register_post_accumulate_grad_hook(self._reduce)  # type: ignore[no-untyped-call]
            _hooked[parameter] = weakref.ref(self), hook

    @uncompiled_function
    def _reduce(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        work = self._manager.allreduce(parameter.grad)
        if self._witnesses is not None:
            self._witnesses.averaged()
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiled, "compiled_autograd_enabled", False):  # such a pass calls nothing at its end
            work.wait()
            return

        def finish() -> None:
            work.wait()

        # The wait is at the end of the backward pass, because later code reads the gradient, or adds to it.
        torch.autograd.Variable._execution_engine.queue_callback(finish)


def _adopt_stages() -> None:
    """Let the stages of torch's pipelines, where they are imported, refuse to pass the hooks by.

    A schedule that splits the backward pass computes the gradients of parameters by `autograd.grad`. It has a
    forward pass before, by when they are imported.
    """
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    base: Any = getattr(stages, "_PipelineStageBase", None)
    method: Callable[..., Any] | None = getattr(base, "backward_maybe_with_nosync", None)
    if method is None or hasattr(method, "__wrapped__"):
        return

    @functools.wraps(method)
    def backward(stage: Any, kind: str, *args: Any, **kwargs: Any) -> Any:
        module = stage.submod
        if kind == "weight" and isinstance(module, DistributedDataParallel | PureDistributedDataParallel):
            raise NotSupportedError(
                "this schedule splits the backward pass, and computes gradients past the hooks by which "
                f"{type(module).__name__} averages them: use fully_shard or replicate with a mesh of "
                "ft_init_device_mesh, or average_over_replicas"
            )
        return method(stage, kind, *args, **kwargs)

    base.backward_maybe_with_nosync = backward
