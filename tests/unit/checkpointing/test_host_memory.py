"""A state between a device and the host through few buffers: bit for bit, whatever the device's pace.

A `PlayedDevice` takes the part of CUDA. Whether CUDA behaves so is what tests/gpu is for.
"""

from __future__ import annotations

import gc
import io
import mmap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.equality import same
from tests.unit.checkpointing.devices import PACES, PlayedDevice, played
from tests.unit.checkpointing.states import load_state, stream_of
from torchft_like.checkpointing.copy_ahead import Piece
from torchft_like.checkpointing.host_memory import KeptMemory, _Staging
from torchft_like.checkpointing.state_stream import IncomingState, Snapshot, read_header
from torchft_like.errors import CheckpointFormatError
from torchft_like.plain_data import Buffer

DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float64)
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: tensor,
    lambda tensor: tensor.t(),
    lambda tensor: tensor[:, ::2],
    lambda tensor: tensor[1:],
    lambda tensor: tensor.unsqueeze(0).expand(3, -1, -1),
    lambda tensor: tensor.conj(),
)
TENSORS = st.tuples(
    st.integers(0, 9), st.integers(0, 40), st.sampled_from(DTYPES), st.sampled_from(VIEWS), st.booleans()
)


def reused(staging: _Staging, take: Callable[[_Staging], Tensor] = _Staging._take) -> Tensor:
    """Take a buffer, and let it be used again at once."""
    buffer = take(staging)
    staging._free.append(buffer)
    return buffer


def unwaited(staging: _Staging, settle: Callable[[_Staging], None] = _Staging._settle) -> None:
    """Wait for nothing."""
    staging._under_way[0][1].clear()
    settle(staging)


def made(shapes: list[tuple[int, int, torch.dtype, Any, bool]], device: PlayedDevice) -> list[object]:
    """Return a state, of which some tensors are on the device."""
    state: list[object] = []
    generator = torch.Generator().manual_seed(len(shapes))
    for rows, columns, dtype, view, is_on_device in shapes:
        tensor = torch.randint(0, 200, (rows, columns), generator=generator).to(dtype)
        state += [view(device.put(tensor) if is_on_device else tensor), columns]
    return state


def is_copied(shapes: Any, nbytes: int, device: PlayedDevice) -> bool:
    state = made(shapes, device)
    with played(device, TO_HOST_BYTES=nbytes):
        snapshot = Snapshot(state).fill()
    assert device.is_idle
    assert device.buffers <= 2
    plain = [one.resolve_conj() if isinstance(one, Tensor) else one for one in state]
    return same(load_state(stream_of(snapshot)), plain)


@given(
    st.lists(TENSORS, max_size=12),
    st.sampled_from((1, 7, 64, 500, 4096)),
    st.sampled_from(PACES),
    st.integers(0, 2**32),
)
def test_a_snapshot_is_the_state(shapes: Any, nbytes: int, pace: str, seed: int) -> None:
    assert is_copied(shapes, nbytes, PlayedDevice(pace, seed))


@pytest.mark.parametrize("on_device", [True, False])
def test_a_single_element_has_any_stride(on_device: bool) -> None:
    """torch views no such tensor in another dtype."""
    assert is_copied([(1, 1, torch.float32, VIEWS[2], on_device)], 64, PlayedDevice("eager", 0))


def landed(size: int, piece: int, pace: str, seed: int) -> bool:
    """Let a state land in tensors on the device; return whether it has."""
    device = PlayedDevice(pace, seed)
    state = {"w": torch.arange(size, dtype=torch.int32), "b": torch.ones(3), "n": torch.arange(size)}
    own = {"w": device.put(torch.zeros(size, dtype=torch.int32)), "b": torch.zeros(3)}
    own["n"] = device.put(torch.zeros(size, dtype=torch.int64))
    with played(device, PIECE_BYTES=piece, CHUNK_BYTES=1024):
        stream = io.BytesIO(stream_of(Snapshot(state).fill()))
        incoming = IncomingState(read_header(stream))
        assert incoming.land_in(own)
        received = incoming.read_all(stream)
    assert device.is_idle
    assert received["w"].data_ptr() == own["w"].data_ptr()  # type: ignore[index]
    return same(received, state) and same(own, state)


@given(
    st.integers(1, 3000), st.sampled_from((64, 100, 1000, 5000)), st.sampled_from(PACES), st.integers(0, 99)
)
def test_a_state_lands_in_tensors_of_a_device(size: int, piece: int, pace: str, seed: int) -> None:
    assert landed(size, piece, pace, seed)


