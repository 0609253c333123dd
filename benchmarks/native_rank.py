"""One rank of a Gloo group that torch makes, or of one of ours, for `native_groups`.

It carries out commands:

* {"do": "make", "kind": k, "store": port, "rank": r, "world_size": n, "timeout": s}: make the object;
* {"do": "configure", "prefix": p, "rank": r, "world_size": n}: meet the members; the seconds of it;
* {"do": "allreduce", "bytes": n}: the sum of a tensor of ones, which is the number of members;
* {"do": "begin"}: an allreduce on a thread of its own, which reports `told`, with the time, when it ends;
* {"do": "abort"}: end what is under way.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import torchft_like.process_group as groups
from benchmarks.commands import report, serve

TORCHS = "torch's Gloo"
LIMIT = timedelta(seconds=60)


def main() -> None:
    torch.set_num_threads(1)
    torch.ones(1).add_(1)
    serve(Rank())


class Rank:
    """Carries out the commands of the parent."""

    def make(self, kind: str, store: int, rank: int, world_size: int, timeout: float) -> dict[str, Any]:
        self._store = store
        begin = time.perf_counter()
        if kind == TORCHS:
            client: Any = dist.TCPStore("127.0.0.1", store, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
            more: Any = {"enable_reconfigure": True}
            limit = timedelta(seconds=timeout)
            dist.init_process_group(
                "gloo", store=client, rank=rank, world_size=world_size, timeout=limit, **more
            )
            self.group: Any = dist.group.WORLD
        else:
            self.group = getattr(groups, f"ProcessGroup{kind}")(timeout)
        return {"seconds": time.perf_counter() - begin}

    def configure(self, prefix: str, rank: int, world_size: int) -> dict[str, Any]:
        begin = time.perf_counter()
        address = f"127.0.0.1:{self._store}/{prefix}"
        if isinstance(self.group, groups.ProcessGroup):
            self.group.configure(address, rank, world_size)
        else:
            groups.reconfigure_with_store(self.group, address, rank, world_size, LIMIT)
        return {"seconds": time.perf_counter() - begin}

    def allreduce(self, bytes: int) -> dict[str, Any]:  # noqa: A002
        tensor = torch.ones(bytes // 4)
        self.group.allreduce([tensor]).wait()
        return {"sum": tensor[0].item()}

    def begin(self) -> None:
        threading.Thread(target=self._allreduce_aside, daemon=True).start()

    def _allreduce_aside(self) -> None:
        try:
            self.allreduce(4)
        except RuntimeError as error:
            report(event="told", at=time.time(), error=str(error)[:200])
        else:
            report(event="told", at=time.time(), error=None)

    def abort(self) -> None:
        self.group.abort()


if __name__ == "__main__":
    main()
