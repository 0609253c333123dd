"""The job into which faults are injected: a lighthouse and replica groups, as a launcher would run them.

A replica group that ends is started again, all its ranks together. An injector sets `Replica.may_end`; any
other end is recorded as a crash. The job reads what its processes write, and judges nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchft_like.testing.chaos.evidence import Job as Members
from torchft_like.testing.chaos.network import Network
from torchft_like.testing.chaos.orders import NAMING, Order, Training
from torchft_like.testing.forks import preload
from torchft_like.testing.invariants import Commit, Process
from torchft_like.testing.journal import JournalTail, Record
from torchft_like.testing.lighthouse import LISTENING
from torchft_like.testing.log import Log, commit_of, rank_of
from torchft_like.testing.processes import ForkedProcess, OutputError, RunningProcess

LOOPBACK = "127.0.0.1"
LIGHTHOUSE = "lighthouse"
LIGHTHOUSE_PORT = 29510
STORE_PORT = 29600
START_S_MAX = 30.0
POLL_S = 0.02
END_S_MAX = 15.0
WORKER = "torchft_like.testing.chaos.worker"
_ROOT = str(Path(__file__).parents[3])
preload(WORKER)


@dataclass(frozen=True)
class JobSettings:
    """The settings of a job.

    Attributes:
        replicas: the number of replica groups.
        ranks: the ranks of each replica group.
        training: the settings of the built-in worker.
        cold: whether each worker is a new interpreter, which takes seconds to load torch; else it is a fork
            of a process that has torch loaded.
        command: the user's own training command instead of the built-in worker; `{index}` in it stands for
            the index of the replica group.
        naming: how the replica groups are named, by the command, too; `{index}` stands for the index.
        min_replicas: the lighthouse's setting.
        join_timeout_ms: the lighthouse's setting.
    """

    replicas: int = 4
    ranks: int = 1
    training: Training = field(default_factory=Training)
    cold: bool = False
    command: tuple[str, ...] = ()
    naming: str = NAMING
    min_replicas: int = 1
    join_timeout_ms: int = 10_000

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replica groups."""
        return tuple(with_index(self.naming, index) for index in range(self.replicas))

    @property
    def members(self) -> Members:
        """The members of the job."""
        return Members(self.names, self.ranks)


class JobError(RuntimeError):
    """The job cannot be run; the text has the output of its processes."""


@dataclass
class Rank:
    """One process of a replica group, its files, and, for a user's command, the state that its events
    tell.
    """

    number: int
    child: RunningProcess
    journal: JournalTail
    events: JournalTail
    members: dict[int, list[str]] = field(default_factory=dict)
    last_vote: float = 0.0
    is_healing: bool = False


