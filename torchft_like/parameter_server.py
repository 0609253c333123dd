"""A parameter server: clients open sessions with it, and each session is a process group of two.

    GET /new_session     200  {"session_id": ..., "store_addr": ...}, and the server waits there
                         401  this process has tokens, and the request shows none that may participate
                         503  all sessions are taken: ask again
                         404  not such a request

The server is rank 0 of the group, the client rank 1. What they say to each other is up to the server's class.
A session has a thread of the server's, and ends with its client: when that dies, the collective in which the
server waits for it fails, and the session's place is free again. The names are torchft's.

A client holds one of a limited number of sessions from the moment it connects. It has `REQUEST_S` seconds to
send its request; the timeout of the process group limits how long the server waits for it in the group, and
in each collective.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import socket
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from lighthouse.address import Address
from lighthouse.core.json_text import read_json
from lighthouse.core.trust import Role
from lighthouse.events import printable
from lighthouse.listening import listen_guarded
from lighthouse.tls import accepted, scheme
from lighthouse.trust import authorization, process_trust
from torchft_like.errors import ConnectError, ProcessGroupError, SessionsTakenError, TrustError
from torchft_like.futures import context_timeout
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.store_server import StoreServer
from torchft_like.runtime.connecting import connect_tcp, shut
from torchft_like.runtime.hosts import advertised_host

PATH = "/new_session"
SESSIONS_MAX = 64
REQUEST_S = 5.0
REFUSAL_S = 0.5  # in which no other client is let in
ANSWER_BYTES_MAX = 4096

_logger = logging.getLogger(__name__)


class ParameterServer(ABC):
    """A server of sessions, until `shutdown`.

    Args:
        port: the port for requests; 0 for a free one.
        store_port: the port of the store in which a session's two ranks meet; 0 for a free one.
        host: the address of this machine at which both listen. Any process that reaches it can open sessions.
        sessions_max: the number of sessions at a time; each has a thread.

    Raises:
        BindError: an address is in use or not of this host.
        ValueError: there are no sessions.
    """

    def __init__(
        self,
        port: int,
        store_port: int = 0,
        *,
        host: str = "127.0.0.1",
        sessions_max: int = SESSIONS_MAX,
    ) -> None:
        if sessions_max < 1:
            raise ValueError(f"sessions_max is {sessions_max}: a server without sessions serves nobody")
        self.store: StoreServer = StoreServer(Address(host, store_port))
        self._host = advertised_host(host)
        self._groups: dict[str, ProcessGroup] = {}
        self._lock = threading.Lock()
        self._ended = False
        with contextlib.ExitStack() as until_served:  # else the ports would be taken at the next attempt
            until_served.callback(self.store.close)
            self._server = _Server(Address(host, port), self, sessions_max)
            until_served.callback(self._server.server_close)
            self._thread = threading.Thread(
                target=self._server.serve_forever, name="torchft-parameter-server", daemon=True
            )
            self._thread.start()
            until_served.pop_all()

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """Return a process group that is not configured yet, for one end of a session."""

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve a session, on a thread of its own; it ends when this returns or raises.

        Args:
            session_id: a text that no other session has.
            pg: the group of the session, in which this process is rank 0 and the client rank 1.
        """

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Open a session with a server; return its process group, in which this process is rank 1.

        Args:
            address: what the server's `address` returned.

        Raises:
            ConnectError: no parameter server answered there.
            SessionsTakenError: the server has no session left; try again later.
            TrustError: this process has no token that the server takes.
            ProcessGroupError: the server did not come to the group.
        """
        session = _ask(address)
        pg = cls.new_process_group()
        try:
            pg.configure(session["store_addr"], 1, 2)
        except BaseException:
            pg.shutdown()
            raise
        return pg

    def address(self) -> str:
        """Return where clients open sessions, as `http://host:port/new_session`."""
        return f"{scheme()}://{Address(self._host, self._server.server_port)}{PATH}"

    def sessions(self) -> list[str]:
        """Return the ids of the sessions that are open now."""
        with self._lock:
            return list(self._groups)

    def shutdown(self) -> None:
        """Take no more sessions, and end those that are open. Safe to call again."""
        with self._lock:
            self._ended = True
            groups = list(self._groups.values())
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.store.close()  # a group that is yet to be configured finds no store; the others are aborted
        for group in groups:
            group.abort(f"the parameter server at {self.address()} was shut down")

    def _handle_session(self, session_id: str, store_addr: str) -> None:
        pg = self.new_process_group()
        with self._lock:
            self._groups[session_id] = pg
            is_over = self._ended
        try:
            if is_over:  # an abort would be one of nothing: the group has no configuration yet
                raise ProcessGroupError("the parameter server was shut down")
            pg.configure(store_addr, 0, 2)
            self.forward(session_id, pg)
        except Exception as error:  # noqa: BLE001 - whatever ended this session, the others go on
            _logger.warning("session %s of the parameter server has ended: %r", session_id, error)
        finally:
            with self._lock:
                del self._groups[session_id]
            pg.shutdown()
            self.store.drop_room(f"session/{session_id}")


class _Server(ThreadingHTTPServer):
    """The HTTP server of the sessions: a thread for each connection, of which there are only so many."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, bind: Address, owner: ParameterServer, sessions_max: int) -> None:
        super().__init__((bind.host, bind.port), _Request, bind_and_activate=False)
        self.socket.close()
        self.socket = listen_guarded(bind)
        self.server_port = self.socket.getsockname()[1]
        self.owner = owner
        self.sessions_max = sessions_max
        self._places = threading.BoundedSemaphore(sessions_max)

    def get_request(self) -> tuple[Any, Any]:
        """Accept a client."""
        peer, client_address = super().get_request()
        return accepted(peer), client_address

    def process_request(self, request: Any, client_address: Any) -> None:
        """Give a client a place and a thread, or refuse it."""
        if self._places.acquire(blocking=False):
            try:
                super().process_request(request, client_address)
            except BaseException:  # there is no memory for a thread, which would give the place back
                self._places.release()
                raise
            return
        with contextlib.suppress(OSError):
            request.settimeout(REFUSAL_S)
            request.recv(ANSWER_BYTES_MAX)  # a socket that is closed with unread bytes loses the answer
            request.sendall(b"HTTP/1.0 503 all %d sessions are taken\r\n\r\n" % self.sessions_max)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a client until its session ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, _request: object, client_address: object) -> None:
        """Log what ended a request."""
        error = sys.exception()
        is_defect = not isinstance(error, OSError)  # such as a stranger's handshake
        _logger.warning("a request of %s has failed: %r", client_address, error, exc_info=is_defect)


