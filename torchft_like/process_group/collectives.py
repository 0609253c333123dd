"""Every collective of `torch.distributed.ProcessGroup`, described once.

A row says what a collective is called, which of its arguments are results, and what it does in a group of
which the caller is the only member. Forwarding, dummies, error swallowing, fault injection and the managed
group are derived from the rows; no class writes a collective out by hand.

The table knows argument positions and shapes of nesting, and nothing about backends: the classes that use it
know how bytes move, and what may fail.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions
from torch.distributed import ReduceOp

from torchft_like.core.agreement.statements import (
    EXCHANGED,
    GATHERED,
    PAIRED,
    SAME,
    SCATTERED,
    SHARED_OUT,
)
from torchft_like.errors import CollectiveRefusedError, ProcessGroupError
from torchft_like.writing import share_memory, writing_to

# Tensors as a call holds them: one tensor, a list, or a list of lists.
Tensors = Any


@dataclass(frozen=True)
class Argument:
    """A tensor argument: its place, its names in the overloads, and how deep its lists nest.

    The shorter overloads pass a tensor where the full one has a list of one; `depth` is that of
    the full one, and `Call` always shows it.
    """

    index: int
    names: tuple[str, ...]
    depth: int

    def find(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensors:
        """Return the argument of one call, nested to `depth`; a TypeError says that it is missing."""
        if len(args) > self.index:
            value = args[self.index]
            if self.depth == 1 and type(value) is list and value and type(value[0]) is Tensor:
                return value  # the usual case
            return _nest(value, self.depth)
        for name in self.names:
            if name in kwargs:
                return _nest(kwargs[name], self.depth)
        given = f" (given are {', '.join(kwargs)}; the names are torch's)" if kwargs else ""
        raise TypeError(f"missing argument {self.names[0]!r}{given}")


class Call(NamedTuple):
    """One call of a collective, with its tensor arguments in the nesting of the full overload.

    It is a tuple, because every operation makes one and a frozen dataclass takes a microsecond more.
    """

    collective: Collective
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Tensors
    inputs: Tensors

    @property
    def reduce_op(self) -> ReduceOp:
        """The reduction asked for, in whichever form the overload has it; SUM if none is named."""
        # The options come last, and to look at torch's enums takes longer than all the rest.
        for value in (*self.kwargs.values(), *reversed(self.args)):
            if (found := getattr(value, "reduceOp", None)) is not None:
                return found  # type: ignore[no-any-return]
            if isinstance(value, ReduceOp | ReduceOp.RedOpType):
                return ReduceOp(value) if isinstance(value, ReduceOp.RedOpType) else value
        return ReduceOp(ReduceOp.SUM)

    @property
    def root(self) -> int:
        """The rank at which a rooted collective begins or ends, in whichever form the overload has it."""
        roots = (getattr(option, "rootRank", option) for option in self.options)
        return next((root for root in roots if isinstance(root, int)), 0)

    @property
    def options(self) -> tuple[Any, ...]:
        """The arguments other than tensors, in the order in which they were given."""
        places, names = self.collective.tensor_places, self.collective.tensor_names
        positional = (value for place, value in enumerate(self.args) if place not in places)
        return *positional, *(value for name, value in self.kwargs.items() if name not in names)

    @property
    def timeout(self) -> timedelta | None:
        """The limit that the call itself names."""
        for value in (*self.args, *self.kwargs.values()):
            limit = getattr(value, "timeout", value)
            if isinstance(limit, timedelta) and limit > timedelta(0):
                return limit
        return None

    def reduction(self) -> tuple[list[Tensor], AllreduceOptions]:
        """Return the tensors and the options of an allreduce, as torch's own functions pass them."""
        options = next((option for option in self.options if hasattr(option, "reduceOp")), None)
        if options is None:
            is_coalesced = self.collective.name == "allreduce_coalesced"
            options = AllreduceCoalescedOptions() if is_coalesced else AllreduceOptions()
            options.reduceOp = self.reduce_op
            options.timeout = self.timeout or options.timeout
        return list(self.outputs), options

    @property
    def split_sizes(self) -> tuple[list[int], list[int]]:
        """How an `alltoall_base` splits its output and its input; an empty list is an even split.

        torch takes any sequence of what stands for whole numbers, such as tensors and numpy's arrays.
        """
        found = (self.argument(place, name) for place, name in enumerate(SPLIT_SIZES, start=2))
        output, input_ = ([] if sizes is None else [*map(operator.index, sizes)] for sizes in found)
        return output, input_

    def argument(self, index: int, *names: str) -> Any:
        """Return an argument by its place or one of its names; None if the call does not have it."""
        if len(self.args) > index:
            return self.args[index]
        return next((self.kwargs[name] for name in names if name in self.kwargs), None)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, positional and by name, with each tensor replaced by `change(tensor)`."""
        places, names = self.collective.tensor_places, self.collective.tensor_names
        positional = (_map(v, change) if place in places else v for place, v in enumerate(self.args))
        named = {name: _map(v, change) if name in names else v for name, v in self.kwargs.items()}
        return tuple(positional), named

    @property
    def result(self) -> list[Any]:
        """The value of the call's future: the outputs, as Gloo's own futures hold them."""
        if self.outputs is None:
            return []
        depth = self.collective.output.depth if self.collective.output is not None else 1
        if depth == 0:
            return [self.outputs]
        if depth == 2 and len(self.outputs) == 1:
            return list(self.outputs[0])
        return list(self.outputs)

    def apply_locally(self, rank: int, world_size: int) -> None:
        """Leave in the outputs the result of a call in which only the caller takes part.

        The caller's own share is in its place, what only a peer could have sent is zero, and a tensor that is
        both input and output keeps its value.
        """
        with writing_to(*tensors_of(self.outputs)):
            self.collective.alone(self, rank, world_size)


@dataclass(frozen=True)
class Collective:
    """One row of the table.

    Attributes:
        name: the method's name; `aliases` are its other names, newer or older.
        alone: the function that writes its result in a group of one, for `Call.apply_locally`.
        output, input: the tensor arguments; None if there is none.
        options: the other parameters of the full overload, for introspection.
        blocking: whether it returns None once it is over, not a Work.
        agreement: what the members' arguments must have in common: a rule of `agreement.referee`.
    """

    name: str
    alone: Callable[[Call, int, int], None]
    output: Argument | None = None
    input: Argument | None = None
    aliases: tuple[str, ...] = ()
    options: str = "opts=None"
    blocking: bool = False
    agreement: str = SAME

    @property
    def names(self) -> tuple[str, ...]:
        """Every name under which torch may call it."""
        return (self.name, *self.aliases)

    @functools.cached_property
    def everyone(self) -> bool:
        """Whether every member has to take part: tensors are shared out by rank, or members counted."""
        return len(self._arguments) == 2 or self.name == "reduce"

    @functools.cached_property
    def tensor_places(self) -> frozenset[int]:
        """The places of the tensors among the positional arguments."""
        return frozenset(argument.index for argument in self._arguments)

    @functools.cached_property
    def tensor_names(self) -> frozenset[str]:
        """The names of the tensor arguments in the overloads."""
        return frozenset(name for argument in self._arguments for name in argument.names)

    @property
    def signature(self) -> str:
        """The parameters of the full overload."""
        return f"({', '.join([*(argument.names[0] for argument in self._arguments), self.options])})"

    @property
    def _arguments(self) -> tuple[Argument, ...]:
        """The tensor arguments, in their order; one that is output and input is one."""
        return tuple(dict.fromkeys(each for each in (self.output, self.input) if each is not None))

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Read the arguments of one call; a TypeError says which tensors are missing."""
        outputs = self.output.find(args, kwargs) if self.output else None
        if self.input is self.output:
            return Call(self, args, kwargs, outputs, outputs)
        inputs = self.input.find(args, kwargs) if self.input else None
        return Call(self, args, kwargs, outputs, inputs)

    def find_on(self, *targets: object) -> Callable[..., Any] | None:
        """Return the method of this collective, from the first of `targets` that has it under any name."""
        for target in targets:
            for name in self.names:
                if (method := getattr(target, name, None)) is not None:
                    return method  # type: ignore[no-any-return]
        return None


