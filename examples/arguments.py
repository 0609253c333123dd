"""Numbers on a command line: one that makes no sense ends the script with a line that says what does."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

N = TypeVar("N", int, float)
SEED_MAX = 2**63 - 1
SECONDS_MAX = 1e7


def number(kind: type[N], least: float, most: float = math.inf) -> Callable[[str], N]:
    """Return what reads a number from `least` to `most`, for the `type` of an argument."""

    def read(text: str) -> N:
        if not least <= (found := kind(text)) <= most or found == math.inf:
            limits = f"{least:g} or more" if most == math.inf else f"between {least:g} and {most:g}"
            raise argparse.ArgumentTypeError(f"{text} is not {limits}")
        return found

    read.__name__ = kind.__name__  # argparse names it where the text is no number
    return read
