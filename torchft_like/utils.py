"""Streams and events of this process's accelerator, of whichever kind, under torchft's names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torchft_like import devices


def get_stream_context(stream: torch.Stream | None) -> AbstractContextManager[Any]:
    """Return a block whose operations go to `stream`; without one, or an accelerator, it does nothing."""
    if stream is None or not torch.accelerator.is_available():
        return nullcontext()
    return stream


def record_event() -> torch.Event:
    """Record an event on the current stream; another process can wait for it if the device allows that.

    Raises:
        RuntimeError: there is no accelerator.
    """
    if torch.cuda.is_available():
        event: torch.Event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().record_event(event)
        return event
    return torch.accelerator.current_stream().record_event()


def synchronize() -> None:
    """Wait until the current stream has done its work; without an accelerator there is none."""
    if devices.is_in_use():
        torch.accelerator.current_stream().synchronize()
