"""Code, commands, variables, error texts, tests and links in the pages are those that there are."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

import torchft_like
from tests.conftest import ROOT
from tests.pages import FENCED, PAGES, Block, blocks, commands

OURS = ("torchft_like", "lighthouse")
PYTHONS = ("python", "python3", ".venv/bin/python")
# Programs that parse their arguments before they do anything else, and one that leaves it to another.
PARSE = {
    "lighthouse",
    "torchft_like.chaos",
    "benchmarks.run",
    "tests.dropin",
    "tests.simulation",
    "tools.matrix",
    "tools.torchft_names",
    "tools.gpu.evidence",
    "examples.train_ddp",
    "examples.train_diloco",
    "examples.train_hsdp",
}
PARSED_BY = {"tools.gpu_evidence": "tools.gpu.evidence"}
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)")
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def sources() -> str:
    files = [path for folder in OURS for path in (ROOT / folder).rglob("*.py")]
    return "\n".join(path.read_text() for path in files)


# ---------------------------------------------------------------------- code


def python_blocks() -> Iterator[tuple[str, Block]]:
    for page in PAGES:
        yield from ((page.name, block) for block in blocks(page) if block.language == "python")


@pytest.mark.parametrize(("name", "block"), list(python_blocks()))
def test_code_uses_what_is_there(name: str, block: Block) -> None:
    tree = ast.parse(block.text, name)
    known: dict[str, Any] = {each: getattr(torchft_like, each) for each in vars(torchft_like)["__all__"]}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(OURS):
            module = importlib.import_module(node.module)
            known |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            assert_takes(known[node.func.id], [each.arg for each in node.keywords if each.arg])
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "manager":
            assert hasattr(torchft_like.Manager, node.attr)


def assert_takes(function: Any, keywords: Sequence[str]) -> None:
    parameters = inspect.signature(function).parameters
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    assert takes_any or set(keywords) <= set(parameters)


# ------------------------------------------------------------------ commands


class Parsed(BaseException):
    """A command line was parsed without an error."""


@by_page
def test_commands_are_those_that_there_are(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_end(*arguments: Any) -> NoReturn:
        parse_args(*arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_end)
    for program, *arguments in filter(None, commands(page)):
        if program == "make":
            assert_made(arguments)
        elif program == "torchft-like":
            assert_parses("torchft_like.chaos", arguments)
        elif program in PYTHONS and arguments[:1] == ["-m"]:
            assert_parses(arguments[1], arguments[2:])
        elif program in PYTHONS and (ROOT / arguments[0]).is_file():
            monkeypatch.syspath_prepend((ROOT / arguments[0]).parent)
            assert_parses(arguments[0].removesuffix(".py").replace("/", "."), arguments[1:])


def assert_made(words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for word in words:
        name, is_variable, _ = word.partition("=")
        form = rf"\$\({name}\)|\$\(or \$\({name}\)" if is_variable else rf"(?m)^{name}:"
        assert re.search(form, makefile), word


def assert_parses(module: str, arguments: Sequence[str]) -> None:
    """Run a program of ours until it has parsed its arguments. Without any it is asked for help."""
    assert importlib.util.find_spec(module) is not None, module
    module = PARSED_BY.get(module, module)
    if module not in PARSE:
        return
    arguments = arguments if len(arguments) > 1 else [*arguments, "--help"]
    before, sys.argv = sys.argv, [module, *arguments]
    try:
        with warnings.catch_warnings(action="ignore"):  # runpy's, of a module that is loaded already
            runpy.run_module(module, run_name="__main__")
        status: object = "it parses nothing"
    except Parsed:
        return
    except SystemExit as error:
        status = error.code
        if status == 0 and arguments[-1] == "--help":
            return
    finally:
        sys.argv = before
    pytest.fail(f"{module} {' '.join(arguments)}: {status}")


# --------------------------------------------------------- names in the text


def test_every_variable_is_read_somewhere() -> None:
    code = sources() + "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
    named = {name for page in PAGES for name in re.findall(r"TORCHFT_[A-Z_]*[A-Z]", page.read_text())}
    assert {name for name in named if name not in code} == set()


def test_every_error_text_of_the_troubleshooting_is_in_the_code() -> None:
    code = re.sub(r'"\s+f?"', "", sources())
    rows = re.findall(r"(?m)^\| `([^`]*)`", (ROOT / "docs" / "troubleshooting.md").read_text())
    assert len(rows) > 20
    for row in rows:
        for part in row.split("..."):
            assert part.strip() in code, row


def test_every_test_of_the_failure_matrix_is_there() -> None:
    page = (ROOT / "docs" / "failures.md").read_text()
    named = re.findall(r"`(test_\w+)`", page)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert named
    assert [name for name in named if f"def {name}(" not in tests] == []


@by_page
def test_links_lead_somewhere(page: Path) -> None:
    for path, anchor in LINK.findall(FENCED.sub("", page.read_text())):
        target = Path(os.path.normpath(page.parent / path)) if path else page
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in map(slug, re.findall(r"(?m)^#+ (.*)$", target.read_text())), f"{path}#{anchor}"


def slug(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
