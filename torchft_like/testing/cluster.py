"""A real job on this machine: a lighthouse and replica groups of processes, which run the caller's script.

    with Cluster(tmp_path, min_replicas=2) as cluster:
        a, b = (cluster.launch(name, ["train.py", name]) for name in "ab")
        cluster.wait_for_quorum_of(a, b)
        a.kill()
        cluster.wait_for_quorum_of(b)

The script trains with a Manager of that replica id and records what it commits, with a `Witness` and
`Journal.of_this_process()`. The cluster starts, signals and reads; it does nothing inside of the processes (a
fault that needs an exact place belongs to the script: `faults`). A test waits for records of the processes,
never for time to pass. When the `with` block ends without an error, the invariants are checked over all
records; no process is left in any case.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchft_like.testing.invariants import Commit, History, Process, progress, violations
from torchft_like.testing.journal import JOURNAL_ENV, JournalReader, Record
from torchft_like.testing.lighthouse import LISTENING
from torchft_like.testing.log import Log, commit_of
from torchft_like.testing.processes import ForkedProcess, kill_all

LOOPBACK = "127.0.0.1"

# Far above the time of any wait here, far below the workers' operation timeout.
LIMIT_S = 40.0
POLL_S = 0.05
HARMLESS_SIGNALS = (signal.SIGSTOP, signal.SIGCONT, signal.SIGUSR1, signal.SIGUSR2)
STACKS_S = 1.0
TRACEBACK_END = re.compile(r"^Traceback .*\n(?:[ \t].*\n)+(\S.*)$", re.MULTILINE)


class Daemon(ForkedProcess):
    """A process of the job, and whether it has a reason to end."""

    def __init__(
        self, label: str, command: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> None:
        self.label = label
        self.may_end = False
        super().__init__(command, folder / f"{label}.log", variables)

    @property
    def is_stopped(self) -> bool:
        return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED

    @property
    def last_error(self) -> str:
        """The last line of the last traceback in its output; empty if there is none."""
        return str((TRACEBACK_END.findall(self.output) or [""])[-1])

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, and everything that it has started."""
        return self.exit_code is not None and not self.session()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this process alone; after a deadly one it may end."""
        if number not in HARMLESS_SIGNALS:
            self.may_end = True
        super().signal(number)

    def kill(self) -> None:
        """End the process and every descendant."""
        self.may_end = True
        super().kill()


class Rank(Daemon):
    """A rank of a replica group, and its records."""

    def __init__(
        self, label: str, command: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> None:
        journal, events = folder / f"{label}.journal", folder / f"{label}.events"
        self._journal, self._events = JournalReader(journal), JournalReader(events)
        self._commits: list[Commit] = []
        files = {JOURNAL_ENV: str(journal), "TORCHFT_EVENT_FILE": str(events)}
        variables = {**variables, **host_of_its_own(label), **files, "OMP_NUM_THREADS": "1"}
        super().__init__(label, command, folder, variables)

    def print_stacks(self) -> None:
        """Make the rank print the stacks of its threads, if it can."""
        if self.exit_code is None and not self.is_stopped:
            self.signal(signal.SIGUSR2)

    def commits(self) -> list[Commit]:
        new = self._journal.records("commit")[len(self._commits) :]
        self._commits += map(commit_of, new)
        return self._commits

    def attempts(self) -> list[Record]:
        """Return the steps that the rank has begun."""
        return self._journal.records("attempt")

    def faults(self) -> list[Record]:
        """Return the planned faults that have struck."""
        return self._journal.records("fault")

    def records(self, kind: str) -> list[Record]:
        """Return the records of its journal."""
        return self._journal.records(kind)

    def events(self, kind: str | None = None) -> list[Record]:
        """Return the Manager's event records."""
        return self._events.records(kind)


