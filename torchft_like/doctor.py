"""The command `torchft-like doctor`: what a host lacks, before a trainer is started on it.

    torchft-like doctor [ADDRESS] [--json]

Run it where a trainer would run, with the trainer's environment. ADDRESS is the lighthouse's; without it the
one in TORCHFT_LIGHTHOUSE. Each line has what was looked at, what was found, and what to change if that is not
as it should be. Exit status 1 says that something is wrong; what is merely doubtful leaves it at 0.

What is found out is told from what it means: the functions `about_...` are pure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from lighthouse import __version__
from lighthouse.address import Address, is_loopback, parse_address
from lighthouse.errors import CoordinationError
from lighthouse.events import printable
from lighthouse.listening import listen_tcp
from lighthouse.page.cli import LIGHTHOUSE_ENV, NoPageError, Pages
from lighthouse.tls import KEY, TLS_ENV, about_expiry, process_identity, why_useless
from lighthouse.trust import TOKEN_FILE_ENV, process_trust
from lighthouse.variables import PREFIX, about_variables

OK, DOUBTFUL, WRONG = "ok", "doubtful", "wrong"
FILES_MIN = 1024
SHARED_BYTES_MIN = 1 << 30
CLOCK_S_MAX = 1.0
ANSWER_S_MAX = 10.0
SLOW_S = 0.2  # a step waits for such answers when a quorum is formed
PROCESSES_MIN = 4096
DETAIL_MAX = 400  # characters
_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
_PACKAGES = ("torch", "grpcio", "protobuf", "pyzmq", "numpy")
_SHARED = "/dev/shm"  # noqa: S108 - where the system keeps it
_PIDS = "/sys/fs/cgroup/pids.max"


class Finding(NamedTuple):
    """What was looked at, how that is, and what to change."""

    check: str
    state: str
    found: str
    cure: str = ""


def add_command(commands: Any) -> None:
    """Add the command to a parser's subparsers; `run` among the options is what it does."""
    what = "look for what this host lacks to run a trainer"
    parser = commands.add_parser("doctor", help=what, description=what)
    parser.add_argument(
        "address",
        nargs="?",
        default=os.environ.get(LIGHTHOUSE_ENV, ""),
        help=f"the lighthouse's (default: {LIGHTHOUSE_ENV})",
    )
    parser.add_argument("--json", action="store_true", help="a list of findings")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    findings = examine(options.address)
    if options.json:
        sys.stdout.write(json.dumps([finding._asdict() for finding in findings], indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for finding in findings for line in lines_of(finding))
    return int(any(finding.state == WRONG for finding in findings))


def lines_of(finding: Finding) -> list[str]:
    """Describe a finding in lines for a terminal."""
    lines = [f"{finding.state:9} {finding.check:14} {finding.found}"]
    return lines + ([f"{'':24} {finding.cure}"] if finding.cure else [])


def examine(address: str) -> list[Finding]:
    """Look at this host, as a trainer of the lighthouse at `address` would find it."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("versions", _versions),
        ("forks", lambda: about_forks(os.environ)),
        ("interfaces", lambda: about_interfaces(os.environ, {name for _, name in socket.if_nameindex()})),
        ("open files", lambda: about_files(resource.getrlimit(resource.RLIMIT_NOFILE))),
        ("processes", lambda: about_processes(resource.getrlimit(resource.RLIMIT_NPROC)[0], _pids_max())),
        ("shared memory", lambda: about_shared_memory(shutil.disk_usage(_SHARED).free)),
        ("secrets", _secrets),
        ("variables", lambda: about_names(os.environ)),
        ("settings", lambda: _settings(address)),
        ("lighthouse", lambda: _lighthouse(address)),
        ("clock", lambda: _clock(address)),
    ]
    findings = []
    for check, look in checks:
        try:
            findings.append(look())
        except (CoordinationError, ImportError, OSError, ValueError) as error:  # whose texts say what to do
            findings.append(Finding(check, WRONG, str(error)))
    return findings


# -- what the findings mean


def about_forks(environ: Mapping[str, str]) -> Finding:
    """Return whether data-loader workers can be forked beside a Manager."""
    given = environ.get(_FORK_SUPPORT, "0")
    if given.lower() in ("0", "false", "no", "n", "f", ""):
        return Finding("forks", OK, "gRPC's own handlers of forks are off")
    cure = f"unset {_FORK_SUPPORT}: gRPC's handlers crash data-loader workers"
    return Finding("forks", WRONG, f"{_FORK_SUPPORT}={given}", cure)


def about_interfaces(environ: Mapping[str, str], known: set[str]) -> Finding:
    """Return whether the interfaces that Gloo, NCCL and RPC are told to use exist."""
    given = {name: environ[name] for name in _INTERFACES if environ.get(name)}
    for variable, text in given.items():
        is_there = known.issuperset(text.split(","))
        # It takes beginnings of names, or after "=" names, or after "^" others.
        if variable.startswith("NCCL"):
            is_whole, names = text.startswith("="), text.lstrip("=").split(",")
            is_there = text.startswith("^") or any(
                one == name if is_whole else one.startswith(name) for one in known for name in names
            )
        if not is_there:
            cure = f"set {variable} to one of {', '.join(sorted(known))}, or unset it"
            return Finding("interfaces", WRONG, f"{variable}={text}: there is none of this name", cure)
    found = ", ".join(f"{name}={text}" for name, text in given.items())
    return Finding("interfaces", OK, found or "none is prescribed")


def about_files(limits: tuple[int, int]) -> Finding:
    """Return whether a process may open enough files, with the soft and the hard limit."""
    soft, hard = limits
    found = f"a process may open {soft}"
    if soft in range(FILES_MIN):
        more = f"ulimit -n {hard}" if hard >= FILES_MIN else "raise the hard limit (limits.conf, LimitNOFILE)"
        return Finding("open files", DOUBTFUL, found, f"{more}: each replica group takes a few in each rank")
    return Finding("open files", OK, found)


def about_processes(per_user: int, per_group: int) -> Finding:
    """Return whether enough threads and processes may run, by this user and in this control group; -1 is no
    limit.
    """
    limits = [limit for limit in (per_user, per_group) if limit >= 0]
    if not limits or min(limits) >= PROCESSES_MIN:
        return Finding("processes", OK, f"{min(limits)} may run" if limits else "no limit is known")
    where = "ulimit -u" if min(limits) == per_user else "pids.max of the control group"
    cure = f"raise {where}: a rank has threads of torch, gRPC and Gloo, and processes that load data"
    return Finding("processes", DOUBTFUL, f"{min(limits)} threads may run", cure)


def about_shared_memory(free_bytes: int) -> Finding:
    """Return whether torch's data loaders and NCCL have room in shared memory; nothing of ours needs it."""
    found = f"{free_bytes / 2**30:.2f} GiB are free in {_SHARED}"
    if free_bytes < SHARED_BYTES_MIN:
        cure = "give the container more: docker run --shm-size=8g, or a medium: Memory volume at /dev/shm"
        return Finding("shared memory", DOUBTFUL, found, cure)
    return Finding("shared memory", OK, found)


def about_secrets(
    has_tokens: bool,
    has_certificate: bool,
    readable_by_others: list[str],
    refused: str = "",
    expiry: str = "",
) -> Finding:
    """Return whether this process has what a job's processes know each other by, and no other user of this
    host; `refused` is why they would not take its certificate, and `expiry` that it expires soon.
    """
    if readable_by_others:
        cure = f"chmod 600 {' '.join(readable_by_others)}"
        return Finding("secrets", WRONG, f"others may read {', '.join(readable_by_others)}", cure)
    if refused:
        cure = f"`torchft-like keys` makes another; what {TLS_ENV} has to name is in docs/security.md"
        return Finding("secrets", WRONG, f"its own job refuses the certificate: {refused}", cure)
    if expiry:
        return Finding("secrets", DOUBTFUL, expiry, "replace it while the job runs (docs/security.md, TLS)")
    if not has_tokens and not has_certificate:
        cure = "fine in a closed network; else `torchft-like keys` makes what docs/security.md describes"
        return Finding("secrets", DOUBTFUL, "there are no tokens and no certificate", cure)
    have = [what for what, has in (("tokens", has_tokens), ("a certificate", has_certificate)) if has]
    return Finding("secrets", OK, f"there are {' and '.join(have)}")


def about_names(environ: Mapping[str, str]) -> Finding:
    """Return whether each variable that is like one of ours is one of ours."""
    if complaint := about_variables(environ):
        return Finding("variables", DOUBTFUL, complaint, "correct what is misspelt")
    return Finding("variables", OK, f"each {PREFIX}* is known, or unlike those that are")


def about_host(host: str, lighthouse: Address) -> Finding:
    """Return whether the address that this host offers to its peers is one that they reach."""
    found = f"peers are told {host}"
    if is_loopback(host) and not is_loopback(lighthouse.host):
        cure = "set TORCHFT_HOSTNAME to a name, an address or an interface of this host that they reach"
        return Finding("settings", WRONG, found, cure)
    return Finding("settings", OK, found)


def about_clock(ahead_s: float, within_s: float) -> Finding:
    """Return whether this host's clock agrees with the lighthouse's; it is known to so many seconds."""
    way = "ahead of" if ahead_s > 0 else "behind"
    found = f"{abs(ahead_s):.3f} s {way} the lighthouse's, give or take {within_s:.3f} s"
    if abs(ahead_s) > CLOCK_S_MAX + within_s:
        cure = "let chrony or ntpd set it: no step depends on it, but the times in events and logs do"
        return Finding("clock", DOUBTFUL, found, cure)
    return Finding("clock", OK, found)


def about_answer(code: str, took_s: float, detail: str = "") -> Finding:
    """Return what a lighthouse's answer to a message that is none says, by its gRPC status and the text with
    it.
    """
    if code == "INVALID_ARGUMENT":  # so it has looked at what it was sent
        found = f"it answers after {took_s * 1000:.0f} ms"
        cure = "every quorum waits for that: is it far away, or overloaded?" if took_s > SLOW_S else ""
        return Finding("lighthouse", DOUBTFUL if cure else OK, found, cure)
    detail = f" ({printable(detail[:DETAIL_MAX])})" if detail else ""
    if code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
        found = f"it does not take this process's token{detail}"
        return Finding("lighthouse", WRONG, found, f"set {TOKEN_FILE_ENV}")
    cure = f"does `torchft-like lighthouse` run there, is the port open, and have both {TLS_ENV}, or neither?"
    return Finding("lighthouse", WRONG, f"no answer: {code}{detail}", cure)


# -- what is found


def _versions() -> Finding:
    found = {"torchft-like": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            return Finding("versions", WRONG, f"{package} is missing", f"pip install {package}")
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    try:
        importlib.import_module("torch")
        importlib.import_module("torchft_like.process_group")
    except (ImportError, OSError) as error:
        return Finding("versions", WRONG, text, f"torch cannot be loaded: {error}")
    return Finding("versions", OK, text)


def _pids_max() -> int:
    path = Path(_PIDS)
    text = path.read_text().strip() if path.exists() else "max"
    return int(text) if text.isdecimal() else -1


def _secrets() -> Finding:
    folder, file = os.environ.get(TLS_ENV), os.environ.get(TOKEN_FILE_ENV)
    paths = [path for path in (folder and os.path.join(folder, KEY), file) if path]
    has_tokens, identity = process_trust() is not None, process_identity()
    readable = [path for path in paths if os.stat(path).st_mode & 0o007]
    refused = expiry = ""
    if identity is not None:
        refused, expiry = why_useless(identity), about_expiry(identity, time.time())
    return about_secrets(has_tokens, identity is not None, readable, refused, expiry)


def _settings(address: str) -> Finding:
    """Resolve the settings of a Manager from this environment, and listen at the address that it offers."""
    config = importlib.import_module("torchft_like.manager.config")  # it loads torch
    alone = {"RANK": "0", "WORLD_SIZE": "1", LIGHTHOUSE_ENV: address}
    resolved = config.resolve(config.ManagerArguments(), {**os.environ, **alone})
    listen_tcp(Address(resolved.host, resolved.port)).close()
    return about_host(resolved.host, resolved.lighthouse)


def _lighthouse(address: str) -> Finding:
    """Call the lighthouse with bytes that are no message, so that it registers no replica."""
    grpc: Any = importlib.import_module("grpc")
    net, wire = importlib.import_module("lighthouse.net"), importlib.import_module("lighthouse.wire")
    target = parse_address(address, f"the lighthouse's address ({LIGHTHOUSE_ENV})")
    with net.make_channel(target) as channel:
        call = net.unary(channel, wire.HEARTBEAT, _Bytes, _Bytes)
        for _ in range(2):  # the first one connects
            began = time.monotonic()
            try:
                call(b"\xff", timeout=ANSWER_S_MAX)
            except grpc.RpcError as error:
                code, detail = error.code().name, error.details() or ""
            else:
                code, detail = "it takes what is no message", ""
        return about_answer(code, time.monotonic() - began, detail)


class _Bytes:
    """A message that is sent as it is."""

    SerializeToString = FromString = staticmethod(bytes)


def _clock(address: str) -> Finding:
    pages = Pages(address)
    try:
        pages.fetch()
    except NoPageError as error:  # it may well have none
        return Finding("clock", DOUBTFUL, f"not compared with the lighthouse's: {error}", "see --page")
    began = time.time()
    _, headers = pages.fetch()
    within_s = (time.time() - began) / 2
    if (told := headers["Torchft-Time"]) is None:
        return Finding("clock", DOUBTFUL, "the lighthouse does not tell its time", "is it of this version?")
    return about_clock(began + within_s - float(told), within_s)
