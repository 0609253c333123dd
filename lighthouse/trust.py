"""The tokens of this process, from a file or the environment, and what each gRPC method asks for.

Without either variable there is no authentication, and everything works as in torchft.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from pathlib import Path

from lighthouse import wire
from lighthouse.address import Address
from lighthouse.core.trust import Role, Trust, parse_trust
from lighthouse.errors import ConfigError

TOKEN_FILE_ENV = "TORCHFT_TOKEN_FILE"  # noqa: S105 - a name
TOKEN_ENV = "TORCHFT_TOKEN"  # noqa: S105 - likewise
INSECURE_ENV = "TORCHFT_INSECURE"

ROLES = {
    wire.QUORUM: Role.PARTICIPATE,
    wire.HEARTBEAT: Role.PARTICIPATE,
    wire.SESSION: Role.PARTICIPATE,
    wire.OFFER_SPARE: Role.PARTICIPATE,
    wire.FILL_VACANCY: Role.PARTICIPATE,
    wire.MANAGER_QUORUM: Role.PARTICIPATE,
    wire.CHECKPOINT_METADATA: Role.PARTICIPATE,
    wire.SHOULD_COMMIT: Role.PARTICIPATE,
    wire.RANK_SESSION: Role.PARTICIPATE,
    wire.KILL: Role.OPERATE,
}

logger = logging.getLogger(__name__)
_known: dict[str, tuple[object, Trust]] = {}  # by path, what was read and the state of the file then
_warned: set[None] = set()


def process_trust() -> Trust | None:
    """Return this process's tokens; None if it was given none.

    A file that has changed is read again. If it cannot be, what it held before stays good.

    Raises:
        ConfigError: the file cannot be read, or what was given is malformed; the message holds none of it.
    """
    path, text = os.environ.get(TOKEN_FILE_ENV), os.environ.get(TOKEN_ENV)
    if path and text:
        raise ConfigError(f"{TOKEN_FILE_ENV} and {TOKEN_ENV} are both set: leave one out")
    if path:
        return _from_file(path)
    return parse_trust(text, f"the environment variable {TOKEN_ENV}") if text else None


def _from_file(path: str) -> Trust:
    before, trust = _known.get(path, (None, None))
    try:
        found = os.stat(path)
        state = found.st_mtime_ns, found.st_size, found.st_ino
        if trust is None or state != before:
            trust = parse_trust(_read(path), f"the file {path} ({TOKEN_FILE_ENV})")
            _known[path] = state, trust
    except (OSError, ConfigError) as error:
        failure = error
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            failure = ConfigError(f"the file {path} ({TOKEN_FILE_ENV}) cannot be read: {reason}")
        if trust is None:
            raise failure from None
        logger.warning("the tokens stay as they were: %s", failure)
    return trust


def _read(path: str) -> str:
    return Path(path).read_bytes().decode(errors="replace")  # which is no token, and parsing says so


def authorization() -> str:
    """Return the header with which this process shows its token; "" if it has none to show."""
    trust = process_trust()
    return f"Bearer {trust.shown}" if trust is not None and trust.shown else ""


def warn_if_open(bind: Address) -> None:
    """Log a warning, once in a process, if other hosts may reach a listener that asks for no token."""
    if (
        _warned
        or os.environ.get(INSECURE_ENV) == "1"
        or _is_loopback(bind.host)
        or process_trust() is not None
    ):
        return
    _warned.add(None)
    logger.warning(
        "%s asks for no token: whoever reaches it can join the job, read its state and end it. Set %s, or "
        "%s=1 if the network is closed (docs/security.md)",
        bind,
        TOKEN_FILE_ENV,
        INSECURE_ENV,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
