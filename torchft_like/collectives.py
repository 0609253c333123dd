"""Collectives that send a byte for each number, under torchft's names.

    numbers --quantize--> rows --all to all--> their owner adds them up, divides, quantizes
            <--dequantize-- rows <--all gather--

Each rank owns an even part of the rows. It alone adds up what all ranks have sent of them, and the rows that
it then sends are the result: all ranks read the same bytes.

INVARIANT: after a call has succeeded, all ranks hold the same bits.

ERROR of a sum: that of each rank's rows, as `quantization` has it, and that of the sum's rows, if they are
quantized again; for an average divided by the number of ranks. Let m_k be the greatest magnitude of the row
on rank k, and m that of the sum. Then with int8 a sum is wrong by at most (m_1 + ... + m_K + m) / 254, and a
rank's part of a reduce-scatter by (m_1 + ... + m_K) / 254.

With *error feedback* a rank adds to the next tensor what quantizing has left of this one, and of the sums of
its rows (Seide et al., 2014; Tang et al., 2019, arXiv:1905.05957). Then the errors of many calls do not add
up: the sum of all results is that of all tensors, less what is left of the last one.

A large call is cut into chunks: while some are sent the next is quantized, and the one before them added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions
from torch.distributed import AllreduceOptions, ReduceOp, ReduceScatterOptions, Work

from torchft_like import quantization
from torchft_like.errors import ConfigError, NotSupportedError
from torchft_like.process_group.collectives import BY_NAME, REDUCE_OPS, Collective
from torchft_like.process_group.work import JointOperation
from torchft_like.quantization import ROW, ROW_BYTES, Format, format_named, rows_for
from torchft_like.writing import is_dense, writing_to

CHUNK_ROWS = 4 * 1024  # 1 MiB on the wire, of 4 MiB in float32
# Chunks that are on their way to their owners. With fewer a link waits: Gloo sends nothing before it has
# heard from the receiver, whose word comes behind all that it is sending itself.
IN_FLIGHT = 4
OptionsT = TypeVar("OptionsT", AllreduceOptions, ReduceScatterOptions)
_EXCHANGE, _GATHER = BY_NAME["alltoall_base"], BY_NAME["_allgather_base"]


def allreduce_quantized(
    tensors: list[Tensor],
    opts: AllreduceOptions | ReduceOp | ReduceOp.RedOpType,
    process_group: dist.ProcessGroup,
    sync_stream: torch.Stream | None = None,
    *,
    quantize_to: str = quantization.FP8.name,
    error_feedback: ErrorFeedback | None = None,
) -> Work:
    """Reduce tensors over the ranks of a group, in place, with all ranks quantizing what they send.

    The call blocks while the tensors go to their owners, unless a stream waits for that; the work that it
    returns is over when the results are there. All ranks pass tensors of the same sizes.

    Args:
        tensors: floating point tensors on one device, which need not be contiguous.
        opts: the operation, SUM or AVG.
        process_group: any process group that has `alltoall_base` and `_allgather_base`.
        sync_stream: the stream on which an accelerator quantizes; None for a new one.
        quantize_to: "fp8" or "int8".
        error_feedback: what earlier calls have left of these tensors, which is added to them.

    Raises:
        NotImplementedError: the operation is another one.
        ValueError: a tensor is not of floating point numbers in memory, or there is no such format.
    """
    operation, options = _read(opts, AllreduceOptions)
    check_quantizable(tensors, options.reduceOp)
    divide_by = process_group.size() if operation == _AVERAGE else None
    stream = stream_beside(tensors, sync_stream)
    to = format_named(quantize_to)
    work = reduce_quantized(tensors, options, process_group, stream, divide_by, to, error_feedback)
    if error_feedback is None:
        return work

    def accept() -> list[Tensor]:
        error_feedback.accept()
        return tensors

    return JointOperation([work], accept, waits=True)


def reduce_quantized(
    tensors: Sequence[Tensor],
    options: AllreduceOptions,
    group: dist.ProcessGroup,
    stream: torch.Stream | None,
    divide_by: int | None,
    to: Format,
    feedback: ErrorFeedback | None = None,
) -> Work:
    """Do as `allreduce_quantized`, with the divisor of a sum and the stream given by the caller."""
    with _on(stream), writing_to(*tensors):
        # What is a copy, as of a tensor with gaps, is copied back.
        flat = [tensor.detach().resolve_neg().contiguous().view(-1) for tensor in tensors]
        chunks = [_Chunk(parts, group, options, to) for parts in _cut(flat, feedback)]
        for number in range(len(chunks) + IN_FLIGHT):
            if number < len(chunks):
                chunks[number].send()
            # Before the last collective begins: to wait for that is to wait for what was done on this stream.
            if number >= 2 * IN_FLIGHT:
                chunks[number - 2 * IN_FLIGHT].work.wait()
                chunks[number - 2 * IN_FLIGHT].take()
            if number >= IN_FLIGHT:
                chunks[number - IN_FLIGHT].reduce(divide_by)

    def take() -> list[Tensor]:
        with writing_to(*tensors):
            for chunk in chunks[-IN_FLIGHT:]:
                chunk.take()
            for tensor, numbers in zip(tensors, flat, strict=True):
                if tensor.numel() and tensor.data_ptr() != numbers.data_ptr():
                    _used_on_current_stream(numbers)
                    tensor.copy_(numbers.view(tensor.shape))
        return list(tensors)

    return JointOperation([chunk.work for chunk in chunks], take, waits=True)


class ErrorFeedback:
    """The error feedback of one tensor, or list of tensors, that is reduced again and again.

    What is left of a call counts from `accept` on. A call that failed, or whose step was not committed, has
    left nothing.
    """

    def __init__(self) -> None:
        self._left: list[Tensor] = []
        self._next: list[Tensor] = []

    def begin(self, flat: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return what is left of the last call for these tensors, and where to write what this one leaves."""
        if not self._left:
            self._left = [torch.zeros_like(numbers, dtype=torch.float32) for numbers in flat]
        if [left.shape for left in self._left] != [numbers.shape for numbers in flat]:
            raise ValueError("these are not the tensors of the last call: each needs a feedback of its own")
        self._next = [torch.empty_like(left) for left in self._left]
        return self._left, self._next

    def accept(self) -> None:
        """Let what the last call has left count."""
        if self._next:
            self._left, self._next = self._next, []


