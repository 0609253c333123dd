"""Which public names of torchft are here: writes docs/torchft-names.md from torchft's names and our code.

    python -m tools.torchft_names                        # the page, from torchft_names.json and our code
    python -m tools.torchft_names --read 0.2.0=WHEEL ... # torchft_names.json; wheels are only parsed

A name that is missing, or that takes other parameters, needs a reason in `REASONS`.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import inspect
import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMES = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "torchft-names.md"
VERDICTS = ("have", "differs", "not yet")
COMMAND = "python -m tools.torchft_names"

Parameters = list[str] | None  # of something that is called; None for anything else
Function = ast.FunctionDef | ast.AsyncFunctionDef
_ENVIRONMENT = re.compile(r"(TORCHFT|TORCH|MASTER|JOB|RANK|WORLD)(_[A-Z]+)*")
_INTERNAL_FILES = re.compile(r"(.*_test|.*_bench|(.*/)?(_|test_|examples/|multiprocessing_dummy).*)")

# Why a name is not there, or takes other parameters: the first pattern that matches counts.
REASONS: Mapping[str, str] = {
    "torchft.quantization.*": "rows have another form here, and are read and written one tensor at a time",
    "torchft.torchcomms*": "there is no group over torchcomms",
    "torchft.http": "its one class is private",
    "torchft.multiprocessing": "its one class is private",
    "torchft.work": "its one class is private",
    "torchft.manager.IS_TRITON_AVAILABLE": "triton is looked for where a GPU quantizes",
    "torchft.manager.*_KEY": "a ManagerServer is found under a key that tells restarts apart",
    "torchft.manager.extract_trailing_digits": "a helper of torchft's own, for names of traces",
    "torchft.otel.TeeLogExporter*": "each exporter has a processor of its own",
    "torchft.otel.main": "an example",
    "*.configure": "rank and world size come first; calls in the order of torchft 0.2.0 are taken too",
    "*.abort": "every abort is an error; `reason`, which comes first, says why",
    "torchft.process_group.*": "the names are torch's",
    "TORCH_CPP_LOG_LEVEL": "torch's; nothing here changes it",
    "TORCH_XCCL_NONBLOCKING_TIMEOUT": "there is no group over XCCL",
}
# What is here under its name and its parameters, and does another thing.
BEHAVIOUR: Mapping[str, str] = {
    "torchft.ProcessGroup*XCCL": "making one raises NotSupportedError",
    "torchft.process_group.ProcessGroup*XCCL*": "making one raises NotSupportedError",
    "*.HTTPTransport.address": "what it serves there has another form",
    "*.HTTPTransport.allow_checkpoint": "CheckpointError where nothing is offered",
    "*.PGTransport": "of `state_dict`, only tensors that lie as those that come are received into",
    "torchft.utils.record_event": "it gives the event, as the nightly's",
    "TORCHFT_LIGHTHOUSE": "it beats the argument",
    "TORCHFT_MANAGER_PORT": "it beats the argument",
    "TORCHFT_WATCHDOG_TIMEOUT_SEC": "unset, nothing ends the process; torchft ends it after 30 s",
}


@dataclass(frozen=True)
class Row:
    """One name: its state here, and why it is not the same."""

    name: str
    versions: str
    verdict: str
    remark: str


def read_wheel(path: Path) -> dict[str, Any]:
    """Names with parameters, variables of the environment and commands of a wheel of torchft."""
    names: dict[str, Parameters] = {}
    modules: list[str] = []
    variables: set[str] = set()
    commands: list[str] = []
    with zipfile.ZipFile(path) as wheel:
        for file in sorted(wheel.namelist()):
            inner = file.removeprefix("torchft/").rpartition(".")[0]
            if file.endswith("entry_points.txt"):
                commands = re.findall(r"(?m)^([\w-]+)\s*=", wheel.read(file).decode())
            if not file.startswith("torchft/") or not file.endswith((".py", ".pyi")):
                continue
            tree = ast.parse(wheel.read(file))
            if inner == "_torchft":  # what is written in Rust, and public under this name
                names |= dict(_names(tree, "torchft.coordination"))
            elif inner.endswith("__init__") or not _INTERNAL_FILES.fullmatch(inner):
                module = f"torchft.{inner.removesuffix('__init__').replace('/', '.')}".rstrip(".")
                if "examples" not in module:
                    modules.append(module)
                    names[module] = None
                    names |= dict(_names(tree, module))
                    variables |= set(_variables(tree))
    return {
        "modules": sorted({*modules, "torchft.coordination"}),
        "names": dict(sorted(names.items())),
        "environment": sorted(variables),
        "commands": commands,
    }


def _names(tree: ast.AST, prefix: str) -> Iterator[tuple[str, Parameters]]:
    """Every public class, function, method and constant that is defined, or listed in `__all__`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler):
            yield from _names(node, prefix)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            made_by = [each for each in node.body if isinstance(each, Function) and each.name == "__init__"]
            yield f"{prefix}.{node.name}", _parameters(made_by[0]) if made_by else None
            yield from _names(node, f"{prefix}.{node.name}")
        elif isinstance(node, Function) and not node.name.startswith("_"):
            is_property = any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list)
            yield f"{prefix}.{node.name}", None if is_property else _parameters(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if not isinstance(target, ast.Name):
                    continue
                if target.id == "__all__" and isinstance(node.value, ast.List | ast.Tuple):
                    yield from ((f"{prefix}.{ast.literal_eval(each)}", None) for each in node.value.elts)
                elif re.fullmatch(r"[A-Z][A-Z_]+", target.id):
                    yield f"{prefix}.{target.id}", None


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def _variables(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and _ENVIRONMENT.fullmatch(text):
            yield text


def rows(peers: Mapping[str, Any]) -> list[Row]:
    """Return one row for each name of any version.

    Raises:
        LookupError: a name needs a reason and has none, or a reason is for no name.
    """
    found = [*_rows_of(peers, "names", _look_at), *_rows_of(peers, "environment", _look_at_variable)]
    found += _rows_of(peers, "commands", _look_at_command)
    needing = [row.name for row in found if row.verdict != "have"]
    unused = [pattern for pattern in REASONS if not any(fnmatchcase(name, pattern) for name in needing)]
    if unused:
        raise LookupError(f"{Path(__file__).name}: these reasons are for nothing that is missing: {unused}")
    return found


def _rows_of(peers: Mapping[str, Any], kind: str, look: Any) -> Iterator[Row]:
    for name in sorted({name for peer in peers.values() for name in peer[kind]}):
        having = {version: peer[kind] for version, peer in peers.items() if name in peer[kind]}
        told = [look(name, names[name] if kind == "names" else None) for names in having.values()]
        verdict, problem = max(told, key=lambda each: VERDICTS.index(each[0]))
        remark = _match(name, BEHAVIOUR) or "" if verdict == "have" else _reason(name, problem)
        if verdict == "have" and remark:
            verdict = "differs"
        yield Row(name, "both" if len(having) == len(peers) else ", ".join(having), verdict, remark)


def _reason(name: str, problem: str) -> str:
    reason = _match(name, REASONS)
    if reason is None:
        raise LookupError(
            f"{Path(__file__).name}: REASONS has nothing for {name} ({problem or 'it is not here'})"
        )
    return f"{problem}: {reason}" if problem else reason


def _match(name: str, texts: Mapping[str, str]) -> str | None:
    return next((text for pattern, text in texts.items() if fnmatchcase(name, pattern)), None)


def _look_at(name: str, theirs: Parameters) -> tuple[str, str]:
    try:
        ours = _resolve(f"torchft_like{name.removeprefix('torchft')}")
    except (AttributeError, ImportError):
        return "not yet", ""
    problem = "" if theirs is None else _difference(theirs, ours)
    return ("differs", problem) if problem else ("have", "")


def _resolve(name: str) -> Any:
    """Return a module, or what is found in the longest part of the name that is one."""
    parts = name.split(".")
    found = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], 1):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[: index + 1]))
        found = getattr(found, part)
    return found


