"""Reconfigurable groups over Gloo: one whose every wait can be ended, and one of torch's own.

Gloo connects CPUs over TCP and cannot be interrupted by itself. These are its waits, and what ends them:

* a wait for the store: `meeting_store`, whose client owns its socket;
* a wait for a peer's data: `GlooDevice.cut` shuts the group's connections down;
* a wait for a peer to connect: `GlooDevice.knock` connects in the peer's place, then `cut` ends that
  connection. An abort does so, and the group's timeout.

The store is needed only while the group is made. A group of one rank asks no store at all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import math
import operator
import os
import platform
import select
import socket
import stat
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllreduceOptions,
    AllToAllOptions,
    HashStore,
    ReduceScatterOptions,
    Store,
    Work,
)
from torch._C._distributed_c10d import ProcessGroup as TorchProcessGroup
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import GroupName

from lighthouse.address import LOOPBACK, Address, parse_address
from lighthouse.forks import Turn, left_to_parent, lock_of_each_process, open_descriptors, replace_sockets
from torchft_like.dtypes import REDUCIBLE
from torchft_like.errors import CollectiveRefusedError, ConfigError, ProcessGroupError
from torchft_like.futures import context_timeout
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.collectives import (
    BY_NAME,
    COLLECTIVES,
    JOINING,
    PEER_NAMES,
    POINT_TO_POINT,
    REDUCE_OPS,
    Call,
    Collective,
    methods_of,
    refuse_unfit,
    tensors_of,
)
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import CONFIGURE_GRACE_S, EXPLAIN_S, LOOK_PAUSE_S, Backend
from torchft_like.process_group.handles import exchange_and_reconfigure, reconfigure_among
from torchft_like.process_group.store import AbortableStore, ExchangeStore, GroupMembers, meeting_store
from torchft_like.process_group.work import Finish, JointOperation
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup
from torchft_like.runtime.event_loop import coordination_loop
from torchft_like.runtime.hosts import INTERFACE_ENV, gloo_interface, interfaces, local_host_towards
from torchft_like.runtime.reach import ask_all, is_silence, why_out_of_reach
from torchft_like.writing import divide, share_memory, writing_to

CPU = torch.device("cpu")

# The threads that run the collectives, and how many there are: so many collectives are under way at once, and
# several keep a slow link busy.
GLOO_THREADS = "pt_gloo_runloop"
GLOO_THREADS_COUNT = 8
# The thread that moves bytes; without connections there are none to move.
GLOO_LOOP = "gloo_tcp_loop"
# Gloo closes connections that were cut, if it ever does, as soon as its thread runs.
LOOKS_UNTIL_SILENCED = 15
STANDSTILL_LOOKS, STANDSTILL_LOOK_S = 10, 0.05
LISTENS = "listens"  # the part of the store with the addresses of Gloo's listeners, by rank
SWEEP_SECONDS_FIRST = 0.005
SWEEP_SECONDS_MAX = 1.0

_logger = logging.getLogger(__name__)


class ProcessGroupGloo(ReconfigurableProcessGroup):
    """Collectives over Gloo (CPU tensors).

    An abort ends blocked operations within milliseconds: their `wait` raises
    ProcessGroupAbortedError, and so does their future.

    Args:
        timeout: the limit of each operation and of `configure`, seconds or timedelta.

    Raises:
        ConfigError: the environment asks for a transport (GLOO_DEVICE_TRANSPORT) that this torch has not, or
            for an interface (GLOO_SOCKET_IFNAME) that this host has not.
    """

    _backend_name = "torchft-gloo"

    def _set_up(self) -> None:
        require_device()

    def _create(self, members: GroupMembers, abort: AbortSignal) -> _GlooBackend:
        if members.world_size == 1:
            return _GlooBackend(HashStore(), LOOPBACK, members, abort)
        with meeting_store(members, abort) as store:
            host = local_host_towards(members.store.server.host, members.store.server.port)
            heard = ExchangeStore(store, members.rank, members.world_size)
            return _GlooBackend(heard, host, members, abort)


class _GlooBackend(Backend):
    """One Gloo group, and the device that its connections belong to."""

    def __init__(self, store: Store, host: str, members: GroupMembers, abort: AbortSignal) -> None:
        self._abort = abort
        self._members = members
        self._device = GlooDevice(host)
        self._gloo: TorchGloo | None = None
        self._looks = 0
        self._pool: ThreadWatch | None = None  # Gloo's threads, since no connection is left
        self._loop: ThreadWatch | None = None  # Gloo's loop, since connections were silenced
        abort.add(self._device.cut)
        try:
            store.set(f"{LISTENS}/{members.rank}", str(self._device.address or ""))
            with _broken_off(store, self._device, members, abort):
                self._gloo = _make_gloo(store, self._device, members)
            self._listeners = _listeners_in(store, members.world_size)
            # Only Gloo's group keeps torch's device now. The last owner destroys it, which takes Gloo up to
            # 10 ms: the group does so without the GIL, this object would do so with it.
            self._device.torch_device = None
            self._shell: TorchProcessGroup | None = _shell_around(self._gloo, members)
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        """Describe what keeps the backend from rest."""
        silenced = "none" if self._loop is None else f"some, {self._loop}"
        return f"{self._device.connections()} connections, silenced: {silenced}; {self._pool}"

    @property
    def inner(self) -> object:
        return self._gloo

    def methods(self) -> Mapping[str, Callable[..., Work]]:
        if (gloo := self._gloo) is None:
            return {}
        return GlooGaps(gloo, self._shell, self._members.rank, self._members.world_size).methods()

    def set_timeout(self, timeout: timedelta) -> None:
        if (gloo := self._gloo) is not None:
            gloo.set_timeout(timeout)

    def break_off(self) -> None:
        self._device.cut()

    def is_still(self) -> bool:
        """Return whether nothing can touch a tensor any more; cut connections that lacked a descriptor
        before.

        A connection that Gloo has still not closed it will never close: it is silenced.
        """
        self._device.cut()
        if self._is_connected():
            return False
        if self._pool is None:
            self._pool = ThreadWatch(GLOO_THREADS)
            return False
        return (self._loop is None or self._loop.have_paused()) and self._pool.have_slept_since()

    def out_of_reach(self, store: AbortableStore | None = None) -> str:
        if store is not None:
            return explain_links(store, self._members, self._listeners)
        rank, listeners = self._members.rank, self._listeners
        silent = [other for other, failure in _failures(rank, listeners).items() if is_silence(failure)]
        return describe_links(rank, {rank: silent}, [], listeners) if silent else ""

    def _is_connected(self) -> bool:
        """Look once; after many looks, silence what is connected, so that it counts no more."""
        if not self._device.connections():
            return False
        self._looks += 1
        if self._looks > LOOKS_UNTIL_SILENCED:
            self._device.silence()
            self._loop = ThreadWatch(GLOO_LOOP)
        return True

    def close(self) -> None:
        """Close everything. Gloo's destructor joins its threads, which the cut has freed, but for one that
        was about to send: Gloo drops the message, and lets it wait until the timeout of its operation, on
        which nothing else waits.
        """
        self._abort.remove(self._device.cut)
        self._device.cut()
        for _ in range(LOOKS_UNTIL_SILENCED + 1):
            if not self._is_connected():
                break
            time.sleep(LOOK_PAUSE_S)
        self._shell = None
        if self._gloo is not None:
            held, self._gloo = [self._gloo], None
            _drop(held)
        self._device.close()


def _make_gloo(store: Store, device: GlooDevice, members: GroupMembers) -> TorchGloo:
    options = TorchGloo._Options()  # type: ignore[attr-defined] # the stub calls it Options
    options._timeout = members.timeout
    options._threads = GLOO_THREADS_COUNT
    options._devices = [device.torch_device]
    options.group_name = members.store.name
    return TorchGloo(store, members.rank, members.world_size, options)


def _shell_around(gloo: TorchGloo, members: GroupMembers) -> TorchProcessGroup:
    shell = TorchProcessGroup(members.rank, members.world_size)  # type: ignore[call-arg] # the stub lacks it
    shell._set_default_backend(TorchProcessGroup.BackendType.GLOO)
    shell._register_backend(CPU, TorchProcessGroup.BackendType.GLOO, gloo)
    shell._set_group_name(GroupName(members.store.name))  # for torch's flight recorder, on all ranks
    shell._set_group_desc("torchft-gloo")
    return shell


@contextlib.contextmanager
def _broken_off(
    store: Store, device: GlooDevice, members: GroupMembers, abort: AbortSignal
) -> Iterator[None]:
    """Break every connection at an abort, again and again, while Gloo connects in the block.

    Once is not enough: Gloo tries again, and goes on to the next peer. The group's timeout does not end it
    either: Gloo takes it for each attempt.

    Raises:
        TimeoutError: the timeout is over; the text says which members do not reach each other.
    """
    done, is_late = threading.Event(), threading.Event()
    # The rest of the grace is for the explanation.
    limit_s = members.timeout.total_seconds() + max(CONFIGURE_GRACE_S - EXPLAIN_S, 0.0)

    def sweep() -> None:
        pause = SWEEP_SECONDS_FIRST
        while not done.is_set():
            device.knock(members.world_size)
            device.cut()
            done.wait(pause)
            pause = min(2 * pause, SWEEP_SECONDS_MAX)

    def start() -> None:
        threading.Thread(target=sweep, name="torchft-gloo-abort", daemon=True).start()

    def give_up() -> None:
        is_late.set()
        start()

    failure: RuntimeError | None = None
    try:
        with abort.ends(start), context_timeout(give_up, timedelta(seconds=limit_s)):
            yield
    except RuntimeError as error:
        if not is_late.is_set():
            is_refused = "Connection refused" in str(error) and abort.reason is None
            if not (is_refused and isinstance(store, ExchangeStore) and store.is_gathered):
                raise
            listeners = _listeners_in(store, members.world_size)
            why = report_refusal(store.inner, members, listeners, str(error))
            raise RuntimeError(f"{why}{error}") from error
        failure = error
    finally:
        done.set()
    if is_late.is_set():  # also if Gloo took a connection made by `knock` for the peer
        late = f"not all peers were connected after {limit_s:g} s"
        abort.check()
        # This member's listener is still there: others may be about to ask it, too.
        if isinstance(store, ExchangeStore) and store.is_gathered:  # else the store is lost
            late += f": {explain_links(store.inner, members, _listeners_in(store, members.world_size))}"
        raise TimeoutError(late) from failure


def _listeners_in(store: Store, world_size: int) -> dict[int, Address]:
    """Return where the members listen, as far as they know."""
    said = {rank: store.get(f"{LISTENS}/{rank}").decode() for rank in range(world_size)}
    return {rank: parse_address(text) for rank, text in said.items() if text}


# -- whether native threads of this process have run since the last look
#
# To the kernel a thread that Python starts has the name of the thread that started it: if a callback on a
# native thread aborts a group, the thread that looks would watch itself. So threads that Python has started
# do not count.

_TASKS = "/proc/self/task"
# The first sleep may have begun before, and may be one within a piece of work, for a lock say.
SLEEPS = 2


class _Activity(NamedTuple):
    """A thread's state now, and its counters since it started."""

    is_asleep: bool
    slept: int  # how often it went to sleep by itself
    preempted: int