class _Part(NamedTuple):
    """A part of a tensor in one chunk, and of what is left of the tensor."""

    numbers: Tensor
    left: Tensor | None = None
    next: Tensor | None = None


class _Chunk:
    """Rows that are reduced together: sent to their owners, added up there, gathered and read."""

    def __init__(
        self, parts: list[_Part], group: dist.ProcessGroup, options: AllreduceOptions, to: Format
    ) -> None:
        self._parts = parts
        self._group = group
        self._options = options
        self._format = to
        self._rows = [rows_for(part.numbers.numel()) for part in parts]
        self._owned = -(-sum(self._rows) // group.size())  # rows of each rank; the last ones are not used
        self.work: Work

    def send(self) -> None:
        """Quantize the numbers, and begin to send each owner its rows."""
        self._all = _empty_rows(self._group.size() * self._owned, self._parts[0].numbers)
        *each, rest = self._split()
        for (numbers, left, next_), rows in zip(self._parts, each, strict=True):
            if left is None or next_ is None:
                quantization.quantize(numbers, rows, self._format)
            else:
                wanted = numbers + left
                quantization.quantize(wanted, rows, self._format)
                quantization.dequantize(rows, next_, self._format)
                _set_lost(next_, wanted - next_)
        rest.zero_()
        self._received = torch.empty_like(self._all)
        self.work = _exchange(self._group, self._received, self._all, self._options, self._format)

    def reduce(self, divide_by: int | None) -> None:
        """Add up the rows that this rank owns, and begin to gather all ranks' rows."""
        self.work.wait()
        parts = self._received.view(self._group.size(), self._owned, ROW_BYTES)
        del self._received
        own = _empty_rows(self._owned, self._all)
        leaves = any(part.next is not None for part in self._parts)
        lost = torch.empty(self._owned, ROW, device=own.device) if leaves else None
        quantization.reduce(parts, own, divide_by, self._format, lost)
        if lost is not None:
            self._leave(lost.view(-1), divide_by or 1)
        options = AllgatherOptions()
        options.timeout = self._options.timeout
        wire = self._format.wire
        self.work = _issue(self._group, _GATHER, self._all.view(wire), own.view(wire), options)

    def _leave(self, lost: Tensor, factor: int) -> None:
        """Leave what is lost of the sums for the next call, in which this rank adds it to its own numbers."""
        _set_lost(lost, lost.mul_(factor))
        first = -self._group.rank() * self._owned * ROW
        for part, rows in zip(self._parts, self._rows, strict=True):
            begin, end = max(first, 0), min(first + rows * ROW, len(lost))
            if part.next is not None and begin < end:
                mine = part.next[begin - first : end - first]
                mine += lost[begin:][: len(mine)]
            first += rows * ROW

    def take(self) -> None:
        """Write the results to the tensors, once the work is over."""
        _used_on_current_stream(self._all)
        for part, rows in zip(self._parts, self._split(), strict=False):
            quantization.dequantize(rows, part.numbers, self._format)
        del self._all

    def _split(self) -> Sequence[Tensor]:
        """Return the rows of each part, and those that are not used."""
        return torch.split(self._all, [*self._rows, len(self._all) - sum(self._rows)])


def reduce_scatter_quantized(
    output: Tensor,
    inputs: list[Tensor],
    opts: ReduceScatterOptions | ReduceOp | ReduceOp.RedOpType,
    process_group: dist.ProcessGroup,
    sync_stream: torch.Stream | None = None,
    *,
    quantize_to: str = quantization.FP8.name,
) -> Work:
    """Reduce tensors over the ranks of a group, of which each rank gets an even part.

    Args:
        output: the results, as `allocate_reduce_scatter_output` makes it: this rank's part of each input, one
          behind the other. A part are as many indices of the first dimension as each rank gets if the inputs
          had the sizes of `get_padded_sizes`; indices that an input lacks are 0.
        inputs: floating point tensors on one device, of the same sizes on all ranks.
        opts, process_group, sync_stream, quantize_to: as for `allreduce_quantized`.

    Raises:
        NotImplementedError, ValueError: as for `allreduce_quantized`.
    """
    operation, options = _read(opts, ReduceScatterOptions)
    check_quantizable([output, *inputs], options.reduceOp)
    ranks, to = process_group.size(), format_named(quantize_to)
    count = sum(size.numel() for size in get_padded_sizes(inputs, ranks)) // ranks
    if output.numel() != count:
        raise ValueError(f"the output has {output.numel()} elements; this rank's part has {count}")
    if not count:
        return JointOperation([], lambda: [output], waits=True)
    owned = rows_for(count)
    with _on(stream_beside(inputs, sync_stream)):
        sent = _empty_rows(ranks * owned, output)
        for rank, rows in enumerate(sent.view(ranks, owned, ROW_BYTES)):
            quantization.quantize(_part_of(inputs, rank, ranks), rows, to)
        received = torch.empty_like(sent)
        work = _exchange(process_group, received, sent, options, to)

    def take() -> list[Tensor]:
        _used_on_current_stream(received)
        divide_by = ranks if operation == _AVERAGE else None
        total = torch.empty(owned, ROW, device=received.device)
        quantization.add_up(received.view(ranks, owned, ROW_BYTES), total, divide_by, to)
        with writing_to(output):
            output.copy_(total.view(-1)[:count].view(output.shape))
        return [output]

    return JointOperation([work], take, waits=True)


def get_padded_sizes(tensors: list[Tensor], world_size: int) -> list[torch.Size]:
    """Return the tensors' sizes with the first dimension rounded up to a multiple of the number of ranks.

    A tensor of one dimension counts as one of two, of which the second has size 1.
    """
    sizes = [(*tensor.shape, 1) if tensor.dim() == 1 else tuple(tensor.shape) for tensor in tensors]
    return [torch.Size((-(-first // world_size) * world_size, *rest)) for first, *rest in sizes]


def allocate_reduce_scatter_output(tensors: list[Tensor], world_size: int) -> tuple[Tensor, list[torch.Size]]:
    """Make the output of `reduce_scatter_quantized` for these inputs; return it, and their padded sizes."""
    sizes = get_padded_sizes(tensors, world_size)
    count = sum(size.numel() for size in sizes) // world_size
    return torch.empty(count, dtype=tensors[0].dtype, device=tensors[0].device), sizes


def _part_of(inputs: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
    """Return a rank's part of each input as one tensor, with zeros for indices that an input lacks."""
    parts = []
    for tensor in inputs:
        count = -(-tensor.shape[0] // ranks)
        part = tensor.detach()[rank * count : (rank + 1) * count].reshape(-1)
        missing = count * tensor[:1].numel() - part.numel()
        parts.append(torch.nn.functional.pad(part, (0, missing)) if missing else part)
    return torch.cat(parts)


def _cut(flat: Sequence[Tensor], feedback: ErrorFeedback | None) -> Iterator[list[_Part]]:
    """Yield parts of the tensors that have at most `CHUNK_ROWS` rows together."""
    chunk: list[_Part] = []
    rows = 0
    each = [flat] if feedback is None else [flat, *feedback.begin(flat)]
    for tensors in zip(*each, strict=True):
        pieces = zip(*(torch.split(tensor, CHUNK_ROWS * ROW) for tensor in tensors), strict=True)
        for part in (_Part(*piece) for piece in pieces) if tensors[0].numel() else ():
            more = rows_for(part.numbers.numel())
            if rows + more > CHUNK_ROWS:
                yield chunk
                chunk, rows = [], 0
            chunk.append(part)
            rows += more
    if chunk:
        yield chunk


def _set_lost(place: Tensor, lost: Tensor) -> None:
    """Write what was lost, which is nothing of what is not finite: it would be lost for ever."""
    place.copy_(lost).nan_to_num_(0.0, 0.0, 0.0)


def _exchange(
    group: dist.ProcessGroup,
    received: Tensor,
    sent: Tensor,
    options: AllreduceOptions | ReduceScatterOptions,
    to: Format,
) -> Work:
    exchange = AllToAllOptions()
    exchange.timeout = options.timeout
    return _issue(group, _EXCHANGE, received.view(to.wire), sent.view(to.wire), [], [], exchange)


def _issue(group: dist.ProcessGroup, collective: Collective, *args: object) -> Work:
    if (method := collective.find_on(group)) is None:
        raise NotSupportedError(f"{group!r:.99} has no {collective.name}, which sends quantized numbers")
    return method(*args)  # type: ignore[no-any-return]


def _empty_rows(count: int, like: Tensor) -> Tensor:
    return torch.empty(count, ROW_BYTES, dtype=torch.uint8, device=like.device)


def _used_on_current_stream(tensor: Tensor) -> None:
    """Keep memory, which was allocated on another stream, until the current stream has read it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


def stream_beside(tensors: Sequence[Tensor], stream: torch.Stream | None = None) -> torch.Stream | None:
    """Return a stream that waits for what is queued on the current one; None where there are none.

    Args:
        stream: the stream to return, instead of a new one.
    """
    if not tensors or not tensors[0].is_cuda:
        return None
    device = tensors[0].device
    own = stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    own.wait_stream(torch.cuda.current_stream(device))
    return own


def _on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)  # type: ignore[arg-type]


def _read(given: OptionsT | ReduceOp | ReduceOp.RedOpType, kind: type[OptionsT]) -> tuple[int, OptionsT]:
    """Return the operation, as its hash, which is its number, and the options."""
    if isinstance(given, kind):
        options = given
    else:
        options = kind()
        options.reduceOp = given  # type: ignore[assignment]
    return hash(options.reduceOp), options


_SUM, _AVERAGE = hash(ReduceOp.SUM), hash(ReduceOp.AVG)


def check_quantizable(tensors: Sequence[Tensor], operation: ReduceOp | ReduceOp.RedOpType) -> None:
    """Refuse what no quantized collective can reduce.

    Raises:
        NotImplementedError: the operation is neither SUM nor AVG.
        ValueError: there is no list of tensors, or one of them is not of floating point numbers in memory, or
          not on the device of the others.
    """
    if isinstance(tensors, Tensor):
        raise ConfigError("a quantized collective takes a list of tensors, not a tensor")
    if hash(operation) not in (_SUM, _AVERAGE):
        name = REDUCE_OPS.get(hash(operation), operation)
        raise NotSupportedError(f"{name} of quantized numbers: only SUM and AVG can be had")
    for tensor in tensors:
        if not (tensor.is_floating_point() and is_dense(tensor)):
            raise ValueError(
                f"a quantized collective needs floating point tensors in memory, not {tensor.dtype}, "
                f"{tensor.layout}"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(f"tensors on {tensors[0].device} and {tensor.device}: pass those of one device")