def refuse_unfit(call: Call) -> None:
    """Refuse a call whose tensors a backend cannot take; a backend calls this before a call begins.

    Raises:
        CollectiveRefusedError: a tensor is made of others, as a DTensor is, and has no memory of its own; or
            the call joins tensors of which two share memory, but are not the same tensor.
    """
    for tensor in tensors_of((call.outputs, call.inputs)):
        if is_made_of_others(tensor):
            is_sharded = hasattr(tensor, "to_local")
            cure = "its local shard, `.to_local()`" if is_sharded else "the tensors that it is made of"
            raise CollectiveRefusedError(
                f"{call.collective.name} was given a {type(tensor).__name__}, which has no memory of its "
                f"own: pass {cure}"
            )
    for one, other in itertools.combinations(call.outputs if call.collective.name in JOINING else (), 2):
        if one is not other and share_memory(one, other):
            raise CollectiveRefusedError(
                f"{call.collective.name} joins its tensors, of which two share memory ({list(one.shape)} and "
                f"{list(other.shape)}): pass copies, or call it for each"
            )


def is_made_of_others(tensor: Tensor) -> bool:
    """Return whether a tensor wraps others that have its elements: a backend would read past its memory."""
    return hasattr(tensor, "__tensor_flatten__")


def refuse_nan(call: Call, rank: int) -> None:
    """Refuse a call whose inputs have a NaN, for TORCH_DIST_NAN_CHECK.

    Raises:
        CollectiveRefusedError: an input of the caller's has a NaN. Tensors that only receive are not checked.
    """
    if call.collective.name == "broadcast" and call.root != rank:
        return
    for tensor in tensors_of(call.inputs) if call.inputs is not None else ():
        values = tensor if tensor.layout is torch.strided else tensor.detach().to_dense()
        if bool(values.isnan().any()):
            raise CollectiveRefusedError(
                f"{call.collective.name} was given a NaN, in a tensor of {list(tensor.shape)} on rank {rank} "
                "(TORCH_DIST_NAN_CHECK=1)"
            )


