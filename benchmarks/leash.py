"""Runs a command that cannot outlive the process that started it.

`python leash.py COMMAND...` asks the kernel to kill this process when its parent dies, then becomes
the command. That holds for a command that is stopped, hangs or ignores signals, and for a parent
that is killed and cleans nothing up.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])


def die_with(parent: int) -> None:
    """From now on the kernel kills this process when its parent, whose id is given, dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit("the parent died before the leash was on")


if __name__ == "__main__":
    main()
