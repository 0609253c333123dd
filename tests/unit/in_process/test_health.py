"""Health checks between two tries."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from torchft_like.errors import AddressError, HealthCheckError
from torchft_like.in_process import health
from torchft_like.manager.config import LIGHTHOUSE_ENV

MORE_THAN_THERE_IS = 1 << 60


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds for which a rank pauses; none of them passes."""
    taken: list[float] = []
    now = [0.0]

    def sleep(seconds: float) -> None:
        taken.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("time.sleep", sleep)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return taken


def test_a_failing_check_is_tried_again_after_longer_and_longer_pauses(pauses: list[float]) -> None:
    failures = [OSError("the disk"), OSError("the disk"), OSError("the disk")]

    def check() -> None:
        if failures:
            raise failures.pop()

    health.wait_until_healthy([check], 60.0)
    assert pauses == [1.0, 2.0, 4.0]


def test_a_rank_gives_up_with_the_reason(pauses: list[float]) -> None:
    def check() -> None:
        raise OSError("the disk is gone")

    with pytest.raises(HealthCheckError, match=r"for 10 s.*OSError: the disk is gone") as raised:
        health.wait_until_healthy([lambda: None, check], 10.0)
    assert pauses == [1.0, 2.0, 4.0, 3.0], "it is tried a last time at the limit"
    assert isinstance(raised.value.__cause__, OSError)


def test_memory_and_device() -> None:
    health.device()
    health.memory(1)()
    with pytest.raises(RuntimeError, match=f"bytes of memory are available, {MORE_THAN_THERE_IS} are needed"):
        health.memory(MORE_THAN_THERE_IS)()


def test_a_disk_has_to_take_a_file_and_to_have_room(tmp_path: Path) -> None:
    health.disk(tmp_path, 1)()
    assert os.listdir(tmp_path) == []
    with pytest.raises(RuntimeError, match=f"bytes are free at {tmp_path}"):
        health.disk(tmp_path, MORE_THAN_THERE_IS)()
    with pytest.raises(FileNotFoundError):
        health.disk(tmp_path / "missing", 1)()


def test_a_lighthouse_has_to_take_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        health.lighthouse(address)()
        monkeypatch.setenv(LIGHTHOUSE_ENV, address)
        health.lighthouse()()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        health.lighthouse()()
    monkeypatch.delenv(LIGHTHOUSE_ENV)
    with pytest.raises(AddressError):
        health.lighthouse()()
