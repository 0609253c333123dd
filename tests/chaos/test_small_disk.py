"""The small disk for checkpoints: there for who has its path, full when it is filled, gone when closed."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from torchft_like.testing.chaos.kinds import SmallDisk

pytestmark = pytest.mark.skipif(
    SmallDisk.why_unavailable() is not None, reason=SmallDisk.why_unavailable() or ""
)


@pytest.mark.parametrize("given", ["relative", "absolute"])
def test_it_is_reached_by_its_path_and_fills_up(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("output") if given == "relative" else tmp_path / "output"
    folder.mkdir()
    disk = SmallDisk(folder)
    try:
        checkpoint = Path(disk.path) / "checkpoint"
        disk.fill()
        with pytest.raises(OSError, match="No space left") as caught:
            checkpoint.write_bytes(bytes(4096))
        assert caught.value.errno == errno.ENOSPC
        disk.free()
        checkpoint.write_bytes(bytes(4096))
        assert not list((folder / "disk").iterdir())  # it exists for who knows the path, and nobody else
    finally:
        disk.close()
    assert not checkpoint.exists()
