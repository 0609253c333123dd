"""Whether the gradients that an optimizer is about to take were averaged over the replicas.

A wrapper of a module averages in a backward pass that follows its forward pass, and once. Past it go what
`torch.autograd.grad` returns, what a second backward pass through the same graph adds, and passes of the
module without its wrapper. Replicas that step with such gradients come apart, and nothing else says so.

Two parameters stand for a module, the first and the last that are trained: looking at each would take longer
than the check is worth. It does not notice a pass that reaches neither.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from torchft_like.errors import NotSupportedError
from torchft_like.manager import Manager

_all: list[weakref.ref[Witnesses]] = []


class Witnesses:
    """The parameters that stand for one module, and what has happened to their gradients.

    Args:
        manager: averages them.
        parameters: all that are trained, in the module's order.
    """

    def __init__(self, manager: Manager, parameters: Sequence[torch.Tensor]) -> None:
        self._manager = manager
        # Weak: its hooks refer to the wrapper, and that to this, a cycle that Python's collector cannot see.
        self._parameters = [weakref.ref(parameter) for parameter in (parameters[0], parameters[-1])]
        self._ids = {id(parameter) for parameter in parameters}
        self._is_due = False  # a forward pass has begun, and no gradient was averaged yet
        self._added: set[int] = set()  # whose gradients were, by a pass that was to average them or after one
        self._averages = True
        self._has_averaged = False  # in this step
        me = weakref.ref(self)  # the module may outlive its wrapper
        _all[:] = [*(one for one in _all if one() is not None), me]

        def note(parameter: torch.Tensor) -> None:
            if (witnesses := me()) is not None and (witnesses._averages or witnesses._has_averaged):
                witnesses._added.add(id(parameter))

        for parameter in (parameters[0], parameters[-1]):
            hook = parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
            weakref.finalize(self, hook.remove)

    def called(self, averages: bool = True) -> None:
        """Record a forward pass; whether its backward pass is to average, as it does outside of `no_sync`."""
        self._averages = averages
        self._is_due = self._is_due or torch.is_grad_enabled()
        self._has_averaged = self._has_averaged and self._manager.has_reduced
        if all(parameter.grad is None for parameter in self._alive()):
            self._added = set()  # what was is cleared

    def averaged(self) -> None:
        """Record that all gradients that were added are averaged, of parameters of other wrappers, too."""
        self._is_due, self._has_averaged = False, True
        for one in _all:
            if (witnesses := one()) is not None:
                witnesses._added = witnesses._added - self._ids

    def are_among(self, updated: Collection[int]) -> bool:
        """Return whether one of them has its id among these."""
        return any(id(parameter) in updated for parameter in self._alive())

    def _alive(self) -> list[torch.Tensor]:
        return [parameter for ref in self._parameters if (parameter := ref()) is not None]

    def check(self, updated: Collection[int]) -> None:
        """Refuse to update the parameters with these ids by gradients that nothing has averaged."""
        if not self.are_among(updated):
            return
        if self._added:
            raise NotSupportedError(
                "gradients were added that no pass averages: DistributedDataParallel averages in the first "
                "backward pass after its forward pass. Add up losses that have one forward pass, let the "
                "last pass be outside of no_sync, call the wrapper and not its module, or take "
                "PureDistributedDataParallel, which averages in each pass"
            )
        if self._is_due and not self._manager.has_reduced and self._manager.errored() is None:
            raise NotSupportedError(
                "nothing was averaged in this step, and replicas would come apart: call `backward` outside "
                "of no_sync, or manager.allreduce for each gradient that torch.autograd.grad or torch.func "
                "returns"
            )


_Check = Callable[[Collection[int]], None]
_checks: list[weakref.WeakMethod[_Check]] = []


def check_updates(check: _Check) -> None:
    """Call a bound method with the ids of the parameters that an `Optimizer` is to update by their gradients,
    for as long as its object lives.
    """
    _checks[:] = [*(one for one in _checks if one() is not None), weakref.WeakMethod(check)]


def check_averaged(parameters: Iterable[torch.Tensor]) -> None:
    """Check that an optimizer may update these parameters.

    Raises:
        NotSupportedError: their gradients are those of this replica alone.
    """
    checks = [check for reference in _checks if (check := reference()) is not None]
    if checks:
        updated = {id(parameter) for parameter in parameters if parameter.grad is not None}
        for check in checks:
            check(updated)
