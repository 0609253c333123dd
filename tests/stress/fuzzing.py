"""Settings that all fuzz targets have in common: how much is tried, and what a parser may do.

A parser returns a valid value or raises one of the errors that it documents, and nothing else, within bounded
memory and time. `FUZZ_EXAMPLES` (`make fuzz EXAMPLES=...`) says how many inputs each target tries; a case
that was found once stays as an `@example` beside its target.
"""

from __future__ import annotations

import os
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "40"))

# Limits for one input of at most a few megabytes: far above what an honest input takes, and far below what a
# parser takes that believes a length, or that looks at every byte once for each other byte.
CPU_SECONDS_MAX = 6.0
REASON_MAX = 5000
PYTHON_BYTES_MAX = 256 * 1024 * 1024

fuzz = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.function_scoped_fixture,
    ],
)


def assert_parsed_or_refused(
    parse: Callable[..., Any], *given: Any, refusals: type[Exception] | tuple[type[Exception], ...]
) -> Any:
    """Return what the parser makes of it; None if it refuses. Any other exception fails the test."""
    tracemalloc.start()
    began = time.thread_time()
    found, why = None, "-"
    try:
        found = parse(*given)
    except refusals as refusal:
        why = str(refusal)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < PYTHON_BYTES_MAX
    assert time.thread_time() - began < CPU_SECONDS_MAX
    assert 0 < len(why) < REASON_MAX, "a refusal says why, and does not repeat everything that it was given"
    return found


numbers = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.sampled_from([0, 1, -1, 2**62, 2**63 - 1, -(2**63), 10**15])
)
"""What an int64 of the wire can be."""

names = st.one_of(
    st.text(max_size=20),
    st.sampled_from(["a", "b", "", "\x1b[2J", "a\nb", "x" * 5000, "\u202eabc", "a:" + "f" * 36]),
).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
"""What a string of the wire can be."""
