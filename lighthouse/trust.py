"""The tokens of this process, from a file or the environment, and what each gRPC method asks for.

Without either variable there is no authentication but that by certificates (`tls.py`); without these, too,
everything works as in torchft.
"""

from __future__ import annotations

import hmac
import logging
import os
from pathlib import Path

from lighthouse import wire
from lighthouse.address import Address, is_loopback
from lighthouse.core.trust import Role, Trust, parse_trust
from lighthouse.errors import ConfigError
from lighthouse.rereading import read_again
from lighthouse.tls import TLS_ENV, process_identity

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

_logger = logging.getLogger(__name__)
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
        where = f"the file {path} ({TOKEN_FILE_ENV})"
        return read_again([path], TOKEN_FILE_ENV, lambda: parse_trust(_read(path), where))
    return parse_trust(text, f"the environment variable {TOKEN_ENV}") if text else None


def _read(path: str) -> str:
    return Path(path).read_bytes().decode(errors="replace")  # which is no token, and parsing says so


def authorization() -> str:
    """Return the header with which this process shows its token; "" if it has none to show."""
    trust = process_trust()
    return f"Bearer {trust.shown}" if trust is not None and trust.shown else ""


def signing_key() -> bytes:
    """Return a key of all processes that show the same token, over restarts, too; b"" without a token."""
    trust = process_trust()
    if trust is None or not trust.shown:
        return b""
    return hmac.digest(trust.shown.encode(), b"statements of quorums", "sha256")


def refuse_if_open(bind: Address) -> None:
    """Check, before there is a listener, that there may be one here.

    Raises:
        ConfigError: this process's tokens or certificate cannot be read; or other hosts may reach it, nothing
            keeps them out, and the environment says that there is to be none such (TORCHFT_INSECURE=0).
    """
    complaint = about_openness(bind)
    if complaint and os.environ.get(INSECURE_ENV) == "0":
        raise ConfigError(complaint)


def warn_if_open(bound: Address) -> None:
    """Log a warning, once in a process, if other hosts may reach a listener and nothing keeps them out.

    Args:
        bound: where it listens, with the port that it got.
    """
    complaint = about_openness(bound)
    if complaint and not _warned:
        _warned.add(None)
        _logger.warning("%s", complaint)


def about_openness(bind: Address) -> str:
    """Return what is wrong with a listener that other hosts may reach and that asks for neither a token nor a
    certificate; "" for any other, and where the environment says that the network is closed.

    Raises:
        ConfigError: this process's tokens or certificate cannot be read.
    """
    asks = [process_trust(), process_identity()]  # both are read, so that neither fails later
    if any(one is not None for one in asks):
        return ""
    if os.environ.get(INSECURE_ENV) == "1" or is_loopback(bind.host):
        return ""
    return (
        f"{bind} asks for no token and no certificate: whoever reaches it can join the job, read its state "
        f"and end it. Set {TOKEN_FILE_ENV} or {TLS_ENV} (`torchft-like keys` makes what they name), or "
        f"{INSECURE_ENV}=1 if the network is closed (docs/security.md)"
    )
