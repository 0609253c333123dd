"""The journal of a process of a test job, which is read while it grows.

One record is one line of JSON, written at once to a descriptor opened for appending: a process that is killed
leaves whole lines behind.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final

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