class Replica:
    """A replica group, through all its starts.

    Attributes:
        may_end: whether an end of its processes has a reason.
        starts: how often it was started.
    """

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.ranks: list[Rank] = []
        self.may_end = False
        self.starts = 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank; after a deadly one the group may end."""
        self.may_end = self.may_end or number in (signal.SIGKILL, signal.SIGTERM)
        for rank in self.ranks:
            rank.child.signal(number)


class ChaosJob:
    """A job with faults. It is not thread-safe: only the main thread uses it.

    Args:
        settings: what to run.
        folder: the folder for logs, journals and event files, which is empty.
        checkpoints: the folder in which the workers save their checkpoints.
        network: the hosts to run on; None for this host.
    """

    def __init__(
        self, settings: JobSettings, folder: Path, checkpoints: str, network: Network | None = None
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.network = network
        self.log = Log()
        self.crashes: list[str] = []
        self.replicas = [Replica(name, index) for index, name in enumerate(settings.names)]
        self.lighthouse: RunningProcess | None = None
        self.last: dict[Process, Commit] = {}
        self.lighthouse_address = self._lighthouse_host() + ":0"
        if network is not None:
            self.lighthouse_address = f"{self._lighthouse_host()}:{LIGHTHOUSE_PORT}"
        self._checkpoints = checkpoints
        self._children: list[RunningProcess] = []
        self._lighthouse_events = JournalTail(folder / "lighthouse.events")
        self._members: dict[tuple[str, ...], frozenset[str]] = {}
        self._ends = False
        self.triggers = folder / "triggers"
        self.triggers.mkdir()

    # -------------------------------------------------------------------------- starting

    def start(self) -> None:
        """Start everything; return when the lighthouse listens."""
        self.start_lighthouse()
        for replica in self.replicas:
            self._start_replica(replica)

    def start_lighthouse(self) -> None:
        """Start the lighthouse; later ones listen at the address of the first one."""
        log = self.folder / f"lighthouse.{len(self._children)}.log"
        command = [
            *self._entering(LIGHTHOUSE),
            *(sys.executable, "-m", "lighthouse", "--bind", self.lighthouse_address),
            f"--min_replicas={self.settings.min_replicas}",
            f"--join_timeout_ms={self.settings.join_timeout_ms}",
        ]
        variables = {**_importable(), "TORCHFT_EVENT_FILE": str(self.folder / "lighthouse.events")}
        self.lighthouse = self._launch(command, log, variables)
        try:
            found = self.lighthouse.wait_for_output(LISTENING, START_S_MAX)
        except OutputError as error:
            raise JobError(f"the lighthouse does not listen: {error}") from None
        self.lighthouse_address = found[1].removeprefix("http://")

    def _start_replica(self, replica: Replica) -> None:
        replica.may_end = False
        replica.starts += 1
        store_port = self._store_port(replica)
        replica.ranks = [
            self._start_rank(replica, number, store_port) for number in range(self.settings.ranks)
        ]

    def _start_rank(self, replica: Replica, number: int, store_port: int) -> Rank:
        label = f"{replica.name}.{replica.starts}.{number}"
        journal, events = self.folder / f"{label}.journal", self.folder / f"{label}.events"
        variables = self._variables(replica, number, store_port) | {"TORCHFT_EVENT_FILE": str(events)}
        if self.settings.command:
            own = [with_index(part, replica.index) for part in self.settings.command]
            command = [*self._entering(replica.name), *own]
            child = self._launch(command, self.folder / f"{label}.log", _importable() | variables)
        else:
            child = self._start_worker(self._order(replica, journal, variables), label)
        return Rank(number, child, JournalTail(journal), JournalTail(events))

    def _start_worker(self, order: Order, label: str) -> RunningProcess:
        log, variables = self.folder / f"{label}.log", {**_importable(), "OMP_NUM_THREADS": "1"}
        command = [WORKER, order.to_json()]
        if self.settings.cold:
            return self._launch([sys.executable, "-m", *command], log, variables)
        self._children.append(ForkedProcess(command, log, variables))
        return self._children[-1]

    def _launch(self, command: Sequence[str], log: Path, variables: dict[str, str]) -> RunningProcess:
        self._children.append(RunningProcess(command, log, variables))
        return self._children[-1]

    def _order(self, replica: Replica, journal: Path, variables: dict[str, str]) -> Order:
        training = self.settings.training
        if training.backend == "mixed":
            is_last = replica.index == self.settings.replicas - 1
            training = replace(training, backend="baby-gloo" if is_last else "gloo")
        return Order(
            name=replica.name,
            index=replica.index,
            journal=str(journal),
            checkpoints=self._checkpoints,
            triggers=str(self.triggers),
            namespace=self.network.namespace(replica.name) if self.network else "",
            training=training,
            variables=variables,
        )

    def _variables(self, replica: Replica, number: int, store_port: int) -> dict[str, str]:
        host = self.network.address(replica.name) if self.network else LOOPBACK
        variables = {
            "TORCHFT_LIGHTHOUSE": f"http://{self.lighthouse_address}",
            "RANK": str(number),
            "WORLD_SIZE": str(self.settings.ranks),
            "REPLICA_GROUP_ID": str(replica.index),
            "NUM_REPLICA_GROUPS": str(self.settings.replicas),
            "CHAOS_HOST": host,
        }
        if self.settings.ranks > 1:
            variables |= {"MASTER_ADDR": host, "MASTER_PORT": str(store_port)}
        return variables

    def _store_port(self, replica: Replica) -> int:
        """Return a free port for a replica group's store; a host of its own has fixed ones."""
        if self.network is not None:
            return STORE_PORT + replica.starts % 1000
        with socket.create_server((LOOPBACK, 0)) as listener:
            return int(listener.getsockname()[1])

    def _lighthouse_host(self) -> str:
        return self.network.address(LIGHTHOUSE) if self.network else LOOPBACK

    def _entering(self, host: str) -> list[str]:
        return self.network.entering(host) if self.network else []

    # --------------------------------------------------------------------------- running

    def tend(self) -> None:
        """Read what was written, and start again what has ended."""
        for replica in self.replicas:
            for rank in replica.ranks:
                self._read(replica, rank)
        self.log.events += self._lighthouse_events.new_records()
        for replica in self.replicas:
            if not self._ends and any(rank.child.exit_code is not None for rank in replica.ranks):
                self._start_again(replica)
        if self.lighthouse is not None and self.lighthouse.exit_code is not None and not self._ends:
            self.crashes.append(f"the lighthouse ended:\n{self.lighthouse.tail()}")
            self.start_lighthouse()

    def kill_lighthouse(self) -> None:
        """Kill the lighthouse, which stays away until `start_lighthouse`."""
        if self.lighthouse is not None:
            self.lighthouse.signal(signal.SIGKILL)
            self.lighthouse.kill()
            self.lighthouse = None

    def wait_until(self, done: Callable[[], object], limit_s: float) -> bool:
        """Tend the job until `done()` is true; return False if that did not happen in time."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                return False
            self.tend()
            time.sleep(POLL_S)
        return True

    def is_whole(self, since: float) -> bool:
        """Return whether all ranks have committed and contributed to a common step that they began after
        `since`.
        """
        everybody = self.settings.members.processes()
        return everybody <= self.last.keys() and all(
            commit.began > since and commit.participating and len(commit.members) == self.settings.replicas
            for commit in (self.last[rank] for rank in everybody)
        )

    def expect_no_end(self) -> None:
        """Treat any end from now on as a crash: every process with a reason to end has ended."""
        for replica in self.replicas:
            replica.may_end = False

    def pids(self) -> dict[str, int]:
        """Return the processes that run now: the label of the start, and the process id."""
        found = {
            f"{replica.name}.{replica.starts}.{rank.number}": rank.child.pid
            for replica in self.replicas
            for rank in replica.ranks
        }
        if self.lighthouse is not None:
            found[f"{LIGHTHOUSE}.{self.lighthouse.pid}"] = self.lighthouse.pid
        return found

    def print_stacks(self) -> None:
        """Make the workers write the stacks of their threads."""
        for replica in self.replicas:
            if not self.settings.command:
                replica.signal(signal.SIGUSR2)

    def _start_again(self, replica: Replica) -> None:
        for rank in replica.ranks:
            code = rank.child.exit_code
            if code is None:
                continue
            if not replica.may_end:
                self._crashed(replica, rank, "which nobody asked for")
            ended = {"kind": "ended", "time": time.time(), "replica": replica.name, "code": code}
            self.log.notes.append(ended)
        for rank in replica.ranks:
            # Processes that an ended rank has left behind must be found, not killed.
            if rank.child.exit_code is None:
                rank.child.kill()
            self._read(replica, rank)
        self._start_replica(replica)

    def _read(self, replica: Replica, rank: Rank) -> None:
        for record in rank.journal.new_records():
            if record["kind"] == "commit":
                self._add(self._commit(record))
            else:
                self.log.notes.append({**record, "replica": replica.name, "group_rank": rank.number})
        for record in rank.events.new_records():
            if not record.get("committed"):
                self.log.events.append(record)
            if self.settings.command:
                self._read_event(replica, rank, record)

    def _read_event(self, replica: Replica, rank: Rank, event: Record) -> None:
        """Make commits of the Manager's own events, without digests, as a user's command writes no
        journal.
        """
        if event["kind"] == "quorum":
            rank.members[event["quorum_id"]] = event["members"]
        rank.is_healing = rank.is_healing or event["kind"] == "heal"
        if event["kind"] != "commit":
            return
        began, rank.last_vote = rank.last_vote, event["time"]
        participating, rank.is_healing = not rank.is_healing, False
        if not event["committed"]:
            self.log.notes.append({**event, "kind": "failed", "replica": replica.name})
            return
        told = {key: event[key] for key in ("time", "replica_id", "group_rank", "step", "quorum_id")}
        members = rank.members.get(event["quorum_id"], [])
        counted = {"participants": event["participants"], "participating": participating}
        unknown = {"index": 0, "ledger": 0, "ledger_steps": 0, "digest": ""}
        self._add(self._commit({**told, **counted, **unknown, "members": members, "began": began}))

    def _add(self, commit: Commit) -> None:
        self.log.commits.append(commit)
        self.last[rank_of(commit)] = commit

    def _commit(self, record: Record) -> Commit:
        names = tuple(record["members"])
        return commit_of(record, self._members.setdefault(names, frozenset(names)))

    # ------------------------------------------------------------------------------ ending

    def stop(self) -> list[str]:
        """Ask every replica group to leave; return those that did not end, in words. Failed ones count as
        crashed.
        """
        self.tend()
        self._ends = True
        for replica in self.replicas:
            replica.signal(signal.SIGTERM)
        deadline = time.monotonic() + END_S_MAX
        found: list[str] = []
        for replica in self.replicas:
            for rank in replica.ranks:
                if not rank.child.ends_within(max(0.1, deadline - time.monotonic())):
                    found.append(f"{replica.name} rank {rank.number} did not end after SIGTERM")
                    rank.child.signal(signal.SIGUSR2)
                elif rank.child.exit_code not in (0, -signal.SIGTERM):
                    self._crashed(replica, rank, "asked to leave")
        self.tend()
        return found

    def _crashed(self, replica: Replica, rank: Rank, when: str) -> None:
        label = f"{replica.name}.{replica.starts}.{rank.number}"
        self.crashes.append(f"{label} ended with {rank.child.exit_code}, {when}:\n{rank.child.tail()}")

    def left_behind(self) -> list[str]:
        """Return the processes that outlive those that started them, even killed ones, in words; call after
        `stop`.
        """
        found = []
        for child in self._children:
            if child.exit_code is not None:
                found += [f"process {p.pid} of {' '.join(child.command[-3:])}" for p in child.session()]
        return found

    def kill(self) -> None:
        """Kill every process."""
        self._ends = True
        for child in self._children:
            child.kill()


def with_index(text: str, index: int) -> str:
    """Return the text with the index of a replica group in its place."""
    return text.replace("{index}", str(index))


def _importable() -> dict[str, str]:
    """Return the variables with which other processes can import the packages of this one."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [_ROOT, os.environ.get("PYTHONPATH")]))}
