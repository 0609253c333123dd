"""Whether an error of a rank is its own, or what the end or the silence of a peer looks like from here. Pure.

A rank that has errors of its own, again and again, is left out of quorums for a while, so that the others
can go on (`lighthouse/core/sickness.py`). An error that is taken for the rank's own, and is not, costs that
rank a second. One that is, and is not taken for it, costs the others their steps for as long as it lasts.
"""

from __future__ import annotations

from torchft_like.errors import FaultToleranceError, SubprocessLostError

OWN_FAILURE_MAX = 400  # characters of an error that go to the lighthouse

# Words in the errors of Gloo, NCCL and torch's stores, all RuntimeErrors, when a peer or its host is why.
_OF_PEERS = ("connect", "peer", "pipe", "socket", "remote", "store", "timed out", "timeout")


def is_own(error: BaseException) -> bool:
    """Return whether an error comes from this process, its device or its host alone."""
    if isinstance(error, SubprocessLostError):  # this rank's subprocess
        return True
    if isinstance(error, FaultToleranceError | ConnectionError | TimeoutError):
        return error.__cause__ is not None and is_own(error.__cause__)
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        return not any(word in text for word in _OF_PEERS)
    return True


def described(error: BaseException) -> str:
    """Return an error in words, as it goes to the lighthouse."""
    return f"{type(error).__name__}: {error}"[:OWN_FAILURE_MAX]