class ThreadWatch:
    """A watch over the threads with a certain name, which go to sleep between any two pieces of work, and one
    more thread, if it is given.

    Linux counts how often a thread was given the processor. A thread that sleeps now and has the same
    count as before has done nothing in between. No answer is yes while the process has no descriptor left.
    """

    def __init__(self, name: str, task: int | None = None) -> None:
        self._name, self._task = name, task
        self._first = self._last = _activities(name, task)

    def __str__(self) -> str:
        return f"{self._name}: {self._first} at first, {self._last} at the last look"

    def have_slept_since(self) -> bool:
        """Return whether all of them slept from the last look, or the constructor's, until this one."""
        before, self._last = self._last, _activities(self._name, self._task)
        now = self._last
        return now is not None and before == now and all(thread.is_asleep for thread in now.values())

    def have_paused(self) -> bool:
        """Return whether each thread has gone to sleep twice, or ended, so that its piece of work is over.

        It is False if there was no such thread.
        """
        now = _activities(self._name)
        if not self._first or now is None:
            self._first = self._first or now
            return False
        begun = [(thread, now[task]) for task, thread in self._first.items() if task in now]
        return all(later.slept >= thread.slept + SLEEPS for thread, later in begun)


def _drop(held: list[Any]) -> None:
    """Destroy what is held, which joins Gloo's threads, and wait for that until it is done, or all of them
    have slept for several looks in a row: as there are no connections, only a timeout wakes them then.
    """
    joins = threading.Thread(target=held.clear, name="torchft-gloo-end", daemon=True)
    try:
        joins.start()
    except RuntimeError:  # the system has no thread
        held.clear()
        return
    joins.join(STANDSTILL_LOOK_S)
    watch, looks = ThreadWatch(GLOO_THREADS, joins.native_id), 0
    while looks < STANDSTILL_LOOKS and joins.is_alive():
        joins.join(STANDSTILL_LOOK_S)
        looks = looks + 1 if watch.have_slept_since() else 0


