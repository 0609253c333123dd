"""The page and its HTTP server: uvicorn, in the lighthouse's own event loop and at a port of its own.

gRPC for Python hands no connection out that speaks HTTP/1.1, so one port for both would need a proxy in front
of every session, whose PINGs then say nothing of the replica behind it. docs/lighthouse-page.md has more.

    GET  /                    the page
    GET  /status              the state of the job, JSON
    GET  /metrics             the same for Prometheus
    GET  /healthz             200 while the lighthouse works
    POST /replica/ID/kill     end a replica group, as torchft's page does

One document is made in SNAPSHOT_S at most, for however many clients, and none while no client asks.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import logging
import re
import socket
import statistics
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import grpc.aio
import uvicorn
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from uvicorn.protocols.http.h11_impl import H11Protocol

from lighthouse import __version__
from lighthouse.address import Address, is_loopback
from lighthouse.core.explanation import Facts, describe, why_no_quorum
from lighthouse.core.history import DURATION_BOUNDS_S, Durations, Heal, Recovery
from lighthouse.core.trust import Role
from lighthouse.errors import AddressError, ConfigError
from lighthouse.events import printable
from lighthouse.listening import DESCRIPTORS_KEPT, listen_guarded
from lighthouse.tls import page_context, scheme
from lighthouse.trust import process_trust

if TYPE_CHECKING:
    from lighthouse.server import Lighthouse
    from lighthouse.wire import torchft_pb2 as pb


# Together they are fewer than the descriptors that are kept from sessions: asyncio takes all that the kernel
# has for it before it closes one.
CONNECTIONS_MAX = DESCRIPTORS_KEPT * 3 // 8
HANDSHAKES_MAX = BACKLOG = DESCRIPTORS_KEPT // 4
WARNED_MAX = 100  # hosts
SILENT_S = 10.0  # seconds in which a connection has to bring a whole request, again and again
_KEEP_ALIVE_S = 10
_STOP_GRACE_S = 1
_HTTP_2 = b"PRI * HTTP/2"  # the beginning of what a client of gRPC says first

_log = logging.getLogger("lighthouse")


class PageServer:
    """The page of a lighthouse, until `stop`."""

    def __init__(self, server: uvicorn.Server, address: Address, task: asyncio.Task[None]) -> None:
        self.address = address
        self.url = f"{scheme()}://{address}"
        self._server = server
        self._task = task

    @classmethod
    async def start(
        cls, lighthouse: Lighthouse, bind: Address, *, everybody_operates: bool = False
    ) -> PageServer:
        """Serve at `bind`; port 0 takes a free one.

        Raises:
            BindError: the address is in use or not of this host.
            ConfigError: everybody is to operate a lighthouse that asks for tokens.
        """
        if everybody_operates and process_trust() is not None:
            raise ConfigError("--page_operators=everybody and a token (TORCHFT_TOKEN_FILE): leave one out")
        listener = _Listener(listen_guarded(bind), lighthouse.address.url)
        config = uvicorn.Config(
            Page(lighthouse, everybody_operates=everybody_operates),
            http=functools.partial(_BoundedProtocol, listener),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_STOP_GRACE_S,
            backlog=BACKLOG,
        )
        config.load()
        config.ssl = page_context(asks=process_trust() is None)
        server = _Server(config)
        task = asyncio.get_running_loop().create_task(server.serve([listener]))
        return cls(server, Address(bind.host, listener.getsockname()[1]), task)

    async def stop(self) -> None:
        """Close the port, and every connection once its request is answered."""
        self._server.should_exit = True
        await asyncio.wait([self._task])


class _Server(uvicorn.Server):
    """A server that leaves signals to the program."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Listener(socket.socket):
    """A listening socket that ends handshakes which take too long; the oldest, if there are too many.

    asyncio tells a protocol of a connection with TLS only after the handshake, for which it gives a stranger
    a minute.
    """

    def __init__(self, listener: socket.socket, lighthouse: str) -> None:
        super().__init__(fileno=listener.detach())
        self._own = lighthouse
        self._warned: set[str] = set()
        self._new: dict[int, socket.socket] = {}  # by descriptor, the oldest first

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, which is new until `is_made`."""
        peer, address = super().accept()
        self._new = {number: known for number, known in self._new.items() if known.fileno() == number}
        self._new[peer.fileno()] = peer
        if len(self._new) > HANDSHAKES_MAX:
            self._end_if_new(next(iter(self._new.values())))
        asyncio.get_running_loop().call_later(SILENT_S, self._end_if_new, peer)
        return peer, address

    def warn_of_trainer(self, client: tuple[str, int] | None) -> None:
        """Warn, once for each host, of a client that speaks gRPC here; trainers try again all the time."""
        host = client[0] if client else "a client"
        if host not in self._warned and len(self._warned) < WARNED_MAX:
            self._warned.add(host)
            _log.warning(
                "%s speaks gRPC to the page, at port %d: trainers need the lighthouse's own address, %s "
                "(TORCHFT_LIGHTHOUSE)",
                host,
                self.getsockname()[1],
                self._own,
            )

    def is_made(self, descriptor: int) -> None:
        """Note that the protocol has a connection, and limits it from now on."""
        self._new.pop(descriptor, None)

    def _end_if_new(self, peer: socket.socket) -> None:
        if self._new.get(peer.fileno()) is peer:
            del self._new[peer.fileno()]
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)


class _BoundedProtocol(H11Protocol):
    """A connection that is closed if it brings no request for too long; the longest silent one, if there are
    too many.

    uvicorn itself lets a client open as many as it likes and say nothing in them; each takes one of the
    descriptors that the lighthouse needs for replicas.
    """

    def __init__(self, listener: _Listener, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._listener = listener

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._listener.is_made(transport.get_extra_info("socket").fileno())
        self._answered: object = None
        self._heard_at = self.loop.time()
        self._watch = self.loop.call_later(SILENT_S, self._close_if_silent)
        if len(self.connections) > CONNECTIONS_MAX:
            longest: Any = min(self.connections, key=attrgetter("_heard_at"))
            longest.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        if data.startswith(_HTTP_2):
            self._listener.warn_of_trainer(self.client)
            self.transport.abort()
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _close_if_silent(self) -> None:
        last: Any = self.cycle  # of request and response; none before the first request
        if last is self._answered:
            self.transport.abort()
            return
        self._answered = last
        self._watch = self.loop.call_later(SILENT_S, self._close_if_silent)


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

    A lighthouse that has tokens asks for one. Else every client may observe, and only clients on the
    lighthouse's own host may operate, or all, if the lighthouse was told so. A request through a proxy on
    that host comes from elsewhere; and one for a name other than that of the loopback interface may come from
    a page of a stranger in a browser on this host, which has given its name this address (DNS rebinding).
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
        if (is_unknown := path not in _PATHS) or method not in ("GET", "HEAD"):
            return _NOT_FOUND if is_unknown else _not_allowed(b"GET, HEAD")
        if path in ("/", "/healthz"):
            return self._page(scope) if path == "/" else Answer(200, b"ok\n")
        snapshot = await self._snapshot()
        if path == "/metrics":
            return Answer(200, self._metrics.text(snapshot), _METRICS)
        return self._status(scope, snapshot)

    def _page(self, scope: Scope) -> Answer:
        html = self._html
        body, encoding = (html.compressed, _GZIP) if _takes_gzip(scope) else (html.body, ())
        headers = (*encoding, _NO_CACHE, (b"content-security-policy", html.policy))
        return Answer(200, body, b"text/html; charset=utf-8", headers)

    def _status(self, scope: Scope, snapshot: Snapshot) -> Answer:
        tag = snapshot.tag.encode()
        role = role_of(scope, self._everybody_operates).name.lower().encode()
        now = str(round(time.time(), 3)).encode()
        headers = ((b"etag", tag), (b"torchft-role", role), (b"torchft-time", now), _NO_CACHE)
        if _header(scope, b"if-none-match") == tag:
            return Answer(304, b"", _JSON, headers)
        if _takes_gzip(scope):
            return Answer(200, snapshot.compressed, _JSON, (*headers, *_GZIP))
        return Answer(200, snapshot.body, _JSON, headers)

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
                f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
                for text in re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), body, re.DOTALL)
            )
            for tag in (b"script", b"style")
        }
        policy = (
            f"default-src 'none'; script-src {hashes[b'script']}; style-src {hashes[b'style']}; "
            "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return cls(body, gzip.compress(body), policy.encode())


_PATHS = ("/", "/status", "/metrics", "/healthz")
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept-encoding"),
)
_GZIP = ((b"content-encoding", b"gzip"),)
_NO_CACHE = (b"cache-control", b"no-cache")
# A browser asks the person for a password, and sends the token that is given as one.
_UNAUTHENTICATED = Answer(
    401,
    b"this lighthouse asks for a token: as Bearer, or as the password of any name (docs/security.md)\n",
    headers=((b"www-authenticate", b'Basic realm="torchft-like", charset="UTF-8"'),),
)
_NO_OPERATOR = Answer(403, b"only from the lighthouse's own host, or with --page_operators=everybody\n")
_NOT_FOUND = Answer(404, b"there are /, /status, /metrics and /healthz\n")
_OTHER_ROLE = Answer(403, b"that takes the token of those who operate\n")


def _header(scope: Scope, name: bytes) -> bytes:
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return next((value for key, value in headers if key == name), b"")


def _takes_gzip(scope: Scope) -> bool:
    return b"gzip" in _header(scope, b"accept-encoding")


def _not_allowed(methods: bytes) -> Answer:
    return Answer(405, b"use " + methods + b"\n", headers=((b"allow", methods),))


_PREFIX = "torchft_lighthouse"
# The number of metrics does not depend on the job. Names are as Prometheus's guide wants them: base
# units, `_total` for what only grows. No label has a value that a replica chose.
_COUNTED = {
    "quorum": ("quorums", "quorums with a new id that were formed"),
    "register": ("registrations", "sessions that replica groups have opened"),
    "loss": ("losses", "replica groups that died or fell silent"),
    "leave": ("leaves", "replica groups that left in good order"),
    "heal": ("heals", "replica groups that took over the state of another one"),
    "refused": ("refusals", "replica groups that were foreign to the job"),
    "left_out": ("exclusions", "changes of the replica groups that quorums leave out"),
    "kill": ("kills", "replica groups that an operator had killed"),
}


class JobMetrics(Collector):
    """The metrics of one lighthouse."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self._lighthouse = lighthouse
        self._snapshot: Snapshot | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, snapshot: Snapshot) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._snapshot = snapshot
        text: bytes = generate_latest(self._registry)
        return text

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the last snapshot."""
        if (snapshot := self._snapshot) is None:
            return
        yield InfoMetricFamily(_PREFIX, "the lighthouse", {"version": __version__})
        replicas = GaugeMetricFamily(f"{_PREFIX}_replicas", "replica groups by state", labels=["state"])
        for state in STATES:
            replicas.add_metric([state.replace(" ", "_")], snapshot.states.get(state, 0))
        yield replicas
        job = snapshot.job
        yield _gauge("quorum_members", "members of the last quorum", job["members"])
        yield _gauge("quorum_members_gone", "members of the last quorum that are gone since", job["gone"])
        yield _gauge("min_replicas", "the smallest quorum that may form", job["min_replicas"])
        is_whole = job["state"] in ("formed", "stands")
        yield _gauge("quorum_is_whole", "1 while there is a quorum of which no member is gone", is_whole)
        yield _gauge("quorum_stands", "1 while its members ask for no other", job["state"] == "stands")
        yield _gauge(
            "quorum_formed_timestamp_seconds", "when the last quorum was formed", job["formed"] or 0.0
        )
        yield _gauge("step", "the newest step that a member has committed", job["step"])
        yield _gauge("steps_per_second", "the median of the members' rates", job["steps_per_s"] or 0.0)
        yield _gauge("is_starved", "1 if this process could not hear just now", self._lighthouse.is_starved)
        history = self._lighthouse.history
        for kind, (name, what) in _COUNTED.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", what, history.counts[kind])
        what = "from the loss of a member to the quorum without it"
        yield _histogram("recovery_to_quorum_seconds", what, history.to_quorum)
        what = "from the loss of a member to the first step that was reported after it"
        yield _histogram("recovery_to_step_seconds", what, history.to_step)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", what, float(value))


def _histogram(name: str, what: str, durations: Durations) -> Metric:
    bounds = [*map(str, DURATION_BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(durations.counts), strict=True))
    return HistogramMetricFamily(f"{_PREFIX}_{name}", what, buckets, durations.sum_s)


# -- the document of /status

SCHEMA = 1
STATES = (
    "member",
    "healing",
    "joined",
    "spare",
    "left out",
    "idle",
    "awaited",
    "expected",
    "suspect",
    "gone",
    "refused",
)
SHOWN_MAX = 10_000  # replicas in a document
_SLICE = 32  # replicas, a fifth of a millisecond
T = TypeVar("T")
_WAITS_SHORTLY_S = 2.0  # members of a quorum that does not stand join for each step


@dataclass
class Snapshot:
    """The document at one time.

    Attributes:
        body: the JSON text; `compressed` the same with gzip.
        tag: different for documents that differ.
        states: how many replicas are in each state.
        job: the part of the document that is called `job`.
    """

    body: bytes
    compressed: bytes
    tag: str
    states: Mapping[str, int]
    job: Mapping[str, Any]


async def take(lighthouse: Lighthouse) -> Snapshot:
    """Make the document of the present state (docs/lighthouse-page.md describes every field).

    It is made in slices, between which the event loop does what is due: with a thousand members the whole of
    it takes tens of milliseconds, and a quorum must not wait for that. So the rows of two replicas may be a
    few milliseconds apart, which no reader can tell.
    """
    view = _View(lighthouse)
    encoder = zlib.compressobj(1, wbits=31)  # gzip
    parts: list[bytes] = []
    compressed: list[bytes] = []

    async def add(text: str) -> None:
        parts.append(text.encode())
        compressed.append(encoder.compress(parts[-1]))
        await asyncio.sleep(0)

    async def add_list(name: str, items: Sequence[T], describe: Callable[[T], object]) -> None:
        await add(f'"{name}":[')
        for first in range(0, len(items), _SLICE):
            rows = [describe(item) for item in items[first : first + _SLICE]]
            await add(("," if first else "") + _encode(rows)[1:-1])
        await add("],")

    await add("{")
    await add_list("replicas", view.replica_ids(), view.row)
    history = lighthouse.history
    await add_list("recoveries", list(reversed(history.recoveries)), _recovery)
    await add_list("heals", list(reversed(history.heals)), _heal)
    timeline = list(reversed(history.moments))
    await add_list("timeline", timeline, lambda at: {**at._asdict(), "time": round(at.time, 3)})
    job = view.job()
    await add(_encode({"schema": SCHEMA, "lighthouse": view.lighthouse_itself(), "job": job})[1:])
    body = b"".join(parts)
    compressed.append(encoder.flush())
    return Snapshot(body, b"".join(compressed), f'"{zlib.crc32(body):08x}"', view.states, job)


def _encode(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


@dataclass
class _View:
    """The lighthouse as it is when this is made; rows look up the rest later."""

    lighthouse: Lighthouse
    facts: Facts = field(init=False)
    states: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.facts = self.lighthouse.facts()
        self._history = self.lighthouse.history
        self._now = asyncio.get_running_loop().time()
        self._members: dict[str, pb.QuorumMember] = {
            m.replica_id: m for m in self.lighthouse.quorum.participants
        }
        self._last = frozenset(self.facts.last)
        self._departed = frozenset(self.facts.departed)
        self._healthy = frozenset(self.facts.healthy)
        self._joined = frozenset(self.facts.joined)
        self._idle = frozenset(self.facts.idle)
        self._left_out = frozenset(self.facts.left_out)
        self._broken: dict[str, list[str]] = {}
        for one, other in self.facts.links:
            self._broken.setdefault(one, []).append(other)
            self._broken.setdefault(other, []).append(one)
        at_work = self._last - self._departed - self._history.healing().keys()
        self._straggler = self._history.straggler(at_work)
        self._rates: list[float] = []
        self._newest = 0

    def replica_ids(self) -> list[str]:
        ids = self._last | self._healthy | self.facts.refused.keys()
        return sorted(ids.union(self.facts.spares))[:SHOWN_MAX]

    def row(self, replica_id: str) -> dict[str, Any]:
        """Describe one replica group."""
        state = self._state(replica_id)
        self.states[state] += 1
        member, pace = self._members.get(replica_id), self._history.paces.get(replica_id)
        rate = None if pace is None else pace.steps_per_s(self._now)
        step = pace.step if pace is not None else member.step if member is not None else None
        # What newcomers say of their steps the next quorum believes, or not.
        if replica_id in self._last and state in ("member", "healing", "joined"):
            self._newest = max(self._newest, step or 0)
            self._rates += [] if rate is None or state == "healing" else [rate]
        heal = self._history.healing().get(replica_id)
        has_said = pace is not None and pace.waiting_permille is not None
        return {
            "id": replica_id,
            "state": state,
            "sign": self.lighthouse.sign_of(replica_id),
            "trouble": self._trouble(replica_id),
            "address": self.lighthouse.address_of(replica_id),
            "ranks": member.world_size if member is not None else None,
            "step": step,
            "step_time": pace.heard_time if pace is not None else None,
            "step_is_live": has_said,
            "steps_per_s": _rounded(rate),
            "waits_for": pace.waits_for if pace is not None else "",
            "waiting_permille": round(pace.waiting_permille or 0) if pace is not None and has_said else None,
            "is_straggler": replica_id == self._straggler,
            "heal": None if heal is None else _heal(heal),
        }

    def _state(self, replica_id: str) -> str:
        is_healthy, is_last = replica_id in self._healthy, replica_id in self._last
        is_left_out = replica_id in self._left_out or replica_id in self.facts.sick
        states = {
            "refused": replica_id in self.facts.refused and not is_healthy,
            "spare": replica_id in self.facts.spares,
            "suspect": self.lighthouse.is_suspect(replica_id),
            "left out": replica_id in self._joined and is_left_out,
            "joined": replica_id in self._joined,
            "gone": replica_id in self._departed or not is_healthy,
            "expected": self.lighthouse.sign_of(replica_id) == "expected",
            "healing": is_last and replica_id in self._history.healing(),
            "member": is_last,
            "idle": replica_id in self._idle,
        }
        return next((state for state, holds in states.items() if holds), "awaited")

    def _trouble(self, replica_id: str) -> str:
        if replica_id not in self._healthy and (end := self._history.ends.get(replica_id)):
            return end
        reasons = [self.facts.sick.get(replica_id, ""), self.facts.refused.get(replica_id, "")]
        if others := self._broken.get(replica_id):
            reasons.append(f"links that do not work: {', '.join(others)}")
        return "; ".join(reason for reason in reasons if reason)

    def job(self) -> dict[str, Any]:
        """Describe the quorum, or why there is none. The rows come first: the newest step is theirs."""
        quorum, facts, config = self.lighthouse.quorum, self.facts, self.lighthouse.config
        waited_s = max(0.0, config.join_timeout_ms / 1000 - facts.late_s) if facts.joined else 0.0
        why = why_no_quorum(facts).removeprefix("no quorum yet: ")
        is_whole = bool(facts.last) and not facts.departed
        state = "none" if not facts.last else "broken" if facts.departed else "formed"
        return {
            "state": "stands" if is_whole and facts.standing else state,
            "quorum_id": facts.last_id if facts.last else None,
            "round": quorum.round,
            "formed": round(self._history.quorum_began, 3) or None,
            "members": len(facts.last),
            "gone": len(self._departed - self._joined),  # one that gave it up is there, and asks for another
            "min_replicas": facts.min_replicas,
            "step": self._newest,
            "steps_per_s": _rounded(statistics.median(self._rates) if self._rates else None),
            "straggler": self._straggler,
            "why_no_quorum": "" if is_whole and waited_s < _WAITS_SHORTLY_S else why,
            "description": describe(facts).splitlines(),
        }

    def lighthouse_itself(self) -> dict[str, Any]:
        """Describe the daemon."""
        return {
            "version": __version__,
            "address": str(self.lighthouse.address),
            "started": round(self.lighthouse.started, 3),
            "job_id": self.lighthouse.config.job_id,
            "is_starved": self.lighthouse.is_starved,
        }


def _recovery(recovery: Recovery) -> dict[str, Any]:
    return {
        "time": round(recovery.time, 3),
        "lost": recovery.lost,
        "quorum_id": recovery.quorum_id or None,
        "quorum_s": _rounded(recovery.quorum_s),
        "step_s": _rounded(recovery.step_s),
    }


def _heal(heal: Heal) -> dict[str, Any]:
    return {
        "time": round(heal.time, 3),
        "replica_id": heal.replica_id,
        "source": heal.source,
        "from_step": heal.from_step,
        "to_step": heal.to_step,
        "quorum_id": heal.quorum_id,
        "seconds": _rounded(heal.seconds),
        "outcome": heal.outcome,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
