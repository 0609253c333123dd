"""vLLM's message queue, as it is in the package index: the one module that it is made of.

The package is for GPUs and brings hundreds of megabytes; of its wheel only that module is kept. What it takes
from the rest of vLLM are a number, a logger and functions for remote readers: `queue_class` gives it these.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.environments import UnavailableError, make_once, run_installer

PEER = "vllm==0.6.6.post1"
MODULE = "vllm/distributed/device_communicators/shm_broadcast.py"
# What vLLM makes of it for a group of workers.
CHUNK_BYTES, CHUNKS = 1 << 22, 6


def queue_source() -> Path:
    """Return the module's file, which is fetched first if it is missing.

    Raises:
        UnavailableError: it cannot be had here; the message says why.
    """
    return make_once("vllm", PEER, _fetch) / MODULE


def queue_class(source: Path) -> Any:
    """Return vLLM's MessageQueue."""
    for name, content in _SURROUNDINGS.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(content)
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    spec = importlib.util.spec_from_file_location("vllm_shm_broadcast", source)
    if spec is None or spec.loader is None:
        raise UnavailableError(f"{source} is no module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where pickle looks for the class of a handle
    spec.loader.exec_module(module)
    return module.MessageQueue


def _fetch(target: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        run_installer([*pip, "--dest", folder, PEER], PEER)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            content.extract(MODULE, target)


def _open_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


_SURROUNDINGS: dict[str, dict[str, object]] = {
    "vllm": {},
    "vllm.envs": {"VLLM_RINGBUFFER_WARNING_INTERVAL": 60},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.utils": {
        "get_ip": lambda: "127.0.0.1",
        "get_open_port": _open_port,
        "is_valid_ipv6_address": lambda _: False,
    },
    "vllm.distributed": {},
    "vllm.distributed.utils": {"StatelessProcessGroup": object},
}


if __name__ == "__main__":
    print(queue_source())
