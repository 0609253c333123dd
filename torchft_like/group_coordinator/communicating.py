"""What the members of a coordinator do with tensors and objects, as methods.

How they travel is said in the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from torchft_like.group_coordinator import compiled, even, objects, point_to_point, queues, variable
from torchft_like.group_coordinator.membership import Members
from torchft_like.group_coordinator.transport import Group, Transport
from torchft_like.message_queue import MessageQueue

Tensors = Tensor | list[Tensor]


class Communicating(Members):
    """See `GroupCoordinator`."""

    def all_reduce(self, input_: Tensor) -> Tensor:
        """The sum over all ranks, in a new tensor; `input_` stays as it is."""
        if torch.compiler.is_compiling():
            return compiled.all_reduce(input_, self.unique_name)  # type: ignore[no-any-return]
        return self._all_reduce_out_place(input_)

    def _all_reduce_out_place(self, input_: Tensor) -> Tensor:
        return even.all_reduce(self._current(), input_)

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """The tensors of all ranks, which have one shape, joined along `dim`."""
        if torch.compiler.is_compiling():
            return compiled.all_gather(input_, dim, self.unique_name, self.world_size)  # type: ignore[no-any-return]
        return self._all_gather_out_place(input_, dim)

    def _all_gather_out_place(self, input_: Tensor, dim: int) -> Tensor:
        return even.all_gather(self._current(), input_, dim)

    @overload
    def all_gatherv(self, input_: Tensor, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor: ...
    @overload
    def all_gatherv(
        self, input_: list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None
    ) -> list[Tensor]: ...
    def all_gatherv(self, input_: Tensors, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensors:
        """The tensors of all ranks, which differ in their rows along `dim`, joined along it.

        Args:
            input_: a tensor, or a list of tensors with the same number of rows.
            sizes: the rows of each rank; None has the ranks say so.
        """
        joined, _ = variable.all_gatherv(self._current(), lambda: _listed(input_), dim, sizes)
        return joined if isinstance(input_, list) else joined[0]

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """This rank's part of the sum over all ranks, which is split evenly along `dim`."""
        if torch.compiler.is_compiling():
            return compiled.reduce_scatter(input_, dim, self.unique_name, self.world_size)  # type: ignore[no-any-return]
        return self._reduce_scatter_out_place(input_, dim)

    def _reduce_scatter_out_place(self, input_: Tensor, dim: int) -> Tensor:
        return even.reduce_scatter(self._current(), input_, dim)

    @overload
    def reduce_scatterv(
        self, input_: Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> Tensor: ...
    @overload
    def reduce_scatterv(
        self, input_: list[Tensor], dim: int = -1, sizes: Sequence[int] | None = None
    ) -> list[Tensor]: ...
    def reduce_scatterv(self, input_: Tensors, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensors:
        """This rank's rows along `dim` of the sum over all ranks.

        Args:
            input_: a tensor, or a list of tensors with the same number of rows; the same shapes everywhere.
            sizes: the rows that each rank gets; None shares them out as evenly as it goes, the first
                ranks getting one more.
        """
        parts = variable.reduce_scatterv(self._current(), _listed(input_), dim, lambda: sizes)
        return parts if isinstance(input_, list) else parts[0]

    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None:
        """The tensors of all ranks, of one shape, joined along `dim` on rank `dst`; None elsewhere."""
        return even.gather(self._current(), input_, dst, dim)

    def broadcast(self, input_: Tensor, src: int = 0) -> Tensor:
        """Overwrite `input_` with that of rank `src`, and return it."""
        return even.broadcast(self._current(), input_, src)

    def send(self, tensor: Tensor, dst: int | None = None) -> None:
        """To one rank, the next if left out; returns when the tensor may be changed.

        In a group of one it goes nowhere.
        """
        transport, to = self._with_peer(dst, +1, "dst")
        if to is None:
            point_to_point.check_alone(transport, tensor)
        else:
            point_to_point.send(transport, tensor, to)

    def recv(self, size: Sequence[int], dtype: torch.dtype, src: int | None = None) -> Tensor:
        """From one rank, the previous if left out: a tensor of that shape on `device`.

        In a group of one: zeros.

        Raises:
            CollectiveMismatchError: another shape or dtype came, or no tensor.
        """
        transport, source = self._with_peer(src, -1, "src")
        if source is None:
            return torch.zeros(torch.Size(size), dtype=dtype, device=self.device)
        return point_to_point.recv(transport, size, dtype, source)

    # ------------------------------------------------------------------------- objects

    def broadcast_object(self, obj: Any = None, src: int = 0) -> Any:
        """The object of rank `src`, which alone need pass it, on every rank.

        Raises:
            PlainDataError: it holds something that does not travel; every rank gets an error.
        """
        transport = self._current()  # first: it is what ends the epoch of an earlier queue
        if self.mq_broadcaster is not None and src == 0:
            return queues.broadcast_object(transport, self.mq_broadcaster, obj)
        return objects.broadcast_object(transport, obj, src)

    def broadcast_object_list(
        self, obj_list: list[Any], src: int = 0, group: Group | None = None
    ) -> list[Any]:
        """Overwrite the objects in the list with those of rank `src`, and return it.

        Args:
            obj_list: of the same length on every rank.
            group: another process group of the same members.
        """
        return objects.broadcast_object_list(self._over(group, None), obj_list, src)

    def send_object(self, obj: Any, dst: int) -> None:
        """To one rank."""
        transport, to = self._with_peer(dst, +1, "dst")
        if to is None:
            point_to_point.check_alone(transport, obj)
        else:
            objects.send_object(transport, obj, to)

    def recv_object(self, src: int) -> Any:
        """From one rank; None in a group of one."""
        transport, source = self._with_peer(src, -1, "src")
        return None if source is None else objects.recv_object(transport, source)

    # -------------------------------------------------------------------------- queues

    def create_mq_broadcaster(
        self,
        writer_rank: int = 0,
        external_writer_handle: MessageQueue | None = None,
        blocking: bool = True,
    ) -> MessageQueue:
        """The caller's end of a queue that one member writes and all others read.

        Args:
            external_writer_handle: on the writer, a queue that it has made already for these readers. It
                stays the caller's: a refusal and `destroy` leave it alone. It ends with the groups, as who
                reads it would wait in vain.
            blocking: wait until all have joined; otherwise call `wait_until_ready` before it is used.
        """
        queue = queues.create_broadcaster(self._current(), writer_rank, external_writer_handle, blocking)
        if queue is not external_writer_handle:
            self._keep(queue)
        return queue

    def create_single_reader_mq_broadcasters(
        self, reader_rank_in_group: int = 0, blocking: bool = False
    ) -> tuple[MessageQueue | None, list[MessageQueue]]:
        """A queue from each of the other members to one of them.

        Returns:
            The caller's queue to write, None on the reader; and on the reader those to read, in the order of
            ranks, with nothing for itself.
        """
        made, read = queues.create_single_reader(self._current(), reader_rank_in_group, blocking)
        self._keep(*(read if made is None else [made]))
        return made, read

    # ------------------------------------------------------------------ whom a call means

    def _over(self, group: Group | None, metadata_group: Group | None) -> Transport:
        """The transport of a call that may name other groups of the same members."""
        if group is None and metadata_group is None:
            return self._current()
        return self._current().over(metadata_group or group, group)

    def _with_peer(self, rank: int | None, step: int, name: str) -> tuple[Transport, int | None]:
        """The transport of a call to one rank, and that rank; None in a group of one."""
        transport = self._current()  # which may have other members than the last call
        default = (transport.rank + step) % transport.world_size
        return transport, point_to_point.peer(transport, rank, default, name)


def _listed(tensors: Tensors) -> list[Tensor]:
    return tensors if isinstance(tensors, list) else [tensors]
