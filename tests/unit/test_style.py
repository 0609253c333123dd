"""The house rules that a machine can check: sizes, arguments, and who may import whom."""

from __future__ import annotations

import ast
import functools
import gc
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 7

FOLDERS = ("lighthouse", "torchft_like", "examples", "benchmarks", "tests", "tools")
GENERATED = ROOT / "lighthouse" / "wire"
FILES = sorted(
    path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if GENERATED not in path.parents
)
LIBRARY = [path for path in FILES if path.parts[len(ROOT.parts)] in ("lighthouse", "torchft_like")]

# The testing kit, and the command, of which `chaos` is a part.
KIT = tuple(ROOT / "torchft_like" / name for name in ("testing", "chaos.py", "cli.py"))

# Functions with more parameters than `PARAMETERS_MAX`, and why.
MANY_PARAMETERS = {
    "torchft_like/manager/manager.py:Manager.__init__": "torchft's signature",
    "torchft_like/manager_server/server.py:ManagerServer.__init__": "torchft's signature",
    "torchft_like/coordination.py:LighthouseClient.quorum": "torchft's signature",
    "torchft_like/manager/client.py:ManagerClient._quorum": "torchft's signature",
    "torchft_like/local_sgd.py:DiLoCo.__init__": "torchft's signature",
    "torchft_like/torchx.py:hsdp": "torchft's signature",
    "*.configure": "torchft's signature: every process group has it",
}

# Folder or file -> what it must not import.
FORBIDDEN_IMPORTS = {
    "lighthouse": ("torch", "torchft_like"),
    "torchft_like/process_group": ("torchft_like.manager", "torchft_like.checkpointing", "grpc"),
    "torchft_like/manager_server": ("torchft_like.manager", "torchft_like.process_group", "torch"),
    "torchft_like/runtime": ("torchft_like.manager", "torchft_like.process_group", "torch", "zmq"),
    "torchft_like/checkpointing": ("torchft_like.manager", "torchft_like.process_group", "grpc"),
    "": ("pickle", "marshal", "shelve", "dill", "cloudpickle"),
}

# Modules in a folder called `core` are pure: they know the standard library, each other and error classes,
# and of the standard library no clocks, threads, sockets or logging.
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

# Functions and classes that make a channel, a server, a connection or a store, or encrypt one -> files that
# call them, or have classes that derive from them.
MAKERS = {
    "insecure_channel": {"lighthouse/net.py"},
    "secure_channel": {"lighthouse/net.py"},
    "server": {"lighthouse/net.py"},
    "create_server": {"lighthouse/listening.py"},
    "listen": {"torchft_like/message_queue/queue.py"},  # a Unix socket
    "add_insecure_port": {"lighthouse/net.py"},
    "add_secure_port": {"lighthouse/net.py"},
    "start_server": set(),
    "start_unix_server": set(),
    "create_datagram_endpoint": set(),
    "fromfd": set(),
    "Server": {"lighthouse/page/server.py"},  # uvicorn's, which is given a listener
    "HTTPServer": set(),
    "ThreadingHTTPServer": {"torchft_like/parameter_server.py"},  # likewise
    "FileStore": set(),
    "TCPStore": {"torchft_like/process_group/store.py"},
    "socket": {
        "lighthouse/forks.py",  # finds those of this process
        "lighthouse/listening.py",
        "lighthouse/page/server.py",  # one that was made in listening.py
        "torchft_like/runtime/connecting.py",
        "torchft_like/runtime/hosts.py",  # asks the kernel for a route, and sends nothing
        "torchft_like/message_queue/queue.py",  # Unix sockets
        "torchft_like/message_queue/remote.py",  # ZeroMQ's, with keys of their own
        "torchft_like/process_group/baby/fork_pool.py",  # pairs of sockets that have no address
        "torchft_like/process_group/gloo.py",  # Gloo's own
    },
    "Context": {"torchft_like/message_queue/remote.py"},
    "create_connection": set(),
    "open_connection": {
        "lighthouse/listening.py",  # to see who listens
        "torchft_like/process_group/store.py",  # torch's own, to hear whether it answers
    },
    "HTTPConnection": {"lighthouse/page/cli.py", "torchft_like/parameter_server.py"},
    "HTTPSConnection": set(),
    "urlopen": set(),
    "wrap_socket": {"lighthouse/tls.py"},
    "SSLContext": {"lighthouse/tls.py"},
    "connect_tcp": {
        "torchft_like/checkpointing/http_fetch.py",
        "torchft_like/in_process/health.py",
        "torchft_like/parameter_server.py",
        "torchft_like/process_group/checking.py",
        "torchft_like/process_group/store.py",
    },
    "listen_guarded": {
        "lighthouse/page/server.py",
        "torchft_like/checkpointing/http_server.py",
        "torchft_like/parameter_server.py",
        "torchft_like/process_group/store_server.py",
    },
    "listen_tcp": {
        "lighthouse/listening.py",
        "torchft_like/doctor.py",
        "torchft_like/process_group/checking.py",
        "torchft_like/process_group/store.py",  # for torch's, where a user has named it
    },
}
# Modules of the standard library and others that would make one by other names.
OTHER_NETWORKING = (
    "aiohttp",
    "ftplib",
    "httpx",
    "multiprocessing.connection",
    "requests",
    "smtplib",
    "socketserver",
    "torch.distributed.rpc",
    "urllib.request",
    "urllib3",
    "websockets",
    "xmlrpc",
)
# Those that leave TLS out, as docs/security.md says.
PLAIN = {
    "torchft_like/checkpointing/http_transport.py",  # says nothing: can the source be reached at all?
    "torchft_like/in_process/health.py",  # likewise
    "torchft_like/process_group/checking.py",
}

