"""A Gloo device whose connections can be broken from another thread.

Gloo cannot be told to give up: its abort marks the group and leaves every thread that waits for a
stopped peer waiting until the timeout. What ends a wait at once is the end of the connection, so
that is what `GlooDevice.cut` brings about: it shuts down the sockets of the device.

INVARIANT: abort touches no socket but this group's. Other threads open and close sockets all the
time, and descriptor numbers are reused, so sockets are never told apart by when they appeared or
by their numbers or addresses. Each device has an epoll instance of its own, with which Gloo
registers every socket of that device for as long as it is open. We hold a duplicate of that epoll
descriptor, which therefore means this device until we close it; the kernel lists what is registered
(`/proc/self/fdinfo`) by descriptor and inode; and a socket is duplicated, its inode compared, and
only then shut down. A descriptor that was closed and reused meanwhile has another inode.

Gloo reads what comes in order, and nothing at all while it has nowhere to put the next message. That stays
so when an operation fails before a peer's part of it has come: the message is for nobody, whoever waits for a
later one waits in vain, and not even the end of the connection is noticed, for which Gloo's thread is called
again and again. Such a connection is silenced (`silence`): it stays registered, but only for events that Gloo
ignores, and each of them once. A connection that is silenced cannot touch a tensor.

An abort needs no descriptor that it does not have: what it reads is open all the time, and one
descriptor is held in reserve for the duplicates. A process that has run out of them may be just the
one that has to give up.

The epoll instance is recognised once, when the device is made: it watches a listening socket whose
inode did not exist before. If another thread opened such a pair at the same moment there are two,
the device is thrown away and made again.

A thread that waits for a peer to connect has no socket to shut down. It is woken by connecting in
the peer's place (`knock`): Gloo's listener takes a connection for pair number n when the first
eight bytes on it say n.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import platform
import select
import socket
import stat
import struct
import threading
import weakref
from collections.abc import Collection, Iterator
from typing import NamedTuple

from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo

from lighthouse.forks import Turn, in_each_fork, lock_of_each_process, replace_sockets

INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
ATTEMPTS_MAX = 20
KNOCK_SECONDS_MAX = 0.2

_EPOLL_CTL_MOD = 3
# The kernel's struct: only on this machine without a gap.
_EPOLL_EVENT = "=IQ" if platform.machine() == "x86_64" else "@IQ"


class _Registered(NamedTuple):
    """What an epoll instance watches."""

    fd: int  # that it was registered under
    inode: int  # behind it
    events: int
    data: int

    @property
    def is_silenced(self) -> bool:
        """Whether Gloo is told neither of data nor of room for more."""
        return not self.events & (select.EPOLLIN | select.EPOLLOUT)


_logger = logging.getLogger(__name__)
_descriptors = "/proc/self/fd"
_descriptor_info = "/proc/self/fdinfo"
_creation = lock_of_each_process()  # our own devices shall not be mistaken for each other
_devices: weakref.WeakSet[GlooDevice] = weakref.WeakSet()


class GlooDevice:
    """A device on one local address.

    Args:
        host: the local address to listen on. `GLOO_SOCKET_IFNAME` beats it, as everywhere in torch.
    """

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._epoll: _Epoll | None = None
        self._address: tuple[object, ...] | None = None
        self._family = socket.AF_INET
        self.torch_device: object | None = self._create(host)
        _devices.add(self)

    def cut(self) -> int:
        """Shut down every connection of the device; gives their number. Never blocks."""
        with self._lock:
            found = () if self._epoll is None else self._epoll.sockets()
            return sum(_shut_down(own) for _, own in found)

    def connections(self) -> int:
        """How many connections of the device are open, and not silenced."""
        with self._lock:
            found = () if self._epoll is None else self._epoll.sockets()
            return sum(_is_connection(own) for entry, own in found if not entry.is_silenced)

    def silence(self) -> None:
        """Have Gloo read no more from any connection that it has not closed; see the module. Never blocks.

        What its thread is about to read may still come.
        """
        with self._lock:
            for entry, own in () if self._epoll is None else self._epoll.sockets():
                if own is not None and not _listens(own) and not entry.is_silenced:
                    self._epoll.silence(entry)  # type: ignore[union-attr] # it has just given this

    def leave_to_parent(self) -> None:
        """In a fork: hold no copy of a socket of the device. Takes no lock: its owner may not exist here."""
        if self._epoll is not None:
            replace_sockets(self._epoll.inherited())

    def knock(self, world_size: int) -> None:
        """Connect in the place of every peer that has not connected yet.

        Only after this the threads that wait for such a peer find their connection broken.
        """
        if self._address is None:
            return
        for number in range(world_size):
            with contextlib.suppress(OSError), socket.socket(self._family) as visitor:
                visitor.settimeout(KNOCK_SECONDS_MAX)
                visitor.connect(self._address)
                visitor.sendall(struct.pack("=q", number))

    def hand_over(self) -> None:
        """From now on only Gloo's group keeps torch's object.

        Whoever is last destroys it, which takes Gloo up to 10 ms: the group does it without the
        interpreter's lock, a variable of ours would do it with it.
        """
        self.torch_device = None

    def close(self) -> None:
        """Let the connections go, which `cut` reaches no more."""
        self.torch_device = None
        with self._lock:
            if self._epoll is not None:
                self._epoll.close()
                self._epoll = None

    def _create(self, host: str) -> object:
        with _creation:
            for _ in range(ATTEMPTS_MAX):
                before = set(_open_sockets())
                device = _make_device(host)
                found = list(_epolls_that_listen_since(before))
                if len(found) == 1:
                    self._remember(*found[0])
                    return device
        _logger.warning("cannot tell Gloo's sockets apart here: an abort waits for the operation's timeout")
        return device

    def _remember(self, epoll: int, listener: _Registered) -> None:
        with _own_socket(listener.fd, listener.inode) as listening:
            if listening is not None:
                self._family = listening.family
                self._address = listening.getsockname()
                self._epoll = _Epoll(epoll)


class _Epoll:
    """A device's epoll instance, and what it takes to look at its sockets: three descriptors."""

    def __init__(self, epoll: int) -> None:
        with contextlib.ExitStack() as undo:
            self._own = os.dup(epoll)
            undo.callback(os.close, self._own)
            self._info = open(f"{_descriptor_info}/{self._own}")  # noqa: SIM115 - closed by `close`
            undo.callback(self._info.close)
            self._reserve = os.dup(epoll)
            undo.pop_all()

    def sockets(self) -> Iterator[tuple[_Registered, socket.socket | None]]:
        """What it watches now; each is closed when the next is asked for. None: it cannot be looked at."""
        self._info.seek(0)
        for entry in [_entry(line) for line in self._info if line.startswith("tfd:")]:
            try:
                with _own_socket(entry.fd, entry.inode) as own:
                    if own is not None:
                        yield entry, own
            except _NoDescriptorError:
                for own in self._by_reserve(entry.fd, entry.inode):
                    yield entry, own

    def inherited(self) -> list[int]:
        """In a fork: the descriptors of the sockets that it watches.

        They are read from a file of the fork's own. The parent's has one position for both processes, and the
        parent may be reading.
        """
        watched = _registered(self._own)
        return [entry.fd for entry in watched if _is_open_socket(entry.fd, entry.inode)]

    def silence(self, entry: _Registered) -> None:
        """Tell of errors and the end only, which are always told of, and only once."""
        event = struct.pack(_EPOLL_EVENT, select.EPOLLET, entry.data)
        ctypes.CDLL(None).epoll_ctl(self._own, _EPOLL_CTL_MOD, entry.fd, event)  # fails if Gloo has closed it

    def close(self) -> None:
        """Let go of it."""
        self._info.close()
        os.close(self._reserve)
        os.close(self._own)

    def _by_reserve(self, fd: int, inode: int) -> Iterator[socket.socket | None]:
        try:
            os.dup2(fd, self._reserve, inheritable=False)
        except OSError:  # closed meanwhile, or the limit was lowered below the reserve
            yield None
            return
        try:
            if _is_socket(self._reserve, inode):
                own = socket.socket(fileno=self._reserve)
                try:
                    yield own
                finally:
                    own.detach()
        finally:
            os.dup2(self._own, self._reserve, inheritable=False)


