"""The commands `torchft-like status`, `watch` and `kill`: the lighthouse's page in a terminal.

    torchft-like status [ADDRESS] [--json]     once; exit status 0 if there is a whole quorum, 1 if not
    torchft-like watch [ADDRESS]               again every second, until Ctrl-C
    torchft-like kill REPLICA [ADDRESS]        end a replica group; exit status 1 if the lighthouse refuses

REPLICA is a replica group's id; or the part of it before the colon or what `status` prints of it, if that is
one group's alone. ADDRESS is that of the lighthouse or of its page; without it the one in TORCHFT_LIGHTHOUSE.
Exit status 2 says that no page answers there.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any, cast
from urllib.parse import quote

from lighthouse.address import Address, parse_address
from lighthouse.core.json_text import read_json
from lighthouse.errors import AddressError, ConfigError, CoordinationError
from lighthouse.events import printable, short_name
from lighthouse.tls import TLS_ENV, connecting
from lighthouse.trust import TOKEN_FILE_ENV, authorization

LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
KILL_HEADER = "X-Torchft-Kill"  # which the page wants in a request to kill, and ignores otherwise
EVERY_S = 1.0
# Members say their steps while somebody looks: what is older than this may be one from before that.
OLD_S = 2.0
NEWS_S = 3.0  # within which they say newer ones, if there are any
ANSWER_S = 10.0
ANSWER_BYTES_MAX = 64 << 20
_HEAD, _CLEAR_LINE, _CLEAR_REST = "\x1b[H", "\x1b[K\n", "\x1b[J"
_COLUMNS = ("name", "state", "step", "steps/s", "waits", "address", "")
_HEADLINES = {
    "none": "no quorum so far",
    "broken": "the quorum is broken: {gone} of {members} gone",
    "formed": "quorum of {members}",
    "stands": "a quorum of {members} stands",
}


class NoPageError(CoordinationError):
    """No page of a lighthouse answers."""


def add_commands(commands: Any) -> None:
    """Add the commands to a parser's subparsers; `run` among the options is what they do. A CoordinationError
    says what cannot be done; a RefusedError, that the lighthouse does not do it.
    """
    for name, what, run in (
        ("status", "print what a lighthouse knows of its job", _status),
        ("watch", "print it every second, until Ctrl-C", _watch),
        ("kill", "end a replica group", _kill),
    ):
        parser = commands.add_parser(name, help=what, description=what)
        if name == "kill":
            parser.add_argument("replica", help="its id, the name that begins it, or what `status` prints")
        parser.add_argument(
            "address",
            nargs="?",
            default=os.environ.get(LIGHTHOUSE_ENV, ""),
            help=f"host:port of a lighthouse, or of its page (default: {LIGHTHOUSE_ENV})",
        )
        parser.set_defaults(run=run)
        if name == "status":
            parser.add_argument("--json", action="store_true", help="the document as it is")


def _status(options: argparse.Namespace) -> int:
    status = _status_with_news(Pages(options.address))
    text = json.dumps(status, indent=1) if options.json else "\n".join(lines_of(status))
    sys.stdout.write(f"{text}\n")
    return 0 if status["job"]["state"] in ("formed", "stands") else 1


def _status_with_news(pages: Pages) -> dict[str, Any]:
    """Return the status once no member's step is an old one, or its members had the time to say a newer."""
    ends_at, recent = time.monotonic() + NEWS_S, None
    while True:
        status, headers = pages.fetch()
        recent = recent or float(headers.get("Torchft-Time", "0")) - OLD_S
        spoke = [each["step_time"] for each in status["replicas"] if each["step_is_live"]]
        if min(spoke, default=recent) >= recent or time.monotonic() >= ends_at:
            return status
        time.sleep(EVERY_S / 4)


def _watch(options: argparse.Namespace) -> int:
    with contextlib.suppress(KeyboardInterrupt):
        pages = Pages(options.address)
        pages.status()  # a wrong address is an error; later the lighthouse may be away for a while
        while True:
            _show(pages)
            time.sleep(EVERY_S)
    return 0


def _kill(options: argparse.Namespace) -> int:
    pages = Pages(options.address)
    replica_id = chosen(options.replica, [replica["id"] for replica in pages.status()["replicas"]])
    pages.kill(replica_id)
    sys.stdout.write(f"{printable(replica_id)} was told to end itself\n")
    return 0


def chosen(name: str, known: Sequence[str]) -> str:
    """Return the replica id that is meant by a name.

    Raises:
        RefusedError: it is none, or that of several.
    """
    if name in known:
        return name
    found = [each for each in known if name in (each.partition(":")[0], short_name(each))]
    if len(found) == 1:
        return found[0]
    what = f"{len(found)} replica groups are" if found else "no replica group is"
    raise RefusedError(printable(f"{what} called {name}; there are: {', '.join(found or known) or 'none'}"))


def _show(pages: Pages) -> None:
    width, height = shutil.get_terminal_size()
    try:
        lines = lines_of(pages.status())
    except NoPageError as error:
        lines = [f"{time.strftime('%H:%M:%S')} {error}"]
    if not sys.stdout.isatty():
        sys.stdout.write("\n".join([*lines, "", ""]))
    else:
        if len(lines) >= height:
            lines = [*lines[: height - 2], f"and {len(lines) - height + 2} lines more"]
        sys.stdout.write(_HEAD + "".join(line[:width] + _CLEAR_LINE for line in lines) + _CLEAR_REST)
    sys.stdout.flush()