def _map(nested: Tensors, change: Callable[[Tensor], Tensor]) -> Tensors:
    return change(nested) if isinstance(nested, Tensor) else [_map(item, change) for item in nested]


def _nest(value: Tensors, depth: int) -> Tensors:
    have = 0
    inner = value
    while not isinstance(inner, Tensor):
        have += 1
        if len(inner) == 0:
            return value
        inner = inner[0]
    for _ in range(depth - have):
        value = [value]
    return value


def tensors_of(nested: Tensors) -> Iterator[Tensor]:
    """Yield every tensor in an argument, however deep its lists."""
    if isinstance(nested, Tensor):
        yield nested
    elif nested is not None:
        for item in nested:
            yield from tensors_of(item)


# -- the result of each collective when only the caller takes part: it is written to the outputs of the call,
# of which one may be an input, too


def _keep(call: Call, rank: int, world_size: int) -> None:
    """Move nothing: the outputs are the inputs."""


def _join(call: Call, rank: int, world_size: int) -> None:
    """Reduce several tensors into each of them, as if each were another rank's, as Gloo does."""
    combine = _COMBINE.get(hash(call.reduce_op), torch.add) if len(call.outputs) > 1 else torch.add
    for other in call.outputs[1:]:
        call.outputs[0].copy_(combine(call.outputs[0], other))
    for output in call.outputs[1:]:
        output.copy_(call.outputs[0])


# The keys are hashes, because an operation's hash is its number. An average counts ranks, not tensors.
_COMBINE: Mapping[int, Callable[[Tensor, Tensor], Tensor]] = {
    hash(ReduceOp.PRODUCT): torch.mul,
    hash(ReduceOp.MIN): torch.minimum,
    hash(ReduceOp.MAX): torch.maximum,
    hash(ReduceOp.BAND): torch.bitwise_and,
    hash(ReduceOp.BOR): torch.bitwise_or,
    hash(ReduceOp.BXOR): torch.bitwise_xor,
}


def _repeat_root(call: Call, rank: int, world_size: int) -> None:
    """Copy the tensor that the options name to all others."""
    root = next((option.rootTensor for option in call.options if hasattr(option, "rootTensor")), 0)
    for output in call.outputs if root < len(call.outputs) else ():
        if output is not call.outputs[root]:
            output.copy_(call.outputs[root])


def _clear(call: Call, rank: int, world_size: int) -> None:
    for output in tensors_of(call.outputs):
        output.zero_()