class _NoDescriptorError(OSError):
    """The process has no descriptor left."""


def _make_device(host: str) -> object:
    if interface := os.environ.get(INTERFACE_ENV):
        return TorchGloo.create_device(interface=interface.split(",")[0], lazy_init=False)
    return TorchGloo.create_device(hostname=host, lazy_init=False)


def _open_sockets() -> Iterator[int]:
    """Their inodes."""
    for _, status in _open_descriptors():
        if stat.S_ISSOCK(status.st_mode):
            yield status.st_ino


def _epolls_that_listen_since(before: Collection[int]) -> Iterator[tuple[int, _Registered]]:
    """Every epoll descriptor that watches a listening socket whose inode is not in `before`, with that."""
    for fd, status in _open_descriptors():
        with contextlib.suppress(OSError):
            if not stat.S_IFMT(status.st_mode) and "eventpoll" in os.readlink(f"{_descriptors}/{fd}"):
                new = [watched for watched in _registered(fd) if watched.inode not in before]
                yield from ((fd, watched) for watched in new if _is_listening(watched))


def _open_descriptors() -> Iterator[tuple[int, os.stat_result]]:
    for name in os.listdir(_descriptors) if os.path.exists(_descriptors) else ():
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # it was closed meanwhile
        yield int(name), status


