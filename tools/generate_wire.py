"""Generate lighthouse/wire from proto/torchft.proto (run by `make proto`).

    python tools/generate_wire.py [OUTPUT_DIRECTORY]

The test that fails when the committed code is stale generates into a directory of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def generate(output: Path) -> None:
    """Write torchft_pb2.py and torchft_pb2.pyi into `output`."""
    output.mkdir(parents=True, exist_ok=True)
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT / 'proto'}"]
    subprocess.run(
        [*protoc, f"--python_out={output}", f"--pyi_out={output}", "torchft.proto"],
        check=True,
    )


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "lighthouse" / "wire")
