"""Asking torch's flight recorder for a trace: through a real pipe, and where nobody reads one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torchft_like.process_group import (
    TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR,
    trigger_nccl_fr_trace_through_pipe,
)
from torchft_like.process_group.nccl import TORCH_FR_DUMP_TEMP_FILE_ENV, DumpPath


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, f"{tmp_path}/rank_")
    return f"{tmp_path}/rank_"


def test_the_reader_of_the_ranks_pipe_is_asked(prefix: str) -> None:
    os.mkfifo(f"{prefix}3.pipe")
    reader = os.open(f"{prefix}3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert trigger_nccl_fr_trace_through_pipe(3)
        assert os.read(reader, 10) == b"1\n"
    finally:
        os.close(reader)


def test_a_pipe_that_nobody_reads_blocks_nobody(prefix: str) -> None:
    os.mkfifo(f"{prefix}3.pipe")
    assert not trigger_nccl_fr_trace_through_pipe(3)
    assert not trigger_nccl_fr_trace_through_pipe(4)  # there is none


def test_without_the_variable_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TORCH_NCCL_DEBUG_INFO_PIPE_FILE_ENV_VAR, raising=False)
    assert not trigger_nccl_fr_trace_through_pipe(0)


def test_each_quorum_has_a_folder_of_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TORCH_FR_DUMP_TEMP_FILE_ENV, f"{tmp_path}/trace")
    path = DumpPath()
    path.follow(None, 1)
    assert os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] == f"{tmp_path}/trace"
    for quorum_id in (7, 8):
        path.follow(quorum_id, 1)
        assert os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] == f"{tmp_path}/trace_quorum_{quorum_id}/1"
        assert (tmp_path / f"trace_quorum_{quorum_id}").is_dir()


def test_a_folder_that_cannot_be_made_harms_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(TORCH_FR_DUMP_TEMP_FILE_ENV, f"{tmp_path}/file/trace")
    DumpPath().follow(7, 1)
    assert os.environ[TORCH_FR_DUMP_TEMP_FILE_ENV] == f"{tmp_path}/file/trace"
