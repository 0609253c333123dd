"""The injectors of each kind of fault.

An injector is a context manager: it injects on entry, returns what it did, and takes it back on exit, also
when the run is interrupted in between. None of them waits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

import psutil

from torchft_like.testing.chaos.job import JOIN_TIMEOUT_MS, ChaosJob
from torchft_like.testing.chaos.network import Network, Rules
from torchft_like.testing.chaos.schedule import Planned
from torchft_like.testing.cluster import Group, Rank
from torchft_like.testing.processes import RunningProcess, holds_within, kill_all, why_no_namespace

DISK_KB = 256
_READY_S_MAX = 5.0
_RUNS_S = 0.05  # how long a starved replica runs between two stops


@dataclass
class Injected:
    """A fault that was injected. `details` may still grow until the fault is lifted."""

    victims: tuple[str, ...] = ()
    details: dict[str, float | str] = field(default_factory=dict)


@dataclass
class Target:
    """The job and the disk to which the faults of a run are done."""

    job: ChaosJob
    disk: SmallDisk | None = None

    def replica(self, planned: Planned, offset: int = 0) -> Group:
        """Return the victim, or the replica group so many places after it."""
        return self.job.replicas[(planned.victim + offset) % len(self.job.replicas)]

    def rank(self, planned: Planned) -> Rank:
        """Return one rank of the victim."""
        ranks = self.replica(planned).ranks
        return ranks[planned.number % len(ranks)]

    def half(self, planned: Planned) -> list[Group]:
        """Return the victim and those after it, together half of all, rounded down, but one at least."""
        return [self.replica(planned, offset) for offset in range(max(1, len(self.job.replicas) // 2))]

    @property
    def network(self) -> Network:
        if self.job.network is None:
            raise RuntimeError("this fault needs a network of namespaces")
        return self.job.network


Injector = Callable[[Target, Planned], AbstractContextManager[Injected]]


def inject(target: Target, planned: Planned) -> AbstractContextManager[Injected]:
    """Inject a fault for the time of a `with` block."""
    return INJECTORS[planned.kind](target, planned)


@contextmanager
def _signal(number: signal.Signals, *chosen: Group | RunningProcess) -> Iterator[Injected]:
    """Signal the victims, or the lighthouse; SIGSTOP is lifted at the end."""
    victims = tuple(each.name for each in chosen if isinstance(each, Group | Rank))
    first = chosen[0]
    for each in chosen:
        each.signal(number)
    try:
        yield Injected(victims, {"rank": first.number} if isinstance(first, Rank) else {})
    finally:
        for each in chosen if number == signal.SIGSTOP else ():
            each.signal(signal.SIGCONT)


def _kill_rank(target: Target, planned: Planned) -> AbstractContextManager[Injected]:
    if not target.job.settings.spares:
        may_end(target.replica(planned))  # its other ranks end by themselves
    return _signal(signal.SIGKILL, target.rank(planned))


@contextmanager
def _starve(target: Target, planned: Planned) -> Iterator[Injected]:
    """Run so many busy processes on each core; there is no victim, as all replica groups have to stay.

    Each has a session of its own: Linux gives the processor to sessions, and to processes within them.
    """
    cores = len(os.sched_getaffinity(0))
    command = [sys.executable, "-c", "while True: pass"]
    busy = [RunningProcess(command) for _ in range(int(planned.amount) * cores)]
    try:
        yield Injected(details={"busy": len(busy), "cores": cores})
    finally:
        kill_all(busy)


@contextmanager
def _slow(target: Target, planned: Planned) -> Iterator[Injected]:
    """Stop the victim again and again, for less than a PING may take; all replica groups have to go on."""
    victim, is_over = target.replica(planned), threading.Event()
    injected = Injected(details={"host": victim.name, "delay_s": planned.amount / 2, "delayed": 0})

    def starve() -> None:
        for times in itertools.count(1):
            victim.signal(signal.SIGSTOP)
            is_over.wait(planned.amount)
            victim.signal(signal.SIGCONT)
            injected.details["delayed"] = times
            if is_over.wait(_RUNS_S):
                return

    with _in_thread(starve, is_over):
        yield injected


@contextmanager
def _in_thread(act: Callable[[], None], is_over: threading.Event) -> Iterator[None]:
    """Act beside a block; its end is told by the event, and waits for the act's."""
    thread = threading.Thread(target=act, name="chaos_act")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _let_idle(target: Target, planned: Planned) -> Iterator[Injected]:
    """Let the victims start again without joining, and then kill another one, so that most of the job does
    not train.
    """
    idle, is_over = target.half(planned), threading.Event()
    victims = [*idle, target.replica(planned, len(idle))]
    for victim in idle:
        _ask_worker(target, "idle", victim, str(1.5 * JOIN_TIMEOUT_MS / 1000))
        victim.signal(signal.SIGKILL)

    def kill_another() -> None:
        while any(target.job.triggers.iterdir()):  # a worker takes its own once it is registered
            if is_over.wait(_RUNS_S):
                return
        victims[-1].signal(signal.SIGKILL)

    with _in_thread(kill_another, is_over):
        yield Injected(tuple(victim.name for victim in victims))


