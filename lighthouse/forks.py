"""What a forked process, such as a data-loader worker, does with what it inherited from its parent.

A fork has its parent's memory and descriptors and none of its threads. The objects on which the parent's
threads worked are useless to the fork, and may do harm in it:

* a lock that another thread held stays taken for ever;
* a signal handler acts for the parent;
* the copy of a connection hides the parent's death: the kernel tells the peer of the end only when the last
  copy is closed, and workers outlive a killed trainer by seconds.

INVARIANT: a fork holds no copy of a TCP socket that this package, gRPC, Gloo, ZeroMQ or a TCPStore of this
package has opened. The sockets of NCCL are not known here: forks have them.

Python code does not see the sockets of the libraries, so they are told by their ports: `disown` is called for
each address that is listened on or connected to. In a fork the descriptor of such a socket names a socket
without a peer from then on. It is not closed: the kernel would give its number to another file, on which the
library that remembers the number would then act. It is not shut down either: that would end the parent's
connection.

Every module that has something to do in a fork registers it here, so that the order is the same in every
fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

from lighthouse.address import Address
from lighthouse.core.hosts import ip_of

L = TypeVar("L")
T = TypeVar("T")
ADDRESSES_MAX = 10_000  # of more, the ones disowned first are forgotten
_DESCRIPTORS = "/proc/self/fd"


class Turn(enum.IntEnum):
    """When an action runs in a fork; actions of the same turn are independent of each other."""

    LOCKS = 0  # all later actions may take these locks
    SIGNALS = 1  # early, as a signal may come at any time
    OBJECTS = 2  # these may look at their descriptors, so the sockets are replaced after them
    SOCKETS = 3


_actions: dict[Turn, list[Callable[[], object]]] = {turn: [] for turn in Turn}
_addresses: dict[tuple[str, int], None] = {}


def in_each_fork(turn: Turn, action: Callable[[], object]) -> None:
    """Call `action` in each process that this one forks from now on, before the fork goes on.

    The action must not wait: only the thread that forked exists. An exception from it hinders no other
    action, and Python reports it on standard error.
    """
    _actions[turn].append(action)


def left_to_parent(turn: Turn, leave: Callable[[T], object]) -> weakref.WeakSet[T]:
    """Return a set that keeps nothing alive; in each fork `leave` is called with all that is in it, and it is
    empty then.
    """
    objects: weakref.WeakSet[T] = weakref.WeakSet()

    def leave_all() -> None:
        for each in list(objects):
            leave(each)
        objects.clear()

    in_each_fork(turn, leave_all)
    return objects


@overload
def lock_of_each_process() -> threading.Lock: ...


@overload
def lock_of_each_process(kind: Callable[[], L]) -> L: ...


def lock_of_each_process(kind: Callable[[], Any] = threading.Lock) -> Any:
    """Make a lock for a module's life, which every fork finds free even if its parent held it."""
    lock = kind()
    in_each_fork(Turn.LOCKS, lock._at_fork_reinit)  # the logging module does the same
    return lock


def keep_for_ever(inherited: object) -> None:
    """Keep this object alive until the process ends: its destructor might wait for the parent's threads."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))


def disown(address: Address) -> None:
    """Let no fork hold a connection from or to this address, nor listen on it.

    An address that is given as a name means that port of every host.
    """
    _addresses.pop(key := (_literal(address.host), address.port), None)
    _addresses[key] = None
    if len(_addresses) > ADDRESSES_MAX:
        del _addresses[next(iter(_addresses))]


def open_descriptors() -> Iterator[tuple[int, os.stat_result]]:
    """Yield the descriptors of this process and what they refer to; none where the system does not tell."""
    for name in os.listdir(_DESCRIPTORS) if os.path.exists(_DESCRIPTORS) else ():
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # it was closed since, as the one by which the folder was read
        yield int(name), status


def replace_sockets(descriptors: Iterable[int]) -> None:
    """Make these descriptors of this process refer to a socket whose peer is gone."""
    dead, other = socket.socketpair()
    with dead:
        other.close()
        for descriptor in descriptors:
            os.dup2(dead.fileno(), descriptor, inheritable=False)


def _run_actions() -> None:
    failures = []
    for turn in Turn:
        for action in _actions[turn]:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - one that fails must not keep the others from running
                failures.append(error)
    if failures:
        reasons = "; ".join(map(repr, failures))  # Python reports only the first line of the error
        raise ExceptionGroup(
            f"what this process inherited could not be left to its parent: {reasons}", failures
        )


def _leave_sockets() -> None:
    if _addresses:
        replace_sockets(list(_disowned()))


def _disowned() -> Iterator[int]:
    for descriptor, _ in open_descriptors():
        with contextlib.suppress(OSError):  # no socket, or none with a peer: no danger
            own = socket.socket(fileno=descriptor)
            try:
                # A listening socket, whose own name counts, has no peer.
                names = (own.getsockname, own.getpeername)
                if own.family in (socket.AF_INET, socket.AF_INET6) and any(map(_is_disowned, names)):
                    yield descriptor
            finally:
                own.detach()


def _is_disowned(name_of_end: Callable[[], tuple[str, int]]) -> bool:
    name = name_of_end()
    hosts = _literal(name[0]), "", "0.0.0.0", "::"
    return any((host, name[1]) in _addresses for host in hosts)


def _literal(host: str) -> str:
    """Return the address in its canonical spelling; empty for a name."""
    return str(ip_of(host.partition("%")[0]) or "")


in_each_fork(Turn.SOCKETS, _leave_sockets)
os.register_at_fork(after_in_child=_run_actions)
