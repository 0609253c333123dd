"""The kinds of fault: how each is injected, and what counts as felt.

An injector is a context manager: it injects on entry, returns what it did, and takes it back on exit, also
when the run is interrupted in between. None of them waits.

Whether a fault was felt, and how long the recovery took, is judged from the log alone. A fault that no
process felt proves nothing: its injector is broken. A recovery begins with the injection and ends with the
last survivor's first committed step that was begun after the fault was felt, so a step in flight does not
count.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

import psutil

from torchft_like.testing.chaos.job import JOIN_TIMEOUT_MS, ChaosJob
from torchft_like.testing.chaos.network import Network, Rules
from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.chaos.schedule import Planned
from torchft_like.testing.cluster import Group, Rank
from torchft_like.testing.invariants import Commit, Process
from torchft_like.testing.journal import Record
from torchft_like.testing.log import Log, name_of, rank_of
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
    return OF_KIND[planned.kind].inject(target, planned)


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


# -- what counts as felt

COMPARED_S = 3.0
RECOVERY_S_MAX = 20.0
WHOLE_S_MAX = 60.0
WAITED_S = 1.0
STALLS = ("loss", "abort", "error", "disconnected")


@dataclass(frozen=True)
class Injection:
    """A fault that was injected.

    Attributes:
        number, kind: as planned.
        time: the time of the injection, in seconds since the Unix epoch.
        lifted: when it was taken back; the time of the injection for a fault that is not.
        victims: the names of the replica groups at which it was aimed, or that had to leave because of it.
        details: what the injector did and counted.
    """

    number: int
    kind: str
    time: float
    lifted: float
    victims: tuple[str, ...] = ()
    details: Mapping[str, float | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a fault.

    Attributes:
        felt: the evidence in words; empty if no process felt it.
        recovery_s: the time from the injection until every survivor had committed a step that it began after
            the fault was felt; None if that did not come.
        whole_s: the time from the injection until all replica groups had committed a step together that they
            began after the fault was lifted; None if that did not come.
        pause_s: the longest time until then in which no survivor committed a step, also for a later reason: a
          replica group that comes back may keep the others waiting.
    """

    injection: Injection
    felt: str
    recovery_s: float | None
    whole_s: float | None
    pause_s: float

    @property
    def is_hang(self) -> bool:
        """Whether survivors did not recover, or the whole job did not come back, within the limits."""
        recovered = self.recovery_s is not None and self.recovery_s <= RECOVERY_S_MAX
        return not recovered or self.whole_s is None or self.whole_s > WHOLE_S_MAX

    def __str__(self) -> str:
        recovery, whole = (
            "never" if time is None else f"after {time:.2f} s" for time in (self.recovery_s, self.whole_s)
        )
        injection = self.injection
        victims = ", ".join(injection.victims) or "nobody in particular"
        return (
            f"fault {injection.number}, {injection.kind} of {victims}: survivors recovered {recovery}, "
            f"all were back {whole}"
        )


def judge(injection: Injection, log: Log, job: JobSettings, until: float) -> Outcome:
    """Judge a fault by the records up to the time `until`, which is that of the next one."""
    if injection.kind == "link":  # the victim is that of the two that was left out first, if one was
        ends = {injection.details.get("one"), injection.details.get("other")}
        told = log.events_between(injection.time, until, "left_out")
        names = (name_of(member) for event in told for member in event["members"])
        injection = replace(injection, victims=tuple(name for name in names if name in ends)[:1])
    view = View(injection, log, job, until)
    felt = OF_KIND[injection.kind].felt(view)
    began = view.first_stall()
    recovered = view.all_committed(job.processes(without=injection.victims), began)
    together = view.all_committed(job.processes(), max(began, injection.lifted), together=True)
    recovery_s, whole_s = (None if time is None else time - injection.time for time in (recovered, together))
    return Outcome(injection, felt, recovery_s, whole_s, view.longest_pause(together or until))