@contextmanager
def _give_up(target: Target, planned: Planned) -> Iterator[Injected]:
    victim = target.replica(planned)
    _ask_worker(target, "give-up", victim)
    yield Injected((victim.name,))


@contextmanager
def _sicken(target: Target, planned: Planned) -> Iterator[Injected]:
    victim = target.replica(planned)
    _ask_worker(target, "sick", victim)
    victim.signal(signal.SIGKILL)
    try:
        yield Injected((victim.name,))
    finally:
        clear_triggers(target)


@contextmanager
def _invite_a_stranger(target: Target, planned: Planned) -> Iterator[Injected]:
    """Start a foreign trainer; there is no victim, as no member of the job may notice."""
    stranger = target.job.start_stranger()
    try:
        yield Injected(details={"stranger": stranger.name})
    finally:
        for rank in stranger.ranks:
            rank.kill()


def _ask_worker(target: Target, what: str, victim: Group, text: str = "") -> None:
    (target.job.triggers / f"{what}.{victim.name}").write_text(text)


@contextmanager
def _leave_in_join(target: Target, planned: Planned) -> Iterator[Injected]:
    victims = target.replica(planned), target.replica(planned, 1)
    with _signal(signal.SIGTERM, victims[0]):
        yield Injected(tuple(victim.name for victim in victims), {"second_after_s": planned.duration_s})
    with _signal(signal.SIGTERM, victims[1]):
        pass


@contextmanager
def _kill_lighthouse(target: Target, planned: Planned) -> Iterator[Injected]:
    target.job.kill_lighthouse()
    try:
        yield Injected(details={"away_s": planned.duration_s})
    finally:
        target.job.start_lighthouse()


@contextmanager
def _hit_baby(target: Target, planned: Planned, number: signal.Signals) -> Iterator[Injected]:
    """Signal the backends, which are the deepest descendants; the fork server above them stays."""
    found = ((replica, _backends(replica)) for replica in reversed(target.job.replicas))
    victim, backends = next(((replica, some) for replica, some in found if some), (None, []))
    _signal_all(backends, number)
    try:
        yield Injected((victim.name,) if victim else (), {"backends": len(backends)})
    finally:
        _signal_all(backends, signal.SIGCONT)


@contextmanager
def _spoil(target: Target, planned: Planned) -> Iterator[Injected]:
    """Ask the workers to spoil the next state that one of them sends, and make one heal.

    The trigger stays until a worker takes it, as a heal has no time limit; the next fault removes it.
    """
    clear_triggers(target)
    (target.job.triggers / planned.kind).touch()
    with _signal(signal.SIGKILL, target.replica(planned)) as injected:
        yield injected


@contextmanager
def _exhaust_descriptors(target: Target, planned: Planned) -> Iterator[Injected]:
    """Take the victim's descriptors while another one is killed, so that it has to connect anew.

    The victim may end: Gloo ends its process when it cannot accept a connection.
    """
    victim, other = target.replica(planned), target.replica(planned, 1)
    may_end(victim)
    limits = [(rank.pid, _limit_descriptors(rank.pid)) for rank in victim.ranks]
    other.signal(signal.SIGKILL)
    try:
        yield Injected(tuple({victim.name, other.name}), {"exhausted": victim.name, "killed": other.name})
    finally:
        for pid, before in limits:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextmanager
def _fill_disk(target: Target, planned: Planned) -> Iterator[Injected]:
    if target.disk is None:
        raise RuntimeError("this fault needs a disk of its own")
    target.disk.fill()
    try:
        yield Injected()
    finally:
        target.disk.free()


@contextmanager
def _rule(
    target: Target, rules: Rules, victims: tuple[str, ...] = (), host: str = "", **details: float | str
) -> Iterator[Injected]:
    """Apply rules; the details get the switch's counts, and how much a host has sent again."""
    network, injected = target.network, Injected(victims, {**details, **({"host": host} if host else {})})
    before, sent_again = network.counts(), network.retransmits(host) if host else 0
    try:
        network.apply(rules)
        yield injected
    finally:
        network.apply(Rules())
        injected.details.update(network.counts() - before)
        if host:
            injected.details["retransmits"] = network.retransmits(host) - sent_again


def _cut_off(
    target: Target, hosts: list[Group], *, incoming: bool = True
) -> AbstractContextManager[Injected]:
    names = tuple(replica.name for replica in hosts)
    return _rule(target, target.network.cut_off(names, incoming=incoming), names)


