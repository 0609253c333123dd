"""The committed lighthouse/wire is what `make proto` makes of proto/torchft.proto."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIRE = ROOT / "lighthouse" / "wire"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("grpc_tools", reason="grpcio-tools, which generates it, needs protobuf 6")
    folder = tmp_path_factory.mktemp("wire")
    subprocess.run([sys.executable, ROOT / "tools" / "generate_wire.py", folder], check=True, timeout=60)
    return folder


@pytest.mark.parametrize("name", ["torchft_pb2.py", "torchft_pb2.pyi"])
def test_committed_wire_code_is_current(generated: Path, name: str) -> None:
    assert (WIRE / name).read_text() == (generated / name).read_text(), "run `make proto`"
