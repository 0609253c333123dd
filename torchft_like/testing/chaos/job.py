"""The job into which faults are injected: a cluster whose replica groups are started again when they end.

All ranks of a group are started together. An injector sets `may_end` of each rank that may end; any other end
is recorded as a crash. The job reads what its processes write, and judges nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchft_like.core.restarts import SPARE_ENV, SPARE_RANK
from torchft_like.core.step import IN_VAIN
from torchft_like.errors import QuorumTimeoutError
from torchft_like.manager.quorum_driver import STOP_WAIT_S
from torchft_like.testing.chaos.network import Network
from torchft_like.testing.chaos.orders import JobSettings, Order, with_index
from torchft_like.testing.cluster import LIGHTHOUSE, LOOPBACK, STACKS_S, Cluster, Group, Rank
from torchft_like.testing.forks import preload
from torchft_like.testing.invariants import Commit, Process
from torchft_like.testing.journal import Record
from torchft_like.testing.log import Log, commit_of, rank_of
from torchft_like.testing.processes import OutputError, holds_within, kill_all

LIGHTHOUSE_PORT = 29510
STORE_PORT = 29600
STRANGER = "stranger"  # the name of a trainer that is no part of the job
SPARE = "spare"  # that of a process without a place
START_S_MAX = 30.0
JOIN_TIMEOUT_MS = 10_000
POLL_S = 0.02
END_S_MAX = 15.0
ASKED_TO_END = (0, -signal.SIGTERM, 128 + signal.SIGTERM)  # the last is a script's word for the second
WORKER = "torchft_like.testing.chaos.worker"
_ROOT = str(Path(__file__).parents[3])
preload(WORKER)


class JobError(RuntimeError):
    """The job cannot be run; the text has the output of its processes."""


@dataclass
class Told:
    """The state that the events of a rank tell, where a user's command writes no journal."""

    members: dict[int, list[str]] = field(default_factory=dict)
    last_vote: float = 0.0
    is_healing: bool = False


