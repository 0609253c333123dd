"""Collectives that torch's Gloo implements only in part, built on those that it has.

* Its reduce-scatters are allreduces that copy the result in `wait`: they have no future, never say that
  they are completed, and do not tell a failure from a wait that is not over. Here the ranks exchange their
  parts and each adds up its own, in the order of ranks: half the bytes of an allreduce.
* Its gathers into one tensor do not take the stacked shape, which NCCL takes.
* For a tensor that is not contiguous it moves the memory from the first element on, gaps included, and
  overwrites what lies between the elements, without an error. Such a tensor is copied here.
* In an average of several tensors it divides only the first, and it takes no average of sparse tensors.
* For a view that negates, it moves the values before negation, and it refuses a view that conjugates only
  after its peers have begun. Such a view is copied, too.

This module knows nothing of the group around it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, ReduceScatterOptions, Work
from torch._C._distributed_c10d import ProcessGroupGloo as TorchGloo
from torch.distributed import ReduceOp

from torchft_like.dtypes import REDUCIBLE
from torchft_like.errors import CollectiveRefusedError, ProcessGroupError
from torchft_like.process_group.collectives import (
    BY_NAME,
    JOINING,
    POINT_TO_POINT,
    Call,
    Collective,
    methods_of,
    refuse_overlap,
    tensors_of,
)
from torchft_like.process_group.work import Finish, JointOperation
from torchft_like.writing import divide, share_memory, writing_to

# Collectives whose results Gloo copies into the outputs once they have come. The others write into the
# outputs' memory.
COPIED_LATER = frozenset(
    {
        "allgather",
        "_allgather_base",
        "allgather_coalesced",
        "allgather_into_tensor_coalesced",
        "allreduce_coalesced",
        "alltoall",
        "gather",
    }
)
_SUM, _AVERAGE = hash(ReduceOp.SUM), hash(ReduceOp.AVG)  # the numbers of the operations


class GlooGaps:
    """Methods of a Gloo group, or of torch's shell around it, by the names of the table of collectives."""

    def __init__(self, gloo: TorchGloo, shell: object, rank: int, world_size: int) -> None:
        self._gloo = methods_of(gloo, shell)
        self._rank = rank
        self._world_size = world_size

    def methods(self) -> dict[str, Callable[..., Work]]:
        """Return Gloo's collectives, by the names of their rows, without the gaps."""
        gathers = "_allgather_base", "allgather_into_tensor_coalesced"
        methods = {}
        for name, run in self._gloo.items():
            joined = functools.partial(self._gather, run) if name in gathers else run
            is_simple = not BY_NAME[name].tensor_places
            methods[name] = run if is_simple else functools.partial(_run_contiguous, BY_NAME[name], joined)
        own = (
            self.allreduce,
            self.alltoall_base,
            self.reduce_scatter,
            self._reduce_scatter_base,
            self.reduce_scatter_tensor_coalesced,
        )
        return methods | {method.__name__: method for method in own}

    def allreduce(self, *args: Any, **kwargs: Any) -> Work:
        """Allreduce; divide the sum for an average of several tensors, or of sparse ones."""
        row, reduce = BY_NAME["allreduce"], self._gloo["allreduce"]
        if not kwargs and _are_simple(row, args):
            return reduce(*args)  # type: ignore[no-any-return]
        call = row.bind(args, kwargs)
        is_one = len(call.outputs) == 1 and call.outputs[0].layout is torch.strided
        if is_one or call.reduce_op != ReduceOp(ReduceOp.AVG):
            return _run_contiguous(row, reduce, *args, **kwargs)
        for tensor in call.outputs:
            torch.empty(0, dtype=tensor.dtype).div_(self._world_size)  # raises an error for integers
        options = AllreduceOptions()
        options.timeout = call.timeout or options.timeout

        def take() -> list[Any]:
            divide(call.outputs, self._world_size)
            return call.result

        return JointOperation([_run_contiguous(row, reduce, list(call.outputs), options)], take)

    def _gather(self, gather: Callable[..., Work], outputs: Any, sources: Any, *options: Any) -> Work:
        """Gather into tensors of either shape: the concatenation or the stack."""
        if isinstance(outputs, Tensor):
            return gather(*self._joined(outputs, sources), *options)
        if len(outputs) != len(sources):
            raise ProcessGroupError(f"{len(outputs)} outputs for {len(sources)} inputs")
        pairs = list(map(self._joined, outputs, sources))
        return gather([output for output, _ in pairs], [source for _, source in pairs], *options)

    def alltoall_base(self, *args: Any, **kwargs: Any) -> Work:
        """Refuse wrong splits, which Gloo finds only after it has begun, and then the group is of no use."""
        call = BY_NAME["alltoall_base"].bind(args, kwargs)
        for tensor, sizes in zip((call.outputs, call.inputs), call.split_sizes, strict=True):
            rows = tensor.shape[0] if tensor.dim() else 0
            if sum(sizes) != rows if sizes else rows % self._world_size:
                raise ProcessGroupError(f"{rows} rows cannot be split into {sizes or self._world_size}")
        if share_memory(call.outputs, call.inputs):  # Gloo would send what it has just received
            args = call.outputs, call.inputs.clone(), *args[2:]
            kwargs = {
                name: value for name, value in kwargs.items() if name not in call.collective.tensor_names
            }
        return _run_contiguous(call.collective, self._gloo["alltoall_base"], *args, **kwargs)

    def reduce_scatter(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce lists of parts; each rank gets its own part."""
        call = BY_NAME["reduce_scatter"].bind(args, kwargs)
        if len(call.outputs) != 1 or len(call.inputs) != 1:
            raise ProcessGroupError(f"reduce_scatter has one output, not {len(call.outputs)}")
        (output,), (parts,) = call.outputs, call.inputs
        if len(parts) != self._world_size:
            raise ProcessGroupError(f"reduce_scatter got {len(parts)} inputs for {self._world_size} ranks")
        for place, part in enumerate(parts):
            _check(output, part, output.shape if place == self._rank else part.shape)
        joined = torch.cat([part.reshape(-1) for part in parts])
        sizes = [part.numel() for part in parts]
        work, finish = self._reduce_parts(output, joined, sizes, call.reduce_op, call.timeout)
        return JointOperation([work], finish, on_cpu=output.is_cpu)

    def _reduce_scatter_base(self, *args: Any, **kwargs: Any) -> Work:
        # The form in which torch and this package call it.
        if len(args) == 3 and type(args[2]) is ReduceScatterOptions:
            output, source, options = args
            if output.dim() and source.shape == (self._world_size * output.shape[0], *output.shape[1:]):
                sizes = [output.numel()] * self._world_size
                work, finish = self._reduce_parts(output, source, sizes, options.reduceOp, options.timeout)
                return JointOperation([work], finish, on_cpu=output.is_cpu)
        call = BY_NAME["_reduce_scatter_base"].bind(args, kwargs)
        return self._reduce_tensors(call, [call.outputs], [call.inputs])

    def reduce_scatter_tensor_coalesced(self, *args: Any, **kwargs: Any) -> Work:
        """Reduce several tensors, each of which is the concatenation or the stack of all ranks' parts."""
        call = BY_NAME["reduce_scatter_tensor_coalesced"].bind(args, kwargs)
        if len(call.outputs) != len(call.inputs):
            raise ProcessGroupError(f"{len(call.outputs)} outputs for {len(call.inputs)} inputs")
        return self._reduce_tensors(call, call.outputs, call.inputs)

    def _reduce_tensors(self, call: Call, outputs: Sequence[Tensor], sources: Sequence[Tensor]) -> Work:
        ranks, pairs = self._world_size, list(zip(outputs, sources, strict=True))
        for output, source in pairs:  # all are checked before any is under way
            joined = [(ranks * output.shape[0], *output.shape[1:])] if output.dim() else []
            _check(output, source, *joined, (ranks, *output.shape))
        started = [
            self._reduce_parts(output, source, [output.numel()] * ranks, call.reduce_op, call.timeout)
            for output, source in pairs
        ]

        def finish() -> list[Any]:
            for _, finish_one in started:  # in their order, as two outputs may be the same tensor
                finish_one()
            return list(outputs)

        is_one_on_cpu = len(outputs) == 1 and outputs[0].is_cpu
        return JointOperation([work for work, _ in started], finish, on_cpu=is_one_on_cpu)

    def _reduce_parts(
        self, output: Tensor, source: Tensor, sizes: list[int], op: ReduceOp, timeout: timedelta | None
    ) -> tuple[Work, Finish]:
        """Begin to reduce the flat parts of `source`, of `sizes` elements, each into its rank's `output`.

        Return the work that moves the parts, and the function that finishes the operation after it. No rank
        receives more bytes than in an allreduce: the ranks exchange their parts unless one of them gets more
        than twice an even part.
        """
        if source.dtype != output.dtype:
            raise ProcessGroupError(f"the input is {source.dtype}, the output {output.dtype}")
        number, ranks = hash(op), self._world_size
        # Operations that Gloo cannot reduce are passed to it nevertheless, so that it raises its own error.
        is_sum = number == _SUM or (number == _AVERAGE and output.is_floating_point())
        total = source.numel()
        is_even = bool(total) and max(sizes) * ranks <= 2 * total
        is_on_cpu = output.is_cpu and source.is_cpu
        if not (is_sum and is_even and is_on_cpu and output.dtype in REDUCIBLE):
            return self._reduce_whole(output, source, sum(sizes[: self._rank]), op, timeout)
        own = output.numel()
        parts = torch.empty(ranks * own, dtype=output.dtype, device="cpu")
        flat = source.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        options = AllToAllOptions()
        options.timeout = timeout or options.timeout

        def add_up() -> list[Any]:
            with writing_to(output):
                output.copy_(torch.sum(parts.view(ranks, *output.shape), 0, dtype=output.dtype))
                if number == _AVERAGE:
                    output.div_(ranks)
            return [output]

        return self._gloo["alltoall_base"](parts, flat, [own] * ranks, sizes, options), add_up

    def _reduce_whole(
        self, output: Tensor, source: Tensor, start: int, op: ReduceOp, timeout: timedelta | None
    ) -> tuple[Work, Finish]:
        """Begin to reduce as `_reduce_parts`, but all parts on all ranks; the own one begins at `start`."""
        options = AllreduceOptions()
        options.reduceOp = op
        options.timeout = timeout or options.timeout
        whole = source.detach().clone().reshape(-1)

        def take() -> list[Any]:
            with writing_to(output):
                output.copy_(whole.narrow(0, start, output.numel()).view(output.shape))
            return [output]

        return self._gloo["allreduce"]([whole], options), take

    def _joined(self, output: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output as a concatenation, which Gloo takes, and the input that fits it."""
        if output.shape != (self._world_size, *source.shape):
            return output, source
        if source.dim() == 0:
            return output, source.view(1)
        return output.view(self._world_size * source.shape[0], *source.shape[1:]), source


def _run_contiguous(row: Collective, run: Callable[..., Work], *args: Any, **kwargs: Any) -> Work:
    """Run a call on copies of its tensors that have gaps, or are not what lies in memory."""
    try:
        if not kwargs and _are_simple(row, args):
            return run(*args)
        call = row.bind(args, kwargs)
        refuse_overlap(call)
        if row.name in POINT_TO_POINT:  # Gloo copies only the tensors of collectives to the CPU
            for tensor in tensors_of((call.outputs, call.inputs)):
                if not tensor.is_cpu:
                    raise CollectiveRefusedError(
                        f"Gloo sends and receives the memory of a CPU, and the tensor is on {tensor.device}: "
                        f"move it to the CPU, or {row.name} it over NCCL"
                    )
        copies: dict[int, Tensor] = {}

        def simple(tensor: Tensor) -> Tensor:
            if tensor.layout is not torch.strided:
                # It is not copied, because a result replaces the memory of a sparse tensor, and only the copy
                # would get it.
                return tensor
            if _is_plain(tensor):
                return tensor.detach()
            if (copy := copies.get(id(tensor))) is None:
                copy = copies[id(tensor)] = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return copy

        positional, named = call.with_tensors(simple)
        # In the mode in which its outputs can be written to: Gloo's thread takes it over.
        with writing_to(*tensors_of(row.bind(positional, named).outputs)):
            work = run(*positional, **named)
        back = [(output, copies[id(output)]) for output in tensors_of(call.outputs) if id(output) in copies]
        if not back:
            return work
        waits = row.name in POINT_TO_POINT  # sends and receives have no future
        return JointOperation([work], functools.partial(_copy_back, call, back), waits=waits)
    finally:
        del run  # an error that the caller keeps would keep this frame, and the group with it


def _copy_back(call: Call, back: list[tuple[Tensor, Tensor]]) -> list[Any]:
    for output, copy in back:
        with writing_to(output):
            output.copy_(copy)
    return call.result


def _are_simple(row: Collective, args: tuple[Any, ...]) -> bool:
    """Return whether no tensor argument needs a copy, or another mode. These are plain loops, because every
    operation pays for them."""
    if len(args) < len(row.tensor_places):
        return False  # an argument is missing, which `bind` reports best
    is_copied = row.name in COPIED_LATER
    for place in row.tensor_places:
        nested = args[place]
        if type(nested) is list and len(nested) > 1 and row.name in JOINING:
            return False  # the tensors may share memory
        for items in nested if type(nested) is list else (nested,):
            for item in items if type(items) is list else (items,):
                is_plain = (
                    type(item) is Tensor and item.is_cpu and item.is_contiguous() and not item.requires_grad
                )
                if not (is_plain and not item.is_neg() and not item.is_conj()):
                    if is_copied or not _is_simple(item):
                        return False
                elif is_copied and item.is_inference():
                    return False  # `_run_contiguous` sets the mode for such tensors
    return True


def _is_simple(nested: Any) -> bool:
    """Return whether the tensors are plain memory, and autograd has nothing to record."""
    if isinstance(nested, Tensor):
        is_own = nested.is_cpu and nested.layout is torch.strided
        return is_own and _is_plain(nested) and not nested.requires_grad
    return all(map(_is_simple, nested))


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the tensor's elements lie in memory as they are, in contiguous order."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def _check(output: Tensor, source: Tensor, *shapes: Sequence[int]) -> None:
    if source.dtype != output.dtype:
        raise ProcessGroupError(f"the input is {source.dtype}, the output {output.dtype}")
    if not any(tuple(source.shape) == tuple(shape) for shape in shapes):
        wanted = " or ".join(str(tuple(shape)) for shape in shapes)
        raise ProcessGroupError(f"the input's shape is {tuple(source.shape)}, not {wanted}")