class RefusedError(CoordinationError):
    """The lighthouse does not do what it was asked for."""


class Pages:
    """The page at an address, or at the port after it, if that is the lighthouse's own.

    Raises:
        AddressError: the text is no address.
    """

    def __init__(self, address: str) -> None:
        if not address:
            raise AddressError(f"pass the lighthouse's address, or set {LIGHTHOUSE_ENV}")
        given = parse_address(address, "the lighthouse's address")
        self._addresses = [given, Address(given.host, min(given.port + 1, 65535))]

    def status(self) -> dict[str, Any]:
        """Return the status document.

        Raises:
            NoPageError: no page answers at either port.
        """
        return self.fetch()[0]

    def fetch(self) -> tuple[dict[str, Any], http.client.HTTPMessage]:
        """Return the status document, and the headers of the answer.

        Raises:
            NoPageError: no page answers at either port.
        """
        problems = []
        for address in list(self._addresses):
            try:
                found = _fetch(address)
            except ConfigError:  # this process's own tokens or certificate
                raise
            except (OSError, http.client.HTTPException, ValueError) as error:
                name = "" if type(error) is ValueError else f"{type(error).__name__} "  # ours say it all
                problems.append(f"{address}: {name}{error}".rstrip())
            else:
                self._addresses = [address]
                return found
        found_none = f"no page of a lighthouse answers at {'; '.join(problems)}"
        cure = f"does one run there, where does it say its page is, and have both {TLS_ENV}, or neither?"
        raise NoPageError(printable(f"{found_none}: {cure}"))

    def kill(self, replica_id: str) -> None:
        """Let the lighthouse end a replica group; `status` has been called before.

        Raises:
            RefusedError: it does not; the text has its reason.
            NoPageError: it does not answer any more.
        """
        path = f"/replica/{quote(replica_id, safe='')}/kill"
        try:
            answer, body = _ask(self._addresses[0], "POST", path)
        except (OSError, http.client.HTTPException) as error:
            raise NoPageError(printable(f"the page at {self._addresses[0]} is gone: {error}")) from error
        if answer.status != http.HTTPStatus.ACCEPTED:
            raise RefusedError(
                printable(f"{replica_id} is not killed: {body.decode(errors='replace').strip()}")
            )


def _fetch(address: Address) -> tuple[dict[str, Any], http.client.HTTPMessage]:
    answer, body = _ask(address, "GET", "/status")
    if answer.status == http.HTTPStatus.UNAUTHORIZED:
        raise ValueError(f"it asks for a token: set {TOKEN_FILE_ENV}")
    if answer.status != http.HTTPStatus.OK:
        raise ValueError(f"answered {answer.status}, and no status")
    return status_in(body), answer.headers


def status_in(body: bytes) -> dict[str, Any]:
    """Return the status document in an answer.

    Raises:
        ValueError: there is none, or one that lacks what `lines_of` needs.
    """
    status = read_json(body)
    try:
        lines_of(status)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"answered with what is no status: {type(error).__name__} {error}") from error
    return cast("dict[str, Any]", status)


def _ask(address: Address, method: str, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=ANSWER_S)
    shown = {"Authorization": header} if (header := authorization()) else {}
    try:
        connection.connect()
        connection.sock = connecting(connection.sock)
        connection.request(method, path, headers={**shown, KILL_HEADER: "yes"})
        answer = connection.getresponse()
        return answer, answer.read(ANSWER_BYTES_MAX)
    finally:
        connection.close()


def lines_of(status: dict[str, Any]) -> list[str]:
    """Describe a status document in lines for a terminal, a table of the replica groups among them."""
    job = status["job"]
    headline = _HEADLINES[job["state"]].format_map(job)
    rate = f", {job['steps_per_s']:g} steps/s" if job["steps_per_s"] else ""
    lines = [f"{status['lighthouse']['address']}: {headline}, step {job['step']}{rate}"]
    if job["why_no_quorum"]:
        lines.append(f"no quorum yet: {job['why_no_quorum']}")
    if job["straggler"]:
        lines.append(f"the others wait for {short_name(job['straggler'])}")
    for recovery in status["recoveries"][:1]:
        lost, seconds = " ".join(map(short_name, recovery["lost"])), recovery["quorum_s"]
        lines.append(
            f"last loss: {lost}, {'no quorum since' if seconds is None else f'quorum after {seconds:g} s'}"
        )
    table = [_COLUMNS, *map(_row, status["replicas"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
    return [printable(line) for line in (*lines, "", *rows)]


def _row(replica: dict[str, Any]) -> Sequence[str]:
    note, heal, waiting = replica["trouble"], replica["heal"], replica["waiting_permille"]
    if heal is not None:
        source = f" from {short_name(heal['source'])}" if heal["source"] else ""
        note = f"heals{source}: step {heal['from_step']} to {heal['to_step']}"
    return (
        short_name(replica["id"]),
        replica["state"],
        "" if replica["step"] is None else str(replica["step"]),
        "" if replica["steps_per_s"] is None else f"{replica['steps_per_s']:g}",
        "" if waiting is None else f"{waiting / 10:.0f} % {replica['waits_for']}".rstrip(),
        replica["address"].removeprefix("http://"),
        note,
    )
