"""Whether a fault was felt, and how long the recovery took, from the log alone. This is pure.

A fault that no process felt proves nothing: its injector is broken. This module says for every kind what
counts as felt; a recovery begins with the injection and ends with the last survivor's first committed step
that was begun after the fault was felt, so a step in flight does not count.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from types import MappingProxyType

from torchft_like.testing.chaos.orders import JobSettings
from torchft_like.testing.invariants import Commit, Process
from torchft_like.testing.journal import Record
from torchft_like.testing.log import Log, name_of, rank_of

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
    felt = FELT.get(injection.kind, _left_out)(view)
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


# ------------------------------------------------------------------ what counts as felt


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


# Of all other kinds the evidence is that the victims were left out.
FELT: Mapping[str, Callable[[View], str]] = MappingProxyType(
    {
        "stop-rank": _did_not_restart,
        "starve": _starved,
        "slow": _slowed,
        "idle": _waited_for_the_idle,
        "give-up": _given_up,
        "sick": _sick_left_out,
        "foreign": _refused,
        "leave-in-join": _came_and_went,
        "lighthouse-stop": _disconnected,
        "lighthouse-kill": _disconnected,
        "lighthouse-away": _went_on,
        "baby-kill": _backend_lost,
        "baby-stop": _backend_lost,
        "truncate": _transfer_refused,
        "bit-flip": _transfer_refused,
        "fd-exhaustion": _no_descriptors,
        "disk-full": _disk_full,
        "link": _stood_still,
        "loss": _sent_again,
        "delay": _slowed,
    }
)