def _activities(name: str, task: int | None = None) -> Mapping[str, _Activity] | None:
    """Return the activity of each thread; None if there is no descriptor left to look with."""
    foreign = threading._DummyThread  # stands for a thread that Python has not started
    own = {str(thread.native_id) for thread in threading.enumerate() if not isinstance(thread, foreign)}
    also = str(task)
    found = {}
    try:
        for number in {*os.listdir(_TASKS)} - own | {also}:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
                if number == also or Path(_TASKS, number, "comm").read_text().strip() == name:
                    lines = Path(_TASKS, number, "status").read_text().splitlines()
                    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                    found[number] = _Activity(
                        is_asleep=fields["State"].startswith("S"),
                        slept=int(fields["voluntary_ctxt_switches"]),
                        preempted=int(fields["nonvoluntary_ctxt_switches"]),
                    )
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        return None
    return found


def adopted(pg: dist.ProcessGroup) -> ProcessGroup:
    """Return the group itself if it is of this package; wrap a group of torch's that can be reconfigured.

    Raises:
        ConfigError: the group is neither of this package nor torch's Gloo that can be reconfigured.
    """
    if hasattr(pg, "configure"):
        return pg  # type: ignore[return-value] # a group with `configure` has this package's interface
    can_ask = isinstance(pg, dist.ProcessGroup) and CPU in pg._device_types
    gloo = pg._get_backend(CPU) if can_ask else None
    # The attribute `supports_reconfigure` of torch's Gloo is true in any case.
    if isinstance(gloo, TorchGloo) and getattr(gloo.options, "enable_reconfigure", False):
        return NativeProcessGroup(pg, gloo)
    raise ConfigError(
        f"no Manager can configure {pg!r:.99}: pass ProcessGroupGloo() or another group of this package, or "
        'what init_process_group("gloo", ..., enable_reconfigure=True) makes, from torch 2.14 on'
    )


class NativeProcessGroup(ReconfigurableProcessGroup):
    """torch's Gloo, made with `enable_reconfigure=True` and configured with the address of a store.

    torch brings the members together and moves the bytes; a generation of this package waits for the
    operations, ends when the Manager says so, and raises errors in the Manager's words. The members meet in
    the store that each of them gave to `init_process_group`: one, for the life of the job.

    Only its timeout ends an operation of torch's Gloo: torch's own abort leaves a blocked one blocked. So an
    abort here reconfigures the group to a single member, as soon as no operation of this process is under
    way: that closes the connections. The neighbours of a member that was killed fail at once, and as they
    leave, most of those that wait for them fail, too; Gloo misses some. Operations that are left, and all
    that wait for a member that is stopped, last until the group's timeout: choose it with that in mind.

    INVARIANT: an operation is never given up while torch may still write to its tensors.

    Args:
        pg: torch's group; its other owners can use it between `configure` and the next abort.
    """

    _backend_name = "native-gloo"

    def __init__(self, pg: Any, gloo: Any) -> None:
        super().__init__(gloo.options._timeout)
        self._torchs = pg
        self._gloo = gloo
        self._meeting = threading.Lock()  # torch has one configuration at a time
        self._latest: _NativeBackend | None = None

    def _create(self, members: GroupMembers, abort: AbortSignal) -> _NativeBackend:
        with self._meeting:
            abort.check()
            self._gloo._set_default_timeout(members.timeout)
            self._latest = backend = _NativeBackend(self, members)
            if members.world_size == 1:
                reconfigure_among(self._torchs, [self._torchs.get_reconfigure_handle()], members.timeout)
                return backend
            with meeting_store(members, abort) as store:
                seat = members.rank, members.world_size
                exchange_and_reconfigure(self._torchs, store, seat, members.timeout)
            return backend

    def _leave(self, backend: _NativeBackend) -> None:
        """Reconfigure to a single member, if this backend is still the latest."""
        with self._meeting:
            if self._latest is not backend:
                return
            self._latest = None
            try:
                reconfigure_among(self._torchs, [self._torchs.get_reconfigure_handle()], self._timeout)
            except RuntimeError as error:  # such as torch's store; the next `configure` reports it
                _logger.warning("torch's group could not leave its peers: %s", error)


