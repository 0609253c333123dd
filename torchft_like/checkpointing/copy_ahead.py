"""Copies of tensors that are begun before the state is read that they are a part of.

A source copies its state at the end of a step, where all replicas wait for it. What nothing but the step
itself changes, parameters and the optimizer's state, stays as it is from the beginning of the step on: it is
copied on a thread beside forward and backward pass, and the end of the step waits for the rest of it only.

INVARIANT: from the making of a CopyAhead until `finish` returns, which is before the optimizer steps, nobody
writes to its tensors. Where somebody does, `take` leaves the tensor out, and it is copied as all others are:
its version has changed, which torch counts up in each operation in place, or it lies elsewhere. Only a write
that torch does not count is not seen: through `.data`, through memory that NumPy shares, by a collective, or
by a `torch._foreach` function to a DTensor. Nor may anybody free their memory in place meanwhile, as
`share_memory_` and `untyped_storage().resize_` do: the thread would read what is not there any more.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from torchft_like.checkpointing.host_memory import KeptMemory
from torchft_like.checkpointing.shards import is_dtensor
from torchft_like.dtypes import as_bytes
from torchft_like.plain_data import Leaf
from torchft_like.runtime.background import run_in_background
from torchft_like.writing import is_dense

ALIGNMENT = 64
COPY_BYTES = 8 * 1024 * 1024  # copied at a time
PLAIN_FROM = 64 * 1024  # bytes of a tensor that is worth pieces of its own

_logger = logging.getLogger(__name__)


def aligned(nbytes: int) -> int:
    """Return the bytes that a leaf of so many takes in a payload: the rest are zeros."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(eq=False, slots=True)
class Piece:
    """A piece of a payload.

    Attributes:
        place: the memory of its copy, which ends with zeros where it is longer than what is copied.
        source: the bytes of the tensor of which it is a part, for as long as that does not change.
        is_copied: whether the copy has been made.
    """

    place: memoryview
    source: torch.Tensor | None = None
    is_copied: bool = False

    def copy(self, *, is_alone: bool) -> None:
        """Copy the source, without the interpreter's lock; `is_alone`: on this thread alone, unlike torch."""
        if (source := self.source) is not None:
            copy = torch.frombuffer(self.place, dtype=torch.uint8, count=source.nbytes)
            if is_alone:
                ctypes.memmove(copy.data_ptr(), source.data_ptr(), source.nbytes)
            else:
                copy.copy_(source)
            self.place[source.nbytes :] = bytes(len(self.place) - source.nbytes)
            self.is_copied = True

    @property
    def is_there(self) -> bool:
        """Whether it can be read."""
        return self.is_copied or self.source is not None

    def read(self, at: int) -> memoryview:
        """Return the bytes from a place on, or some of them: of the copy, or else of the source."""
        if self.is_copied or (source := self.source) is None:
            return self.place[at:]
        data: memoryview = source.numpy().data
        return data[at:] or memoryview(bytes(len(self.place) - at))


