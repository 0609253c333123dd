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
import errno
import functools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, Work
from torch._C._distributed_c10d import ProcessGroup as TorchProcessGroup
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo
from torch.distributed.distributed_c10d import GroupName

from lighthouse.address import LOOPBACK
from torchft_like.errors import ConfigError
from torchft_like.futures import context_timeout
from torchft_like.process_group.base import ProcessGroup
from torchft_like.process_group.configuration import AbortSignal
from torchft_like.process_group.generation import CONFIGURE_GRACE_S, LOOK_PAUSE_S, AbandonableOperation
from torchft_like.process_group.gloo.device import GlooDevice, require_transport
from torchft_like.process_group.gloo.gaps import GlooGaps
from torchft_like.process_group.handles import exchange_and_reconfigure, reconfigure_among
from torchft_like.process_group.store import ExchangeStore, GroupMembers, meeting_store
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup
from torchft_like.runtime.hosts import local_host_towards

CPU = torch.device("cpu")

# The threads that run the collectives, and how many there are: so many collectives are under way at once, and
# several keep a slow link busy.
GLOO_THREADS = "pt_gloo_runloop"
GLOO_THREADS_COUNT = 8
# The thread that moves bytes; without connections there are none to move.
GLOO_LOOP = "gloo_tcp_loop"
# Gloo closes connections that were cut, if it ever does, as soon as its thread runs.
LOOKS_UNTIL_SILENCED = 15
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
        ConfigError: the environment asks for a transport (GLOO_DEVICE_TRANSPORT) that this torch has not.
    """

    _backend_name = "torchft-gloo"

    def _set_up(self) -> None:
        require_transport()

    def _create(self, members: GroupMembers, abort: AbortSignal) -> _GlooBackend:
        if members.world_size == 1:
            return _GlooBackend(HashStore(), LOOPBACK, members, abort)
        with meeting_store(members, abort) as store:
            host = local_host_towards(members.store.server.host, members.store.server.port)
            heard = ExchangeStore(store, members.rank, members.world_size)
            return _GlooBackend(heard, host, members, abort)


class _GlooBackend:
    """One Gloo group, and the device that its connections belong to."""

    rest_s_max = None

    def __init__(self, store: Store, host: str, members: GroupMembers, abort: AbortSignal) -> None:
        self._abort = abort
        self._members = members
        self._device = GlooDevice(host)
        self._looks = 0
        self._pool: ThreadWatch | None = None  # Gloo's threads, since no connection is left
        self._loop: ThreadWatch | None = None  # Gloo's loop, since connections were silenced
        abort.add(self._device.cut)
        try:
            with _broken_off(self._device, members, abort):
                self._gloo: TorchGloo | None = _make_gloo(store, self._device, members)
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
        found = GlooGaps(gloo, self._shell, self._members.rank, self._members.world_size).methods()
        found["recv_anysource"] = functools.partial(self._receive, found["recv_anysource"])
        return found

    def _receive(self, receive: Callable[..., Work], *args: Any, **kwargs: Any) -> Work:
        """Receive from any rank, and end at an abort: Gloo notices no broken connection in this operation."""
        return AbandonableOperation(receive(*args, **kwargs), self._abort)

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
        """Close everything. Gloo's destructor joins its threads, which the cut has freed."""
        self._abort.remove(self._device.cut)
        self._device.cut()
        for _ in range(LOOKS_UNTIL_SILENCED + 1):
            if not self._is_connected():
                break
            time.sleep(LOOK_PAUSE_S)
        self._shell = None
        self._gloo = None
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
def _broken_off(device: GlooDevice, members: GroupMembers, abort: AbortSignal) -> Iterator[None]:
    """Break every connection at an abort, again and again, while Gloo connects in the block.

    Once is not enough: Gloo tries again, and goes on to the next peer. The group's timeout does not end it
    either: Gloo takes it for each attempt.

    Raises:
        TimeoutError: the timeout is over.
    """
    done, is_late = threading.Event(), threading.Event()
    limit_s = members.timeout.total_seconds() + CONFIGURE_GRACE_S

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
            raise
        failure = error
    finally:
        done.set()
    if is_late.is_set():  # also if Gloo took a connection made by `knock` for the peer
        raise TimeoutError(f"not all peers were connected after {limit_s:g} s") from failure


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
    """A watch over the threads with certain names, which go to sleep between any two pieces of work.

    Linux counts how often a thread was given the processor. A thread that sleeps now and has the same
    count as before has done nothing in between. No answer is yes while the process has no descriptor left.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._first = self._last = _activities(name)

    def __str__(self) -> str:
        return f"{self._name}: {self._first} at first, {self._last} at the last look"

    def have_slept_since(self) -> bool:
        """Return whether all of them slept from the last look, or the constructor's, until this one."""
        before, self._last = self._last, _activities(self._name)
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


def _activities(name: str) -> Mapping[str, _Activity] | None:
    """Return the activity of each thread; None if there is no descriptor left to look with."""
    foreign = threading._DummyThread  # stands for a thread that Python has not started
    own = {str(thread.native_id) for thread in threading.enumerate() if not isinstance(thread, foreign)}
    found = {}
    try:
        for task in set(os.listdir(_TASKS)) - own:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since
                if Path(_TASKS, task, "comm").read_text().strip() == name:
                    lines = Path(_TASKS, task, "status").read_text().splitlines()
                    fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
                    found[task] = _Activity(
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
        gloo: the backend of that group.
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


class _NativeBackend:
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