def _spread(call: Call, rank: int, world_size: int) -> None:
    """Copy the caller's tensors, one after the other, to the places of each output list."""
    for outputs in call.outputs:
        for output, source in zip(outputs, itertools.cycle(call.inputs), strict=False):
            output.copy_(source)


def _fill(call: Call, rank: int, world_size: int) -> None:
    """Repeat the caller's tensor in an output that joins all ranks' tensors."""
    for output, source in zip(tensors_of(call.outputs), tensors_of(call.inputs), strict=False):
        if source.numel():
            copies = output.numel() // source.numel()
            output.copy_(source.reshape(1, -1).expand(copies, -1).reshape(output.shape))


def _own_item(call: Call, rank: int, world_size: int) -> None:
    """Copy the caller's place of each input list to its output; zero an output without a list."""
    for output, sources in itertools.zip_longest(call.outputs, call.inputs or ()):
        if sources:
            output.copy_(sources[min(rank, len(sources) - 1)])
        else:
            output.zero_()


def _own_chunk(call: Call, rank: int, world_size: int) -> None:
    for output, source in zip(tensors_of(call.outputs), tensors_of(call.inputs), strict=False):
        chunks = torch.split(source.reshape(-1), max(output.numel(), 1))
        output.copy_(chunks[min(rank, len(chunks) - 1)].view(output.shape))


def _own_to_own(call: Call, rank: int, world_size: int) -> None:
    """Copy what the caller sends to itself, and zero what others would have sent."""
    own = min(rank, len(call.outputs) - 1)
    for place, output in enumerate(call.outputs):
        if place == own:
            output.copy_(call.inputs[place])  # copying a tensor to itself is harmless
        else:
            output.zero_()


def _own_split(call: Call, rank: int, world_size: int) -> None:
    output_sizes, input_sizes = call.split_sizes
    own = _share(call.inputs, input_sizes, rank, world_size).clone()  # the output may be the input
    _clear(call, rank, world_size)
    _share(call.outputs, output_sizes, rank, world_size).copy_(own)


def _share(tensor: Tensor, sizes: Sequence[int], rank: int, world_size: int) -> Tensor:
    if not sizes:
        return tensor.chunk(world_size)[rank]
    return tensor.narrow(0, sum(sizes[:rank]), sizes[rank])


# -- the table


def _first(*names: str, depth: int = 1) -> Argument:
    return Argument(0, names, depth)


def _second(*names: str, depth: int = 1) -> Argument:
    return Argument(1, names, depth)


_TENSORS = _first("tensors", "tensor")
_OUTPUT = _first("output", "output_tensor", "outputTensor", depth=0)
_INPUT = _second("input", "input_tensor", "inputTensor", depth=0)
_OUTPUTS = _first("output_tensors", "outputs", "output_tensor", "output")
_INPUTS = _second("input_tensors", "inputs", "input_tensor", "input")
_COALESCED = _first("outputs", *_OUTPUTS.names), _second("inputs", *_INPUTS.names)
_OUTPUT_LISTS = _first("output_tensors", "output_lists", depth=2)
_INPUT_LISTS = _second("input_tensors", "input_tensor", "input", depth=2)

# Operations between two ranks, which Gloo runs in the thread that waits for them.
POINT_TO_POINT = frozenset({"send", "recv", "recv_anysource"})

# Collectives that make one result of several tensors, while they write to them.
JOINING = frozenset({"allreduce", "broadcast"})

# The keys are hashes, because an operation's hash is its number, and its name takes long to find.
REDUCE_OPS = {hash(op): name for name, op in ReduceOp.RedOpType.__members__.items()}

# Collectives that begin or end at one rank; torch takes rank 0 if a call names none.
ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})

SPLIT_SIZES = "output_split_sizes", "input_split_sizes"
PEER_NAMES = "dst_rank", "dstRank", "src_rank", "srcRank"  # of the rank that a message goes to, or comes from
_SIZES = f"{', '.join(SPLIT_SIZES)}, opts=None"
_WAIT_FOR_ALL = "timeout=None, wait_all_ranks=False"

