"""Code, commands, variables, error texts, tests and links in the pages are those that there are."""

from __future__ import annotations

import argparse
import ast
import importlib.util
import inspect
import json
import os
import re
import runpy
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints

import pytest

import torchft_like
from lighthouse import admission, net, server, session
from lighthouse.core import claims, config, decisions, history, left_out
from lighthouse.listening import DESCRIPTORS_KEPT
from lighthouse.page import server as page_server
from tests.conftest import ROOT
from tests.pages import FENCED, PAGES, SPAN, Block, blocks, commands
from tools import torchft_names
from tools.torchft_names import COMMAND, NAMES, rows
from torchft_like import parameter_server, plain_data
from torchft_like.checkpointing import http_server, state_stream
from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.checkpointing.shards import STATE_SCHEMA
from torchft_like.core import conversation, store
from torchft_like.core.agreement import statements
from torchft_like.message_queue import remote
from torchft_like.process_group import checking, store_server
from torchft_like.process_group import store as store_client

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


@by_page
def test_every_file_is_there(page: Path) -> None:
    """A path in a page may begin at any folder of ours, end without .py, and name several files in braces."""
    tops = (*OURS, "docs", "examples", "benchmarks", "proto", "tests", "tools")
    files = [path for top in tops for path in (ROOT / top, *(ROOT / top).rglob("*"))]
    folders = {path.name for path in files if path.is_dir()}
    known = "".join(f"/{path.relative_to(ROOT)}\n" for path in files)
    for span in SPAN.findall(FENCED.sub("", page.read_text())):
        is_path = span.partition("/")[0] in folders if "/" in span else re.match(r"test_.*\.py$", span)
        if is_path and re.fullmatch(r"[\w./{},-]+", span):
            for path in in_braces(span.rstrip("/")):
                assert f"/{path}\n" in known or f"/{path}.py\n" in known, path


def in_braces(text: str) -> list[str]:
    before, _, rest = text.partition("{")
    inside, _, after = rest.partition("}")
    return [before + each + after for each in inside.split(",")]


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


# The limits that docs/security.md tells are those of the code.


TEXT = (ROOT / "docs" / "security.md").read_text()
TABLE = TEXT.partition("## Limits\n")[2].partition("## Ports")[0]
ROWS = [
    [cell.strip("| ") for cell in row.split(" | ")] for row in TABLE.splitlines() if row.startswith("| ")
][1:]

JOB, GRPC = config.LighthouseConfig(), net.ServerLimits()
SOURCE, STATE, FLOOR = http_server.ServerLimits(), STATE_SCHEMA.limits, state_stream.GROWTH_FROM
REPLICAS_HIGHEST = get_type_hints(config.LighthouseConfig, include_extras=True)["replicas_max"].__metadata__[
    1
]
STALL_S = inspect.signature(HTTPTransport).parameters["stall_timeout"].default.total_seconds()


