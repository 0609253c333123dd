"""The command `torchft-like keys`: what the processes of a job know each other by.

    torchft-like keys FOLDER [--host HOST ...] [--days N]

It makes FOLDER/observe, FOLDER/participate and FOLDER/operate, with the tokens of the roles, and FOLDER/tls,
with the certificate of the job, its key, and the authority that signed it, whose own key is in no file: it
signs no other. Only their owner may read them, none is overwritten, and where one cannot be made none is
left. No token and no key is printed. Exit status 2 says that a file could not be made.
"""

from __future__ import annotations

import argparse
import contextlib
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lighthouse.address import parse_host
from lighthouse.core.hosts import ip_of
from lighthouse.core.trust import Role, make_texts
from lighthouse.errors import ConfigError
from lighthouse.tls import AUTHORITIES, CERTIFICATE, FILES, KEY, NAME, TLS_ENV
from lighthouse.trust import TOKEN_FILE_ENV

DAYS = 365
_WHOSE = {
    Role.OBSERVE: "for who looks at the page, such as Prometheus",
    Role.PARTICIPATE: f"for the trainers: {TOKEN_FILE_ENV}=",
    Role.OPERATE: f"for the lighthouse, and for who may kill: {TOKEN_FILE_ENV}=",
}


def add_command(commands: Any) -> None:
    """Add the command to a parser's subparsers; `run` among the options is what it does."""
    what = "make the tokens and the certificate of a job"
    parser = commands.add_parser("keys", help=what, description=what)
    parser.add_argument("folder", type=Path, help="where the files go; it is made, if need be")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="HOST",
        help="a name or address of the lighthouse's host that browsers use; may be given again",
    )
    parser.add_argument("--days", type=int, default=DAYS, help="of the certificate (default: %(default)s)")
    parser.add_argument("--tokens-only", action="store_true", help="make no certificate, which takes openssl")
    parser.set_defaults(run=_make)


def _make(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    try:
        # The certificate comes first, as it is what may fail.
        made = {} if options.tokens_only else certify(options.host, options.days)
        files = {Path("tls", name): text for name, text in made.items()}
        texts = {Path(role.name.lower()): text for role, text in make_texts().items()}
        with contextlib.ExitStack() as undo:
            for path, text in {**texts, **files}.items():
                _write(folder / path, text, undo)
            undo.pop_all()
    except OSError as error:
        where = error.filename or folder  # a disk that is full has no name
        sys.stderr.write(f"torchft-like: {where}: {error.strerror}; nothing was overwritten\n")
        return 2
    for role, whose in _WHOSE.items():
        path = folder / role.name.lower()
        sys.stdout.write(f"{path}: {whose}{path if whose.endswith('=') else ''}\n")
    if files:
        sys.stdout.write(f"{folder / 'tls'}: for all of them: {TLS_ENV}={folder / 'tls'}\n")
    return 0


def _write(path: Path, text: str, undo: contextlib.ExitStack) -> None:
    if not path.parent.is_dir():
        path.parent.mkdir(mode=0o700, parents=True)
        undo.callback(path.parent.rmdir)
    path.touch(mode=0o600, exist_ok=False)
    undo.callback(path.unlink)
    path.write_text(text)


def certify(hosts: Sequence[str], days: int = DAYS, name: str = NAME) -> dict[str, str]:
    """Make an authority, and a certificate of it for a name and for hosts; return the files' texts by name.

    Raises:
        AddressError: a host is neither a name nor an address.
        ConfigError: openssl is not there, or refuses.
    """
    hosts = [parse_host(host, "--host") for host in hosts]
    names = [f"DNS:{name}", *(f"{'IP' if ip_of(host) else 'DNS'}:{host}" for host in hosts)]
    with tempfile.TemporaryDirectory(prefix="torchft-keys-") as scratch:
        Path(scratch, "extensions").write_text(
            f"subjectAltName={','.join(names)}\nbasicConstraints=critical,CA:FALSE\n"
            "keyUsage=critical,digitalSignature\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        new = "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"
        life = "-sha256", "-days", str(days), "-set_serial", f"0x{secrets.token_hex(16)}"
        ends = "-out", AUTHORITIES, "-keyout", "ca.key", "-subj", f"/CN=authority of {secrets.token_hex(4)}"
        _openssl(scratch, *new, "-x509", *life, *ends, "-addext", "keyUsage=critical,keyCertSign")
        _openssl(scratch, *new, "-out", "request", "-keyout", KEY, "-subj", f"/CN={name}")
        signed = "x509", "-req", "-in", "request", "-CA", AUTHORITIES, "-CAkey", "ca.key", *life
        _openssl(scratch, *signed, "-extfile", "extensions", "-out", CERTIFICATE)
        return {file: Path(scratch, file).read_text() for file in FILES}


def _openssl(folder: str, *arguments: str) -> None:
    try:
        subprocess.run(  # noqa: S603 - no shell, and the names are checked
            ["openssl", *arguments],  # noqa: S607 - the operator's own
            cwd=folder,
            check=True,
            capture_output=True,
            text=True,
            umask=0o077,
        )
    except FileNotFoundError:
        text = "a certificate takes the command openssl, 1.1.1 or later, which is not installed: install it"
        raise ConfigError(f"{text}, or pass --tokens-only") from None
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"openssl {arguments[0]} has failed: {error.stderr.strip()[-500:]}") from None