def _difference(theirs: list[str], ours: Any) -> str:
    try:
        signature = inspect.signature(ours)
    except (TypeError, ValueError):
        return ""  # written in C: torch's own
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    kinds = {parameter.kind for parameter in parameters}
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [] if inspect.Parameter.VAR_KEYWORD in kinds else [each for each in theirs if each not in names]
    if missing:
        return "no " + ", ".join(f"`{each}`" for each in missing)
    placed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    open_end = inspect.Parameter.VAR_POSITIONAL in kinds
    moved = [n for i, n in enumerate(theirs) if n in names and n not in placed[i : i + 1] and not open_end]
    return "another place: " + ", ".join(f"`{each}`" for each in moved) if moved else ""


def _look_at_variable(name: str, _: None) -> tuple[str, str]:
    return ("have", "") if name in _our_variables() else ("not yet", "")


@functools.cache
def _our_variables() -> set[str]:
    files = [path for folder in ("torchft_like", "lighthouse") for path in (ROOT / folder).rglob("*.py")]
    return {each for path in files for each in _variables(ast.parse(path.read_text()))}


def _look_at_command(name: str, _: None) -> tuple[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return ("have", "") if name in project["scripts"] else ("not yet", "")


def page() -> str:
    """Return the text of docs/torchft-names.md."""
    peers = json.loads(NAMES.read_text())
    found = rows(peers)
    count = {verdict: sum(row.verdict == verdict for row in found) for verdict in VERDICTS}
    lines = [
        "# torchft's names",
        "",
        f"Generated by `{COMMAND}` from `tools/torchft_names.json`, which holds the public names of torchft",
        f"{' and '.join(peers)}, and from the code: do not edit. A test fails when it is stale.",
        "",
        "*have*: it is here and takes torchft's parameters, in torchft's places. *differs*: it is here, and",
        "takes others or does another thing. *not yet*: it is not here. What else behaves differently, and",
        "why, is in [Coming from torchft](coming-from-torchft.md).",
        "",
        f"{len(found)} names: {', '.join(f'{number} {verdict}' for verdict, number in count.items())}.",
    ]
    modules = {module for peer in peers.values() for module in peer["modules"]}
    section = ""
    for row in found:
        owner = _section(row.name, modules)
        if owner != section:
            section = owner
            lines += ["", f"## {section}", "", "| name | in | here | |", "|---|---|---|---|"]
        name = row.name.removeprefix(f"{section}.")
        lines.append(f"| `{name}` | {row.versions} | {row.verdict} | {row.remark} |")
    return "\n".join(lines) + "\n"


def _section(name: str, modules: set[str]) -> str:
    """Return the module of a name."""
    while name not in modules and "." in name:
        name = name.rpartition(".")[0]
    return name if name in modules else "Environment and commands"


def wheel(text: str) -> tuple[str, Path]:
    """Read VERSION=WHEEL; argparse names this function where it is none."""
    version, path = text.split("=", 1)
    return version, Path(path)


def main() -> None:
    """Write the page, or with `--read` the names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--read", nargs="+", type=wheel, metavar="VERSION=WHEEL", help="parse wheels of torchft"
    )
    options = parser.parse_args()
    if options.read:
        peers = {version: read_wheel(path) for version, path in options.read}
        NAMES.write_text(json.dumps(peers, indent=1) + "\n")
    else:
        PAGE.write_text(page())


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