def pieces_of(source: torch.Tensor, place: memoryview) -> list[Piece]:
    """Cut the bytes of a tensor into pieces, whose copies fill the place."""
    ends = [*range(COPY_BYTES, source.nbytes, COPY_BYTES), len(place)]
    return [Piece(place[start:end], source[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


class Copying:
    """Pieces that any number of threads copy.

    Attributes:
        changed: is notified when a piece was copied.
    """

    def __init__(self) -> None:
        self.changed: threading.Condition = threading.Condition()
        self._open: deque[Piece] = deque()
        self._under_way = 0  # pieces that threads copy

    def copy_next(self, *, is_alone: bool = False) -> int:
        """Copy a piece, and return how many bytes it has; return 0 if there is none."""
        with self.changed:
            if not self._open:
                return 0
            piece = self._open.popleft()
            self._under_way += 1
        try:
            piece.copy(is_alone=is_alone)
        except BaseException:
            with self.changed:
                self._open.append(piece)  # `finish` copies it, or raises
            raise
        finally:
            with self.changed:
                self._under_way -= 1
                self.changed.notify_all()
        return len(piece.place)

    def finish(self) -> None:
        """Copy what is yet to be copied, and wait for other threads that copy."""
        is_whole = False
        while not is_whole:
            while self.copy_next():
                pass
            with self.changed:
                self.changed.wait_for(lambda: self._open or not self._under_way)
                is_whole = not self._open


class _Begun(NamedTuple):
    """A tensor, as it was listed and as it is copied, two where it is a DTensor; the versions of both when
    the copy was begun, as an operation on a DTensor is counted there, not in its shard; and its pieces.
    """

    listed: torch.Tensor
    tensor: torch.Tensor
    versions: tuple[int, int]
    pieces: list[Piece]


class CopyAhead(Copying):
    """Copies that a thread of their own begins, and the caller of `finish` helps to complete.

    Args:
        tensors: lists the tensors; called on the new thread.
        lender: lends the memory of the copies, for as long as this object lives.
    """

    def __init__(self, tensors: Callable[[], Iterable[torch.Tensor]], lender: KeptMemory) -> None:
        super().__init__()
        self._list: Callable[[], Iterable[torch.Tensor]] | None = tensors
        self._lender = lender
        self._begun: dict[object, _Begun] = {}
        run_in_background("torchft-copy-ahead", self._run)

    def take(self, leaves: Sequence[Leaf]) -> dict[int, list[Piece]]:
        """Return by its index the pieces of each leaf of a state that is still as it was; `finish` copies the
        rest of them. Nothing else is copied any more.
        """
        with self.changed:
            taken = {
                index: begun.pieces
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, torch.Tensor)
                and (begun := self._begun.get(_key(leaf))) is not None
                and (begun.listed._version, begun.tensor._version) == begun.versions
            }
            wanted = {piece for pieces in taken.values() for piece in pieces}
            self._open = deque(piece for piece in self._open if piece in wanted)
            self._list, self._begun = None, {}
        return taken

    def stop(self) -> None:
        """Copy nothing more, unless `take` was called: the copy is not needed."""
        with self.changed:
            if self._list is not None:
                self.take(())

    def _run(self) -> None:
        try:
            self._begin()
            while self.copy_next(is_alone=True):
                pass
        except Exception:  # memory may have run out, or the script's replay has failed
            _logger.exception("what is left of the state is copied at the end of the step")

    def _begin(self) -> None:
        """List the tensors and make memory for their copies, unless `take` was earlier."""
        if (listed := self._list) is None:
            return
        pairs = [(one, tensor) for one in listed() if (tensor := plain_part(one)) is not None]
        unique = {_key(tensor): (one, tensor) for one, tensor in pairs}
        memory = self._lender.lend(sum(aligned(tensor.nbytes) for _, tensor in unique.values()), self)
        at, begun = 0, {}
        for key, (one, tensor) in unique.items():
            pieces = pieces_of(as_bytes(tensor), memory[at : (at := at + aligned(tensor.nbytes))])
            begun[key] = _Begun(one, tensor, (one._version, tensor._version), pieces)
        with self.changed:
            if self._list is not None:
                self._begun = begun
                self._open.extend(piece for one in begun.values() for piece in one.pieces)


def stand_ins(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the sizes of those that can be copied ahead. They were never written to, so they take
    hardly any memory.
    """
    plain = [one for one in map(plain_part, tensors) if one is not None]
    return [torch.empty(one.nbytes, dtype=torch.uint8, device="cpu") for one in plain]


def plain_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor, or this rank's shard of it; None if it is to be copied with the rest of the state."""
    if is_dtensor(tensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    if tensor.device.type != "cpu" or not is_dense(tensor) or not tensor.is_contiguous():
        return None
    if tensor.nbytes < PLAIN_FROM:
        return None
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return None
    if not tensor.data_ptr():  # it has no elements, or has them in other tensors, or its memory was freed
        return None
    return tensor.detach()  # which has the same memory and version


def _key(tensor: torch.Tensor) -> object:
    """Return what two tensors have in common that have the same elements in the same memory."""
    if not is_dense(tensor):
        return None
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
