"""The daemon: `torchft-like lighthouse`, `python -m lighthouse`, or `torchft-like-lighthouse`.

The daemon takes torchft's flags, with underscores or dashes. Once it can be reached it prints to standard
output where its page is (`lighthouse page on http://HOST:PORT`), if it has one, and as the last line
`lighthouse listening on http://HOST:PORT`; event records go to standard error.
SIGTERM and Ctrl-C end it with status 0; a wrong argument is reported in one line and ends it with status 2.

Where other hosts could reach it, and it has neither tokens nor a certificate, it does not start without
`--insecure`. Under torchft's name, `torchft_lighthouse`, it warns and starts: torchft's scripts know no such
flag.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NoReturn

from lighthouse import __version__
from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.core.config import LighthouseConfig
from lighthouse.errors import BindError, ConfigError, CoordinationError
from lighthouse.variables import process_variables

if TYPE_CHECKING:
    from lighthouse.page.server import PageServer
    from lighthouse.server import Lighthouse

DEFAULT_PORT = 29510
FEWEST_REPLICAS = 16
START_GRACE_MS = 500
CERTIFICATE_EVERY_S = 3600.0
REPLICAS_MAX = LighthouseConfig().replicas_max

_HELP = {
    "min_replicas": "a quorum never has fewer members",
    "join_timeout_ms": "how long those who joined wait for healthy replicas that did not",
    "quorum_tick_ms": "accepted for torchft's sake, without effect: nothing ticks here",
    "heartbeat_timeout_ms": "how long a replica without a session is healthy after its last call",
    "replicas": "while fewer are there, spares take part; at the least min_replicas",
    "reconnect_grace_ms": "after a restart, how long members of the last quorum are awaited",
    "start_grace_ms": "after a start, how long members of a quorum may come back before newcomers form one",
    "standing_lease_ms": "how long a quorum that stands goes on without a word, and others wait for it",
    "sick_pause_ms": "how long who spoilt two quorums in a row by itself is left out, doubled each time",
    "sick_pause_max_ms": "the longest time for which it is left out",
    "keepalive_time_ms": "a connection silent for so long is probed",
    "keepalive_timeout_ms": "a probe unanswered for so long ends the connection",
    "progress_interval_ms": "how often members say how far they are, while somebody looks; 0: never",
    "replicas_max": "more replicas are refused",
    "session_queue_max": "messages that may wait for one session's reader",
    "job_id": "the name of the job; replicas that were given another one are refused",
    "hosts": "where replicas may say that they serve, beside the address from which each calls: networks and"
    " names, as 10.0.0.0/8,*.trainers.svc",
}


def main(arguments: Sequence[str] | None = None, *, may_be_open: bool = False) -> int:
    """Run the daemon until a signal ends it, and return the exit status."""
    try:
        given = _parse(sys.argv[1:] if arguments is None else arguments)
        _check_openness(given, may_be_open)
        form = "%(asctime)s %(levelname)s %(message)s"
        logging.basicConfig(stream=sys.stderr, level=given.log_level, format=form)
        process_variables()
        given.config = _within_open_files(given.config)
        asyncio.run(_serve(given))
    except CoordinationError as error:
        print(f"lighthouse: {error}", file=sys.stderr)  # noqa: T201 - a command line prints its errors
        return 2
    return 0


def main_as_torchft() -> int:
    """Run the daemon as torchft's."""
    return main(may_be_open=True)


def _check_openness(given: _Given, may_be_open: bool) -> None:
    """Refuse what a stranger could reach.

    Raises:
        ConfigError: other hosts could reach a listener that asks for nothing, and it was not told to be so.
    """
    from lighthouse.trust import INSECURE_ENV, about_openness  # noqa: PLC0415 - --help does without

    if given.is_insecure:
        os.environ[INSECURE_ENV] = "1"
    for bind in filter(None, [given.bind, given.page]):
        if (complaint := about_openness(bind)) and not may_be_open:
            raise ConfigError(f"{complaint}; here --insecure says so, too")


@dataclass
class _Given:
    """What the command line says; without `page` there is none."""

    bind: Address
    config: LighthouseConfig
    log_level: str
    page: Address | None
    must_have_page: bool
    everybody_operates: bool
    is_insecure: bool


async def _serve(given: _Given) -> None:
    from lighthouse.server import Lighthouse  # noqa: PLC0415 - it loads gRPC, which --help does without

    if given.page is not None:
        with contextlib.suppress(ImportError):  # `_start_page` says so
            importlib.import_module("lighthouse.page.server")  # now, as soon there will be replicas that wait
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    lighthouse, page = await Lighthouse.start(given.config, given.bind), None
    try:
        page = await _start_page(lighthouse, given)
        _say(f"lighthouse listening on {lighthouse.address.url}")
        watch = loop.create_task(_watch_certificate())
        await signalled.wait()
        watch.cancel()
    finally:
        await asyncio.gather(lighthouse.stop("signal"), *([page.stop()] if page else []))


def _say(text: str) -> None:
    """Print a line, or log it: a lighthouse serves, too, where the disk with its output is full."""
    if sys.stdout is None:
        return
    try:
        # Python would keep what cannot be written, and fail once more at its end.
        os.write(sys.stdout.fileno(), f"{text}\n".encode())
    except OSError as error:
        logging.getLogger("lighthouse").warning("standard output: %s; %s", error.strerror or error, text)