class _Request(BaseHTTPRequestHandler):
    """A client's request, whose thread is then that of the session."""

    timeout = REQUEST_S
    server: _Server

    def handle(self) -> None:
        """Serve a client, whose whole request has to come in time, however it trickles in."""
        with contextlib.ExitStack() as self._until_asked:
            limit = timedelta(seconds=REQUEST_S)
            self._until_asked.enter_context(context_timeout(lambda: shut(self.connection), limit))
            super().handle()

    def do_GET(self) -> None:
        """Answer, end the connection, and serve the session."""
        self._until_asked.close()
        if self.path != PATH:
            self.send_error(404, f"clients ask for {PATH}")
            return
        if (trust := process_trust()) is not None:
            role = trust.role_of_header(self.headers.get("Authorization", ""))
            if role < Role.PARTICIPATE:
                self.send_error(401, "this server asks for a token of the job (TORCHFT_TOKEN_FILE)")
                return
        owner, session_id = self.server.owner, str(uuid.uuid4())
        reached = Address(owner._host, owner.store.address.server.port)
        store_addr = f"{replace(owner.store.address, server=reached)}/session/{session_id}"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"session_id": session_id, "store_addr": store_addr}).encode() + b"\n")
        self.wfile.flush()
        socket.socket.shutdown(self.connection, socket.SHUT_RDWR)
        owner._handle_session(session_id, store_addr)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log a line, without what a terminal would act on."""
        _logger.debug("%s: %s", self.client_address[0], printable(format % args))


def _ask(address: str) -> dict[str, str]:
    """Ask a server for a session, and return its answer."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
    try:
        connection.sock = connect_tcp(Address(connection.host, connection.port), REQUEST_S)
        header = authorization()
        connection.request("GET", parts.path, headers={"Authorization": header} if header else {})
        response = connection.getresponse()
        if response.status == http.HTTPStatus.UNAUTHORIZED:
            raise TrustError(f"the parameter server at {address} says: {printable(response.reason)}")
        if response.status == http.HTTPStatus.SERVICE_UNAVAILABLE:
            raise SessionsTakenError(
                f"the parameter server at {address} takes no session now ({printable(response.reason)}); try "
                "again later, or give the server more with `sessions_max`"
            )
        answer = read_json(response.read(ANSWER_BYTES_MAX))
        return {key: str(answer[key]) for key in ("session_id", "store_addr")}
    except TrustError:
        raise
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
        raise ConnectError(
            f"no parameter server answers at {address} ({error!r:.200}); check the address, and that it runs"
        ) from error
    finally:
        connection.close()
