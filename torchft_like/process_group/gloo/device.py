"""A Gloo device whose connections can be broken from another thread.

Gloo's own abort only marks the group: a thread that waits for a stopped peer waits until the timeout. The end
of the connection ends such a wait at once, so `GlooDevice.cut` shuts down the sockets of the device.

INVARIANT: abort touches no socket but this group's. Other threads open and close sockets all the time, and
descriptor numbers are reused, so sockets are never told apart by when they appeared or by their numbers or
addresses. Each device has an epoll instance of its own, with which Gloo registers every socket of that device
for as long as it is open. This object holds a duplicate of that epoll descriptor, which therefore means this
device until it is closed; the kernel lists what is registered (`/proc/self/fdinfo`) by descriptor and inode;
and a socket is duplicated, its inode compared, and only then shut down. A descriptor that was closed and
reused meanwhile has another inode.

Gloo reads messages in order, and nothing at all while it has no buffer for the next one. If an operation
fails before a peer's part of it has come, that part never gets a buffer. Every wait for a later message is
then in vain, and Gloo does not notice the end of the connection either, although its thread is woken for it
again and again. Such a connection is silenced (`silence`): it stays registered, but only for events that Gloo
ignores, and each of them once. A connection that is silenced cannot touch a tensor.

An abort opens no descriptor: the file that it reads stays open, and one descriptor is held in reserve for the
duplicates. A process that has run out of descriptors may be the very one that has to abort.

The epoll instance is recognised once, when the device is made: it watches a listening socket whose inode did
not exist before. If another thread opened such a pair at the same moment there are two; then the device is
dropped and another one made.

A thread that waits for a peer to connect has no socket to shut down. It is woken by connecting in
the peer's place (`knock`): Gloo's listener takes a connection for pair number n when the first
eight bytes on it say n.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import select
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple, TextIO

import torch
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo

from lighthouse.address import LOOPBACK
from lighthouse.forks import Turn, in_each_fork, lock_of_each_process, replace_sockets
from torchft_like.errors import ConfigError

INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
TRANSPORT_ENV = "GLOO_DEVICE_TRANSPORT"
ATTEMPTS_MAX = 20
KNOCK_SECONDS_MAX = 0.2

_EPOLL_CTL_MOD = 3
# The kernel's struct is packed on x86-64 only.
_EPOLL_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"


class _Registered(NamedTuple):
    """A socket that an epoll instance watches."""

    fd: int  # the descriptor under which it was registered
    inode: int  # the socket's inode
    events: int
    data: int

    @property
    def is_silenced(self) -> bool:
        """Whether Gloo is notified neither of data nor of room for more."""
        return not self.events & (select.EPOLLIN | select.EPOLLOUT)


_logger = logging.getLogger(__name__)
_descriptors = "/proc/self/fd"
_descriptor_info = "/proc/self/fdinfo"
_creation = lock_of_each_process()  # keeps the devices of this package from being mistaken for each other
_devices: weakref.WeakSet[GlooDevice] = weakref.WeakSet()
_transport: list[str] = []  # for which the environment asked at the first device


class GlooDevice:
    """A device on the local address `host`; `GLOO_SOCKET_IFNAME` overrides it, as everywhere in torch."""

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._epoll: _Epoll | None = None
        self._address: tuple[object, ...] | None = None
        self._family: int = socket.AF_INET
        self.torch_device: object | None = self._create(host)
        _devices.add(self)

    def cut(self) -> int:
        """Shut down every connection of the device, and return their number. This never blocks."""
        count = 0
        with self._lock:
            for _, own in self._sockets():
                # The listening socket stays: Gloo's thread would end the process over a failed accept.
                if own is not None and not _listens(own):
                    count += 1
                    with contextlib.suppress(OSError):
                        own.shutdown(socket.SHUT_RDWR)
        return count

    def connections(self) -> int:
        """Return how many connections of the device are open and not silenced."""
        with self._lock:
            found = self._sockets()
            return sum(own is None or not _listens(own) for entry, own in found if not entry.is_silenced)

    def silence(self) -> None:
        """Keep Gloo from reading any connection that it has not closed. This never blocks.

        Gloo's thread may still finish a read that it has begun.
        """
        with self._lock:
            for entry, own in self._sockets():
                if own is not None and not _listens(own) and not entry.is_silenced:
                    self._epoll.silence(entry)  # type: ignore[union-attr] # it has just returned this entry

    def leave_to_parent(self) -> None:
        """Give up the copies of the device's sockets; runs in a fork, where locks may have no owner."""
        if self._epoll is not None:
            replace_sockets(self._epoll.inherited())

    def knock(self, world_size: int) -> None:
        """Connect in the place of every peer that has not connected yet.

        Only then a `cut` wakes the threads that wait for such a peer.
        """
        if self._address is None:
            return
        for number in range(world_size):
            with contextlib.suppress(OSError), socket.socket(self._family) as visitor:
                visitor.settimeout(KNOCK_SECONDS_MAX)
                visitor.connect(self._address)
                visitor.sendall(struct.pack("=q", number))

    def close(self) -> None:
        """Release the descriptors; `cut` reaches the connections no more."""
        self.torch_device = None
        with self._lock:
            if self._epoll is not None:
                self._epoll.close()
                self._epoll = None

    def _sockets(self) -> Iterable[tuple[_Registered, socket.socket | None]]:
        return () if self._epoll is None else self._epoll.sockets()

    def _create(self, host: str) -> object:
        with _creation:
            for _ in range(ATTEMPTS_MAX):
                before = {entry.st_ino for _, entry in _open_descriptors() if stat.S_ISSOCK(entry.st_mode)}
                device = _make_device(host)
                found = list(_epolls_that_listen_since(before))
                if len(found) == 1:
                    epoll, self._family, self._address = found[0]
                    self._epoll = _Epoll(epoll)
                    return device
        _logger.warning("cannot tell Gloo's sockets apart here: an abort waits for the operation's timeout")
        return device


