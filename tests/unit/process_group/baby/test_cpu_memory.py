"""Tensors in memory that a subprocess can see."""

from __future__ import annotations

import errno
import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.descriptors import left_open_since, open_descriptors
from torchft_like.errors import NotSupportedError, ProcessGroupError
from torchft_like.process_group.baby.messages import TensorSpec, ToChild, tensor_at
from torchft_like.process_group.baby.tensor_sharing import (
    CpuExporter,
    Exports,
    Staging,
    open_segment,
    require_dense,
)
from torchft_like.process_group.collectives import BY_NAME
from torchft_like.shared_memory import Segment


def shared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()  # type: ignore[no-any-return, no-untyped-call]


def seen_through(segment: Segment, spec: TensorSpec) -> torch.Tensor:
    """The tensor as another process would map it."""
    return tensor_at(open_segment(*segment.descriptors, *segment.details), spec)


def test_views_of_one_storage_are_one_segment() -> None:
    exports = Exports()
    tensor = shared(torch.zeros(10))
    segments = {exports.find(view)[0] for view in (tensor, tensor[2:], tensor.view(5, 2))}  # type: ignore[index]
    assert len(segments) == 1


def test_a_segment_is_dead_once_nobody_has_its_storage() -> None:
    exports = Exports()
    tensor = shared(torch.zeros(10))
    found = exports.find(tensor)
    assert found is not None
    view = tensor[1:]
    del tensor
    gc.collect()
    assert list(exports.take_dead()) == []
    del view
    gc.collect()
    assert list(exports.take_dead()) == [found[0].number]
    assert list(exports.take_dead()) == []


def test_no_number_stands_for_two_storages() -> None:
    exports = Exports()
    numbers = []
    for _ in range(50):
        found = exports.find(shared(torch.zeros(10)))
        assert found is not None
        numbers.append(found[0].number)
    assert len(set(numbers)) == 50
    assert len(list(exports.take_dead())) == 50


def test_shared_memory_with_a_name_has_to_be_staged_and_stays_where_it_is() -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        tensor = shared(torch.zeros(3))
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    assert Exports().find(tensor) is None
    assert tensor.data_ptr() == address


def test_a_mapped_file_has_to_be_staged_also_when_it_was_unlinked(tmp_path: Path) -> None:
    path = tmp_path / "mapped"
    path.write_bytes(bytes(4096))
    tensor = torch.from_file(str(path), shared=True, size=1024)
    assert Exports().find(tensor) is None
    path.unlink()
    assert Exports().find(tensor) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(()),
        torch.zeros(0),
        torch.zeros(3, 0, 2),
        torch.zeros(3, 5),
        torch.zeros(3, 5).t(),
        torch.zeros(8, 8)[1::2, ::3],
        torch.zeros(7, dtype=torch.bfloat16),
        torch.zeros(7, dtype=torch.complex128),
        torch.zeros(7, dtype=torch.bool),
        torch.zeros(3_000_000, dtype=torch.int8),
    ],
    ids=lambda t: f"{t.dtype}{list(t.shape)}{list(t.stride())}",
)
def test_a_staged_tensor_keeps_its_shape_and_its_values(tensor: torch.Tensor) -> None:
    staging = Staging()
    torch.manual_seed(1)
    tensor.copy_(torch.randint(0, 2, tensor.shape))
    block, spec = staging.stage(tensor)
    tensor_at(block.storage, spec).copy_(tensor)
    seen = seen_through(block.segment, spec)
    assert (seen.shape, seen.dtype) == (tensor.shape, tensor.dtype)
    assert seen.is_contiguous()
    assert torch.equal(seen, tensor)
    staging.close()


def test_room_is_taken_for_elements_not_for_what_lies_between_them() -> None:
    staging = Staging()
    block, _ = staging.stage(torch.zeros(4000, 4000)[:, 0])
    assert block.nbytes <= 2 * 4000 * 4
    staging.close()


def test_two_tensors_never_share_a_block_and_a_block_is_used_again() -> None:
    staging = Staging()
    first, second = (staging.stage(torch.zeros(16))[0] for _ in range(2))
    assert (first.segment, first.start) != (second.segment, second.start)
    staging.give_back([first])
    assert staging.stage(torch.zeros(16))[0] is first
    staging.close()


@pytest.mark.no_leak
def test_repeated_use_takes_no_more_memory() -> None:
    staging = Staging()
    for _ in range(100):
        blocks = [staging.stage(torch.zeros(1000))[0] for _ in range(10)]
        staging.give_back(blocks)
    assert len({block.segment for block in blocks}) == 1
    staging.close()


@pytest.mark.no_leak
def test_memory_that_nobody_closed_goes_with_its_owner() -> None:
    before = open_descriptors()
    Staging().stage(torch.zeros(10))
    gc.collect()
    assert not left_open_since(before)


@pytest.mark.no_zombie
def test_a_block_of_before_is_not_used_again() -> None:
    staging = Staging()
    block, _ = staging.stage(torch.zeros(16))
    staging.close()
    staging.give_back([block])
    assert staging.stage(torch.zeros(16))[0].segment is not block.segment
    staging.close()


def test_closed_exports_leave_nothing_on_the_storage() -> None:
    tensor = shared(torch.zeros(10))
    for _ in range(10):
        exports = Exports()
        exports.find(tensor)
        exports.close()
        watcher = weakref.ref(exports)
        del exports
        gc.collect()
        assert watcher() is None


def test_a_full_machine_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", no_space)
    before = open_descriptors()
    with pytest.raises(ProcessGroupError, match=r"No space left.*share_memory_"):
        Staging().stage(torch.zeros(10))
    assert not left_open_since(before)


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.zeros(3).to_sparse(), "sparse"), (torch.zeros(3, device="meta"), "meta")],
    ids=["sparse", "meta"],
)
def test_what_has_no_plain_storage_is_refused_by_name(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(NotSupportedError, match=kind):
        require_dense(tensor)


# What is said to the subprocess before a request.


class Recorder:
    """What an exporter sends, with the inodes of the descriptors, which have to be open then."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.inodes: list[int] = []

    def __call__(self, message: tuple[Any, ...], descriptors: tuple[int, ...]) -> None:
        self.sent.append((message[0], message[2]))
        self.inodes += [os.fstat(descriptor).st_ino for descriptor in descriptors]


def test_a_segment_is_mapped_once_and_while_its_descriptor_is_open() -> None:
    staging = Staging()
    exporter = CpuExporter(staging)
    exporter.send = recorder = Recorder()
    blocks = [exporter.stage(torch.zeros(size))[0] for size in (10, 1_000_000, 10)]
    assert recorder.sent == [(ToChild.MAP, block.segment.number) for block in blocks[:2]]
    assert len(set(recorder.inodes)) == 2
    staging.close()


def test_memory_that_is_gone_is_unmapped_before_the_next_call() -> None:
    exporter = CpuExporter(Staging())
    exporter.send = recorder = Recorder()
    tensor = torch.zeros(10).share_memory_()  # type: ignore[no-untyped-call]
    exporter.find(tensor)
    ((_, number),) = recorder.sent
    del tensor
    gc.collect()
    exporter.export(BY_NAME["barrier"].bind((), {}))
    assert recorder.sent[1:] == [(ToChild.UNMAP, number)]
