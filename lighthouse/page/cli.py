"""The commands `torchft-like status` and `torchft-like watch`: the lighthouse's status in a terminal.

    torchft-like status [ADDRESS] [--json]     once; exit status 0 if there is a whole quorum, 1 if not
    torchft-like watch [ADDRESS]               again every second, until Ctrl-C

ADDRESS is that of the lighthouse or of its page; without it the one in TORCHFT_LIGHTHOUSE. Exit status 2 says
that no page answers there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

from lighthouse.address import Address, parse_address
from lighthouse.errors import AddressError, CoordinationError
from lighthouse.events import printable, short_name
from lighthouse.tls import connecting
from lighthouse.trust import TOKEN_FILE_ENV, authorization

LIGHTHOUSE_ENV = "TORCHFT_LIGHTHOUSE"
EVERY_S = 1.0
ANSWER_S = 10.0
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
    """Add both commands to a parser's subparsers; `run` among the options is what they do."""
    for name, what, run in (
        ("status", "print what a lighthouse knows of its job", _status),
        ("watch", "the same every second", _watch),
    ):
        parser = commands.add_parser(name, help=what, description=what)
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
    try:
        status = Pages(options.address).status()
    except CoordinationError as error:
        sys.stderr.write(f"torchft-like: {error}\n")
        return 2
    text = json.dumps(status, indent=1) if options.json else "\n".join(lines_of(status))
    sys.stdout.write(f"{text}\n")
    return 0 if status["job"]["state"] in ("formed", "stands") else 1


def _watch(options: argparse.Namespace) -> int:
    try:
        pages = Pages(options.address)
        pages.status()  # a wrong address is an error; later the lighthouse may be away for a while
        while True:
            _show(pages)
            time.sleep(EVERY_S)
    except CoordinationError as error:
        sys.stderr.write(f"torchft-like: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 0


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
        problems = []
        for address in list(self._addresses):
            try:
                status = _fetch(address)
            except (OSError, http.client.HTTPException, ValueError) as error:
                problems.append(f"{address}: {type(error).__name__} {error}".rstrip())
            else:
                self._addresses = [address]
                return status
        raise NoPageError(printable(f"no page of a lighthouse answers at {'; '.join(problems)}"))


def _fetch(address: Address) -> dict[str, Any]:
    connection = http.client.HTTPConnection(address.host, address.port, timeout=ANSWER_S)
    try:
        connection.connect()
        connection.sock = connecting(connection.sock)
        header = authorization()
        connection.request("GET", "/status", headers={"Authorization": header} if header else {})
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status == http.HTTPStatus.UNAUTHORIZED:
        raise ValueError(f"it asks for a token: set {TOKEN_FILE_ENV}")
    status = json.loads(body)
    if answer.status != http.HTTPStatus.OK or not isinstance(status, dict) or "job" not in status:
        raise ValueError(f"answered {answer.status}, and no status")
    return status


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
