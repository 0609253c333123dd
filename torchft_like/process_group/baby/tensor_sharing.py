"""How a subprocess comes to see the tensors of a call: the interface of the two sides, for each kind of
memory.

`cpu_sharing` and `cuda_exporter` implement it; `backend` and `child` know no more than this interface.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor
from torch._C._distributed_c10d import Work

from torchft_like.process_group.baby.channel import Message
from torchft_like.process_group.baby.requests import Request, Requests
from torchft_like.process_group.baby.tensor_spec import TensorSpec
from torchft_like.process_group.baby.work import Failures, RemoteOperation
from torchft_like.process_group.collectives import Call

# A message, and the descriptors that are sent with it.
Preamble = tuple[Message, tuple[int, ...]]


class CallTensors(Protocol):
    """The tensors of one call, while the subprocess may use them. One thread at a time makes and fills
    them.
    """

    def locate(self, tensor: Tensor) -> TensorSpec:
        """Return where the subprocess finds the tensor, from now on until `settle`.

        Raises:
            NotSupportedError: the subprocess cannot be given the tensor; the text says why.
        """

    def context(self) -> bytes | None:
        """Return what the subprocess has to know besides the arguments; called once, after the last
        `locate`.
        """

    def settle(self, request: Request) -> None:
        """Give the tensors back to the caller: the request is over, or was never sent."""

    def operation(
        self, requests: Requests, request: Request, result: list[Any], failures: Failures
    ) -> RemoteOperation:
        """Make the operation behind the caller's work."""


class Exporter(Protocol):
    """The trainer's side."""

    def export(self, call: Call) -> CallTensors:
        """Return an object for the tensors of one call."""

    def next_preamble(self) -> Preamble | None:
        """Return the message that the subprocess must get before the next request, if there is one."""

    def preamble_sent(self) -> None:
        """Note that the last preamble was sent, so that the next one may follow."""

    def greeting(self) -> Any:
        """Return what the subprocess's side is made of, as plain data."""

    def greeted(self, greeting: Any) -> None:
        """Take the greeting of the subprocess's side, which it sent when it was made."""

    def cut_off(self) -> int:
        """Return how many operations that the subprocess has begun may not be over, just before it is killed.

        This must not block: a lock may be held by a thread whose wait only the kill ends.
        """

    def is_busy(self) -> bool:
        """Return whether a device has yet to pass an operation that was answered, or the copies of its
        results.
        """

    def abandon(self) -> None:
        """Never use again what the subprocess may still touch, because it does not die."""

    def close(self) -> None:
        """Take everything back: the subprocess is dead and reaped."""


class Importer(Protocol):
    """The subprocess's side; for the thread that reads requests."""

    def greeting(self) -> Any:
        """Return the plain data for `Exporter.greeted`, once the backend is made."""

    def map(self, details: tuple[Any, ...], descriptors: list[int]) -> None:
        """Map a storage that later requests use."""

    def unmap(self, storage: int) -> None:
        """Release a storage that no later request uses."""

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Return the tensor that a request describes."""

    def entered(self, context: Any, /) -> AbstractContextManager[None]:
        """Return the context within which the operation of a request is started."""

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...] | None:
        """Return what to answer at once, within `entered`; None if the answer has to wait for the
        operation.
        """
