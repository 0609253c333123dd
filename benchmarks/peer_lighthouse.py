"""torchft's lighthouse as a process of the peer's environment; it reports its port and serves.

torchft's own console script serves the same object, but names its port only in a log line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import signal


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bind", default="127.0.0.1:0")
    parser.add_argument("--min_replicas", type=int, required=True)
    parser.add_argument("--join_timeout_ms", type=int, default=60_000)
    parser.add_argument("--heartbeat_timeout_ms", type=int, default=5_000)
    options = parser.parse_args()
    server = importlib.import_module("torchft.coordination").LighthouseServer(**vars(options))
    print(json.dumps({"event": "serving", "port": int(server.address().rpartition(":")[2])}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