class View:
    """The log in the time of one fault."""

    def __init__(self, injection: Injection, log: Log, job: JobSettings, until: float) -> None:
        self.injection = injection
        self.job = job
        self._log = log
        self._until = until

    def events(self, *kinds: str) -> list[Record]:
        """Return the events in the time of this fault."""
        return self._log.events_between(self.injection.time, self._until, *kinds)

    def notes(self, *kinds: str) -> list[Record]:
        """Return the notes in the time of this fault."""
        return self._log.notes_between(self.injection.time, self._until, *kinds)

    def struck(self, *acts: str) -> list[Record]:
        """Return the faults that workers did to themselves in the time of this one."""
        return [note for note in self.notes("fault") if note["act"] in acts]

    def commits(self) -> Iterable[Commit]:
        """Return the commits in the time of this fault."""
        return self._log.commits_between(self.injection.time, self._until)

    def without_victims(self) -> list[Commit]:
        """Return the commits of quorums that none of the victims was in."""
        victims = set(self.injection.victims)
        return [commit for commit in self.commits() if not victims & set(map(name_of, commit.members))]

    def step_times(self) -> tuple[list[float], list[float]]:
        """Return the seconds of steps within the fault, and of those just before it."""
        time, lifted = self.injection.time, self.injection.lifted
        during = [c.time - c.began for c in self.commits() if c.began > time and c.time < lifted]
        before = self._log.commits_between(time - COMPARED_S, time)
        return during, [c.time - c.began for c in before]

    def is_victim(self, record: Record) -> bool:
        """Return whether a victim wrote the record."""
        return name_of(str(record.get("replica_id") or record.get("replica"))) in self.injection.victims

    def first_stall(self) -> float:
        """Return when a survivor was first told of a fault; the time of the injection if none was."""
        told = (float(event["time"]) for event in self.events(*STALLS) if not self.is_victim(event))
        return min(told, default=self.injection.time)

    def longest_pause(self, until: float | None = None) -> float:
        """Return the longest time, from the injection on, in which no survivor committed."""
        until = self._until if until is None else until
        survivors = self.job.processes(without=self.injection.victims)
        times = [c.time for c in self.commits() if c.time <= until and rank_of(c) in survivors]
        moments = sorted({self.injection.time, *times, until})
        return max((after - before for before, after in pairwise(moments)), default=0.0)

    def all_committed(
        self, processes: frozenset[Process], began: float, *, together: bool = False
    ) -> float | None:
        """Return when the last of these committed the first step that it began after the time `began`.

        Args:
            processes: the name and the group rank of each.
            began: a time in seconds since the Unix epoch.
            together: whether only steps of a quorum of all replica groups count.
        """
        first: dict[Process, float] = {}
        for commit in self.commits():
            if commit.began > began and (not together or len(commit.members) == len(self.job.names)):
                rank = rank_of(commit)
                first[rank] = min(first.get(rank, math.inf), commit.time)
        return max(first[rank] for rank in processes) if processes and processes <= first.keys() else None


def _left_out(view: View) -> str:
    """Check that a survivor was told of the loss of each victim, or a quorum without the victims
    committed.
    """
    victims = set(view.injection.victims)
    losses = {
        name_of(str(event["member"])) for event in view.events("loss") if not view.is_victim(event)
    } & victims
    without = view.without_victims()
    if losses == victims:
        return f"told of the loss of {_and(victims)}"
    return f"quorum {without[0].quorum_id} went on without {_and(victims)}" if without else ""


def _disconnected(view: View) -> str:
    away = {name_of(str(event["replica_id"])) for event in view.events("disconnected")}
    back = {name_of(str(event["replica_id"])) for event in view.events("connected")}
    return f"{_and(away)} lost the lighthouse and came back" if away and away <= back else ""


def _went_on(view: View) -> str:
    """Check that the job committed steps for all of the time in which the lighthouse was away."""
    felt, pause_s = _disconnected(view), view.longest_pause(view.injection.lifted)
    lasted_s = view.injection.lifted - view.injection.time
    return (
        f"{felt}, no step for {pause_s:.2f} s of {lasted_s:.0f} s" if felt and pause_s < lasted_s / 4 else ""
    )