def size(nbytes: int) -> str:
    unit, name = next(one for one in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")) if nbytes >= one[0])
    return f"{nbytes / unit:.2g} {name}" if nbytes < 10 * unit else f"{nbytes // unit} {name}"


# What the cells of the limits say, by how their rows begin.
LIMITS: dict[str, list[str]] = {
    "connections to a lighthouse": [f"2 * replicas_max + {JOB.connections_max - 2 * JOB.replicas_max}"],
    "open calls": [f"{GRPC.streams} on one connection"],
    "connections to the page": [
        f"{page_server.CONNECTIONS_MAX}, each with a whole request in {page_server.SILENT_S:g} s",
        f"{page_server.HANDSHAKES_MAX} that shake hands, {page_server.SILENT_S:g} s each",
    ],
    "descriptors that are kept": [f"{DESCRIPTORS_KEPT}"],
    "sessions of a parameter": [f"{parameter_server.SESSIONS_MAX} ", f"in {parameter_server.REQUEST_S:g} s"],
    "what the page keeps": [
        f"{history.MOMENTS_MAX:,} moments of {history.TEXT_MAX} characters",
        f"{history.RECORDS_MAX} heals, {history.RECORDS_MAX} recoveries",
    ],
    "connections, calls": [f"{GRPC.connections:,} each, {GRPC.streams} calls"],
    "a connection that does not": [f"{GRPC.handshake_s:g} s"],
    "a connection without a call": [f"{GRPC.idle_s:g} s"],
    "a session that does not": [f"{session.REGISTER_S:g} s"],
    "a request to a lighthouse": [
        f"2 MiB and {config._REPORT_BYTES} bytes",
        f"{size(JOB.request_bytes_max)} by default",
    ],
    "a request to a ManagerServer": [size(GRPC.request_bytes)],
    "an answer": [size(config.MESSAGE_BYTES_MAX)],
    "one member of a quorum": [
        f"{size(config.MESSAGE_BYTES_MAX)} / replicas_max, {size(config._MEMBER_BYTES_MAX)} at the most",
        f"{size(JOB.member_bytes_max)} by default",
    ],
    "a group": ["refused"],
    "replicas": [f"{JOB.replicas_max:,}; up to {REPLICAS_HIGHEST:,}"],
    "a replica id": [f"{admission.TEXT_MAX:,} characters"],
    "a step": [f"0 to 10^{len(str(decisions.STEP_MAX)) - 1}"],
    "quorums of an earlier start": [f"{claims.QUORUMS_MAX}, "],
    "links that": [f"{left_out.REPORTED_MAX}, {left_out.REPORTED_CHARACTERS_MAX:,} characters"],
    "a quorum id": [f"{admission.AHEAD_MS_MAX // (365 * 24 * 60 * 60 * 1000)} years"],
    "unary Quorum calls": [f"{server._CALLS_PER_REPLICA_MAX}"],
    "messages that wait": [f"{JOB.session_queue_max}; {conversation.KEPT_MAX} at a ManagerServer"],
    "connections to a checkpoint": [f"{SOURCE.connections}, "],
    "a request to it (checkpoint)": [
        f"{size(http_server.HEAD_BYTES_MAX)}, {SOURCE.request_s:g} s",
        f"further one {STALL_S:g} s",
    ],
    "1 MiB of state": [f"{STALL_S:g} s"],
    "the state that a peer sends": [
        f"{state_stream.GROWTH_MAX} times",
        f"{size(FLOOR.structure_bytes)} of description, {FLOOR.leaves:,} tensors, {size(FLOOR.leaf_bytes)}",
    ],
    "the description of a state": [
        f"{size(STATE.structure_bytes)}, {STATE.leaves:,} tensors, {STATE.values:,} values",
        f"{plain_data.DEPTH_MAX} levels",
    ],
    "an object that": [
        f"{size(plain_data.STRUCTURE_BYTES_MAX)} beside its tensors, {plain_data.LEAVES_MAX:,} tensors",
        f"{plain_data.VALUES_MAX:,} values, {plain_data.DEPTH_MAX} levels",
    ],
    "keys of one dict": [f"{plain_data.EQUAL_HASHES_MAX}"],
    "connections to a store": [f"{store_server.CONNECTIONS_MAX:,}"],
    "connections to it": [f"{store_server.UNKNOWN_MAX}, {store_server.KEY_S:g} s"],
    "a request to it (store)": [
        f"{size(store.MESSAGE_BYTES_MAX)}, {store.REQUEST_KEYS_MAX:,} keys of {size(store.KEY_BYTES_MAX)}",
        f"{size(store.FIRST_BYTES_MAX)} before",
    ],
    "requests to it": [size(store_server.PARTIAL_BYTES_MAX)],
    "keys, values and waits": [
        f"{size(store.STORE_BYTES_MAX)}, a key counting {store.ENTRY_BYTES} bytes",
        f"{store.QUORUMS_MAX} quorums",
    ],
    "a value that": [size(store_client.VALUE_BYTES_MAX)],
    "connections of those": [f"{checking.CALLERS_MAX}"],
    "a message about": [f"{size(checking.BODY_BYTES_MAX)}, {statements.TENSORS_MAX:,} tensors"],
}


@pytest.mark.parametrize(("begins", "row"), list(zip(LIMITS, ROWS, strict=True)), ids=list(LIMITS))
def test_a_limit_is_that_of_the_code(begins: str, row: list[str]) -> None:
    what, limit, _ = row
    assert what.startswith(begins.partition(" (")[0])
    for text in LIMITS[begins]:
        assert text in limit.replace("`", "")


def test_the_rest_of_its_numbers_are_those_of_the_code() -> None:
    assert f"The lighthouse remembers its last {claims.QUORUMS_MAX} quorums" in TEXT
    assert f"makes {server._SECRET_BYTES} random bytes for each quorum id" in TEXT
    assert f"deleted after {store.QUORUMS_MAX - 1} more" in TEXT
    assert f"one without the key is closed after {remote.SILENCE_S:g} s" in TEXT


# The page of torchft's names is that of the present code, and says of no name what is not so.


def test_the_page_of_torchfts_names_is_current() -> None:
    assert torchft_names.page() == torchft_names.PAGE.read_text(), f"run {COMMAND}"


def peer(**names: list[str] | None) -> dict[str, Any]:
    of_manager = {f"torchft.manager.{name}": parameters for name, parameters in names.items()}
    return {"modules": ["torchft.manager"], "names": of_manager, "environment": [], "commands": []}


@pytest.mark.parametrize(
    ("theirs", "verdict", "remark"),
    [
        (["timeout_sec_env", "default_timeout_sec"], "have", ""),
        (
            ["default_timeout_sec", "timeout_sec_env"],
            "differs",
            "another place: `default_timeout_sec`, `timeout_",
        ),
        (["timeout_sec_env", "more"], "differs", "no `more`: because"),
        (None, "have", ""),
    ],
)
def test_a_signature_is_compared(
    monkeypatch: pytest.MonkeyPatch, theirs: list[str] | None, verdict: str, remark: str
) -> None:
    reasons = {} if verdict == "have" else {"torchft.manager.get_timeout": "because"}
    monkeypatch.setattr(torchft_names, "REASONS", reasons)
    (row,) = rows({"1": peer(get_timeout=theirs)})
    assert row.verdict == verdict
    assert row.remark.startswith(remark)


def test_a_name_that_is_missing_needs_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_names, "REASONS", {})
    with pytest.raises(LookupError, match=r"REASONS has nothing for torchft\.manager\.gone"):
        rows({"1": peer(gone=[])})


def test_a_reason_needs_a_name_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchft_names, "REASONS", {"torchft.manager.Manager": "because"})
    with pytest.raises(LookupError, match="for nothing that is missing"):
        rows({"1": peer(Manager=None)})


def test_every_version_has_the_names_that_scripts_use() -> None:
    for version in json.loads(NAMES.read_text()).values():
        assert {"torchft.Manager", "torchft.manager.Manager.should_commit"} <= set(version["names"])
        assert "pg" in version["names"]["torchft.manager.Manager"]
        assert "timeout" in version["names"]["torchft.coordination.LighthouseClient.quorum"]
        assert "TORCHFT_LIGHTHOUSE" in version["environment"]
        assert version["commands"] == ["torchft_lighthouse"]
