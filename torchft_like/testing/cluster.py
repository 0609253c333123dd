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

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchft_like.process_group.store import serve_store
from torchft_like.testing.invariants import Commit, History, Process, progress, violations
from torchft_like.testing.journal import JOURNAL_ENV, JournalReader, Record
from torchft_like.testing.log import Log, commit_of
from torchft_like.testing.processes import END_S_MAX, RunningProcess, kill_all

LOOPBACK = "127.0.0.1"
LIGHTHOUSE = "lighthouse"
LISTENING: Final = r"(?m)^lighthouse listening on (http://\S+)\n"
START_S_MAX: Final = 60.0
# No member of a quorum can be about to come back to an address at which there was no lighthouse before.
FIRST_OF_ALL: Final = ("--start_grace_ms=0",)

# Far above the time of any wait here, far below the workers' operation timeout.
LIMIT_S = 60.0
POLL_S = 0.05
STACKS_S = 1.0


class LighthouseProcess(RunningProcess):
    """A lighthouse, which listens when the constructor returns, and is ended when its block ends.

    Args:
        flags: the flags of its command line.
        bind: host and port to listen at; a free port of loopback by default.
        event_file: the file into which it writes its events.
        is_cold: whether to start a new interpreter, which is what a measurement of its memory needs.
        log, variables, namespace: as in RunningProcess.

    Attributes:
        url, address: where it listens; `address` is host and port, at which another one may listen after it.

    Raises:
        OutputError: it does not listen; the text has its output.
    """

    def __init__(
        self,
        *flags: str,
        bind: str = f"{LOOPBACK}:0",
        event_file: Path | None = None,
        is_cold: bool = False,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
        namespace: str = "",
    ) -> None:
        first = FIRST_OF_ALL if bind.endswith(":0") else ()
        # A page takes a moment to load; a flag that follows asks for one.
        command = ["lighthouse", "--bind", bind, "--page=off", *first, *flags]
        told = {"TORCHFT_EVENT_FILE": str(event_file)} if event_file else {}
        cold = [sys.executable, "-m"] if is_cold else []
        super().__init__(
            [*cold, *command], log, {**told, **(variables or {})}, is_fork=not is_cold, namespace=namespace
        )
        try:
            self.url: str = self.wait_for_output(LISTENING, START_S_MAX)[1]
        except BaseException:
            self.kill()
            raise
        self.address: str = self.url.removeprefix("http://")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit status."""
        self.signal(number)
        return self.wait(END_S_MAX)


class Rank(RunningProcess):
    """A rank of a replica group, and its records; its label is the group's name, the start and its number.

    Attributes:
        name: the name of the replica group.
        number: its group rank.
        journal, event_file: readers of what it writes.

    Args:
        command: a module or a script, and its arguments, for a fork; of a cold process the program and its
            arguments.
        folder: the folder for its output and its records.
    """

    def __init__(
        self,
        label: str,
        command: Sequence[str],
        folder: Path,
        variables: Mapping[str, str],
        *,
        namespace: str = "",
        is_cold: bool = False,
    ) -> None:
        self.name, _, number = label.rsplit(".", 2)
        self.number: int = int(number)
        self.journal: JournalReader = JournalReader(folder / f"{label}.journal")
        self.event_file: JournalReader = JournalReader(folder / f"{label}.events")
        self._commits: list[Commit] = []
        own = {JOURNAL_ENV: str(self.journal.path), "TORCHFT_EVENT_FILE": str(self.event_file.path)}
        if not is_cold:
            own |= {**host_of_its_own(label), "OMP_NUM_THREADS": "1"}
        log = folder / f"{label}.log"
        super().__init__(command, log, {**own, **variables}, is_fork=not is_cold, namespace=namespace)

    def print_stacks(self) -> None:
        """Make the rank print the stacks of its threads, if it can."""
        if self.exit_code is None and not self.is_stopped:
            self.signal(signal.SIGUSR2)

    def commits(self) -> list[Commit]:
        new = self.journal.records("commit")[len(self._commits) :]
        self._commits += map(commit_of, new)
        return self._commits

    def faults(self) -> list[Record]:
        """Return the planned faults that have struck."""
        return self.journal.records("fault")

    def records(self, kind: str) -> list[Record]:
        """Return the records of its journal: "attempt" for the steps that it has begun, and so on."""
        return self.journal.records(kind)

    def events(self, kind: str | None = None) -> list[Record]:
        """Return the Manager's event records."""
        return self.event_file.records(kind)