class _NativeBackend(Backend):
    """torch's group in one configuration."""

    rest_s_max = math.inf  # torch ends every operation at its timeout, and nothing ends one before

    def __init__(self, owner: NativeProcessGroup, members: GroupMembers) -> None:
        self._owner = owner
        self._members = members

    def __str__(self) -> str:
        return f"torch's Gloo: {self._members}"

    @property
    def inner(self) -> object:
        return self._owner._gloo

    def methods(self) -> Mapping[str, Callable[..., Work]]:
        members = self._members
        return GlooGaps(self._owner._gloo, self._owner._torchs, members.rank, members.world_size).methods()

    def set_timeout(self, timeout: timedelta) -> None:
        self._owner._gloo._set_default_timeout(timeout)

    def break_off(self) -> None:
        """Do nothing before an abort: alone, the next operation would succeed, with a wrong result."""

    def is_still(self) -> bool:
        """Return False: only torch knows when it is done with its operations."""
        return False

    def close(self) -> None:
        """Leave the peers, which frees those that wait for this process."""
        self._owner._leave(self)


# -- the device

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


_descriptor_info = "/proc/self/fdinfo"
_creation = lock_of_each_process()  # keeps the devices of this package from being mistaken for each other
_devices: weakref.WeakSet[GlooDevice] = left_to_parent(Turn.SOCKETS, lambda one: one.leave_to_parent())
_transport: list[str] = []  # for which the environment asked at the first device


class GlooDevice:
    """A Gloo device whose connections can be broken from another thread.

    It is on the local address `host`; `GLOO_SOCKET_IFNAME` overrides it, as everywhere in torch.

    Gloo's own abort only marks the group: a thread that waits for a stopped peer waits until the timeout. The
    end of the connection ends such a wait at once, so `GlooDevice.cut` shuts down the sockets of the device.

    INVARIANT: abort touches no socket but this group's. Other threads open and close sockets all the time,
    and descriptor numbers are reused, so sockets are never told apart by when they appeared or by their
    numbers or addresses. Each device has an epoll instance of its own, with which Gloo registers every socket
    of that device for as long as it is open. This object holds a duplicate of that epoll descriptor, which
    therefore means this device until it is closed; the kernel lists what is registered (`/proc/self/fdinfo`)
    by descriptor and inode; and a socket is duplicated, its inode compared, and only then shut down. A
    descriptor that was closed and reused meanwhile has another inode.

    Gloo reads messages in order, and nothing at all while it has no buffer for the next one. If an operation
    fails before a peer's part of it has come, that part never gets a buffer. Every wait for a later message
    is then in vain, and Gloo does not notice the end of the connection either, although its thread is woken
    for it again and again. Such a connection is silenced (`silence`): it stays registered, but only for
    events that Gloo ignores, and each of them once. A connection that is silenced cannot touch a tensor.

    An abort opens no descriptor: the file that it reads stays open, and one descriptor is held in reserve for
    the duplicates. A process that has run out of descriptors may be the very one that has to abort.

    The epoll instance is recognised once, when the device is made: it watches a listening socket whose inode
    did not exist before. If another thread opened such a pair at the same moment there are two; then the
    device is dropped and another one made.
    """

    def __init__(self, host: str) -> None:
        self._lock = threading.Lock()
        self._epoll: _Epoll | None = None
        self._address: tuple[Any, ...] | None = None
        self._family: int = socket.AF_INET
        self.torch_device: object | None = self._create(host)
        _devices.add(self)

    @property
    def address(self) -> Address | None:
        """Where the device listens; None if that is not known."""
        return None if self._address is None else Address(self._address[0], self._address[1])

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

        A thread that waits for such a peer has no socket to shut down; after this a `cut` wakes it. Gloo's
        listener takes a connection for pair number n when the first eight bytes on it say n.
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
                before = {entry.st_ino for _, entry in open_descriptors() if stat.S_ISSOCK(entry.st_mode)}
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


def require_device() -> None:
    """Check that torch makes devices as the environment asks: on an interface, of a transport (TCP_TLS).

    Raises:
        ConfigError: it does not; without the check each step would fail, or traffic that was to be encrypted
            might be plain.
    """
    wanted = os.environ.get(TRANSPORT_ENV, "")
    if _transport and _transport[0] != wanted:
        raise ConfigError(
            f"{TRANSPORT_ENV} is {wanted!r:.50}, and was {_transport[0]!r:.50} when the first group of this "
            "process was made, which is when torch reads it: set it before"
        )
    if wanted or gloo_interface():
        _make_device(LOOPBACK)


def _make_device(host: str) -> object:
    transport, interface = os.environ.get(TRANSPORT_ENV, ""), gloo_interface()
    _transport.extend([] if _transport else [transport])
    try:
        if interface:
            return TorchGloo.create_device(interface=interface, lazy_init=False)
        return TorchGloo.create_device(hostname=host, lazy_init=False)
    except RuntimeError as error:
        said = f"{str(error).splitlines()[0]:.200}"
        if interface and (not transport or interface in said):
            raise ConfigError(
                f"{INTERFACE_ENV} is {interface!r:.50}, an interface of which Gloo finds no address: set it "
                f"to one of {interfaces()} that has one, or unset it"
            ) from error
        if not transport:
            raise
        raise ConfigError(
            f"torch {torch.__version__} makes no device of Gloo for {TRANSPORT_ENV}={transport!r:.50} "
            f"({said}). TCP_TLS takes a torch that was built with "
            f"USE_GLOO_WITH_OPENSSL=1, and the files that {TRANSPORT_ENV}_TCP_TLS_PKEY, _CERT and _CA_FILE "
            "name. Otherwise unset it, and encrypt the network, as by WireGuard (docs/security.md)"
        ) from error


