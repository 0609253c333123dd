"""How the tensors of a call are lent to the subprocess: what the two sides of each kind of memory offer.

`cpu_lending` and `cuda_lending` do it; `backend` and `child` know no more than what is here.
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

# A message and the descriptors that go with it.
Letter = tuple[Message, tuple[int, ...]]


class Loan(Protocol):
    """The tensors of one call. One thread at a time makes and fills loans."""

    def locate(self, tensor: Tensor) -> TensorSpec:
        """Where the subprocess finds the tensor, from now on until the loan is settled.

        Raises:
            NotSupportedError: it cannot be lent; says why.
        """

    def context(self) -> bytes | None:
        """What the subprocess has to know besides the arguments; asked once, at the end."""

    def settle(self, request: Request) -> None:
        """The request is over, or was never made: the tensors are the caller's again."""

    def operation(
        self, requests: Requests, request: Request, result: list[Any], failures: Failures
    ) -> RemoteOperation:
        """What stands behind the caller's handle."""


class Lender(Protocol):
    """The trainer's side."""

    def lend(self, call: Call) -> Loan:
        """A loan for one call."""

    def next_letter(self) -> Letter | None:
        """What the subprocess has to be told before the next request, if anything."""

    def letter_sent(self) -> None:
        """The last letter is on its way: the next one may follow."""

    def greeting(self) -> Any:
        """What the subprocess's side is made of, as plain data."""

    def greeted(self, greeting: Any) -> None:
        """What the subprocess's side had to say when it was made."""

    def cut_off(self) -> int:
        """The subprocess is about to be killed: how many operations that it has begun may not be over.

        Must not block: what holds a lock may be what only the kill ends.
        """

    def is_busy(self) -> bool:
        """Whether a device has yet to pass an operation that was answered, or its results."""

    def abandon(self) -> None:
        """The subprocess does not die: what it may still touch is never used again."""

    def close(self) -> None:
        """The subprocess is dead and reaped: everything is the trainer's again."""


class Borrower(Protocol):
    """The subprocess's side; for the thread that reads requests."""

    def greeting(self) -> Any:
        """For `Lender.greeted`, once the backend is made; as plain data."""

    def map(self, details: tuple[Any, ...], descriptors: list[int]) -> None:
        """A storage that later requests use."""

    def unmap(self, storage: int) -> None:
        """It is not used any more."""

    def tensor(self, spec: TensorSpec) -> Tensor:
        """The tensor that a request means."""

    def entered(self, context: Any, /) -> AbstractContextManager[None]:
        """Start the operation of a request within this."""

    def answer_when_started(self, work: Work | None) -> tuple[Any, ...] | None:
        """What to answer at once, within `entered`; None where the answer has to wait for the operation."""
