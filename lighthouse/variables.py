"""The environment variables that this project reads, all of them, and those that look like a misspelt one.

What a misspelt variable was to change is not changed, and nothing fails for it: it is only said.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Mapping

PREFIX = "TORCHFT_"
KNOWN = (
    "CHECK_COLLECTIVES",
    "CONNECT_TIMEOUT_SEC",
    "DEAD_AFTER_SEC",
    "EVENT_FILE",
    "HOSTNAME",
    "INSECURE",
    "JOB_ID",
    "KEEPALIVE_TIMEOUT_MS",
    "KEEPALIVE_TIME_MS",
    "LIGHTHOUSE",
    "LIGHTHOUSE_ABSENCE",
    "MANAGER_PORT",
    "OTEL_RESOURCE_ATTRIBUTES_JSON",
    "QUORUM_RETRIES",
    "QUORUM_TIMEOUT_SEC",
    "SPARE",
    "TESTING_JOURNAL",
    "TESTING_WHOLE_END",
    "TIMEOUT_SEC",
    "TLS",
    "TOKEN",
    "TOKEN_FILE",
    "TRIGGER_FR_ON_ABORT",
    "USE_BUCKETIZATION",
    "USE_OTEL",
    "WATCHDOG_TIMEOUT_SEC",
)
# A name that is less like one of these may be a script's own.
_LIKENESS_MIN = 0.65
# So does Kubernetes tell every container of a Service that is called torchft-lighthouse, say.
_OF_A_SERVICE = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_[0-9]|_PORT=\w+://")

_logger = logging.getLogger(__name__)
_warned: set[None] = set()


def about_variables(environ: Mapping[str, str]) -> str:
    """Return which variables are read by nothing and are probably misspelt, and as what; "" if none is."""
    return "; ".join(
        f"nothing reads the environment variable {name}: {PREFIX}{near[0]} is meant, perhaps"
        for name, text in sorted(environ.items())
        if name.startswith(PREFIX) and (rest := name.removeprefix(PREFIX)) not in KNOWN
        if not _OF_A_SERVICE.search(f"{name}={text}")
        if (near := difflib.get_close_matches(rest, KNOWN, 1, _LIKENESS_MIN))
        if f"{PREFIX}{near[0]}" not in environ  # one that is set is known, and this one is a script's own
    )


def process_variables() -> Mapping[str, str]:
    """Return this process's environment. Log a warning, once, if a variable is probably misspelt."""
    if (complaint := about_variables(os.environ)) and not _warned:
        _warned.add(None)
        _logger.warning("%s", complaint)
    return os.environ
