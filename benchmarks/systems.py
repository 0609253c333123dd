"""What is compared: each system's interpreter, package, lighthouse and usual way to train.

A system is measured as its users run it: its own lighthouse daemon, its own Manager, its own
gradient path, in its own environment.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from benchmarks.peer import NIGHTLY, RELEASE, Peer
from benchmarks.processes import Fleet, FleetProcess, Record
from lighthouse import keys
from lighthouse.core.trust import Role, make_texts
from lighthouse.tls import TLS_ENV
from lighthouse.trust import TOKEN_ENV

FOLDER = Path(__file__).parent
START_SECONDS_MAX = 60.0


@dataclass(frozen=True)
class System:
    """One contestant. Its worker imports `package`, in the environment of `peer` or, without one, in ours."""

    name: str
    package: str
    color: str
    peer: Peer | None = None
    lighthouse_options: tuple[str, ...] = ()
    worker_options: tuple[str, ...] = ()

    @cached_property
    def interpreter(self) -> str:
        """Raises UnavailableError for a torchft that cannot be installed."""
        return sys.executable if self.peer is None else str(self.peer.python())


OURS = System("torchft_like", "torchft_like", "tab:blue")
TORCHFT = System("torchft", "torchft", "tab:orange", RELEASE)
TORCHFT_NIGHTLY = System("torchft nightly", "torchft", "tab:green", NIGHTLY)
PEERS = (TORCHFT, TORCHFT_NIGHTLY)
TRUSTED = "tokens and TLS"
PLAIN_DDP = System("plain DDP", "ddp", "tab:gray")

# A line for the method of every benchmark with peers.
PEER_VERSIONS = ", ".join(f"{system.name} is {system.peer}" for system in PEERS) + ", from the package index."


@contextlib.contextmanager
def with_and_without_trust() -> Iterator[dict[str, dict[str, str]]]:
    """Yield the variables of a job without tokens and certificate, and of one with them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in keys.certify([]).items():
            Path(folder, name).write_text(text)
        token = make_texts()[Role.PARTICIPATE]
        yield {"plain": {}, TRUSTED: {TLS_ENV: folder, TOKEN_ENV: token}}


@dataclass
class Lighthouse:
    """A running lighthouse daemon."""

    process: FleetProcess
    port: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def start_lighthouse(
    fleet: Fleet, system: System, min_replicas: int, port: int = 0, extra: tuple[str, ...] = ()
) -> Lighthouse:
    """The system's own lighthouse on loopback; port 0 takes a free one."""
    options = [
        f"--bind=127.0.0.1:{port}",
        f"--min_replicas={min_replicas}",
        *system.lighthouse_options,
        *extra,
    ]
    if system.peer is not None:
        command = [system.interpreter, str(FOLDER / "peer_lighthouse.py"), *options]
    else:
        command = [system.interpreter, "-m", "lighthouse", *options]
    process = fleet.start(f"{system.name}-lighthouse", command)
    got = fleet.wait_for(lambda: _port(process), "lighthouse", START_SECONDS_MAX)
    return Lighthouse(process, got)


def _port(process: FleetProcess) -> int | None:
    for record in process.records:
        return int(record["port"])
    for line in process.lines():
        if "listening on" in line:
            return int(line.rpartition(":")[2])
    return None


def start_worker(fleet: Fleet, system: System, name: str, *options: str) -> FleetProcess:
    """One replica; see worker.py for the options and for what it reports."""
    command = [system.interpreter, "-W", "ignore", str(FOLDER / "worker.py"), f"--package={system.package}"]
    return fleet.start(name, [*command, f"--name={name}", *system.worker_options, *options])


@dataclass
class Job:
    """A lighthouse and the replicas that train under it, for the measurements that need no faults."""

    system: System
    workers: list[FleetProcess]
    lighthouse: Lighthouse | None = None
    warm: bool = field(default=False)


def start_job(fleet: Fleet, system: System, replicas: int, model: str) -> Job:
    """Replicas that step in turns. They are started, not yet joined: `take_turn` waits for that."""
    options = [f"--replicas={replicas}", f"--model={model}", "--turns"]
    lighthouse = None
    if system.package == PLAIN_DDP.package:
        options.append(f"--rendezvous={fleet.folder / f'{model}-{replicas}.rendezvous'}")
    else:
        lighthouse = start_lighthouse(fleet, system, min_replicas=replicas)
        options.append(f"--lighthouse={lighthouse.address}")
    workers = [
        start_worker(fleet, system, f"{system.name}-{rank}", *options, f"--rank={rank}")
        for rank in range(replicas)
    ]
    return Job(system, workers, lighthouse)


class TurnError(RuntimeError):
    """Steps that should have been committed by all replicas were not: the times mean nothing."""


def take_turn(fleet: Fleet, job: Job, steps: int) -> list[list[float]]:
    """Let all replicas take `steps` steps at the same time; seconds per step, replica by replica.

    Raises:
        TurnError: a step was not committed, or not by every replica (never on the first turn, in
            which the replicas join).
    """
    turns = fleet.ask(job.workers, steps=steps)
    if job.warm and not all(_is_clean(turn, steps, len(job.workers)) for turn in turns):
        raise TurnError(f"{job.system.name}: {turns}\n{fleet.last_words()}")
    job.warm = True
    return [turn["seconds"] for turn in turns]


def _is_clean(turn: Record, steps: int, replicas: int) -> bool:
    return bool(turn["committed"] == steps and turn["participants"] == replicas)
