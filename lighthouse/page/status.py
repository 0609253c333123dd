"""The state of the job as one JSON document (docs/lighthouse-page.md describes every field).

The document is made in slices, between which the event loop does what is due: with a thousand members the
whole of it takes tens of milliseconds, and a quorum must not wait for that. So the rows of two replicas may
be a few milliseconds apart, which no reader can tell.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from lighthouse import __version__
from lighthouse.core.explanation import Facts, describe, why_no_quorum

if TYPE_CHECKING:
    from lighthouse.core.history import Heal, Recovery
    from lighthouse.server import Lighthouse
    from lighthouse.wire import torchft_pb2 as pb

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
    """Make the document of the present state."""
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
            "gone": len(self._departed - self._joined),  # who gave it up is there, and asks for another
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