class Group:
    """One start of a replica group; a second start has the same name and is another Group."""

    def __init__(self, name: str, ranks: list[Rank], store: TCPStore | None) -> None:
        self.name = name
        self.ranks = ranks
        self._store = store

    @property
    def replica_id(self) -> str | None:
        """The replica id of its last event; None before the first."""
        return next((str(e["replica_id"]) for e in reversed(self.ranks[0].events()) if e["replica_id"]), None)

    @property
    def processes(self) -> list[Process]:
        return [(str(self.replica_id), rank) for rank in range(len(self.ranks))]

    @property
    def step(self) -> int:
        """The last step that every rank has committed."""
        return min(max((c.step for c in rank.commits()), default=0) for rank in self.ranks)

    @property
    def last_commit(self) -> Commit:
        """The latest commit of rank 0."""
        return self.ranks[0].commits()[-1]

    def events(self, kind: str | None = None, since: float = 0.0) -> list[Record]:
        """Return the event records of all ranks after the time `since`."""
        return [event for rank in self.ranks for event in rank.events(kind) if event["time"] > since]

    def faults(self) -> list[Record]:
        return [fault for rank in self.ranks for fault in rank.faults()]

    def failures(self, since: float = 0.0) -> list[Record]:
        """Return errors, aborts, and attempts at a step that were not committed."""
        votes = [event for event in self.events("commit", since) if not event["committed"]]
        return votes + self.events("error", since) + self.events("abort", since)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every rank."""
        for rank in self.ranks:
            rank.signal(number)

    def kill(self) -> None:
        """End every rank, and the store on the same host."""
        self.signal(signal.SIGKILL)
        for rank in self.ranks:
            rank.kill()
        self._store = None

    def has_ended(self) -> bool:
        return all(rank.exit_code is not None for rank in self.ranks)


class Cluster:
    """A lighthouse and the replica groups under it.

    Args:
        folder: the folder for logs, journals and event files.
        min_replicas: the lighthouse's setting.
        join_timeout_ms: the lighthouse's setting; by default so long that no recovery can come from it.
        limit_s: the limit of every wait, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        min_replicas: int = 1,
        join_timeout_ms: int = 120_000,
        limit_s: float = LIMIT_S,
    ) -> None:
        self._folder = folder
        self._limit_s = limit_s
        self._options = [f"--min_replicas={min_replicas}", f"--join_timeout_ms={join_timeout_ms}"]
        self._daemons: list[Daemon] = []
        self._indices: dict[str, int] = {}
        self.groups: list[Group] = []
        self.lighthouse_address = f"http://{LOOPBACK}:0"

    def __enter__(self) -> Self:
        try:
            self.start_lighthouse()
        except BaseException:
            self._end_all()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.check()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        kill_all(self._daemons)

    # ------------------------------------------------------------ starting

    def start_lighthouse(self) -> None:
        """Start the lighthouse; a later one listens at the address of the first one."""
        bind = self.lighthouse_address.removeprefix("http://")
        label = f"lighthouse.{len(self._daemons)}"
        events = self._folder / f"{label}.events"
        variables = {"TORCHFT_EVENT_FILE": str(events)}
        command = ["lighthouse", "--bind", bind, *self._options]
        self.lighthouse = Daemon(label, command, self._folder, variables)
        self._daemons.append(self.lighthouse)
        self.lighthouse_events = JournalReader(events)
        self.lighthouse_address = self.lighthouse.wait_for_output(LISTENING, self._limit_s)[1]

    def index_of(self, name: str) -> int:
        """Return the position of a replica group among those that were started: its bit in the ledger."""
        return self._indices.setdefault(name, len(self._indices))

    def launch(self, name: str, command: Sequence[str], *, size: int = 1) -> Group:
        """Start a replica group of `size` ranks, as torchrun would; a name may be started again.

        Args:
            command: a module, as after `python -m`, or the path of a script, and its arguments.
        """
        store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False) if size > 1 else None
        ranks = [
            Rank(
                f"{name}{len(self.groups)}.{rank}", command, self._folder, self._variables(rank, size, store)
            )
            for rank in range(size)
        ]
        self._daemons += ranks
        self.groups.append(Group(name, ranks, store))
        return self.groups[-1]

    def _variables(self, rank: int, size: int, store: TCPStore | None) -> dict[str, str]:
        variables = {
            "TORCHFT_LIGHTHOUSE": self.lighthouse_address,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
        }
        if store is not None:
            variables |= {
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
        return variables

    # -------------------------------------------------------------- faults

    def plan(self, act: str, place: str) -> str:
        """Describe a fault for the script's `Faults` that waits for `pull_trigger`."""
        return f"{act}@{place}@{self._folder / 'trigger'}"

    def pull_trigger(self) -> None:
        """Let the planned fault strike the next process that comes to its place."""
        (self._folder / "trigger").touch()

    # ------------------------------------------------------------- waiting

    def wait_until(self, predicate: Callable[[], object], what: str, limit_s: float | None = None) -> None:
        """Wait until the processes make the predicate true.

        Raises:
            AssertionError: it did not become true, or a process ended without a reason; the text has the
              logs.
        """
        limit_s = limit_s or self._limit_s
        deadline = time.monotonic() + limit_s
        while not predicate():
            self._fail_if("waiting for: " + what)
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {limit_s:.0f} s: {what}\n{self._tails()}")
            time.sleep(POLL_S)

    def wait_for_quorum_of(self, *groups: Group, steps: int = 3) -> None:
        """Wait until these groups, and no other, commit `steps` more steps together."""
        since = time.time()

        def train_together() -> bool:
            members = {str(group.replica_id) for group in groups}
            together = [c for g in groups for r in g.ranks for c in r.commits() if c.members == members]
            processes = [process for group in groups for process in group.processes]
            return not any(progress(History(tuple(together)), since, processes, steps))

        self.wait_until(train_together, f"{', '.join(g.name for g in groups)} commit {steps} steps together")

    def wait_for_event(self, group: Group, kind: str, since: float = 0.0) -> Record:
        """Wait for an event record of a group and return the first one."""
        self.wait_until(lambda: group.events(kind, since), f"{group.name} writes a {kind} event")
        return group.events(kind, since)[0]

    def wait_for_fault(self, *groups: Group) -> tuple[Group, float]:
        """Wait until the planned fault of one of the groups has struck; return that group, and the time."""
        names = ", ".join(group.name for group in groups)
        self.wait_until(lambda: any(group.faults() for group in groups), f"a fault strikes in {names}")
        struck = next(group for group in groups if group.faults())
        return struck, float(struck.faults()[0]["time"])

    def wait_for_end(self, *groups: Group) -> None:
        """Wait until all ranks have ended."""
        for rank in (rank for group in groups for rank in group.ranks):
            rank.may_end = True
        names = ", ".join(group.name for group in groups)
        self.wait_until(lambda: all(group.has_ended() for group in groups), f"{names} end")

    # ------------------------------------------------------------ checking

    def history(self) -> History:
        """Return the records of all ranks of all incarnations so far."""
        ranks = [rank for group in self.groups for rank in group.ranks]
        commits = [commit for rank in ranks for commit in rank.commits()]
        return Log(commits, [event for rank in ranks for event in rank.events()]).history()

    def check(self) -> None:
        """Check that the invariants hold, and that no process has ended without a reason.

        Raises:
            AssertionError: an invariant is violated, or a process has ended; the text has every violation,
              and the logs.
        """
        found = violations(self.history())
        if found:
            raise AssertionError("\n".join([*found[:20], self._tails()]))
        self._fail_if("at the end")

    def _fail_if(self, when: str) -> None:
        for daemon in self._daemons:
            if daemon.exit_code is not None and not daemon.may_end:
                raise AssertionError(f"{daemon.label} ended with {daemon.exit_code}, {when}\n{self._tails()}")

    def _tails(self) -> str:
        for rank in (rank for group in self.groups for rank in group.ranks):
            rank.print_stacks()
        time.sleep(STACKS_S)
        paths = sorted(self._folder.glob("*.events"))
        texts = {path.name: path.read_text(errors="replace") for path in paths}
        texts |= {daemon.label: daemon.output for daemon in self._daemons}
        return "\n".join(f"--- {name}\n{_tail(text)}" for name, text in texts.items())


def _tail(text: str, lines: int = 120) -> str:
    """Return the end of a log or event file, without committed steps, which are too many."""
    kept = [line[:400] for line in text.splitlines() if '"committed":true' not in line]
    return "\n".join(kept[-lines:])


def host_of_its_own(name: str) -> dict[str, str]:
    """Return variables with which NCCL lets several ranks share a GPU; each process needs its own `name`.

    NCCL refuses two ranks on one device of one host. It identifies a device by its bus id and a host by a
    hash, which is that of NCCL_HOSTID if that is set (NCCL 2.28.9: src/misc/utils.cc, src/init.cc). With
    another id in each process the ranks count as being on different hosts, and sockets connect them. The
    driver gives the processes the device in turn, so such a group is slow; it reduces and fails as NCCL does
    between hosts.
    """
    return {"NCCL_HOSTID": name, "NCCL_SOCKET_IFNAME": "lo"}
