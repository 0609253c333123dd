"""The daemon: `python -m lighthouse`, or `torchft-like-lighthouse`.

The daemon takes torchft's flags, with underscores or dashes. It prints one line to standard output,
`lighthouse listening on http://HOST:PORT`, once it can be reached; event records go to standard error.
SIGTERM and Ctrl-C end it with status 0; a wrong argument is reported in one line and ends it with status 2.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NoReturn

from lighthouse import __version__
from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.core.config import LighthouseConfig
from lighthouse.errors import ConfigError, CoordinationError

DEFAULT_PORT = 29510
FEWEST_REPLICAS = 16
START_GRACE_MS = 500
REPLICAS_MAX = LighthouseConfig().replicas_max

_HELP = {
    "min_replicas": "a quorum never has fewer members",
    "join_timeout_ms": "how long those who joined wait for healthy replicas that did not",
    "quorum_tick_ms": "accepted for torchft's sake, without effect: nothing ticks here",
    "heartbeat_timeout_ms": "how long a replica without a session is healthy after its last call",
    "reconnect_grace_ms": "after a restart, how long members of the last quorum are awaited",
    "start_grace_ms": "after a start, how long members of a quorum may come back before newcomers form one",
    "standing_lease_ms": "how long a quorum that stands goes on without a word, and others wait",
    "sick_pause_ms": "how long who spoilt two quorums in a row by itself is left out, doubled each time",
    "sick_pause_max_ms": "the longest time for which it is left out",
    "keepalive_time_ms": "a connection silent for so long is probed",
    "keepalive_timeout_ms": "a probe unanswered for so long ends the connection",
    "replicas_max": "more replicas are refused",
    "session_queue_max": "messages that may wait for one session's reader",
    "job_id": "the name of the job; replicas that were given another one are refused",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon until a signal ends it, and return the exit status."""
    try:
        bind, config, level = _parse(sys.argv[1:] if arguments is None else arguments)
        logging.basicConfig(stream=sys.stderr, level=level, format="%(asctime)s %(levelname)s %(message)s")
        config = _within_open_files(config)
        asyncio.run(_serve(bind, config))
    except CoordinationError as error:
        print(f"lighthouse: {error}", file=sys.stderr)  # noqa: T201 - a command line prints its errors
        return 2
    return 0


async def _serve(bind: Address, config: LighthouseConfig) -> None:
    from lighthouse.server import Lighthouse  # noqa: PLC0415 - it loads gRPC, which --help does without

    loop, signalled = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    lighthouse = await Lighthouse.start(config, bind)
    try:
        print(f"lighthouse listening on {lighthouse.address.url}", flush=True)  # noqa: T201
        await signalled.wait()
    finally:
        await lighthouse.stop("signal")


def _within_open_files(config: LighthouseConfig) -> LighthouseConfig:
    """Raise this process's limit of open files as far as it goes; return settings for which it is enough.

    Raises:
        ConfigError: it is not enough for the replicas that were asked for, or for hardly any.
    """
    from lighthouse.net import DESCRIPTORS_KEPT, allow_many_files  # noqa: PLC0415 - likewise

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


def _parse(arguments: Sequence[str]) -> tuple[Address, LighthouseConfig, str]:
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
            metavar="NAME" if isinstance(setting.default, str) else "N",
            help=f"{_HELP[setting.name]} (default: {'none' if setting.default == '' else '%(default)s'})",
        )
    parser.add_argument(
        *_spellings("log_level"),
        default="INFO",
        choices=["DEBUG", "INFO", "WARNING", "ERROR"],
        metavar="LEVEL",
    )
    given = parser.parse_args(arguments)
    numbers = [f.name for f in fields(LighthouseConfig) if not isinstance(f.default, str)]
    settings = {**vars(given), **{name: _number(name, getattr(given, name)) for name in numbers}}
    config = LighthouseConfig(**{f.name: settings[f.name] for f in fields(LighthouseConfig)})
    return parse_address(given.bind, "--bind"), config, given.log_level


def _spellings(name: str) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _number(name: str, text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name} {text!r:.100} is not a whole number") from None
