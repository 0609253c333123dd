"""The lock that fences memory is free, whatever happens to those who have used it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from types import FrameType

import pytest

from tests.unit.message_queue.queues import LIMIT_S
from torchft_like.message_queue import fence

FENCES = pytest.mark.parametrize("pass_fence", [fence._one_round, fence._two_rounds])


@FENCES
def test_a_fence_that_was_interrupted_holds_nobody_up(pass_fence: object) -> None:
    def interrupt(_: FrameType, event: str, function: object) -> None:
        if event == "c_return" and getattr(function, "__name__", "") == "acquire":
            sys.setprofile(None)
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        sys.setprofile(interrupt)
        try:
            pass_fence()  # type: ignore[operator]
        finally:
            sys.setprofile(None)
    assert not fence._lock.locked()


def test_a_fork_has_a_fence_of_its_own() -> None:
    """Another thread may have been in one."""
    with fence._lock:
        child = os.fork()
        if not child:
            passing = threading.Thread(target=fence._two_rounds, daemon=True)
            passing.start()
            passing.join(LIMIT_S)
            os._exit(int(passing.is_alive()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
