"""Every case by its name."""

from __future__ import annotations

from . import cases
from .calls import CALLS, REDUCING, REDUCTIONS, call
from .functional import FUNCTIONAL, compiled, functional_call
from .methods import METHODS, THREADED, WRONG, method
from .scene import Case

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