# A function's docstring that begins with one of these words has neither a subject nor a verb that commands.
# A property's may: it names a value, as in "Whether the group is configured.".
NO_SENTENCE = re.compile(
    r"(also|as|at|because|by|for|from|how|in|into|like|neither|nobody|nor|of|on|only|or|so|such|than|that"
    r"|those|to|until|what|where|whether|which|who|whoever|whom|whose|why|with|without)\b",
    re.IGNORECASE,
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """All nodes of a file's tree, in the order of `ast.walk`, which takes longer than most tests of them."""
    return list(ast.walk(parse(path)))


@pytest.fixture(scope="module", autouse=True)
def _trees() -> Iterator[None]:
    """Parse all files while the collector stands still: it would look at each node again and again."""
    gc.disable()
    for path in FILES:
        nodes(path)
    gc.freeze()
    gc.enable()
    yield
    for cached in (parse, nodes, functions_of):
        cached.cache_clear()


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Every function with its dotted name, nested ones and methods too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function):
            yield f"{prefix}{child.name}", child
        name = f"{prefix}{child.name}." if isinstance(child, Function | ast.ClassDef) else prefix
        yield from functions(child, name)


@functools.cache
def functions_of(path: Path) -> list[tuple[str, Function]]:
    return list(functions(parse(path)))


def imports(path: Path) -> Iterator[str]:
    """Every module imported anywhere in the file, for type checking too; absolute names."""
    for node in nodes(path):
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


def test_functions_fit_a_screen() -> None:
    assert_none(
        f"{name_of(path)}:{function.lineno} {name} has {length} lines, {FUNCTION_LINES_MAX} at most"
        for path in FILES
        for name, function in functions_of(path)
        if (length := (function.end_lineno or function.lineno) - function.lineno + 1) > FUNCTION_LINES_MAX
    )


def test_no_function_wants_an_object_instead_of_its_arguments() -> None:
    assert_none(
        f"{name_of(path)}:{function.lineno} {name} has {count} parameters, {PARAMETERS_MAX} at most"
        for path in LIBRARY
        for name, function in functions_of(path)
        if (count := parameter_count(function)) > PARAMETERS_MAX
        if not {f"*.{function.name}", f"{name_of(path)}:{name}"} & set(MANY_PARAMETERS)
    )


def test_every_module_says_what_it_is() -> None:
    assert_none(
        f"{name_of(path)} has no docstring"
        for path in FILES
        if not ast.get_docstring(parse(path)) and path.read_text().strip()
    )


def test_docstrings_begin_with_a_verb_or_a_subject() -> None:
    """A docstring says something itself: no "See X", no single word, and a function's begins a sentence."""
    assert_none(
        f"{name_of(path)}:{node.body[0].lineno} the docstring is no sentence: {text.splitlines()[0]}"
        for path in LIBRARY
        for node in nodes(path)
        if isinstance(node, ast.Module | ast.ClassDef | Function) and (text := ast.get_docstring(node))
        if is_fragment(node, text)
    )


def is_fragment(node: ast.AST, text: str) -> bool:
    is_property = any("property" in ast.unparse(mark) for mark in getattr(node, "decorator_list", ()))
    is_action = isinstance(node, Function) and not is_property
    return text.startswith("See ") or len(text.split()) == 1 or bool(is_action and NO_SENTENCE.match(text))


