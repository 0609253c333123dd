"""The house rules that a machine can check: sizes, arguments, and who may import whom."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 500
PARAMETERS_MAX = 7

FOLDERS = ("lighthouse", "torchft_like", "examples", "benchmarks", "tests", "tools")
GENERATED = ROOT / "lighthouse" / "wire"
FILES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if GENERATED not in path.parents
)
LIBRARY = [path for path in FILES if path.parts[len(ROOT.parts)] in ("lighthouse", "torchft_like")]

# Functions with more parameters than `PARAMETERS_MAX`, and why.
MANY_PARAMETERS = {
    "torchft_like/manager/manager.py:Manager.__init__": "torchft's signature",
    "torchft_like/manager/server.py:ManagerServer.__init__": "torchft's signature",
    "torchft_like/coordination.py:LighthouseClient.quorum": "torchft's signature",
    "torchft_like/manager/client.py:ManagerClient._quorum": "torchft's signature",
    "*.configure": "torchft's signature: every process group has it",
}

# Folder or file -> what it must not import.
FORBIDDEN_IMPORTS = {
    "lighthouse": ("torch", "torchft_like"),
    "torchft_like/process_group": ("torchft_like.manager", "torchft_like.checkpointing", "grpc"),
    "torchft_like/checkpointing": ("torchft_like.manager", "torchft_like.process_group", "grpc"),
    "": ("pickle", "marshal", "shelve", "dill", "cloudpickle"),
}

# Pure cores and the values they use: the standard library and each other, and of that no clocks,
# threads, sockets or logging.
CORES = (
    "lighthouse/decisions.py",
    "lighthouse/quorum.py",
    "lighthouse/links.py",
    "lighthouse/explanation.py",
    "lighthouse/membership.py",
    "lighthouse/config.py",
    "lighthouse/errors.py",
    "torchft_like/manager/step.py",
    "torchft_like/manager/group.py",
    "torchft_like/manager/peer_links.py",
    "torchft_like/manager/assignment.py",
    "torchft_like/divergence/comparison.py",
    "torchft_like/divergence/slices.py",
    "torchft_like/process_group/checking/rules.py",
    "torchft_like/process_group/checking/referee.py",
)
IMPURE = (
    "asyncio",
    "logging",
    "os",
    "random",
    "select",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name, nested ones and methods too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child
        name = f"{prefix}{child.name}." if isinstance(child, Function | ast.ClassDef) else prefix
        yield from functions(child, name)


def imports(path: Path) -> Iterator[str]:
    """Every module imported anywhere in the file, for type checking too; absolute names."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT).parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, [package, node.module]))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def parameter_count(function: Function) -> int:
    """Without `self`, `cls`, `*args` and `**kwargs`."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    lengths = {name: (f.end_lineno or f.lineno) - f.lineno + 1 for name, f in functions(parse(path))}
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LINES_MAX} == {}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_is_two_modules(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MODULE_LINES_MAX


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_no_function_wants_an_object_instead_of_its_arguments(path: Path) -> None:
    crowded = {
        f"{name_of(path)}:{name}": parameter_count(function)
        for name, function in functions(parse(path))
        if parameter_count(function) > PARAMETERS_MAX and f"*.{function.name}" not in MANY_PARAMETERS
    }
    assert {name: count for name, count in crowded.items() if name not in MANY_PARAMETERS} == {}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(parse(path)) or not path.read_text().strip()


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_libraries_import_only_what_their_place_allows(path: Path) -> None:
    found = set(imports(path))
    for folder, forbidden in FORBIDDEN_IMPORTS.items():
        if path.is_relative_to(ROOT / folder):
            assert [module for module in found if within(module, forbidden)] == []


@pytest.mark.parametrize("core", CORES)
def test_pure_cores_know_the_standard_library_and_each_other(core: str) -> None:
    others = tuple(other.removesuffix(".py").replace("/", ".") for other in CORES)
    for module in set(imports(ROOT / core)) - {"torchft_like.manager"}:
        assert within(module, others) or module.split(".")[0] in sys.stdlib_module_names, module
        assert not within(module, IMPURE), module


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_libraries_hold_no_mocks_and_never_print(path: Path) -> None:
    assert [module for module in imports(path) if within(module, ("unittest", "pytest", "tests"))] == []
    if path.stem in ("cli", "__main__"):
        return
    calls = [node.func for node in ast.walk(parse(path)) if isinstance(node, ast.Call)]
    assert [call.lineno for call in calls if isinstance(call, ast.Name) and call.id == "print"] == []


def test_no_exception_is_swallowed_without_a_word() -> None:
    """`except Exception: pass`, or a bare `except`, anywhere."""
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ExceptHandler)
        and (
            node.type is None
            or (ast.unparse(node.type) in ("Exception", "BaseException") and is_empty(node.body))
        )
    ]
    assert found == []


def is_empty(body: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Pass | ast.Continue) for statement in body)
