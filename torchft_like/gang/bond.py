"""What ties a part of a group to the whole: when the configuration ends in which it was made, so does it.

A member that has died is noticed by whoever talks to it. Those who do not, in a part of which it was no
member, would wait for partners that have long gone on to meet anew. So the abort of the whole, or its
next `configure`, is the abort of all its parts, and of their parts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch.distributed as dist

from torchft_like.errors import ProcessGroupAbortedError
from torchft_like.gang.likeness import innermost
from torchft_like.process_group import ProcessGroup
from torchft_like.process_group.generation import AbortSignal
from torchft_like.process_group.wrapper import ReconfigurableProcessGroup

REPEAT_S = 0.02


class Bond:
    """Between a configuration of `whole`, the present one, and groups that are made of it.

    A group of torch's own has one configuration, and its end is nobody's business: such a bond never breaks.
    """

    def __init__(self, whole: dist.ProcessGroup) -> None:
        self._whole = whole
        self._signal = _signal_of(whole) or AbortSignal()
        self._configuring = threading.Event()
        self._done = threading.Event()
        self._part: ProcessGroup | None = None

    @property
    def broken(self) -> str | None:
        """Why the configuration has ended; None while it has not."""
        return self._signal.reason

    @property
    def is_latest(self) -> bool:
        """Whether the whole has not been configured anew since, aborted or not."""
        return _signal_of(self._whole) in (None, self._signal)

    @contextlib.contextmanager
    def tying(self, part: ProcessGroup) -> Iterator[None]:
        """In the block `part` is configured, and from then on it ends with the whole.

        Raises:
            ProcessGroupAbortedError: the whole has ended before.
        """
        self._part = part
        self._configuring.set()
        self._signal.add(self._end)
        try:
            self._signal.check()
            yield
            self._signal.check()
        except BaseException:
            self._signal.remove(self._end)
            raise
        finally:
            self._configuring.clear()
            self._done.set()

    def untie(self) -> None:
        """The part has been given up."""
        self._signal.remove(self._end)
        self._part = None

    def _end(self) -> None:
        """On the thread that aborts the whole, which must not be kept."""
        if (part := self._part) is None:
            return
        part.abort(self._reason())
        if self._configuring.is_set():
            # The abort may have come before `configure` began to listen.
            threading.Thread(
                target=self._repeat, args=(part,), name="torchft-gang-abort", daemon=True
            ).start()

    def _repeat(self, part: ProcessGroup) -> None:
        while not self._done.wait(REPEAT_S):
            part.abort(self._reason())

    def _reason(self) -> str:
        return f"the group that it is a part of has ended: {self._signal.reason}"


def _signal_of(whole: dist.ProcessGroup) -> AbortSignal | None:
    inner = innermost(whole)
    return inner.ending if isinstance(inner, ReconfigurableProcessGroup) else None


def check_whole(bond: Bond) -> None:
    """Whether the whole goes on.

    Raises:
        ProcessGroupAbortedError: it does not.
    """
    if bond.broken is not None:
        raise ProcessGroupAbortedError(bond.broken)
