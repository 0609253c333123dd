"""The journal of a process of a test job, which is read while it grows, and a rank's records in it.

One record is one line of JSON, written at once to a descriptor opened for appending: a process that is killed
leaves whole lines behind. A `Witness` records the steps that a rank commits, the evidence that `invariants`
checks. It uses the Manager as any script may: an allreduce beside those of the gradients, and its events.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from lighthouse.events import Event
from torchft_like import Manager
from torchft_like.testing.invariants import QUORUMS_TOLD_APART

Record = dict[str, Any]
JOURNAL_ENV: Final = "TORCHFT_TESTING_JOURNAL"


class Journal:
    """A journal, which appends records to a file."""

    @classmethod
    def of_this_process(cls) -> Journal:
        """Open the journal that this process was given, for example by a `Cluster`."""
        return cls(os.environ[JOURNAL_ENV])

    def __init__(self, path: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, **fields: object) -> None:
        """Append one record with the time in seconds since the Unix epoch."""
        record = {"kind": kind, "time": time.time(), **fields}
        os.write(self._descriptor, (json.dumps(record) + "\n").encode())


class JournalReader:
    """A reader of a growing file; a line that is still being written comes later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._records: list[Record] = []

    def new_records(self) -> list[Record]:
        """Return the records since the last call, oldest first; the reader keeps none of them."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return [json.loads(line) for line in whole.splitlines()]

    def records(self, kind: str | None = None) -> list[Record]:
        """Return all records so far, which the reader keeps, or those of one kind, oldest first."""
        self._records += self.new_records()
        return [record for record in self._records if kind in (None, record["kind"])]


class Witness:
    """Writes the commits of one rank into its journal, as `invariants.Commit` describes them.

    Args:
        index: the index of the replica group, below 40: its bit in the ledger.
    """

    def __init__(self, manager: Manager, journal: Journal, index: int) -> None:
        self._manager = manager
        self._journal = journal
        self._index = index
        self._ledger = torch.zeros(3, dtype=torch.float64)
        self._average = torch.zeros(1, dtype=torch.float64)
        self._before: str | None = None
        self._is_participating = False
        self._quorum_id = 0
        self._members: dict[int, list[str]] = {}
        self._vote: Event | None = None
        manager.events.subscribe(self._on_event)

    def attend(self, step: int, digest: str | None = None) -> None:
        """Find out which replicas take part in a step, and at which step each is; called after its gradients.

        Args:
            digest: the digest of all parameters, with which the gradients were computed; its caller calls
              `took_over`, too, or a replica that heals in the step would seem to have lost its state.
        """
        self._vote = None
        bit = 2.0**self._index
        number = self._quorum_id % QUORUMS_TOLD_APART
        self._ledger = torch.tensor([1.0, step, number], dtype=torch.float64) * bit
        self._average = torch.tensor([bit], dtype=torch.float64)
        self._manager.allreduce(self._ledger, reduce_op=ReduceOp.SUM).wait()
        self._manager.allreduce(self._average).wait()
        self._is_participating = self._manager.is_participating()
        self._before = digest

    def took_over(self, digest: str) -> None:
        """Note that a peer's state was loaded.

        Args:
            digest: the digest of all parameters now.
        """
        self._before = digest

    @property
    def has_committed(self) -> bool:
        """Whether the step that was attended ended, and was committed.

        The number of the step does not tell: a replica that heals in it goes on to another step in any case.
        """
        return self._vote is not None and self._vote.fields["committed"] is True

    def testify(self, digest: str, **more: object) -> None:
        """Record that the step that was attended has been committed.

        Args:
            digest: the digest of all parameters after it.
        """
        if self._vote is None:
            raise RuntimeError("a step was committed without a commit event")
        self._journal.write(
            "commit",
            replica_id=self._vote.replica_id,
            group_rank=self._vote.group_rank,
            step=self._manager.current_step(),
            quorum_id=self._vote.quorum_id,
            members=self._members[self._vote.quorum_id],
            participants=self._manager.num_participants(),
            participating=self._is_participating,
            index=self._index,
            ledger=int(self._ledger[0].item()),
            ledger_steps=int(self._ledger[1].item()),
            ledger_quorums=int(self._ledger[2].item()),
            average=self._average.item(),
            before=self._before,
            digest=digest,
            **more,
        )

    def _on_event(self, event: Event) -> None:
        if event.kind == "quorum":
            self._quorum_id = event.quorum_id
            members = event.fields["members"]
            self._members[event.quorum_id] = members if isinstance(members, list) else []
        if event.kind == "commit":
            self._vote = event