COLLECTIVES: tuple[Collective, ...] = (
    Collective("allreduce", _join, _TENSORS, _TENSORS),
    Collective("allreduce_coalesced", _keep, _TENSORS, _TENSORS),
    Collective("broadcast", _repeat_root, _TENSORS, _TENSORS),
    Collective("reduce", _keep, _TENSORS, _TENSORS),
    Collective("allgather", _spread, _OUTPUT_LISTS, _INPUTS, agreement=GATHERED),
    Collective("allgather_coalesced", _spread, _first("output_lists", depth=2), _second("input_list")),
    Collective("_allgather_base", _fill, _OUTPUT, _INPUT, ("all_gather_single",)),
    Collective("allgather_into_tensor_coalesced", _fill, *_COALESCED, ("all_gather_single_coalesced",)),
    Collective("gather", _spread, _OUTPUT_LISTS, _INPUTS, agreement=GATHERED),
    Collective("scatter", _own_item, _OUTPUTS, _INPUT_LISTS, agreement=SCATTERED),
    Collective("reduce_scatter", _own_item, _OUTPUTS, _INPUT_LISTS, agreement=SHARED_OUT),
    Collective("_reduce_scatter_base", _own_chunk, _OUTPUT, _INPUT, ("reduce_scatter_single",)),
    Collective(
        "reduce_scatter_tensor_coalesced", _own_chunk, *_COALESCED, ("reduce_scatter_single_coalesced",)
    ),
    Collective("alltoall", _own_to_own, _OUTPUTS, _INPUTS, agreement=EXCHANGED),
    Collective(
        "alltoall_base", _own_split, _OUTPUT, _INPUT, ("all_to_all_single",), _SIZES, agreement=EXCHANGED
    ),
    Collective("send", _keep, None, _TENSORS, options="dst_rank, tag", agreement=PAIRED),
    Collective("recv", _clear, _TENSORS, options="src_rank, tag", agreement=PAIRED),
    Collective("recv_anysource", _clear, _TENSORS, options="tag", agreement=PAIRED),
    Collective("barrier", _keep),
    Collective("monitored_barrier", _keep, options=_WAIT_FOR_ALL, blocking=True),
)

BY_NAME: Mapping[str, Collective] = MappingProxyType(
    {name: collective for collective in COLLECTIVES for name in collective.names}
)

ALLREDUCE = BY_NAME["allreduce"]


def parts_of(output: Tensor, source: Tensor, world_size: int) -> list[Tensor]:
    """Return the part of one output tensor that takes each rank's tensor, in the order of ranks.

    Raises:
        ProcessGroupError: the output is neither the concatenation nor the stack of tensors such as `source`.
    """
    stacked = (world_size, *source.shape)
    joined = (world_size * source.shape[0], *source.shape[1:]) if source.dim() else stacked
    if output.dtype != source.dtype or tuple(output.shape) not in (stacked, joined):
        raise ProcessGroupError(
            f"the output is {output.dtype} {list(output.shape)}, not {source.dtype} {list(joined)} or "
            f"{list(stacked)}: it takes {world_size} tensors of {list(source.shape)}"
        )
    whole = output.detach()
    return list(whole.unbind(0) if whole.shape == stacked else whole.tensor_split(world_size))


def methods_of(*targets: object) -> dict[str, Callable[..., Any]]:
    """Return the method of each collective, from the first of `targets` that has it under any name."""
    found = ((collective.name, collective.find_on(*targets)) for collective in COLLECTIVES)
    return {name: method for name, method in found if method is not None}


ClassT = TypeVar("ClassT", bound=type)


def install_collectives(cls: ClassT) -> ClassT:
    """Add one method per row and name to a class; each of them calls `self._run`."""
    for name, collective in BY_NAME.items():
        setattr(cls, name, _method(name, collective))
    return cls


def _method(name: str, collective: Collective) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._checks_nan:
            refuse_nan(collective.bind(args, kwargs), self.rank())
        work = self._run(collective, args, kwargs)
        if self._batches:
            self._coalesce(collective, args, kwargs, work)
        return work

    method.__name__ = name
    method.__qualname__ = f"ProcessGroup.{name}"
    method.__doc__ = f"torch.distributed.ProcessGroup.{name}{collective.signature}, with all its overloads."
    parameters = collective.signature[1:-1].split(", ")
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY), *map(_parameter, parameters)]
    )
    return method


def _parameter(text: str) -> inspect.Parameter:
    name, _, default = text.partition("=")
    values = {"": inspect.Parameter.empty, "None": None, "False": False}
    return inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=values[default])
