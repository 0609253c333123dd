"""The command `torchft-like keys`: the tokens of a job, a file for each role.

    torchft-like keys FOLDER

It makes FOLDER/observe, FOLDER/participate and FOLDER/operate, which only their owner may read, and
overwrites none. No token is printed. Exit status 2 says that a file could not be made.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from lighthouse.core.trust import Role, make_texts
from lighthouse.trust import TOKEN_FILE_ENV

_WHOSE = {
    Role.OBSERVE: "for who looks at the page, such as Prometheus",
    Role.PARTICIPATE: f"for the trainers: {TOKEN_FILE_ENV}=",
    Role.OPERATE: f"for the lighthouse, and for who may kill: {TOKEN_FILE_ENV}=",
}


def add_command(commands: Any) -> None:
    """Add the command to a parser's subparsers; `run` among the options is what it does."""
    what = "make the tokens of a job, a file for each role"
    parser = commands.add_parser("keys", help=what, description=what)
    parser.add_argument("folder", type=Path, help="where the files go; it is made, if need be")
    parser.set_defaults(run=_make)


def _make(options: argparse.Namespace) -> int:
    folder: Path = options.folder
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for role, text in make_texts().items():
            path = folder / role.name.lower()
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
            whose = _WHOSE[role]
            sys.stdout.write(f"{path}: {whose}{path if whose.endswith('=') else ''}\n")
    except OSError as error:
        sys.stderr.write(f"torchft-like: {error.filename}: {error.strerror}; nothing was overwritten\n")
        return 2
    return 0
