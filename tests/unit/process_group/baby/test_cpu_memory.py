"""Tensors in memory that a subprocess can see."""

from __future__ import annotations

import errno
import gc
import os
import resource
import weakref
from pathlib import Path

import pytest
import torch

from tests.descriptors import left_open_since, open_descriptors
from tests.faults import raising
from torchft_like.errors import ProcessGroupError
from torchft_like.process_group.baby.tensor_sharing import Exports, Staging


def shared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()  # type: ignore[no-any-return, no-untyped-call]


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


def test_room_is_taken_for_elements_not_for_what_lies_between_them() -> None:
    staging = Staging()
    block, _ = staging.stage(torch.zeros(4000, 4000)[:, 0])
    assert block.nbytes <= 2 * 4000 * 4
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


def test_a_limit_of_the_size_of_files_is_an_error_that_names_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ProcessGroupError, match="ulimit -f"):
            Staging().stage(torch.zeros(10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_machine_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    before = open_descriptors()
    with pytest.raises(ProcessGroupError, match=r"No space left.*share_memory_"):
        Staging().stage(torch.zeros(10))
    assert not left_open_since(before)
