"""What is served over HTTP, as an ASGI application (docs/lighthouse-page.md).

    GET  /                    the page
    GET  /status              the state of the job, JSON
    GET  /metrics             the same for Prometheus
    GET  /healthz             200 while the lighthouse works
    POST /replica/ID/kill     end a replica group, as torchft's page does

However many look, one document is made in SNAPSHOT_S at most, and only while somebody does.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import grpc.aio

from lighthouse.address import is_loopback
from lighthouse.core.trust import Role
from lighthouse.errors import AddressError
from lighthouse.events import printable
from lighthouse.page.metrics import JobMetrics
from lighthouse.page.status import Snapshot, take
from lighthouse.trust import process_trust

if TYPE_CHECKING:
    from lighthouse.server import Lighthouse

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

SNAPSHOT_S = 1.0
KILL_HEADER = b"x-torchft-kill"
_JSON, _TEXT = b"application/json", b"text/plain; charset=utf-8"
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
_METRICS = b"text/plain; version=0.0.4; charset=utf-8"
_KILL = re.compile(r"/replica/(.+)/kill", re.DOTALL)


def role_of(scope: Scope, everybody_operates: bool) -> Role:
    """Return the role of a request: the one place where that is decided.

    A lighthouse that has tokens asks for one. Else everybody may observe, and only whoever is on the
    lighthouse's own host may operate, or everybody, if the lighthouse was told so. A request through a proxy
    on that host comes from elsewhere; and one for a name other than that of the loopback interface may come
    from a page of a stranger in a browser on this host, which has given its name this address (DNS
    rebinding).
    """
    if (trust := process_trust()) is not None:
        return trust.role_of_header(_header(scope, b"authorization").decode("latin-1"))
    client = (scope.get("client") or ("",))[0]
    is_forwarded = any(_header(scope, name) for name in _FORWARDED)
    is_local = is_loopback(client) and is_loopback(_host(scope)) and not is_forwarded
    return Role.OPERATE if everybody_operates or is_local else Role.OBSERVE


def _host(scope: Scope) -> str:
    try:
        return urlsplit(f"//{_header(scope, b'host').decode('latin-1')}").hostname or ""
    except ValueError:
        return ""


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    body: bytes
    content_type: bytes = _TEXT
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Page:
    """The application.

    Args:
        lighthouse: the one that is shown.
        everybody_operates: whether a request from anywhere may kill.
    """

    def __init__(self, lighthouse: Lighthouse, *, everybody_operates: bool = False) -> None:
        self._lighthouse = lighthouse
        self._everybody_operates = everybody_operates
        self._metrics = JobMetrics(lighthouse)
        self._html = _Html.load()
        self._taken: asyncio.Task[Snapshot] | None = None
        self._taken_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        answer = await self._answer(scope)
        length = [] if answer.status == 304 else [(b"content-length", str(len(answer.body)).encode())]
        headers = [(b"content-type", answer.content_type), *_ALWAYS, *answer.headers, *length]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        body = b"" if scope["method"] == "HEAD" else answer.body
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Scope) -> Answer:
        path, method = scope["path"], scope["method"]
        if path != "/healthz" and role_of(scope, self._everybody_operates) < Role.OBSERVE:
            return _UNAUTHENTICATED
        if (match := _KILL.fullmatch(path)) is not None:
            return await self._kill(scope, match[1]) if method == "POST" else _not_allowed(b"POST")
        serve = {"/": self._page, "/status": self._status, "/metrics": self._scrape, "/healthz": self._health}
        if path not in serve:
            return Answer(404, b"there are /, /status, /metrics and /healthz\n")
        return await serve[path](scope) if method in ("GET", "HEAD") else _not_allowed(b"GET, HEAD")

    async def _page(self, scope: Scope) -> Answer:
        html = self._html
        body, encoding = (html.compressed, _GZIP) if _takes_gzip(scope) else (html.body, ())
        cache = (b"cache-control", b"no-cache")
        return Answer(
            200,
            body,
            b"text/html; charset=utf-8",
            (*encoding, cache, (b"content-security-policy", html.policy)),
        )

    async def _status(self, scope: Scope) -> Answer:
        snapshot = await self._snapshot()
        tag = snapshot.tag.encode()
        role = role_of(scope, self._everybody_operates).name.lower().encode()
        now = str(round(time.time(), 3)).encode()
        headers = (
            (b"etag", tag),
            (b"cache-control", b"no-cache"),
            (b"torchft-role", role),
            (b"torchft-time", now),
        )
        if _header(scope, b"if-none-match") == tag:
            return Answer(304, b"", _JSON, headers)
        if _takes_gzip(scope):
            return Answer(200, snapshot.compressed, _JSON, (*headers, *_GZIP))
        return Answer(200, snapshot.body, _JSON, headers)

    async def _scrape(self, _: Scope) -> Answer:
        return Answer(200, self._metrics.text(await self._snapshot()), _METRICS)

    async def _health(self, _: Scope) -> Answer:
        return Answer(200, b"ok\n")

    async def _kill(self, scope: Scope, replica_id: str) -> Answer:
        if role_of(scope, self._everybody_operates) < Role.OPERATE:
            return _NO_OPERATOR if process_trust() is None else _OTHER_ROLE
        if not _header(scope, KILL_HEADER):  # which a form of a stranger's page cannot send
            return Answer(400, b"the request needs the header X-Torchft-Kill: yes\n")
        try:
            await self._lighthouse.kill(replica_id, f"somebody at {(scope.get('client') or ['?'])[0]}")
        except AddressError:
            return Answer(404, b"no replica group of this name is known, or it has told no address\n")
        except grpc.aio.AioRpcError as error:
            return Answer(
                502, f"it does not answer: {printable(error.details() or error.code().name)}\n".encode()
            )
        return Answer(202, b"it was told to end itself\n")

    async def _snapshot(self) -> Snapshot:
        """Return the present document, which is made once for all who ask within SNAPSHOT_S."""
        self._lighthouse.look()
        now = asyncio.get_running_loop().time()
        if self._taken is None or (self._taken.done() and now >= self._taken_at + SNAPSHOT_S):
            self._taken_at = now
            self._taken = asyncio.get_running_loop().create_task(take(self._lighthouse))
        return await asyncio.shield(self._taken)


@dataclass(frozen=True)
class _Html:
    """The page, and the policy by which a browser runs nothing else in it."""

    body: bytes
    compressed: bytes
    policy: bytes

    @classmethod
    def load(cls) -> _Html:
        body = resources.files("lighthouse.page").joinpath("page.html").read_bytes()
        hashes = {
            tag: " ".join(
                f"'sha256-{_digest(text)}'"
                for text in re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), body, re.DOTALL)
            )
            for tag in (b"script", b"style")
        }
        policy = (
            f"default-src 'none'; script-src {hashes[b'script']}; style-src {hashes[b'style']}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return cls(body, gzip.compress(body), policy.encode())


_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept-encoding"),
)
_GZIP = ((b"content-encoding", b"gzip"),)
# A browser asks the person for a password, and sends the token that is given as one.
_UNAUTHENTICATED = Answer(
    401,
    b"this lighthouse asks for a token: as Bearer, or as the password of any name (docs/security.md)\n",
    headers=((b"www-authenticate", b'Basic realm="torchft-like", charset="UTF-8"'),),
)
_NO_OPERATOR = Answer(403, b"only from the lighthouse's own host, or with --page_operators=everybody\n")
_OTHER_ROLE = Answer(403, b"that takes the token of those who operate\n")


def _digest(text: bytes) -> str:
    return base64.b64encode(hashlib.sha256(text).digest()).decode()


def _header(scope: Scope, name: bytes) -> bytes:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), b"")


def _takes_gzip(scope: Scope) -> bool:
    return b"gzip" in _header(scope, b"accept-encoding")


def _not_allowed(methods: bytes) -> Answer:
    return Answer(405, b"use " + methods + b"\n", headers=((b"allow", methods),))
