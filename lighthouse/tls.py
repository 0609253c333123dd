"""The certificate of this process, which encrypts connections and shows that both ends are of the job.

The variable TORCHFT_TLS names a folder with three PEM files, under the names that Kubernetes gives them:

    tls.crt    the certificate, and those between it and the authority
    tls.key    its private key
    ca.crt     the authorities of the job, one or more

INVARIANT: with it, nothing is said to a server, or heard from a client, that has not shown a certificate of
one of these authorities; browsers, which show a token to the page, are the exception. A server's certificate
has to be for the name `torchft-like`, wherever it runs: replicas come and go, and an address proves nothing.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from dataclasses import dataclass, field
from pathlib import Path

from lighthouse.errors import ConfigError
from lighthouse.rereading import read_again

TLS_ENV = "TORCHFT_TLS"
NAME = "torchft-like"
NOTICE_S_MAX = 14 * 24 * 3600
CERTIFICATE, KEY, AUTHORITIES = FILES = ("tls.crt", "tls.key", "ca.crt")


@dataclass(frozen=True)
class Identity:
    """A certificate, its key and the authorities of the job: as PEM for gRPC, as contexts for sockets.

    Attributes:
        server: for servers whose clients have to show a certificate.
        page: for those whose clients need not.
        client: for clients.
    """

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes
    server: ssl.SSLContext
    page: ssl.SSLContext
    client: ssl.SSLContext


def process_identity() -> Identity | None:
    """Return this process's certificate; None if it was given none. Files that have changed are read again.

    Raises:
        ConfigError: a file cannot be read, or they do not belong together; the message quotes none of them.
    """
    if not (folder := os.environ.get(TLS_ENV)):
        return None
    return read_again([os.path.join(folder, name) for name in FILES], TLS_ENV, lambda: _read(Path(folder)))


def _read(folder: Path) -> Identity:
    paths = folder / CERTIFICATE, folder / KEY, folder / AUTHORITIES
    certificate, key, authorities = (path.read_bytes() for path in paths)
    try:
        return Identity(
            certificate,
            key,
            authorities,
            server=_context(ssl.PROTOCOL_TLS_SERVER, folder),
            page=_context(ssl.PROTOCOL_TLS_SERVER, folder, asks=False),
            client=_context(ssl.PROTOCOL_TLS_CLIENT, folder),
        )
    except ssl.SSLError as error:
        raise ConfigError(
            f"the files {', '.join(FILES)} in {folder} ({TLS_ENV}) are no certificate, its key and its "
            f"authority ({error.reason or 'no PEM'}); `torchft-like keys` makes some"
        ) from None


def _context(protocol: int, folder: Path, asks: bool = True) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Without the argument OpenSSL would ask the terminal for the passphrase of a key that has one.
    context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
    context.load_verify_locations(folder / AUTHORITIES)
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def why_useless(identity: Identity) -> str:
    """Return why another process with the same files would refuse this one; "" if the two would speak."""
    return _shaken(identity)[0]


def about_expiry(identity: Identity, now: float) -> str:
    """Return when a certificate expires, if a sixth of its life is left, or two weeks where that is less; ""
    if more is left, or if it is useless already. `now` is in seconds since the epoch.
    """
    if not (shown := _shaken(identity)[1]):
        return ""
    begins, ends = (ssl.cert_time_to_seconds(str(shown[name])) for name in ("notBefore", "notAfter"))
    if ends - now > min(NOTICE_S_MAX, (ends - begins) / 6):
        return ""
    return f"the certificate expires at {time.strftime('%Y-%m-%d %H:%M', time.gmtime(ends))} UTC"


def _shaken(identity: Identity) -> tuple[str, dict[str, object]]:
    """Shake hands with itself; return why that fails, or what the server's certificate says."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = identity.client.wrap_bio(down, up, server_hostname=NAME)
    server = identity.server.wrap_bio(up, down, server_side=True)
    for end in (client, server, client, server):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLCertVerificationError as error:
            return error.verify_message, {}
        except ssl.SSLError as error:
            return error.reason or str(error), {}
    return "", dict(client.getpeercert() or {})


def accepted(peer: socket.socket) -> socket.socket:
    """Return the connection through which to speak to a client that was accepted; `peer` is of no use then.

    Nothing is sent or awaited yet: the first operation shakes hands, within its own limit.
    """
    if (identity := process_identity()) is None:
        return peer
    return identity.server.wrap_socket(peer, server_side=True, do_handshake_on_connect=False)


def connecting(peer: socket.socket) -> socket.socket:
    """Return the connection through which to speak to a server. Its `connect` shakes hands, too."""
    if (identity := process_identity()) is None:
        return peer
    return identity.client.wrap_socket(peer, server_hostname=NAME)


def page_context(asks: bool) -> ssl.SSLContext | None:
    """Return what the page's server needs, if this process has a certificate; `asks` is whether browsers have
    to show one, too. Each connection is given the certificate that is there when it comes.
    """

    def current() -> ssl.SSLContext | None:
        if (identity := process_identity()) is None:
            return None
        return identity.server if asks else identity.page

    def follow(connection: ssl.SSLSocket | ssl.SSLObject, _name: object, _first: object) -> None:
        if (context := current()) is not None:
            connection.context = context

    if (first := current()) is not None:
        first.sni_callback = follow  # OpenSSL calls it for clients that tell no name, too
    return first


def scheme() -> str:
    """Return `https` if this process's HTTP servers use TLS, and else `http`."""
    return "http" if process_identity() is None else "https"
