"""Every other function of `torch.distributed` that takes a group, and functional collectives."""

from __future__ import annotations

import inspect
import re
from operator import attrgetter

import pytest
import torch.distributed as dist

from tests.versions import NEEDS_COMPARABLE_GROUPS, NEEDS_PERMUTE_TENSOR

from . import cases
from .calls import CALLS
from .cases import CASES
from .fleet import Fleet
from .functional import FUNCTIONAL
from .scene import KINDS, MODES
from .subjects import DOING, PAIR, Subject

pytestmark = pytest.mark.integration

_WINDOWS = "memory that other ranks write to: no group of ours has it"
_NATIVE = "how torch configures a group of its own anew: no collective"

# Functions with a group that the suite does not call, and why.
EXCUSED = {
    "destroy_process_group": "it ends the group: tests/integration/test_registration.py",
    "gather_into_tensor": "gather_single under its older name, of which torch warns",
    "get_backend_impl": "tests/unit/process_group/test_registration.py",
    "set_timeout": "tests/unit/process_group/test_controls.py",
    "_get_reconfigure_handle": _NATIVE,
    "_reconfigure": _NATIVE,
    "_supports_reconfigure": _NATIVE,
    "_new_window": _WINDOWS,
    "_supports_window": _WINDOWS,
    "new_subgroups": "it makes groups of torch's own, of the members of the default group only",
}
OF_POINT_TO_POINT = [name for name in CASES if re.search("send|recv|P2POp", name)]
OF_COALESCING = [name for name in CASES if name.startswith("_coalescing_manager")]


@pytest.mark.parametrize("case", CASES)
def test_functions_do_what_torchs_group_does(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    fleet.assert_like_torch(subject.name, world, case)


@pytest.mark.parametrize("case", OF_POINT_TO_POINT)
def test_messages_take_every_kind_of_tensor(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    kinds = subject.kinds(KINDS)
    if case == "recv from anybody":
        kinds = [kind for kind in kinds if 0 not in kind.shape]  # Gloo waits for ever for the second of them
    fleet.assert_like_torch(subject.name, world, case, kinds)


@pytest.mark.parametrize("case", OF_COALESCING)
def test_coalesced_operations_have_one_wait(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    fleet.assert_like_torch(subject.name, world, case, modes=MODES)


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_functional_collectives_match_torchs(fleet: Fleet, subject: Subject, world: int, name: str) -> None:
    fleet.assert_like_torch(subject.name, world, f"functional {name}")


# Compiled code finds each class by its name alike: a function of one tensor and one of several stand for all.
@pytest.mark.parametrize(
    ("subject", "name"),
    [
        pytest.param(
            subject,
            name,
            marks=[NEEDS_PERMUTE_TENSOR] * (name == "permute_tensor"),
            id=f"{subject.name}-{name}",
        )
        for subject in DOING
        for name in FUNCTIONAL
        if not name.endswith("_autograd")
        if subject is DOING[0] or name in ("all_reduce", "all_gather_into_tensor_coalesced")
    ],
)
def test_compiled_code_gets_torchs_results(fleet: Fleet, subject: Subject, world: int, name: str) -> None:
    world = world if name == "permute_tensor" else min(PAIR, world)  # of two it is a swap; each rank compiles
    fleet.assert_like_torch(subject.name, world, f"compiled {name}")


@NEEDS_COMPARABLE_GROUPS
@pytest.mark.parametrize("subject", DOING, ids=attrgetter("name"))
def test_the_interpreter_calls_a_group_between_compiled_code(
    fleet: Fleet, subject: Subject, world: int
) -> None:
    fleet.assert_like_torch(subject.name, min(PAIR, world), "between compiled code")


def test_no_function_that_takes_a_group_is_forgotten() -> None:
    """A release of torch cannot add one unnoticed."""
    called = set(re.findall(r"\w+", " ".join([*CALLS, *CASES])))
    called |= set(re.findall(r"(?:dist|c10d)\.(\w+)", inspect.getsource(cases)))
    assert _functions() - called - set(EXCUSED) == set()
    assert {name for name in EXCUSED if hasattr(dist, name)} <= _functions()


def _functions() -> set[str]:
    found = set()
    for name, function in vars(dist).items():
        if callable(function) and "group" in _parameters(function) | {"pg"} & _parameters(function):
            found.add(name)
    return found


def _parameters(function: object) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set()