def _came_and_went(view: View) -> str:
    """Check that quorums went on without either of the victims."""
    names = [frozenset(map(name_of, commit.members)) for commit in view.commits()]
    gone = [victim for victim in view.injection.victims if any(victim not in members for members in names)]
    return f"quorums went on without {_and(gone)}" if len(gone) == len(view.injection.victims) else ""


def _waited_for_the_idle(view: View) -> str:
    """Check that replica groups were idle, that a survivor was told of each loss, and that it had to wait."""
    idle = {str(note["replica"]) for note in view.notes("idle")}
    felt, pause_s = _left_out(view), view.longest_pause()
    has_waited = idle and felt and pause_s > WAITED_S
    return f"{felt}; {_and(idle)} idle, no step for {pause_s:.2f} s" if has_waited else ""


def _given_up(view: View) -> str:
    """Check that a victim gave a step up, and that this ended the step of another one."""
    gave_up = view.struck("give-up")
    ended = [event for event in view.events("abort", "error") if not view.is_victim(event)]
    return f"{name_of(str(ended[0]['replica_id']))}: {ended[0]['reason']}" if gave_up and ended else ""


def _sick_left_out(view: View) -> str:
    """Check that the lighthouse left the victim out for what it fails with by itself, and others went on."""
    victims = set(view.injection.victims)
    told = [e for e in view.events("left_out") if e["source"] == "lighthouse" and e["reasons"]]
    named = [event for event in told if set(map(name_of, event["members"])) == victims]
    return f"left out: {named[0]['reasons'][0]}" if named and view.without_victims() else ""


def _refused(view: View) -> str:
    """Check that the lighthouse refused the stranger, and that no member of the job noticed."""
    stranger = view.injection.details["stranger"]
    refused = [event for event in view.events("refused") if name_of(event["member"]) == stranger]
    noticed = [*view.events(*STALLS), *view.notes("ended", "failed")]
    return f"refused: {refused[0]['reason']}" if refused and not noticed else ""


def _backend_lost(view: View) -> str:
    """Check that a step failed: the victim's for its subprocess, or, before it, that of a peer for the
    connection.
    """
    errors = sorted(view.events("error"), key=view.is_victim, reverse=True)
    if not errors or not view.injection.details.get("backends"):
        return ""
    return f"{name_of(str(errors[0]['replica_id']))}: {errors[0]['reason']}"


def _transfer_refused(view: View) -> str:
    """Check that the relay spoilt a transfer, and the healing replica refused it; others may have sent it."""
    struck = view.struck("cut-answer", "flip-answer")
    refused = [str(e["reason"]) for e in view.events("error") if "could not be fetched" in str(e["reason"])]
    heals = view.events("heal")
    refused += [str(source) for event in heals for source in event["refused"]]
    if struck and not refused and view.injection.kind == "truncate":
        # Its connection may have been the slow one at the end, whose part another source had begun to send.
        refused += [f"{e['addresses']} have sent the rest" for e in heals if len(e["addresses"]) > 1]
    return f"the healing replica: {refused[0]}" if struck and refused else ""


def _disk_full(view: View) -> str:
    failed = [note for note in view.notes("checkpoint_failed") if note["errno"] == "ENOSPC"]
    return f"{len(failed)} checkpoints: {failed[0]['reason']}" if failed else ""


def _no_descriptors(view: View) -> str:
    reasons = [str(e["reason"]) for e in view.events("error") if view.is_victim(e)]
    reasons += [str(n["reason"]) for n in view.notes("checkpoint_failed") if view.is_victim(n)]
    named = [reason for reason in reasons if "Too many open files" in reason]
    gave_up = [note for note in view.notes("ended") if note["code"] == -signal.SIGABRT]
    if any(note["replica"] == view.injection.details.get("exhausted") for note in gave_up):
        named.append("Gloo ended its process")
    return f"the victim: {named[0]}" if named else ""


def _stood_still(view: View) -> str:
    """Check that packets were cut, and that one end was left out or no step committed for half of the
    time.
    """
    injection = view.injection
    lasted_s, cut = injection.lifted - injection.time, injection.details.get("cut", 0)
    pause_s = view.longest_pause(injection.lifted)
    if not cut or not (injection.victims or pause_s > lasted_s / 2):
        return ""
    gone = f"without {_and(injection.victims)}" if injection.victims else "nobody left out"
    return f"{cut} packets cut, no step for {pause_s:.2f} s, {gone}"