def _registered(epoll: int) -> list[_Registered]:
    """What an epoll instance watches."""
    with open(f"{_descriptor_info}/{epoll}") as lines:
        return [_entry(line) for line in lines if line.startswith("tfd:")]


def _entry(line: str) -> _Registered:
    """From `tfd: 7 events: 19 data: 5581d0 pos:0 ino:1f4e sdev:9`."""
    words = line.replace(":", " ").split()
    inode, events, data = (int(words[words.index(name) + 1], 16) for name in ("ino", "events", "data"))
    return _Registered(int(words[1]), inode, events, data)


def _is_listening(entry: _Registered) -> bool:
    with _own_socket(entry.fd, entry.inode) as own:
        return own is not None and _listens(own)


def _is_connection(own: socket.socket | None) -> bool:
    return own is None or not _listens(own)


def _shut_down(own: socket.socket | None) -> bool:
    """Shut one connection down; whether it was one.

    The listening socket stays as it is: Gloo's thread would end the process over a failed accept.
    """
    if own is None or _listens(own):
        return False
    with contextlib.suppress(OSError):
        own.shutdown(socket.SHUT_RDWR)
    return True


def _listens(own: socket.socket) -> bool:
    return own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1


@contextlib.contextmanager
def _own_socket(fd: int, inode: int) -> Iterator[socket.socket | None]:
    """A duplicate of the descriptor if it is still the socket with that inode, else None."""
    try:
        duplicate = os.dup(fd)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise _NoDescriptorError(*error.args) from None
        yield None
        return
    if not _is_socket(duplicate, inode):
        os.close(duplicate)
        yield None
        return
    with socket.socket(fileno=duplicate) as own:
        yield own


def _is_open_socket(fd: int, inode: int) -> bool:
    try:
        return _is_socket(fd, inode)
    except OSError:
        return False


def _is_socket(fd: int, inode: int) -> bool:
    status = os.fstat(fd)
    return status.st_ino == inode and stat.S_ISSOCK(status.st_mode)


def _leave_devices_to_parent() -> None:
    for device in list(_devices):
        device.leave_to_parent()


in_each_fork(Turn.SOCKETS, _leave_devices_to_parent)
