"""The messages between a trainer, its fork server and the forks: the first item of each names its kind.

Errors of a fork travel as their type and their text.
"""

from __future__ import annotations

import builtins
from enum import IntEnum
from typing import Any, Final

from torch import distributed as dist

from torchft_like import errors

# The number of requests that expect no answer.
UNASKED: Final = 0


# The only message from the trainer to its fork server, answered by FORKED or NOT_FORKED.
FORK: Final = (0, 0)


class FromServer(IntEnum):
    """Messages from the fork server to the trainer."""

    FORKED = 0  # (pid,) with the channel to the fork and its pidfd
    ENDED = 1  # (pid, how)                 sent for each fork that has ended
    NOT_FORKED = 2  # (0, why): the machine, or the process, has no room for a fork


class ToChild(IntEnum):
    """Messages from the trainer to a fork, answered by (request, outcome, ...) unless it is UNASKED."""

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


_OF_TORCH = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "QueueEmptyError")
_KNOWN: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *(getattr(dist, name) for name in _OF_TORCH),
        *(
            kind
            for module in (errors, builtins)
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Exception)
        ),
    )
}


def answer_for(error: BaseException) -> tuple[Any, ...]:
    """Encode the error: its type, or the nearest base that both sides know, and its text."""
    known = next(kind for kind in type(error).__mro__ if kind.__name__ in _KNOWN or kind is BaseException)
    return known.__name__, str(error)


def error_from(answer: tuple[Any, ...]) -> Exception:
    """Decode an error that `answer_for` has encoded."""
    name, text = answer
    try:
        return _KNOWN.get(name, RuntimeError)(text)
    except TypeError:  # this type is not made of a single text
        return RuntimeError(f"{name}: {text}")