def _did_not_restart(view: View) -> str:
    """Check that the others were told, and that no process of the victim has ended."""
    ended = any(view.is_victim(note) for note in view.notes("ended"))
    return "" if ended else _left_out(view)


def _starved(view: View) -> str:
    """Check that a step took longer than before, and that no process has ended."""
    during, before = view.step_times()
    slower = max(during, default=0.0) / median(before) if before else 0.0
    busy = view.injection.details.get("busy")
    is_felt = slower > 2 and not view.notes("ended")
    return f"{busy} busy processes, a step took {slower:.0f} times as long" if is_felt else ""


def _sent_again(view: View) -> str:
    details = view.injection.details
    lost, again = details.get("lost", 0), details.get("retransmits", 0)
    return f"{lost} packets lost, {again} segments sent again" if lost and again else ""


def _slowed(view: View) -> str:
    """Check that steps took longer than before, by the delay of a packet at least."""
    during, before = view.step_times()
    if not during or not before or not view.injection.details.get("delayed"):
        return ""
    more_s = median(during) - median(before)
    delay_s = float(view.injection.details.get("delay_s", math.inf))
    return f"a step took {more_s:.3f} s longer, with {delay_s:.3f} s of delay" if more_s >= delay_s else ""


def _and(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


class _Kind(NamedTuple):
    inject: Injector
    felt: Callable[[View], str] = _left_out


# Where nothing else is said, the evidence is that the victims were left out.
OF_KIND: Mapping[str, _Kind] = MappingProxyType(
    {
        "kill": _Kind(lambda target, planned: _signal(signal.SIGKILL, target.replica(planned))),
        "kill-half": _Kind(lambda target, planned: _signal(signal.SIGKILL, *target.half(planned))),
        "kill-rank": _Kind(_kill_rank),
        "stop": _Kind(lambda target, planned: _signal(signal.SIGSTOP, target.replica(planned))),
        "stop-rank": _Kind(
            lambda target, planned: _signal(signal.SIGSTOP, target.rank(planned)), _did_not_restart
        ),
        "starve": _Kind(_starve, _starved),
        "slow": _Kind(_slow, _slowed),
        "idle": _Kind(_let_idle, _waited_for_the_idle),
        "give-up": _Kind(_give_up, _given_up),
        "sick": _Kind(_sicken, _sick_left_out),
        "foreign": _Kind(_invite_a_stranger, _refused),
        "leave": _Kind(lambda target, planned: _signal(signal.SIGTERM, target.replica(planned))),
        "leave-half": _Kind(lambda target, planned: _signal(signal.SIGTERM, *target.half(planned))),
        "leave-in-join": _Kind(_leave_in_join, _came_and_went),
        "lighthouse-stop": _Kind(
            lambda target, _: _signal(signal.SIGSTOP, target.job.lighthouse), _disconnected
        ),
        "lighthouse-kill": _Kind(_kill_lighthouse, _disconnected),
        "lighthouse-away": _Kind(_kill_lighthouse, _went_on),
        "baby-kill": _Kind(partial(_hit_baby, number=signal.SIGKILL), _backend_lost),
        "baby-stop": _Kind(partial(_hit_baby, number=signal.SIGSTOP), _backend_lost),
        "truncate": _Kind(_spoil, _transfer_refused),
        "bit-flip": _Kind(_spoil, _transfer_refused),
        "fd-exhaustion": _Kind(_exhaust_descriptors, _no_descriptors),
        "disk-full": _Kind(_fill_disk, _disk_full),
        "blackhole": _Kind(lambda target, planned: _cut_off(target, [target.replica(planned)])),
        "one-way": _Kind(lambda target, planned: _cut_off(target, [target.replica(planned)], incoming=False)),
        "partition": _Kind(lambda target, planned: _cut_off(target, target.half(planned))),
        "link": _Kind(_cut_link, _stood_still),
        "loss": _Kind(_lose, _sent_again),
        "delay": _Kind(_delay, _slowed),
    }
)