async def _watch_certificate() -> None:
    """Warn as long as the certificate of this process is about to expire, or is of no use."""
    from lighthouse.tls import about_expiry, process_identity, why_useless  # noqa: PLC0415 - likewise

    said = ""
    while True:
        complaint = ""
        if (identity := process_identity()) is not None:
            complaint = why_useless(identity) or about_expiry(identity, time.time())
        if complaint and complaint != said:
            logging.getLogger("lighthouse").warning("%s: replace it (docs/security.md)", complaint)
        said = complaint
        await asyncio.sleep(CERTIFICATE_EVERY_S)


async def _start_page(lighthouse: Lighthouse, given: _Given) -> PageServer | None:
    """Serve the page, if there is to be one. A lighthouse that was not told to have one does without where
    there can be none.

    Raises:
        BindError, ConfigError: it was told to, and cannot listen there, or what serves it is not installed.
    """
    if given.page is None:
        return None
    failure: CoordinationError
    try:
        from lighthouse.page.server import PageServer  # noqa: PLC0415 - trainers do without

        everybody = given.everybody_operates
        page = await PageServer.start(lighthouse, given.page, everybody_operates=everybody)
    except ImportError as error:
        failure = ConfigError(f"the page needs {error.name}: pip install --upgrade torchft-like")
    except BindError as error:
        failure = error
    else:
        _say(f"lighthouse page on {page.url}")
        return page
    if given.must_have_page:
        raise failure
    logging.getLogger("lighthouse").warning("there is no page: %s (or pass --page=off)", failure)
    return None


def _within_open_files(config: LighthouseConfig) -> LighthouseConfig:
    """Raise this process's limit of open files as far as it goes; return settings for which it is enough.

    Raises:
        ConfigError: it is not enough for the replicas that were asked for, or for hardly any.
    """
    from lighthouse.listening import DESCRIPTORS_KEPT  # noqa: PLC0415 - likewise
    from lighthouse.net import allow_many_files  # noqa: PLC0415 - likewise

    files = allow_many_files()
    enough_for = files - DESCRIPTORS_KEPT
    if config.replicas_max <= enough_for:
        return config
    if enough_for < max(config.min_replicas, FEWEST_REPLICAS) or config.replicas_max != REPLICAS_MAX:
        raise ConfigError(
            f"this process may open {files} files, and --replicas_max {config.replicas_max} needs "
            f"{config.replicas_max + DESCRIPTORS_KEPT}: raise the limit (ulimit -n), or pass less"
        )
    text = "may open %d files (ulimit -n): more than %d replicas are refused"
    logging.getLogger("lighthouse").warning(text, files, enough_for)
    return replace(config, replicas_max=enough_for)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message:.1000} (--help lists the flags)")


def _parse(arguments: Sequence[str]) -> _Given:
    parser = _Parser(
        prog="lighthouse",
        allow_abbrev=False,
        description="Decides who is in the quorum of a fault-tolerant job.",
    )
    parser.add_argument("--version", action="version", version=f"lighthouse of torchft-like {__version__}")
    parser.add_argument(
        "--bind",
        default=f"{LOOPBACK}:{DEFAULT_PORT}",
        metavar="HOST:PORT",
        help="where to listen; port 0 takes a free one, [::]:29510 every address of this host"
        " (default: %(default)s)",
    )
    defaults = LighthouseConfig(start_grace_ms=START_GRACE_MS)
    for setting in fields(LighthouseConfig):
        parser.add_argument(
            *_spellings(setting.name),
            dest=setting.name,
            default=getattr(defaults, setting.name),
            type=type(setting.default),
            metavar="TEXT" if setting.default == "" else "N",
            help=f"{_HELP[setting.name]} (default: {'none' if setting.default == '' else '%(default)s'})",
        )
    parser.add_argument(
        "--page",
        metavar="HOST:PORT",
        help="where the page, /status and /metrics are served over HTTP; off for nowhere (default: the port"
        " after that of --bind, if it is free)",
    )
    parser.add_argument(
        *_spellings("page_operators"),
        default="local",
        choices=["local", "everybody"],
        help="who may kill a replica group there: who is on this host, or whoever reaches it"
        " (default: %(default)s)",
    )
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen for other hosts without tokens and certificate, in a closed network",
    )
    parser.add_argument(
        *_spellings("log_level"),
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        metavar="LEVEL",
        help="of its own log: DEBUG, INFO, WARNING or ERROR (default: %(default)s)",
    )
    given = parser.parse_args(arguments)
    config = LighthouseConfig(**{f.name: getattr(given, f.name) for f in fields(LighthouseConfig)})
    bind, is_page_asked = parse_address(given.bind, "--bind"), given.page not in (None, "off")
    page = replace(bind, port=(bind.port + 1) % 2**16 if bind.port else 0)
    if is_page_asked:
        page = parse_address(given.page, "--page")
    return _Given(
        bind,
        config,
        given.log_level,
        page=None if given.page == "off" else page,
        must_have_page=is_page_asked,
        everybody_operates=given.page_operators == "everybody",
        is_insecure=given.insecure,
    )


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))