class _Epoll:
    """A device's epoll instance, and the descriptors to look at its sockets with: three in all."""

    def __init__(self, epoll: int) -> None:
        with contextlib.ExitStack() as undo:
            self._own = os.dup(epoll)
            undo.callback(os.close, self._own)
            self._info = open(f"{_descriptor_info}/{self._own}")  # noqa: SIM115 - `close` closes it
            undo.callback(self._info.close)
            self._reserve = os.dup(epoll)
            undo.pop_all()

    def sockets(self, besides: Collection[int] = ()) -> Iterator[tuple[_Registered, socket.socket | None]]:
        """Yield the sockets that are watched now, but no known inode; None for one that cannot be looked at.

        Each is a duplicate in the place of the reserve, which ends when the next one is asked for.
        """
        self._info.seek(0)
        for entry in [each for each in _entries(self._info) if each.inode not in besides]:
            try:
                os.dup2(entry.fd, self._reserve, inheritable=False)
            except OSError:
                if _is_socket(entry.fd, entry.inode):  # the limit was lowered below the reserve's number
                    yield entry, None
                continue
            try:
                if _is_socket(self._reserve, entry.inode):
                    own = socket.socket(fileno=self._reserve)
                    try:
                        yield entry, own
                    finally:
                        own.detach()
            finally:
                os.dup2(self._own, self._reserve, inheritable=False)

    def inherited(self) -> list[int]:
        """Return the descriptors of the sockets that are watched; runs in a fork.

        The fork opens a file of its own to read them: the parent's has one position for both processes, and
        the parent may be reading.
        """
        with open(f"{_descriptor_info}/{self._own}") as info:
            return [entry.fd for entry in _entries(info) if _is_socket(entry.fd, entry.inode)]

    def silence(self, entry: _Registered) -> None:
        """Register the socket for errors and its end only, which are always reported, and only once."""
        event = struct.pack(_EPOLL_EVENT, select.EPOLLET, entry.data)
        ctypes.CDLL(None).epoll_ctl(self._own, _EPOLL_CTL_MOD, entry.fd, event)  # fails if Gloo has closed it

    def close(self) -> None:
        """Release the descriptors."""
        self._info.close()
        os.close(self._reserve)
        os.close(self._own)


