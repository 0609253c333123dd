"""The state of the job as metrics for Prometheus, of which there is the same number whatever the job is.

Names are as Prometheus's guide wants them: base units, `_total` for what only grows. No label has a value
that a replica chose.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from lighthouse import __version__
from lighthouse.core.history import DURATION_BOUNDS_S, Durations
from lighthouse.page.status import STATES, Snapshot

if TYPE_CHECKING:
    from lighthouse.server import Lighthouse

_PREFIX = "torchft_lighthouse"
_COUNTED = {
    "quorum": ("quorums", "quorums with a new id that were formed"),
    "register": ("registrations", "sessions that replica groups have opened"),
    "loss": ("losses", "replica groups that died or fell silent"),
    "leave": ("leaves", "replica groups that left in good order"),
    "heal": ("heals", "replica groups that took over the state of another one"),
    "refused": ("refusals", "replica groups that were foreign to the job"),
    "left_out": ("exclusions", "changes of the replica groups that quorums leave out"),
    "kill": ("kills", "replica groups that an operator had killed"),
}


class JobMetrics(Collector):
    """The metrics of one lighthouse."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self._lighthouse = lighthouse
        self._snapshot: Snapshot | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self, snapshot: Snapshot) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._snapshot = snapshot
        text: bytes = generate_latest(self._registry)
        return text

    def collect(self) -> Iterator[Metric]:
        """Yield every metric of the last snapshot."""
        if (snapshot := self._snapshot) is None:
            return
        yield InfoMetricFamily(_PREFIX, "the lighthouse", {"version": __version__})
        replicas = GaugeMetricFamily(f"{_PREFIX}_replicas", "replica groups by state", labels=["state"])
        for state in STATES:
            replicas.add_metric([state.replace(" ", "_")], snapshot.states.get(state, 0))
        yield replicas
        job = snapshot.job
        yield _gauge("quorum_members", "members of the last quorum", job["members"])
        yield _gauge("quorum_members_gone", "members of the last quorum that are gone since", job["gone"])
        yield _gauge("min_replicas", "the smallest quorum that may form", job["min_replicas"])
        is_whole = job["state"] in ("formed", "stands")
        yield _gauge("quorum_is_whole", "1 while there is a quorum of which no member is gone", is_whole)
        yield _gauge("quorum_stands", "1 while its members ask for no other", job["state"] == "stands")
        yield _gauge(
            "quorum_formed_timestamp_seconds", "when the last quorum was formed", job["formed"] or 0.0
        )
        yield _gauge("step", "the newest step that a member has committed", job["step"])
        yield _gauge("steps_per_second", "the median of the members' rates", job["steps_per_s"] or 0.0)
        yield _gauge("is_starved", "1 if this process could not hear just now", self._lighthouse.is_starved)
        history = self._lighthouse.history
        for kind, (name, what) in _COUNTED.items():
            yield CounterMetricFamily(f"{_PREFIX}_{name}", what, history.counts[kind])
        what = "from the loss of a member to the quorum without it"
        yield _histogram("recovery_to_quorum_seconds", what, history.to_quorum)
        what = "from the loss of a member to the first step that was reported after it"
        yield _histogram("recovery_to_step_seconds", what, history.to_step)


def _gauge(name: str, what: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{_PREFIX}_{name}", what, float(value))


def _histogram(name: str, what: str, durations: Durations) -> Metric:
    bounds = [*map(str, DURATION_BOUNDS_S), "+Inf"]
    buckets = list(zip(bounds, itertools.accumulate(durations.counts), strict=True))
    return HistogramMetricFamily(f"{_PREFIX}_{name}", what, buckets, durations.sum_s)
