"""A TCPStore for the groups that are measured; as a program, one that reports its port and waits.

It has a listener that sees IPv4 addresses. About others torch's server asks the name server, for each
client, and stands still until that answers: 5 s where an answer is lost.
"""

from __future__ import annotations

import json
import signal
import socket

from torch._C._distributed_c10d import TCPStore

BACKLOG = 512  # all ranks of a group come at once


def serve_store() -> TCPStore:
    """Serve a store at a free port of loopback."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def main() -> None:
    store = serve_store()
    print(json.dumps({"event": "serving", "port": store.port}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
