"""The messages between a trainer, its fork server and the forks: the first item of each names its kind."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

# The number of requests that expect no answer.
UNASKED: Final = 0


class ToServer(IntEnum):
    """Messages from the trainer to its fork server."""

    FORK = 0  # (0,)                        answered by FORKED or NOT_FORKED
    HOW_ENDED = 1  # (pid,)                 answered by ENDED


class FromServer(IntEnum):
    """Messages from the fork server to the trainer."""

    FORKED = 0  # (pid,) with the channel to the fork and its pidfd
    ENDED = 1  # (pid, how)
    NOT_FORKED = 2  # (0, why): the machine, or the process, has no room for a fork


class ToChild(IntEnum):
    """Messages from the trainer to a fork; answered by (request, outcome, ...) unless the request is
    UNASKED.
    """

    BEGIN = 0  # (request, environment, group, importer, greeting, store, rank, world_size, timeout)
    MAP = 1  # (UNASKED, storage, what the kind of memory needs to map it), perhaps with a descriptor
    UNMAP = 2  # (UNASKED, storage)
    RUN = 3  # (request, the call as bytes, and what the kind of memory needs besides, if anything)
    SET_TIMEOUT = 4  # (UNASKED, timeout)
    WARM_UP = 5  # (UNASKED, environment, device index): make a CUDA context


class Outcome(IntEnum):
    """How a request ended: the second item of its answer."""

    DONE = 0  # the parts are what the collective, or the kind of memory, answers
    FAILED = 1  # (type, text): the backend cannot be used any more
    REFUSED = 2  # (type, text): the call was wrong; the backend can still be used
