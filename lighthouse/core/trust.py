"""Tokens and their roles say what a caller may do. Pure: a text with tokens in, a role out.

The text has one token a line, the role before it; a line that is nothing but a token has the highest role:

    participate 5f2c...          a token in clear, which this process may show
    operate sha256:9b1e...       only the digest of a token, which this process can check and not show

A process shows the first token that it has in clear. Two tokens of each role are good at a time, so that they
can be replaced while the job runs. Tokens are random and long, so that a digest does not give them away.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import hmac
import re
import secrets
from collections import Counter
from dataclasses import dataclass, field

from lighthouse.errors import ConfigError

TOKENS_PER_ROLE_MAX = 2
_DIGEST = "sha256:"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{32,256}")
_DIGEST_FORM = re.compile(r"sha256:([0-9a-f]{64})")


class Role(enum.IntEnum):
    """What a caller may do. Each role may do what the ones below it may."""

    STRANGER = 0
    OBSERVE = 1
    PARTICIPATE = 2
    OPERATE = 3


@dataclass(frozen=True)
class Trust:
    """The tokens of a job, as one process has them; its `repr` holds none.

    Attributes:
        shown: the token that this process shows to others, "" if it has only digests.
        accepted: roles, and the SHA-256 digests of the tokens that give them.
    """

    shown: str = field(repr=False)
    accepted: tuple[tuple[Role, bytes], ...] = field(repr=False)

    def role_of(self, token: str, own: bytes = b"") -> Role:
        """Return the role that a token gives; one with the digest `own` gives all.

        How long that takes does not depend on the token's characters.
        """
        digest, role = digest_of(token), Role.STRANGER
        for given, known in (*self.accepted, (Role.OPERATE, own)):
            if hmac.compare_digest(digest, known):
                role = max(role, given)
        return role

    def role_of_header(self, authorization: str, own: bytes = b"") -> Role:
        """Return the role that the token in an `Authorization` header gives, as `role_of` does.

        A browser sends it as the password of a user of any name (RFC 7617), everybody else as a Bearer token
        (RFC 6750).
        """
        kind, _, value = authorization.partition(" ")
        token = (
            value.strip() if kind.lower() == "bearer" else _password(value) if kind.lower() == "basic" else ""
        )
        return self.role_of(token, own) if token else Role.STRANGER


def parse_trust(text: str, source: str) -> Trust:
    """Read tokens and their roles.

    Raises:
        ConfigError: a line is malformed; the message names `source` and the line, and holds no part of it.
    """
    accepted: list[tuple[Role, bytes]] = []
    shown = ""
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        *name, token = words
        role = _role(name, f"{source}, line {number}")
        if match := _DIGEST_FORM.fullmatch(token):
            accepted.append((role, bytes.fromhex(match[1])))
        elif is_token(token):
            shown = shown or token
            accepted.append((role, digest_of(token)))
        else:
            raise ConfigError(
                f"{source}, line {number}: this is no token, 32 to 256 letters, digits and ._~+/=-, nor "
                f"a digest, {_DIGEST} and 64 hexadecimal digits; `torchft-like keys` makes both"
            )
    for role, count in Counter(role for role, _ in accepted).items():
        if count > TOKENS_PER_ROLE_MAX:
            raise ConfigError(
                f"{source} has {count} tokens for {role.name.lower()}, {TOKENS_PER_ROLE_MAX} are the most: "
                "remove those that were replaced"
            )
    if not accepted:
        raise ConfigError(f"{source} has no token: `torchft-like keys` makes some")
    return Trust(shown, tuple(accepted))


def make_texts() -> dict[Role, str]:
    """Make a token for each role; return the text for the holders of each role.

    Each text has the role's own token in clear and the digests of the others.
    """
    tokens = {role: secrets.token_hex(32) for role in Role if role}
    return {
        own: "\n".join(
            [f"{own.name.lower()} {tokens[own]}"]
            + [
                f"{role.name.lower()} {_DIGEST}{digest_of(token).hex()}"
                for role, token in tokens.items()
                if role is not own
            ]
        )
        + "\n"
        for own in tokens
    }


def is_token(text: str) -> bool:
    """Return whether a text has the form of a token."""
    return _TOKEN.fullmatch(text) is not None


def digest_of(token: str) -> bytes:
    """Return the SHA-256 digest of a token."""
    return hashlib.sha256(token.encode()).digest()


def _password(credentials: str) -> str:
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def _role(name: list[str], where: str) -> Role:
    roles = [role.name.lower() for role in Role if role]
    if not name:
        return Role.OPERATE
    if len(name) > 1 or name[0] not in roles:
        raise ConfigError(f"{where}: before a token stands its role, {', '.join(roles)}, or nothing")
    return Role[name[0].upper()]
