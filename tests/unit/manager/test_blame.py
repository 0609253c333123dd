"""Which errors a rank takes for its own."""

from __future__ import annotations

import errno

import pytest

from torchft_like.errors import (
    OWN_FAILURE_MAX,
    MemberLostError,
    ProcessGroupAbortedError,
    ProcessGroupNotConfiguredError,
    SubprocessLostError,
    describe_own_error,
    is_own_error,
)


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        MemoryError(),
        ValueError("a shape"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA out of memory"),
        SubprocessLostError("the subprocess died"),
        caused_by(ProcessGroupNotConfiguredError("failed"), OSError(errno.EMFILE, "Too many open files")),
    ],
    ids=str,
)
def test_an_error_of_the_process_its_device_or_its_host_is_its_own(error: Exception) -> None:
    assert is_own_error(error)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("not all peers were connected after 5 s"),
        RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:55141"),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        ProcessGroupAbortedError("b was lost"),
        MemberLostError("b was lost"),
        caused_by(ProcessGroupNotConfiguredError("failed"), RuntimeError("Connection refused")),
    ],
    ids=str,
)
def test_what_the_end_of_a_peer_looks_like_is_not(error: Exception) -> None:
    assert not is_own_error(error)


def test_a_long_error_is_cut() -> None:
    assert len(describe_own_error(ValueError("x" * 10_000))) == OWN_FAILURE_MAX