@pytest.mark.parametrize(("method", "defect"), [("_take", reused), ("_settle", unwaited)])
def test_a_buffer_that_is_used_too_early_is_noticed(
    method: str, defect: Callable[[_Staging], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above would fail."""
    monkeypatch.setattr(_Staging, method, defect)
    assert not all(landed(2000, 1000, pace, 0) for pace in PACES)
    shapes = [(9, 40, torch.float32, VIEWS[0], True)] * 3
    assert not all(is_copied(shapes, 500, PlayedDevice(pace)) for pace in PACES)


def test_readers_hear_of_each_tensor_when_it_has_come() -> None:
    """Not before: the snapshot is sent while it is made."""
    device = PlayedDevice("lazy")
    state = [device.put(torch.arange(100)), torch.arange(50), device.put(torch.arange(70))]
    with played(device, TO_HOST_BYTES=64, COPY_BYTES=64):
        snapshot, seen = Snapshot(state), list[bytes]()
        noted = snapshot._note_copied

        def note(piece: Piece) -> None:
            seen.append(bytes(piece.place))
            noted(piece)

        snapshot._note_copied = note  # type: ignore[method-assign]
        snapshot.fill()
    assert [len(data) for data in seen] == [832, 448, 576]
    assert b"".join(seen) == b"".join(snapshot.pieces(0, snapshot.nbytes))


class Broken(io.BytesIO):
    """A stream that ends early."""


@pytest.mark.heal_is_clean
@pytest.mark.parametrize("pace", PACES)
def test_after_a_transfer_that_has_failed_nothing_writes_to_a_tensor(pace: str) -> None:
    device = PlayedDevice(pace)
    own = {"w": device.put(torch.zeros(5000))}
    data = stream_of(Snapshot({"w": torch.ones(5000)}).fill())
    with played(device, PIECE_BYTES=1000):
        incoming = IncomingState(read_header(stream := io.BytesIO(data[:-9000])))
        incoming.land_in(own)
        with pytest.raises(CheckpointFormatError, match="truncated"):
            incoming.read_all(stream)
    assert device.is_idle
    assert own["w"].any()  # what the transport says with `Destination.is_written`


def test_a_state_that_cannot_be_copied_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PlayedDevice("lazy")
    snapshot = Snapshot([device.put(torch.ones(100)), torch.ones(3)])
    with played(device):
        monkeypatch.setattr(
            "torchft_like.checkpointing.state_stream._copy_on_host", lambda *_: threading.Lock().release()
        )
        with pytest.raises(RuntimeError):
            snapshot.fill()
    assert device.is_idle


def test_a_state_on_the_host_takes_no_buffer() -> None:
    device = PlayedDevice()
    with played(device):
        Snapshot([torch.ones(100)]).fill()
    assert device.buffers == 0


# -- memory of snapshots: kept from one to the next, and never taken from one that somebody reads

STATE = [torch.arange(1000.0), b"abc"]
MEGABYTE = 2**20


def address(memory: Buffer) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


class Borrower:
    """Whoever has memory."""


def test_the_next_snapshot_is_made_in_the_memory_of_the_last() -> None:
    memory = KeptMemory()
    last = Snapshot(STATE, memory).fill()
    place = address(next(last.pieces(0, 64)))
    del last
    gc.collect()
    assert address(next(Snapshot(STATE, memory).fill().pieces(0, 64))) == place


def test_what_the_last_snapshot_left_is_not_in_the_next() -> None:
    memory = KeptMemory()
    last = Snapshot([torch.full((4096,), 255, dtype=torch.uint8)], memory).fill()
    sums = b"".join(Snapshot(STATE).fill().sums())
    del last
    gc.collect()
    assert b"".join(Snapshot(STATE, memory).fill().sums()) == sums


def test_a_snapshot_that_is_read_keeps_its_memory() -> None:
    memory = KeptMemory()
    Snapshot(STATE, memory)
    gc.collect()  # there is memory that was given back
    read = Snapshot(STATE, memory).fill()
    payload = b"".join(read.pieces(0, read.nbytes))
    Snapshot([torch.zeros(1000), b"xyz"], memory).fill()
    assert b"".join(read.pieces(0, read.nbytes)) == payload


def test_the_kernel_may_take_memory_that_nobody_has() -> None:
    memory, borrower = KeptMemory(), Borrower()
    lent = memory.lend(8 * MEGABYTE, borrower)
    torch.frombuffer(lent, dtype=torch.uint8).fill_(1)
    before = takeable()
    del borrower
    gc.collect()
    assert takeable() - before >= 8 * MEGABYTE


def takeable() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("LazyFree"))
    return int(line.split()[1]) * 1024


def test_memory_that_is_much_too_large_or_too_small_is_given_back() -> None:
    memory, borrower = KeptMemory(), Borrower()
    for kept, wanted in ((5 * MEGABYTE, 2 * MEGABYTE), (MEGABYTE, 2 * MEGABYTE)):
        memory.lend(kept, Borrower())
        assert len(cast(mmap.mmap, memory.lend(wanted, borrower).obj)) == wanted


def test_no_more_than_one_piece_is_kept() -> None:
    memory = KeptMemory()
    borrowers = [Borrower() for _ in range(3)]
    for borrower in borrowers:
        memory.lend(MEGABYTE, borrower)
    borrowers.clear()
    del borrower
    gc.collect()
    assert len(memory._kept) == 1
