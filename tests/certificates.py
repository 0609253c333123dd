"""Certificates of a job, and of strangers, for tests."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc

from lighthouse import keys
from lighthouse.tls import AUTHORITIES, CERTIFICATE, KEY, NAME


def certify(folder: Path, name: str = NAME) -> Path:
    """Make a new authority, and a certificate of it, in `folder`; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in keys.certify([], days=1, name=name).items():
        (folder / file).write_text(text)
    return folder


def stranger_context(shows: Path | None) -> ssl.SSLContext:
    """Return the context of a client that trusts everybody, and shows a folder's certificate, or none."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shows is not None:
        context.load_cert_chain(shows / CERTIFICATE, shows / KEY)
    return context


def stranger_credentials(trusts: Path, shows: Path | None) -> grpc.ChannelCredentials:
    """Return what a gRPC client has that knows the job's authority, and shows some certificate, or none."""
    authority = (trusts / AUTHORITIES).read_bytes()
    if shows is None:
        return grpc.ssl_channel_credentials(authority)
    return grpc.ssl_channel_credentials(
        authority, (shows / KEY).read_bytes(), (shows / CERTIFICATE).read_bytes()
    )
