"""A subclass of a transport may override what torchft's transports have, and the Manager calls it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from torchft_like.checkpointing.http_transport import HTTPTransport
from torchft_like.checkpointing.transport import Destination, Source

LIMIT = timedelta(seconds=60)
called: list[str] = []


class Own(HTTPTransport[Any]):
    def address(self) -> str:
        called.append("address")
        return super().address()

    def send_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        called.append("send")
        super().send_checkpoint(*args, **kwargs)


class Receiving:
    def recv_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        called.append("recv")
        return super().recv_checkpoint(*args, **kwargs)  # type: ignore[misc]


class Mixed(Receiving, Own):
    pass


def test_a_subclass_may_override_what_torchfts_may() -> None:
    called.clear()
    own = Mixed(LIMIT, hostname="127.0.0.1")
    try:
        own.use_key("secret")
        own.send_checkpoint_with(None, [1], 5, {"w": torch.ones(2)}, LIMIT)
        source = Source(0, own.metadata())
        for received in (
            own.recv_checkpoint_from([source], 5, LIMIT, Destination(key="secret")),
            own.recv_checkpoint(0, own.metadata(), 5),
        ):
            assert received["w"].tolist() == [1.0, 1.0]
    finally:
        own.shutdown()
    assert called == ["send", "address", "recv", "address", "recv"]
