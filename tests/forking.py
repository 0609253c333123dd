"""What a fork of the process of a test finds."""

from __future__ import annotations

import os
from collections.abc import Callable


def is_so_in_a_fork(is_so: Callable[[], object]) -> bool:
    """Return whether something is true in a fork of this process, without an error."""
    if not (child := os.fork()):
        code = 1
        try:
            code = 0 if is_so() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
