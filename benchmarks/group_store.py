"""A TCPStore of its own process, for every group that is measured; reports its port and waits.

It has a listener that sees IPv4 addresses: about others torch's server asks the name server.
"""

from __future__ import annotations

import json
import signal
import socket

from torch._C._distributed_c10d import TCPStore

BACKLOG = 512  # all ranks of a group come at once


def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    print(json.dumps({"event": "serving", "port": store.port}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