def _cut_link(target: Target, planned: Planned) -> AbstractContextManager[Injected]:
    """Cut a link; the job decides which of the two is the victim and has to leave until the link works
    again.
    """
    one, other = target.replica(planned).name, target.replica(planned, 1).name
    return _rule(target, Rules(cut=frozenset({(one, other), (other, one)})), one=one, other=other)


def _lose(target: Target, planned: Planned) -> AbstractContextManager[Injected]:
    """Lose packets; there is no victim, as all replica groups have to go on."""
    host = target.replica(planned).name
    return _rule(target, Rules(loss={host: planned.amount}), host=host, loss=planned.amount)


def _delay(target: Target, planned: Planned) -> AbstractContextManager[Injected]:
    host = target.replica(planned).name
    return _rule(target, Rules(delay_s={host: planned.amount}), host=host, delay_s=planned.amount)


INJECTORS: Mapping[str, Injector] = MappingProxyType(
    {
        "kill": lambda target, planned: _signal(signal.SIGKILL, target.replica(planned)),
        "kill-half": lambda target, planned: _signal(signal.SIGKILL, *target.half(planned)),
        "kill-rank": _kill_rank,
        "stop": lambda target, planned: _signal(signal.SIGSTOP, target.replica(planned)),
        "stop-rank": lambda target, planned: _signal(signal.SIGSTOP, target.rank(planned)),
        "starve": _starve,
        "slow": _slow,
        "idle": _let_idle,
        "give-up": _give_up,
        "sick": _sicken,
        "foreign": _invite_a_stranger,
        "leave": lambda target, planned: _signal(signal.SIGTERM, target.replica(planned)),
        "leave-half": lambda target, planned: _signal(signal.SIGTERM, *target.half(planned)),
        "leave-in-join": _leave_in_join,
        "lighthouse-stop": lambda target, _: _signal(signal.SIGSTOP, target.job.lighthouse),
        "lighthouse-kill": _kill_lighthouse,
        "lighthouse-away": _kill_lighthouse,
        "baby-kill": partial(_hit_baby, number=signal.SIGKILL),
        "baby-stop": partial(_hit_baby, number=signal.SIGSTOP),
        "truncate": _spoil,
        "bit-flip": _spoil,
        "fd-exhaustion": _exhaust_descriptors,
        "disk-full": _fill_disk,
        "blackhole": lambda target, planned: _cut_off(target, [target.replica(planned)]),
        "one-way": lambda target, planned: _cut_off(target, [target.replica(planned)], incoming=False),
        "partition": lambda target, planned: _cut_off(target, target.half(planned)),
        "link": _cut_link,
        "loss": _lose,
        "delay": _delay,
    }
)


def may_end(victim: Group) -> None:
    """Have no end of a rank of this replica group count as a crash."""
    for rank in victim.ranks:
        rank.may_end = True


def clear_triggers(target: Target) -> None:
    """Remove the requests to workers that were not carried out yet."""
    for trigger in target.job.triggers.iterdir():
        trigger.unlink(missing_ok=True)


class SmallDisk:
    """A file system for checkpoints that is so small that it can be filled.

    It is mounted in a mount namespace that a process holds, and reached through that process: when that ends,
    at the latest with this one, nothing of the mount is left.

    Raises:
        OSError: the file system could not be mounted.
    """

    def __init__(self, folder: Path) -> None:
        mount_point = folder.resolve() / "disk"
        mount_point.mkdir()
        options = f"size={DISK_KB}k"
        script = f'mount -t tmpfs -o {options} chaos "$0" && touch "$0/mounted" && exec sleep infinity'
        command = ["unshare", "-m", "sh", "-c", script, str(mount_point)]
        self._holder = RunningProcess(command, folder / "disk.log", {})
        self.path: str = f"/proc/{self._holder.pid}/root{mount_point}"
        self._filler = Path(self.path) / "filler"
        if not holds_within(_READY_S_MAX, (Path(self.path) / "mounted").exists):
            self.close()
            raise OSError(
                f"no small disk for checkpoints within {_READY_S_MAX:g} s: "
                f"{self._holder.tail() or f'{command} printed nothing'}"
            )

    @staticmethod
    def why_unavailable() -> str | None:
        """Return why there can be no small disk here; None if there can."""
        return why_no_namespace("a small disk", "-m")

    def fill(self) -> None:
        """Use up every byte."""
        with contextlib.suppress(OSError), self._filler.open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass

    def free(self) -> None:
        """Free the space."""
        self._filler.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount the disk."""
        self._holder.kill()


def _backends(replica: Group) -> list[psutil.Process]:
    return [process for rank in replica.ranks for process in rank.descendants() if not _children_of(process)]


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _children_of(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children()
    except psutil.NoSuchProcess:
        return []


def _limit_descriptors(pid: int) -> tuple[int, int]:
    """Let a process open no descriptor beyond those below its lowest free one; return the limits before."""
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    lowest_free = next(number for number in range(len(used) + 1) if number not in used)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest_free, before[1]))
    return before
