"""Every case by its name."""

from __future__ import annotations

import re

from torchft_like.errors import CollectiveRefusedError, NotSupportedError

from . import cases
from .calls import CALLS, REDUCING, REDUCTIONS, call
from .forms import AVERAGES, FORMS
from .functional import FUNCTIONAL, between, compiled, functional_call
from .methods import METHODS, THREADED, WRONG, method
from .scene import Case

# Cases that a class refuses and torch's own Gloo takes: patterns of subjects and of cases, the error, and the
# reason.
REFUSED = (
    (
        "",
        r"(allreduce|broadcast) of (overlapping|two views of one)",
        CollectiveRefusedError,
        "gives every rank another sum, or a race",
    ),
    ("Managed", r"allreduce\w* of two dtypes, AVG", ValueError, "as torch does, and earlier"),
    ("Baby", r".*(sparse|in rows)", NotSupportedError, "only dense tensors can be shared with a subprocess"),
)

CASES: dict[str, Case] = {
    **{name: call(name) for name in CALLS},
    **{f"{name} {reduction}": call(name, reduction) for name in REDUCING for reduction in REDUCTIONS},
    **cases.CASES,
    **{f"method {name}": method(name) for name in METHODS},
    **FORMS,
    **AVERAGES,
    **THREADED,
    **WRONG,
    **{f"functional {name}": functional_call(name) for name in FUNCTIONAL},
    **{f"compiled {name}": compiled(name) for name in FUNCTIONAL},
    "between compiled code": between,
}


def case(name: str) -> Case:
    """Return the function of a case."""
    return CASES[name]


def model(subject: str, name: str) -> Case:
    """Return the case that torch's own group runs to show the right result."""
    if found := re.fullmatch(r"allreduce of (.*), AVG", name):
        return CASES[f"average of {found[1]}"]
    return CASES[name]


def refusal(subject: str, name: str) -> type[Exception] | None:
    """Return the error with which a class refuses a case that torch's group may take; None if it does not."""
    fitting = (row for row in REFUSED if re.search(row[0], subject) and re.match(row[1], name))
    return next((error for _, _, error, _ in fitting), None)