def _epolls_that_listen_since(before: Collection[int]) -> Iterator[tuple[int, int, tuple[object, ...]]]:
    """Yield each epoll descriptor that watches a listening socket not in `before`, its family and address."""
    for fd, status in open_descriptors():
        with contextlib.suppress(OSError):
            if stat.S_IFMT(status.st_mode) or "eventpoll" not in os.readlink(f"/proc/self/fd/{fd}"):
                continue
            with contextlib.closing(_Epoll(fd)) as epoll:
                for _, own in epoll.sockets(besides=before):
                    if own is not None and _listens(own):
                        yield fd, own.family, own.getsockname()


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


# -- what Gloo lacks or gets wrong

# Collectives after which torch writes to the outputs: it copies results into them, or divides them for an
# average. The others only write into the outputs' memory.
WRITTEN_LATER = frozenset(
    {
        "allgather",
        "_allgather_base",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "gather",
        "reduce",
    }
)
_OVERLAPS = 1  # of torch's answers: no, yes, not known
_SUM, _AVERAGE = hash(ReduceOp.SUM), hash(ReduceOp.AVG)  # the numbers of the operations

# The dtypes that Gloo has code for; of complex numbers it sums and broadcasts the two parts.
MOVABLE = REDUCIBLE | {torch.bool}
_FLOATS = frozenset(dtype for dtype in MOVABLE if dtype.is_floating_point)
_COMPLEX = frozenset({torch.complex64, torch.complex128})
_ALL = MOVABLE | _COMPLEX | {torch.complex32}
REDUCING = frozenset(row.name for row in COLLECTIVES if "reduce" in row.name)
TAKING_COMPLEX = REDUCING | {"broadcast"}
# Those that each other operation than a sum takes, by its number.
_TAKEN = {_AVERAGE: _FLOATS | _COMPLEX}
_TAKEN |= dict.fromkeys(map(hash, (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)), MOVABLE)
_TAKEN |= dict.fromkeys(map(hash, (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)), MOVABLE - _FLOATS)


