"""Settings in files, such as tokens and certificates, that may be replaced while the process runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lighthouse.errors import ConfigError

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_known: dict[tuple[str, ...], tuple[object, Any]] = {}  # by paths, the files' state, and what was read then
_complaints: dict[tuple[str, ...], str] = {}  # by paths, what is wrong with the files now


def read_again(paths: Sequence[str], variable: str, read: Callable[[], T]) -> T:
    """Return what `read` makes of these files, which is called again once one of them has changed.

    If they cannot be read then, what they held before stays good, with a warning.

    Args:
        variable: the environment variable that names them, for the text of an error.
        read: a function that reads the files; what it raises, an OSError or a ConfigError, must not quote
          them.

    Raises:
        ConfigError: they could not be read at all so far.
    """
    before, value = _known.get(key := tuple(paths), (None, None))
    try:
        state = [(found.st_mtime_ns, found.st_size, found.st_ino) for found in map(os.stat, paths)]
        if value is None or state != before:
            value = read()
            _known[key] = state, value
        _complaints.pop(key, None)
    except (OSError, ConfigError) as error:
        failure = error
        if isinstance(error, OSError):
            reason = error.strerror or type(error).__name__
            name = error.filename or " or ".join(paths)
            failure = ConfigError(f"the file {name} ({variable}) cannot be read: {reason}")
        if value is None:
            raise failure from None
        if _complaints.get(key) != str(failure):  # else a line for each call and connection
            _complaints[key] = str(failure)
            _logger.warning("what these files held stays good: %s", failure)
    return value  # type: ignore[no-any-return]