class Group:
    """One start of a replica group; a second start has the same name and is another Group."""

    def __init__(self, name: str, start: int, ranks: list[Rank], store: TCPStore | None) -> None:
        self.name = name
        self.start = start
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

    def is_broken(self) -> bool:
        """Return whether a rank has ended."""
        return any(rank.exit_code is not None for rank in self.ranks)

    def has_ended(self) -> bool:
        return all(rank.exit_code is not None for rank in self.ranks)


class Cluster:
    """A lighthouse and the replica groups under it.

    Args:
        folder: the folder for logs, journals and event files.
        min_replicas: the lighthouse's setting.
        join_timeout_ms: the lighthouse's setting; by default so long that no recovery can come from it.
        lighthouse_flags: further flags of its command line.
        limit_s: the limit of every wait, in seconds.
    """

    def __init__(
        self,
        folder: Path,
        *,
        min_replicas: int = 1,
        join_timeout_ms: int = 120_000,
        lighthouse_flags: Sequence[str] = (),
        limit_s: float = LIMIT_S,
    ) -> None:
        self.folder = folder
        self._limit_s = limit_s
        settings = [f"--min_replicas={min_replicas}", f"--join_timeout_ms={join_timeout_ms}"]
        self._options = [*settings, *lighthouse_flags]
        self._daemons: list[RunningProcess] = []
        self._indices: dict[str, int] = {}
        self.groups: list[Group] = []
        self.lighthouse_address = f"http://{LOOPBACK}:0"
        self.lighthouse_events: JournalReader = JournalReader(folder / f"{LIGHTHOUSE}.events")

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

    def host_of(self, name: str) -> tuple[str, str]:
        """Return the address and the network namespace of a replica group, or of the lighthouse."""
        return LOOPBACK, ""

    def start_lighthouse(self) -> None:
        """Start the lighthouse; a later one listens at the address of the first one."""
        first = () if self._daemons else FIRST_OF_ALL
        self.lighthouse = LighthouseProcess(
            *first,
            *self._options,
            bind=self.lighthouse_address.removeprefix("http://"),
            event_file=self.folder / f"{LIGHTHOUSE}.events",
            log=self.folder / f"{LIGHTHOUSE}.{len(self._daemons)}.log",
            variables={"TORCHFT_INSECURE": "1"},  # a namespace of its own, and no other host
            namespace=self.host_of(LIGHTHOUSE)[1],
        )
        self._daemons.append(self.lighthouse)
        self.lighthouse_address = self.lighthouse.url

    def index_of(self, name: str) -> int:
        """Return the position of a replica group among those that were started: its bit in the ledger."""
        return self._indices.setdefault(name, len(self._indices))

    def launch(
        self,
        name: str,
        command: Sequence[str],
        *,
        size: int = 1,
        variables: Mapping[str, str] | None = None,
        is_cold: bool = False,
    ) -> Group:
        """Start a replica group of `size` ranks, as torchrun would; a name may be started again.

        Args:
            command: a module, as after `python -m`, or the path of a script, and its arguments.
            variables: variables of the environment.
            is_cold: whether `command` is a program, which starts anew; else it runs in forks that have torch
                loaded.
        """
        start = 1 + sum(group.name == name for group in self.groups)
        store, where = self._store(name, start) if size > 1 else (None, {})
        job = {"TORCHFT_LIGHTHOUSE": self.lighthouse_address, "WORLD_SIZE": str(size), **where}
        ranks = []
        for number in range(size):
            own = {**job, **(variables or {}), "RANK": str(number)}
            label, namespace = f"{name}.{start}.{number}", self.host_of(name)[1]
            ranks.append(Rank(label, command, self.folder, own, namespace=namespace, is_cold=is_cold))
            self._daemons.append(ranks[-1])
        self.groups.append(Group(name, start, ranks, store))
        return self.groups[-1]

    def _store(self, name: str, start: int) -> tuple[TCPStore | None, dict[str, str]]:
        """Serve the store of a replica group of several ranks, as torchrun's agent does; return it, and the
        variables that lead to it.
        """
        store, _ = serve_store(LOOPBACK, timedelta(seconds=LIMIT_S))
        return store, {
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    # -------------------------------------------------------------- faults

    def plan(self, act: str, place: str) -> str:
        """Describe a fault for the script's `Faults` that waits for `pull_trigger`."""
        return f"{act}@{place}@{self.folder / 'trigger'}"

    def pull_trigger(self) -> None:
        """Let the planned fault strike the next process that comes to its place."""
        (self.folder / "trigger").touch()

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
        paths = sorted(self.folder.glob("*.events"))
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
