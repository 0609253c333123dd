"""Every case by its name."""

from __future__ import annotations

from . import cases
from .calls import CALLS, REDUCING, REDUCTIONS, call
from .functional import FUNCTIONAL, compiled, functional_call
from .methods import METHODS, THREADED, WRONG, method
from .scene import Case

# What ours do and torch's own Gloo does not. Where a case of the suite shows it, torch's group is given
# what it can take instead, and has to come to the same result.
BETTER = {
    "reduce_scatter, reduce_scatter_tensor": "works have a future and say when they are completed",
    "all_gather_into_tensor, reduce_scatter_tensor": "take the stacked shape and scalars, too",
    "tensors that are not contiguous": "are moved right; torch moves the memory between the elements as well",
    "isend, irecv of such tensors": "work; torch raises RuntimeError",
    "waiting twice for a send or a receive": "returns; torch waits for another message",
    "_coalescing_manager(device=...)": "works, with one work for all operations; torch raises RuntimeError",
    "all_reduce_coalesced of nothing": "says what is wrong; torch's dispatcher raises NotImplementedError",
    "all_to_all_single with wrong splits": "is refused at once",
}

CASES: dict[str, Case] = {
    **{name: call(name) for name in CALLS},
    **{f"{name} {reduction}": call(name, reduction) for name in REDUCING for reduction in REDUCTIONS},
    **cases.CASES,
    **{f"method {name}": method(name) for name in METHODS},
    **THREADED,
    **WRONG,
    **{f"functional {name}": functional_call(name) for name in FUNCTIONAL},
    **{f"compiled {name}": compiled(name) for name in FUNCTIONAL},
}


def case(name: str) -> Case:
    """The function of a case."""
    return CASES[name]