def require_transport() -> None:
    """Check that torch makes devices of the transport for which the environment asks, such as TCP_TLS.

    Raises:
        ConfigError: it does not; without the check traffic that was to be encrypted might be plain.
    """
    wanted = os.environ.get(TRANSPORT_ENV, "")
    if _transport and _transport[0] != wanted:
        raise ConfigError(
            f"{TRANSPORT_ENV} is {wanted!r:.50}, and was {_transport[0]!r:.50} when the first group of this "
            "process was made, which is when torch reads it: set it before"
        )
    if wanted:
        _make_device(LOOPBACK)


def _make_device(host: str) -> object:
    transport = os.environ.get(TRANSPORT_ENV, "")
    _transport.extend([] if _transport else [transport])
    try:
        if interface := os.environ.get(INTERFACE_ENV):
            return TorchGloo.create_device(interface=interface.split(",")[0], lazy_init=False)
        return TorchGloo.create_device(hostname=host, lazy_init=False)
    except RuntimeError as error:
        if not transport:
            raise
        raise ConfigError(
            f"torch {torch.__version__} makes no device of Gloo for {TRANSPORT_ENV}={transport!r:.50} "
            f"({str(error).splitlines()[0]:.200}). TCP_TLS takes a torch that was built with "
            f"USE_GLOO_WITH_OPENSSL=1, and the files that {TRANSPORT_ENV}_TCP_TLS_PKEY, _CERT and _CA_FILE "
            "name. Otherwise unset it, and encrypt the network, as by WireGuard (docs/security.md)"
        ) from error


def _epolls_that_listen_since(before: Collection[int]) -> Iterator[tuple[int, int, tuple[object, ...]]]:
    """Yield each epoll descriptor that watches a listening socket not in `before`, its family and address."""
    for fd, status in _open_descriptors():
        with contextlib.suppress(OSError):
            if stat.S_IFMT(status.st_mode) or "eventpoll" not in os.readlink(f"{_descriptors}/{fd}"):
                continue
            with contextlib.closing(_Epoll(fd)) as epoll:
                for _, own in epoll.sockets(besides=before):
                    if own is not None and _listens(own):
                        yield fd, own.family, own.getsockname()


def _open_descriptors() -> Iterator[tuple[int, os.stat_result]]:
    for name in os.listdir(_descriptors) if os.path.exists(_descriptors) else ():
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # it was closed since
        yield int(name), status


def _entries(info: TextIO) -> list[_Registered]:
    """Parse lines such as `tfd: 7 events: 19 data: 5581d0 pos:0 ino:1f4e sdev:9`."""
    found = []
    for line in info:
        if line.startswith("tfd:"):
            words = line.replace(":", " ").split()
            named = dict(zip(words[2::2], words[3::2], strict=True))
            inode, events, data = (int(named[name], 16) for name in ("ino", "events", "data"))
            found.append(_Registered(int(words[1]), inode, events, data))
    return found


def _listens(own: socket.socket) -> bool:
    return own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


def _is_socket(fd: int, inode: int) -> bool:
    try:
        status = os.fstat(fd)
    except OSError:
        return False
    return status.st_ino == inode and stat.S_ISSOCK(status.st_mode)


def _leave_devices_to_parent() -> None:
    for device in list(_devices):
        device.leave_to_parent()


in_each_fork(Turn.SOCKETS, _leave_devices_to_parent)
