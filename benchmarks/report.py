"""The form of every result: raw samples, their summary, the bars, and where they were taken.

A benchmark fills a `Result`; tables and plots are made from the saved JSON and from nothing else.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "grpcio", "protobuf")
MAPPED_LOOPBACK = "::ffff:127.0.0.1"


@dataclass
class Row:
    """The samples of one system in one case. No samples means that it never happened: see `note`.

    Rows with an `at` are drawn as curves over it: a number of ranks, for example.
    """

    case: str
    system: str
    unit: str
    samples: list[float]
    note: str = ""
    at: float | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None


@dataclass
class Bar:
    """A bound that the project set itself, and what was measured against it."""

    what: str
    measured: float | None
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured is not None and self.measured <= self.limit


@dataclass
class Result:
    """Everything that one benchmark found out."""

    name: str
    question: str
    method: list[str]
    rows: list[Row] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def add(
        self,
        case: str,
        system: str,
        unit: str,
        samples: Iterable[float],
        note: str = "",
        at: float | None = None,
    ) -> Row:
        row = Row(case, system, unit, list(samples), note, at)
        self.rows.append(row)
        print(f"{self.name}: {case}: {system}: {_summary(row)}", flush=True)
        return row

    def median(self, case: str, system: str) -> float | None:
        return next((row.median for row in self.rows if (row.case, row.system) == (case, system)), None)

    def ratio(self, case: str, system: str, over: str) -> float | None:
        """Return median over median, None where either never happened."""
        upper, lower = self.median(case, system), self.median(case, over)
        return upper / lower if upper is not None and lower else None

    def save(self) -> None:
        """Write results/<name>.json."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        path.write_text(json.dumps(self._as_json(), indent=1) + "\n")

    def _as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "question": self.question,
            "method": self.method,
            "machine": machine(),
            "rows": [{**asdict(row), **_statistics(row)} for row in self.rows],
            "bars": [{**asdict(bar), "met": bar.met} for bar in self.bars],
        }


def load(name: str) -> dict[str, Any]:
    """Return a saved result, as JSON."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def machine() -> dict[str, str | int]:
    """Return where and with what a result was taken. It names no host."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 0,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in PACKAGES},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "load_before": f"{os.getloadavg()[0]:.2f}",
        "names_loopback": "hosts file" if hosts_name_loopback() else "name server",
    }


def hosts_name_loopback() -> bool:
    """Return whether the hosts file names the address about which torch's TCPStore asks for each connection.

    Else a name server is asked, and an answer that is lost costs torch and torchft 5 s.
    """
    lines = (line.partition("#")[0].split() for line in Path("/etc/hosts").read_text().splitlines())
    return any(line[:1] == [MAPPED_LOOPBACK] for line in lines)


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _statistics(row: Row) -> dict[str, float | None]:
    if not row.samples:
        return {"median": None, "min": None, "max": None}
    return {"median": row.median, "min": min(row.samples), "max": max(row.samples)}


def _summary(row: Row) -> str:
    if not row.samples:
        return row.note
    spread = f"{min(row.samples):.4g} to {max(row.samples):.4g}, n={len(row.samples)}"
    return f"{row.median:.4g} {row.unit} ({spread}) {row.note}".rstrip()