class GlooGaps:
    """Collectives that torch's Gloo implements only in part, built on those that it, or torch's shell, has.

    * Its reduce-scatters are allreduces that copy the result in `wait`: they have no future, never say that
      they are completed, and do not tell a failure from a wait that is not over. Here the ranks exchange
      their parts and each adds up its own, in the order of ranks: half the bytes of an allreduce.
    * Its gathers into one tensor do not take the stacked shape, which NCCL takes.
    * For a tensor that is not contiguous it moves the memory from the first element on, gaps included, and
      overwrites what lies between the elements, without an error. Such a tensor is copied here.
    * In an average of several tensors it divides only the first, and it takes no average of sparse tensors.
    * It has begun when it finds that it has no code for a dtype, or none for an operation on it, or that an
      alltoall is not split into parts that fit, and then the group is of no use. Such a call is refused here.
    * A message from a rank that there is not ends the process, and one to it asks the store: refused, too.
    * For a view that negates, it moves the values before negation, and it refuses a view that conjugates only
      after its peers have begun. Such a view is copied, too.
    """

    def __init__(self, gloo: TorchGloo, shell: object, rank: int, world_size: int) -> None:
        self._gloo = methods_of(gloo, shell)
        self._rank = rank
        self._world_size = world_size

    def methods(self) -> dict[str, Callable[..., Work]]:
        """Return Gloo's collectives, by the names of their rows, without the gaps."""
        gathers = "_allgather_base", "allgather_into_tensor_coalesced"
        methods = {}
        for name, run in self._gloo.items():
            joined = functools.partial(self._gather, run) if name in gathers else run
            is_simple = not BY_NAME[name].tensor_places
            methods[name] = run if is_simple else functools.partial(_run_contiguous, BY_NAME[name], joined)
            if name in ("send", "recv"):
                methods[name] = functools.partial(self._to_peer, BY_NAME[name], methods[name])
        own = (
            self.allreduce,
            self.alltoall_base,
            self.reduce_scatter,
            self._reduce_scatter_base,
            self.reduce_scatter_tensor_coalesced,
        )
        return methods | {method.__name__: method for method in own}

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        """Allreduce; divide the sum for an average of several tensors, or of sparse ones."""
        row, reduce = BY_NAME["allreduce"], self._gloo["allreduce"]
        if not kwargs and _are_simple(row, args):
            return reduce(*args)  # type: ignore[no-any-return]
        call = row.bind(args, kwargs)
        is_one = len(call.outputs) == 1 and call.outputs[0].layout is torch.strided
        if is_one or call.reduce_op != ReduceOp(ReduceOp.AVG):
            return _run_contiguous(row, reduce, *args, **kwargs)
        _refuse_dtypes(row, call.outputs, _AVERAGE)
        options = AllreduceOptions()
        options.timeout = call.timeout or options.timeout

        def take() -> list[Any]:
            divide(call.outputs, self._world_size)
            return call.result

        return JointOperation([_run_contiguous(row, reduce, list(call.outputs), options)], take)

    def _gather(self, gather: Callable[..., Work], outputs: Any, sources: Any, *options: Any) -> Work:
        """Gather into tensors of either shape: the concatenation or the stack."""
        if isinstance(outputs, Tensor):
            return gather(*self._joined(outputs, sources), *options)
        if len(outputs) != len(sources):
            raise ProcessGroupError(f"{len(outputs)} outputs for {len(sources)} inputs")
        pairs = list(map(self._joined, outputs, sources))
        return gather([output for output, _ in pairs], [source for _, source in pairs], *options)

    def _to_peer(self, row: Collective, run: Callable[..., Work], *args: Any, **kwargs: Any) -> Work:
        """Send a message to another rank, or receive one from it."""
        peer = operator.index(Call(row, args, kwargs, None, None).argument(1, *PEER_NAMES))
        if peer == self._rank or not 0 <= peer < self._world_size:
            raise ProcessGroupError(
                f"{row.name}: rank {peer} is no other rank of the group, which has {self._world_size}"
            )
        return run(*args, **kwargs)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Work:
        """Refuse wrong splits, which Gloo finds only after it has begun, and then the group is of no use."""
        call = BY_NAME["alltoall_base"].bind(args, kwargs)
        own = [
            self._own_part(*each) for each in zip((call.outputs, call.inputs), call.split_sizes, strict=True)
        ]
        if own[0] != own[1]:
            raise ProcessGroupError(
                f"rank {self._rank} would send {own[1]} numbers to itself, and receive {own[0]} of them"
            )
        if share_memory(call.outputs, call.inputs):  # Gloo would send what it has just received
            args = call.outputs, call.inputs.clone(), *args[2:]
            kwargs = {
                name: value for name, value in kwargs.items() if name not in call.collective.tensor_names
            }
        return _run_contiguous(call.collective, self._gloo["alltoall_base"], *args, **kwargs)

    def _own_part(self, tensor: Tensor, sizes: list[int]) -> int:
        """Return how many numbers of a tensor that is split into rows are this rank's own."""
        rows, ranks = tensor.shape[0] if tensor.dim() else 0, self._world_size
        parts = sizes or [rows // ranks] * ranks
        if len(parts) != ranks or sum(parts) != rows or min(parts) < 0:
            raise ProcessGroupError(f"{rows} rows cannot be split into {sizes or ranks} for {ranks} ranks")
        return math.prod(tensor.shape[1:]) * parts[self._rank]

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce lists of parts; each rank gets its own part."""
        call = BY_NAME["reduce_scatter"].bind(args, kwargs)
        refuse_unfit(call)
        if len(call.outputs) != 1 or len(call.inputs) != 1:
            raise ProcessGroupError(f"reduce_scatter has one output, not {len(call.outputs)}")
        (output,), (parts,) = call.outputs, call.inputs
        if len(parts) != self._world_size:
            raise ProcessGroupError(f"reduce_scatter got {len(parts)} inputs for {self._world_size} ranks")
        for place, part in enumerate(parts):
            _check(output, part, output.shape if place == self._rank else part.shape)
        joined = torch.cat([part.reshape(-1) for part in parts])
        sizes = [part.numel() for part in parts]
        work, finish = self._reduce_parts(output, joined, sizes, call.reduce_op, call.timeout)
        return JointOperation([work], finish, on_cpu=output.is_cpu)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Work:
        # The form in which torch and this package call it.
        if len(args) == 3 and type(args[1]) is Tensor and type(args[2]) is ReduceScatterOptions:
            output, source, options = args
            if output.dim() and source.shape == (self._world_size * output.shape[0], *output.shape[1:]):
                sizes = [output.numel()] * self._world_size
                work, finish = self._reduce_parts(output, source, sizes, options.reduceOp, options.timeout)
                return JointOperation([work], finish, on_cpu=output.is_cpu)
        call = BY_NAME["_reduce_scatter_base"].bind(args, kwargs)
        return self._reduce_tensors(call, [call.outputs], [call.inputs])

    def reduce_scatter_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce several tensors, each of which is the concatenation or the stack of all ranks' parts."""
        call = BY_NAME["reduce_scatter_tensor_coalesced"].bind(args, kwargs)
        if len(call.outputs) != len(call.inputs):
            raise ProcessGroupError(f"{len(call.outputs)} outputs for {len(call.inputs)} inputs")
        return self._reduce_tensors(call, call.outputs, call.inputs)

    def _reduce_tensors(self, call: Call, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Work:
        refuse_unfit(call)
        ranks, pairs = self._world_size, list(zip(outputs, sources, strict=True))
        for output, source in pairs:  # all are checked before any is under way
            joined = [(ranks * output.shape[0], *output.shape[1:])] if output.dim() else []
            _check(output, source, *joined, (ranks, *output.shape))
        started = [
            self._reduce_parts(output, source, [output.numel()] * ranks, call.reduce_op, call.timeout)
            for output, source in pairs
        ]

        def finish() -> list[Any]:
            for _, finish_one in started:  # in their order, as two outputs may be the same tensor
                finish_one()
            return list(outputs)

        is_one_on_cpu = len(outputs) == 1 and outputs[0].is_cpu
        return JointOperation([work for work, _ in started], finish, on_cpu=is_one_on_cpu)

    def _reduce_parts(
        self, output: Tensor, source: Tensor, sizes: list[int], op: ReduceOp, timeout: timedelta | None
    ) -> tuple[Work, Finish]:
        """Begin to reduce the flat parts of `source`, of `sizes` elements, each into its rank's `output`.

        Return the work that moves the parts, and the function that finishes the operation after it. No rank
        receives more bytes than in an allreduce: the ranks exchange their parts unless one of them gets more
        than twice an even part.
        """
        if source.dtype != output.dtype:
            raise ProcessGroupError(f"the input is {source.dtype}, the output {output.dtype}")
        number, ranks = hash(op), self._world_size
        _refuse_dtypes(BY_NAME["reduce_scatter"], [output], number)
        is_sum = number in (_SUM, _AVERAGE)
        total = source.numel()
        is_even = bool(total) and max(sizes) * ranks <= 2 * total
        is_on_cpu = output.is_cpu and source.is_cpu
        if not (is_sum and is_even and is_on_cpu and output.dtype in REDUCIBLE):
            return self._reduce_whole(output, source, sum(sizes[: self._rank]), op, timeout)
        own = output.numel()
        parts = torch.empty(ranks * own, dtype=output.dtype, device="cpu")
        flat = source.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        options = AllToAllOptions()
        options.timeout = timeout or options.timeout

        def add_up() -> list[Any]:
            with writing_to(output):
                output.copy_(torch.sum(parts.view(ranks, *output.shape), 0, dtype=output.dtype))
                if number == _AVERAGE:
                    output.div_(ranks)
            return [output]

        return self._gloo["alltoall_base"](parts, flat, [own] * ranks, sizes, options), add_up

    def _reduce_whole(
        self, output: Tensor, source: Tensor, start: int, op: ReduceOp, timeout: timedelta | None
    ) -> tuple[Work, Finish]:
        """Begin to reduce as `_reduce_parts`, but all parts on all ranks; the own one begins at `start`."""
        options = AllreduceOptions()
        options.reduceOp = op
        options.timeout = timeout or options.timeout
        whole = source.detach().clone().reshape(-1)

        def take() -> list[Any]:
            with writing_to(output):
                output.copy_(whole.narrow(0, start, output.numel()).view(output.shape))
            return [output]

        return self._gloo["allreduce"]([whole], options), take

    def _joined(self, output: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output as a concatenation, which Gloo takes, and the input that fits it."""
        if output.shape != (self._world_size, *source.shape):
            return output, source
        if source.dim() == 0:
            return output, source.view(1)
        return output.view(self._world_size * source.shape[0], *source.shape[1:]), source


def _run_contiguous(row: Collective, run: Callable[..., Work], *args: Any, **kwargs: Any) -> Work:
    """Run a call on copies of its tensors that have gaps, or are not what lies in memory."""
    try:
        if not kwargs and _are_simple(row, args):
            return run(*args)
        call = row.bind(args, kwargs)
        refuse_unfit(call)
        if row.name in POINT_TO_POINT:  # Gloo copies only the tensors of collectives to the CPU
            for tensor in tensors_of((call.outputs, call.inputs)):
                if not tensor.is_cpu:
                    raise CollectiveRefusedError(
                        f"Gloo sends and receives the memory of a CPU, and the tensor is on {tensor.device}: "
                        f"move it to the CPU, or {row.name} it over NCCL"
                    )
        else:
            number = hash(call.reduce_op) if row.name in REDUCING else _SUM
            _refuse_dtypes(row, tensors_of((call.outputs, call.inputs)), number)
        for output in tensors_of(call.outputs):
            if output.layout is torch.strided and torch._debug_has_internal_overlap(output) == _OVERLAPS:
                raise CollectiveRefusedError(
                    f"{row.name} cannot write to a tensor whose elements share memory, as one that was "
                    "expanded: pass a clone"
                )
        copies: dict[int, Tensor] = {}

        def simple(tensor: Tensor) -> Tensor:
            if tensor.layout is not torch.strided:
                # It is not copied, because a result replaces the memory of a sparse tensor, and only the copy
                # would get it.
                return tensor
            if _is_plain(tensor):
                return tensor.detach()
            if (copy := copies.get(id(tensor))) is None:
                copy = copies[id(tensor)] = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return copy

        positional, named = call.with_tensors(simple)
        # In the mode in which its outputs can be written to: Gloo's thread takes it over.
        with writing_to(*tensors_of(row.bind(positional, named).outputs)):
            work = run(*positional, **named)
        back = [(output, copies[id(output)]) for output in tensors_of(call.outputs) if id(output) in copies]
        if not back:
            return work
        waits = row.name in POINT_TO_POINT  # sends and receives have no future
        return JointOperation([work], functools.partial(_copy_back, call, back), waits=waits)
    finally:
        del run  # an error that the caller keeps would keep this frame, and the group with it


def _copy_back(call: Call, back: list[tuple[Tensor, Tensor]]) -> list[Any]:
    for output, copy in back:
        with writing_to(output):
            output.copy_(copy)
    return call.result


def _are_simple(row: Collective, args: tuple[Any, ...]) -> bool:
    """Return whether no tensor argument needs a copy, or another mode. These are plain loops, because every
    operation pays for them."""
    if len(args) < len(row.tensor_places):
        return False  # an argument is missing, which `bind` reports best
    is_written = row.name in WRITTEN_LATER
    # Of integers the operation counts, too. To look for a bitwise one of floats takes a microsecond: Gloo
    # refuses it before it sends anything (`errors.is_refusal`).
    dtypes = _FLOATS if row.name in REDUCING else MOVABLE
    for place in row.tensor_places:
        nested = args[place]
        if type(nested) is list and len(nested) > 1 and row.name in JOINING:
            return False  # the tensors may share memory
        for items in nested if type(nested) is list else (nested,):
            for item in items if type(items) is list else (items,):
                is_plain = (
                    type(item) is Tensor
                    and item.dtype in dtypes
                    and item.is_cpu
                    and item.is_contiguous()
                    and not item.requires_grad
                )
                if not is_plain or item.is_neg() or item.is_conj():
                    return False
                if is_written and item.is_inference():
                    return False  # `_run_contiguous` sets the mode for such tensors
    return True


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's elements lie in memory as they are, in contiguous order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _refuse_dtypes(row: Collective, tensors: Iterable[Tensor], operation: int) -> None:
    """Refuse a dtype that Gloo has no code for. `operation` is that of a reduction, as a hash."""
    for tensor in tensors:
        moved = _ALL if row.name in TAKING_COMPLEX and tensor.layout is torch.strided else MOVABLE
        if (dtype := tensor.dtype) not in moved or dtype not in _TAKEN.get(operation, _ALL):
            name, cure = row.name, "its bytes, `.view(torch.uint8)`"
            if name in REDUCING:
                name, cure = f"{name} by {REDUCE_OPS[operation]}", "another dtype"
            raise ProcessGroupError(f"Gloo has no {name} of {dtype}: pass {cure}")


def _check(output: Tensor, source: Tensor, *shapes: Sequence[int]) -> None:
    if source.dtype != output.dtype:
        raise ProcessGroupError(f"the input is {source.dtype}, the output {output.dtype}")
    if not any(tuple(source.shape) == tuple(shape) for shape in shapes):
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ProcessGroupError(f"the input's shape is {tuple(source.shape)}, not {wanted}")


# -- which members do not reach each other: for the errors of a group whose time is up
#
# Gloo says that a peer is missing, and not which one; and a member that reaches all others waits as well, for
# one that waits for a third. So whoever gives up asks the listeners of all others first. As long as they have
# the store in which they meet, the members exchange there what they have found. Who is refused does not wait,
# and leaves word there: of a member that is still there that is a firewall's doing.

ASK_S = 2.5  # for the answers of all
# In which the others say what they have found: most of them give up at the same time, and ask for a second.
REPORT_S = 2.0

NAMED_MAX = 4  # ranks whose links a text names

Links = Mapping[int, Iterable[int]]
Listeners = Mapping[int, Address]  # the members', by rank


def explain_links(store: AbortableStore, members: GroupMembers, listeners: Listeners) -> str:
    """Return what keeps the members from connecting, as far as this one can find out in a few seconds."""
    failures = _failures(members.rank, listeners)
    refusing = [rank for rank, failure in failures.items() if isinstance(failure, ConnectionRefusedError)]
    silent = [rank for rank, failure in failures.items() if is_silence(failure)]
    found: dict[int, Iterable[int]] = {members.rank: silent}
    with contextlib.suppress(ProcessGroupError, OSError):  # this rank's own answers are enough for an error
        found |= _exchange(store, members, silent)
    ended = {*refusing} - found.keys()  # before they could say anything
    found = {one: {*others} - ended for one, others in found.items()}
    return describe_links(members.rank, found, refusing, listeners)


def report_refusal(store: AbortableStore, members: GroupMembers, listeners: Listeners, error: str) -> str:
    """Tell the members that wait on who refuses this one, as Gloo's error says; return words for that."""
    # Gloo writes the port as it is sent, so most machines read another number.
    at = {rank: f"remote=[{to.host}]:{socket.htons(to.port)}$" for rank, to in listeners.items()}
    refusing = [rank for rank, remote in at.items() if remote in error]
    store.set_timeout(timedelta(seconds=REPORT_S))
    with contextlib.suppress(ProcessGroupError, OSError):
        there = [rank for rank in refusing if not store.check([f"silent/{rank}"])]
        store.set(f"silent/{members.rank}", ",".join(map(str, there)))
    return f"{describe_links(members.rank, {}, refusing, listeners)}: " if refusing else ""


def _failures(rank: int, listeners: Listeners) -> dict[int, OSError]:
    """Return why connections to other members fail."""
    loop = coordination_loop()
    others = sorted(listeners.keys() - {rank})
    return loop.run(ask_all(others, lambda other: why_out_of_reach(listeners[other]), ASK_S, loop.clock))


def _exchange(store: AbortableStore, members: GroupMembers, silent: Iterable[int]) -> dict[int, list[int]]:
    """Say whom this rank does not reach; return what each rank says that has done so."""
    keys = {rank: f"silent/{rank}" for rank in range(members.world_size)}
    store.set_timeout(timedelta(seconds=REPORT_S))
    store.set(keys[members.rank], ",".join(map(str, silent)))
    try:
        store.wait(list(keys.values()))
    except TimeoutError:
        store.connect(insists=False)
    said = {rank: store.get(key) for rank, key in keys.items() if store.check([key])}
    return {rank: read_ranks(text, members.world_size) for rank, text in said.items()}


def read_ranks(said: bytes, world_size: int) -> list[int]:
    """Read the ranks that a member has named; others than those of the group are left out."""
    return [rank for rank in range(world_size) if str(rank).encode() in said.split(b",")]


def describe_links(rank: int, found: Links, refusing: Iterable[int], listeners: Listeners) -> str:
    """Return a sentence on who does not reach whom, and the cure.

    Args:
        found: the ranks from whose hosts nothing came, by the rank that has asked them.
        refusing: the ranks whose hosts have refused the caller.
    """

    def named(one: int) -> str:
        return f"{one} ({listeners[one].host})" if one in listeners else str(one)

    pairs = {frozenset((one, other)) for one, others in found.items() for other in others if one != other}
    texts = list[str]()
    while pairs and len(texts) < NAMED_MAX:
        counts = Counter(one for pair in sorted(map(sorted, pairs)) for one in pair)
        [(most, _)] = counts.most_common(1)
        partners = sorted(one for pair in pairs if most in pair for one in pair if one != most)
        pairs = {pair for pair in pairs if most not in pair}
        if len(partners) == 1:
            texts.append(f"ranks {named(most)} and {named(partners[0])} do not reach each other")
        else:
            texts.append(f"rank {named(most)} and ranks {partners} do not reach each other")
    if texts:
        return f"{', '.join(texts)}; check the network between them, and their firewalls"
    if refusing:
        return (
            f"ranks {sorted(refusing)} refuse connections: their processes have ended, or gave up before; or "
            "a firewall is between"
        )
    return (
        f"rank {rank} reaches the hosts of all others; two of these may not reach each other, or a process "
        "is stopped: the errors of the others say more"
    )