class ChaosJob(Cluster):
    """A job with faults. It is not thread-safe: only the main thread uses it.

    Args:
        settings: what to run.
        folder: the folder for logs, journals and event files, which is empty.
        checkpoints: the folder in which the workers save their checkpoints.
        network: the hosts to run on; None for this host.
        tell: called again and again while the job is tended.

    Attributes:
        replicas: the present start of each replica group.
        spares: the processes that wait for a place.
    """

    def __init__(
        self,
        settings: JobSettings,
        folder: Path,
        checkpoints: str,
        network: Network | None = None,
        tell: Callable[[], object] = bool,
    ) -> None:
        super().__init__(
            folder,
            min_replicas=settings.min_replicas,
            join_timeout_ms=JOIN_TIMEOUT_MS,
            limit_s=START_S_MAX,
        )
        self.settings = settings
        self.network = network
        self._tell = tell
        self.log: Log = Log()
        self.crashes: list[str] = []
        self.replicas: list[Group] = []
        self.spares: list[Rank] = []
        self._spares_started = 0
        self._waiting: set[str] = set()  # labels of spares that wait
        self.last: dict[Process, Commit] = {}
        if network is not None:
            self.lighthouse_address = f"http://{network.address(LIGHTHOUSE)}:{LIGHTHOUSE_PORT}"
        self._checkpoints = checkpoints
        self._told: dict[str, Told] = defaultdict(Told)
        self._members: dict[tuple[str, ...], frozenset[str]] = {}
        self._ends = False
        self.triggers: Path = folder / "triggers"
        self.triggers.mkdir()

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Start everything; return when the lighthouse listens.

        Raises:
            JobError: the lighthouse does not listen.
        """
        try:
            self.start_lighthouse()
        except OutputError as error:
            raise JobError(f"the lighthouse does not listen: {error}") from None
        self.replicas = [self._start_replica(name) for name in self.settings.names]
        self.spares = [self._start_spare() for _ in range(self.settings.spares)]

    def host_of(self, name: str) -> tuple[str, str]:
        """Return the address and the network namespace of a host."""
        if self.network is None:
            return super().host_of(name)
        host = LIGHTHOUSE if name == STRANGER else name
        return self.network.address(host), self.network.namespace(host)

    def _start_replica(self, name: str) -> Group:
        settings, index = self.settings, self.index_of(name)
        variables = {
            "REPLICA_GROUP_ID": str(index),
            "NUM_REPLICA_GROUPS": str(settings.replicas),
            "CHAOS_HOST": self.host_of(name)[0],
        }
        command = [with_index(part, index) for part in settings.command]
        if not command:
            command = self._worker(self._order(name, index), variables)
        is_cold = settings.cold or bool(settings.command)
        if is_cold:
            variables |= _importable()
        return self.launch(name, command, size=settings.ranks, variables=variables, is_cold=is_cold)

    def _worker(self, order: Order, variables: dict[str, str]) -> list[str]:
        command = [WORKER, order.to_json()]
        if not self.settings.cold:
            return command
        variables["OMP_NUM_THREADS"] = "1"
        return [sys.executable, "-m", *command]

    def _start_spare(self) -> Rank:
        """Start a process that waits for the place of a rank, of whichever replica group."""
        variables = {
            "TORCHFT_LIGHTHOUSE": self.lighthouse_address,
            SPARE_ENV: SPARE_RANK,
            "CHAOS_HOST": LOOPBACK,
            **(_importable() if self.settings.cold else {}),
        }
        self._spares_started += 1
        label = f"{SPARE}.{self._spares_started}.0"
        command = self._worker(self._order(self.settings.naming, -1), variables)
        spare = Rank(label, command, self.folder, variables, is_cold=self.settings.cold)
        self._daemons.append(spare)
        return spare

    def start_stranger(self) -> Group:
        """Start a trainer of a wider model; it is no part of the job, and is not started again."""
        order = self._order(STRANGER, 0)
        order = replace(order, training=replace(order.training, width=2 * order.training.width))
        variables = {"CHAOS_HOST": self.host_of(STRANGER)[0]}
        command = [WORKER, order.to_json()]
        return self.launch(STRANGER, command, size=self.settings.ranks, variables=variables)

    def _order(self, name: str, index: int) -> Order:
        training = self.settings.training
        if training.backend == "mixed":
            is_last = index == self.settings.replicas - 1
            training = replace(training, backend="baby-gloo" if is_last else "gloo")
        return Order(name, index, self._checkpoints, str(self.triggers), training)

    def _store(self, name: str, start: int) -> tuple[None, dict[str, str]]:
        """Have rank 0 serve the store; a host of its own has fixed ports."""
        port = STORE_PORT + start % 1000
        if self.network is None:
            with socket.create_server((LOOPBACK, 0)) as listener:
                port = int(listener.getsockname()[1])
        return None, {"MASTER_ADDR": self.host_of(name)[0], "MASTER_PORT": str(port)}

    # --------------------------------------------------------------------------- running

    def ranks(self) -> list[Rank]:
        """Return the ranks of the present start of each replica group, and the spares."""
        return [*(rank for group in self.replicas for rank in group.ranks), *self.spares]

    def tend(self) -> None:
        """Read what was written, and start again what has ended."""
        for rank in self.ranks():
            self._read(rank)
        self.log.events += self.lighthouse_events.new_records()
        if self._ends:
            return
        for index, group in enumerate(self.replicas):
            if not (group.has_ended() if self.settings.spares else group.is_broken()):
                continue
            for rank in group.ranks:
                self._note_end(rank)
            for rank in group.ranks:  # each has had the same time to end by itself
                if rank.exit_code is None:
                    rank.kill()
                self._read(rank)
            self.replicas[index] = self._start_replica(group.name)
        for spare in list(self.spares):
            if spare.name != SPARE or spare.exit_code is not None:
                self._give_place(spare)
        if self.lighthouse.exit_code is not None and not self.lighthouse.may_end:
            self.crashes.append(f"the lighthouse ended:\n{self.lighthouse.tail()}")
            self.start_lighthouse()

    def kill_lighthouse(self) -> None:
        """Kill the lighthouse, which stays away until `start_lighthouse`."""
        self.lighthouse.signal(signal.SIGKILL)
        self.lighthouse.kill()

    def tend_until(self, done: Callable[[], object], limit_s: float) -> bool:
        """Tend the job until `done()` is true; return False if that did not happen in time."""

        def is_done() -> object:
            self.tend()
            self._tell()
            return done()

        return bool(done()) or holds_within(limit_s, is_done, POLL_S)

    def is_whole(self, since: float) -> bool:
        """Return whether all ranks have committed and contributed to a common step that they began after
        `since`.
        """
        everybody = self.settings.processes()
        if any(spare.label not in self._waiting for spare in self.spares):
            return False
        return everybody <= self.last.keys() and all(
            commit.began > since and commit.participating and len(commit.members) == self.settings.replicas
            for commit in (self.last[rank] for rank in everybody)
        )

    def strangers(self) -> list[str]:
        """Return the names of replica groups that have committed a step and are none of this job's."""
        return sorted({name for name, _ in self.last} - set(self.settings.names))

    def expect_no_end(self) -> None:
        """Treat any end from now on as a crash: every process with a reason to end has ended."""
        for rank in self.ranks():
            rank.may_end = False

    def pids(self) -> dict[str, int]:
        """Return the processes that run now: the label of the start, and the process id."""
        there = [p for p in self.ranks() if p not in self.spares]  # a spare that becomes a rank grows
        return {p.label: p.pid for p in (*there, self.lighthouse) if p.exit_code is None}

    def print_stacks(self) -> None:
        """Make the workers write the stacks of their threads."""
        for rank in self.ranks() if not self.settings.command else ():
            rank.print_stacks()

    def _give_place(self, spare: Rank) -> None:
        """Put a spare into the place that it has taken, and start another one, as for one that has ended."""
        self.spares.remove(spare)
        self.spares.append(self._start_spare())
        if spare.name == SPARE:
            self._note_end(spare)
            return
        group = self.replicas[self.index_of(spare.name)]
        self._note_end(group.ranks[spare.number])
        group.ranks[spare.number] = spare

    def _note_end(self, rank: Rank) -> None:
        if rank.exit_code is None:
            return  # what an ended rank has left behind must be found, not killed
        if not rank.may_end:
            self._crashed(rank, "which nobody asked for")
        ended = {"kind": "ended", "time": time.time(), "replica": rank.name, "code": rank.exit_code}
        self.log.notes.append(ended)

    def _read(self, rank: Rank) -> None:
        for record in rank.journal.new_records():
            if record["kind"] == "commit":
                self._add(record)
            elif record["kind"] == "waits":
                self._waiting.add(rank.label)
            elif record["kind"] == "try":
                rank.name, rank.number = record["name"], record["rank"]
                self.log.notes.append({**record, "replica": rank.name, "group_rank": rank.number})
            elif record["kind"] != "attempt":
                self.log.notes.append({**record, "replica": rank.name, "group_rank": rank.number})
        for record in rank.event_file.new_records():
            if not record.get("committed"):
                self.log.events.append(record)
            if self.settings.command:
                self._read_event(rank, record)

    def _read_event(self, rank: Rank, event: Record) -> None:
        """Make commits of the Manager's own events, without digests, as a user's command writes no
        journal.
        """
        told = self._told[rank.label]
        if event["kind"] == "quorum":
            told.members[event["quorum_id"]] = event["members"]
        told.is_healing = told.is_healing or event["kind"] == "heal"
        if event["kind"] != "commit":
            return
        began, told.last_vote = told.last_vote, event["time"]
        participating, told.is_healing = not told.is_healing, False
        if not event["committed"]:
            self.log.notes.append({**event, "kind": "failed", "replica": rank.name})
            return
        known = {key: event[key] for key in ("time", "replica_id", "group_rank", "step", "quorum_id")}
        members = told.members.get(event["quorum_id"], [])
        counted = {"participants": event["participants"], "participating": participating}
        unknown: dict[str, Any] = {"index": 0, "ledger": 0, "ledger_steps": 0, "digest": ""}
        self._add({**known, **counted, **unknown, "members": members, "began": began})

    def _add(self, record: Record) -> None:
        names = tuple(record["members"])
        commit = commit_of(record, self._members.setdefault(names, frozenset(names)))
        self.log.commits.append(commit)
        self.last[rank_of(commit)] = commit

    # ------------------------------------------------------------------------------ ending

    def stop(self) -> list[str]:
        """Ask every replica group to leave; return those that did not end, in words. Failed ones count as
        crashed, but for one that has begun a step when too few others were left for a quorum: that one may
        wait STOP_WAIT_S for it in vain, and end only then.
        """
        self.tend()
        self._ends = True
        for rank in self.ranks():
            rank.signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S_MAX
        late = []
        for rank in self.ranks():
            if not rank.ends_within(max(0.1, deadline - time.monotonic())):
                late.append(rank)
                rank.print_stacks()
        if late:
            time.sleep(STACKS_S)
        for rank in self.ranks():
            if rank in late:
                has_ended = rank.ends_within(max(0.1, deadline + STOP_WAIT_S - time.monotonic()))
                if not (has_ended and IN_VAIN in rank.output):
                    continue
                late.remove(rank)
            if rank.exit_code not in ASKED_TO_END and QuorumTimeoutError.__name__ not in rank.tail():
                self._crashed(rank, "asked to leave")
        found = [
            f"{rank.name} rank {rank.number} did not end after SIGTERM:\n{rank.tail(200)}" for rank in late
        ]
        self.tend()
        return found

    def _crashed(self, rank: Rank, when: str) -> None:
        self.crashes.append(f"{rank.label} ended with {rank.exit_code}, {when}:\n{rank.tail()}")

    def left_behind(self) -> list[str]:
        """Return the processes that outlive those that started them, even killed ones, in words; call after
        `stop`.
        """
        ended = [daemon for daemon in self._daemons if daemon.exit_code is not None]
        return [f"process {p.pid} of {' '.join(d.command[-3:])}" for d in ended for p in d.session()]

    def kill(self) -> None:
        """Kill every process."""
        self._ends = True
        kill_all(self._daemons)


def _importable() -> dict[str, str]:
    """Return the variables with which other processes can import the packages of this one."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))}
