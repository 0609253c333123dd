"""What runs on a GPU, how it fails there and what it costs, in stages of nine minutes (docs/gpu.md).

    python3 tools/gpu_evidence.py --stage C1 --wheels wheels
    python3 tools/gpu_evidence.py --stage C1 --dry-run        # the same on the CPU, over Gloo
    python3 tools/gpu_evidence.py --page                      # write the tables of docs/gpu.md

This file needs nothing but Python: it unpacks the wheels of what is not installed, and goes on as
`tools.gpu.evidence` with them and this repository on the path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OPTION = "--wheels"


def main() -> None:
    arguments = sys.argv[1:]
    paths = [str(ROOT)]
    if OPTION in arguments:
        at = arguments.index(OPTION)
        if arguments[at + 1 :] == []:
            sys.exit(f"{OPTION} names a folder: make it as docs/gpu.md says")
        paths.append(str(unpacked(Path(arguments[at + 1]))))
        del arguments[at : at + 2]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    os.chdir(ROOT)
    os.execv(sys.executable, [sys.executable, "-m", "tools.gpu.evidence", *arguments])


def unpacked(folder: Path) -> Path:
    """Return a folder with what all wheels in `folder` hold: no extension module can be loaded from a
    wheel.
    """
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        sys.exit(f"{folder} holds no wheels: make it as docs/gpu.md says")
    key = hashlib.sha256("".join(wheel.name for wheel in wheels).encode()).hexdigest()[:12]
    target = ROOT / ".cache" / f"wheels-{key}"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    fresh = tempfile.mkdtemp(dir=target.parent)
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)
    with contextlib.suppress(OSError):  # somebody else was quicker; their files are never written to again
        os.rename(fresh, target)
    return target


if __name__ == "__main__":
    main()
