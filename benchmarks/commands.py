"""A process that carries out the commands of a `Fleet`, each a JSON object in a line, and reports.

It needs the standard library alone: it runs in the environment of every system.
"""

from __future__ import annotations

import json
import os
import sys


def serve(worker: object) -> None:
    """Report that the worker is ready; then call its method for each command until there are no more.

    A command has the method's name under "do", beside the arguments; the method returns the record's fields.
    """
    report(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        report(event=do, **(getattr(worker, do)(**command) or {}))


def report(**record: object) -> None:
    """Write one line of JSON in one write."""
    os.write(sys.stdout.fileno(), (json.dumps(record) + "\n").encode())