def test_libraries_import_only_what_their_place_allows() -> None:
    assert_none(
        f"{name_of(path)} imports {module}, which nothing in {folder or 'the library'} may"
        for path in LIBRARY
        for folder, forbidden in FORBIDDEN_IMPORTS.items()
        if path.is_relative_to(ROOT / folder)
        for module in sorted(set(imports(path)))
        if within(module, forbidden)
    )


def test_channels_servers_and_listeners_are_made_where_tokens_are_asked_for() -> None:
    files = [path for path in LIBRARY if not any(path.is_relative_to(part) for part in KIT)]
    calls = [
        (path, node, ast.unparse(made).rpartition(".")[2])
        for path in files
        for node in nodes(path)
        if isinstance(node, ast.Call | ast.ClassDef)
        for made in (node.bases if isinstance(node, ast.ClassDef) else [node.func])
    ]
    found = {(name, name_of(path)) for path, _, name in calls if name in MAKERS}
    assert_none(
        f"{name_of(path)}:{node.lineno} calls {alias.name} {alias.asname}, which hides it from this test"
        for path in files
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name in MAKERS and alias.asname
    )
    assert_none(
        f"{name_of(path)} imports {module}"
        for path in files
        for module in imports(path)
        if within(module, OTHER_NETWORKING)
    )
    assert_none(
        f"{name_of(path)}:{node.lineno} calls {name}: lighthouse/net.py, listening.py or connecting.py should"
        for path, node, name in calls
        if name in MAKERS and name_of(path) not in MAKERS[name]
    )
    assert_none(
        f"{file} calls {name} no more"
        for name, files in MAKERS.items()
        for file in files
        if (name, file) not in found
    )


def test_connections_are_plain_only_where_the_documentation_says_so() -> None:
    plain = {
        name_of(path)
        for path in LIBRARY
        for node in nodes(path)
        if isinstance(node, ast.Call)
        for word in node.keywords
        if word.arg == "is_plain" and ast.unparse(word.value) == "True"
    }
    assert plain == PLAIN


def test_the_library_knows_nothing_of_its_testing_kit() -> None:
    assert_none(
        f"{name_of(path)} imports {module}"
        for path in LIBRARY
        if not any(path.is_relative_to(part) for part in KIT)
        for module in imports(path)
        if within(module, ("torchft_like.testing", "torchft_like.chaos", "psutil"))
    )


def test_modules_in_a_core_folder_are_pure() -> None:
    cores = [path for path in LIBRARY if "core" in path.parent.relative_to(ROOT).parts]
    assert cores
    known = ("torchft_like.core", "lighthouse.core", "torchft_like.errors", "lighthouse.errors")
    assert_none(
        f"{name_of(path)}, which is pure, imports {module}"
        for path in (*cores, ROOT / "lighthouse/errors.py")
        for module in imports(path)
        if within(module, IMPURE)
        or not (within(module, known) or module.split(".")[0] in sys.stdlib_module_names)
    )


def test_libraries_hold_no_mocks() -> None:
    assert_none(
        f"{name_of(path)} imports {module}"
        for path in LIBRARY
        for module in imports(path)
        if within(module, ("unittest", "pytest", "tests"))
    )


def test_libraries_never_print() -> None:
    assert_none(
        f"{name_of(path)}:{node.lineno} prints"
        for path in LIBRARY
        if path.stem not in ("cli", "__main__")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    )


def test_every_test_shows_what_it_asserts() -> None:
    """A reader sees in its body what it guards: an `assert`, `raises`, or a function named for it."""
    assert_none(
        f"{name_of(path)}:{function.lineno} {name} asserts nothing in its own body"
        for path in FILES
        if path.name.startswith("test_")
        for name, function in functions_of(path)
        if function.name.startswith("test_") and not any(map(asserts, ast.walk(function)))
    )


def asserts(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return isinstance(node, ast.Assert)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    return name.startswith("assert_") or name in ("raises", "warns", "fail")


def test_no_exception_is_swallowed_without_a_word() -> None:
    """Neither by `except Exception: pass` nor by a bare `except`."""
    assert_none(
        f"{name_of(path)}:{node.lineno} swallows every exception"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.ExceptHandler)
        if node.type is None
        or (ast.unparse(node.type) in ("Exception", "BaseException") and is_empty(node.body))
    )


def assert_none(offences: Iterable[str]) -> None:
    """Fail the test with all offences in one message, if there are any."""
    if found := list(offences):
        pytest.fail("\n".join(found), pytrace=False)


def is_empty(body: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Pass | ast.Continue) for statement in body)
