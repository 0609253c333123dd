"""Objects: plain data of a closed schema (see `torchft_like.plain_data`), never a pickle."""

from __future__ import annotations

from typing import Any

from torchft_like.group_coordinator.arguments import Terms
from torchft_like.group_coordinator.messages import start_broadcast, start_receiving, start_sending
from torchft_like.group_coordinator.plans import checked_rank
from torchft_like.group_coordinator.transport import Transport

OBJECT = "object"


def broadcast_object(transport: Transport, obj: object, src: int) -> Any:
    """The object of rank `src`, on every rank."""

    def terms() -> Terms:
        return (("src", str(checked_rank(src, transport.world_size, "src"))),)

    with transport.guard("broadcast_object"):
        return start_broadcast(transport, "broadcast_object", lambda: obj, src, terms).land()


def broadcast_object_list(transport: Transport, obj_list: list[Any], src: int) -> list[Any]:
    """Put the objects of rank `src` into the list of every rank; gives that list."""

    def terms() -> Terms:
        if type(obj_list) is not list:
            raise TypeError(f"obj_list must be a list on every rank, not {type(obj_list).__name__}")
        src_term = "src", str(checked_rank(src, transport.world_size, "src"))
        return src_term, ("length", str(len(obj_list)))

    with transport.guard("broadcast_object_list"):
        arrived = start_broadcast(transport, "broadcast_object_list", lambda: obj_list, src, terms).land()
        if arrived is not obj_list:
            obj_list[:] = arrived
        return obj_list


def send_object(transport: Transport, obj: object, dst: int) -> None:
    """To one rank; returns when the object may be changed."""
    with transport.guard("send_object"):
        start_sending(transport, dst, OBJECT, lambda: ((), obj)).land()


def recv_object(transport: Transport, src: int) -> Any:
    """What `src` sent."""
    with transport.guard("recv_object"):
        return start_receiving(transport, src, transport.tag("from", src), OBJECT).land()
