"""The stream on which a CUDA graph is captured; on a CPU there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GraphCaptureContext:
    """The place where a graph is captured.

    Attributes:
        stream: a stream of the coordinator's device, other than the default one, on which CUDA does not
            capture; None on a CPU.
    """

    stream: torch.cuda.Stream | None


@contextlib.contextmanager
def capturing(device: torch.device, context: GraphCaptureContext | None) -> Iterator[GraphCaptureContext]:
    """Run the block on a stream of its own, after all work of the present stream, and before its later work.

    Args:
        context: the context of a capture around this one, whose stream is used; None makes a stream.
    """
    if device.type != "cuda":
        yield context or GraphCaptureContext(None)
        return
    if context is None or context.stream is None:
        context = GraphCaptureContext(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    outer, stream = torch.cuda.current_stream(device), context.stream
    if stream is None or stream == outer:
        yield context
        return
    stream.wait_stream(outer)
    try:
        with torch.cuda.stream(stream):
            yield context
    finally:
        outer.wait_stream(stream)
