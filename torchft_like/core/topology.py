"""The rank lists of parallel gangs: which ranks are together. Numbers in, numbers out."""

from __future__ import annotations

from torchft_like.errors import TopologyError

Partition = list[list[int]]


def tensor_parallel_ranks(size: int, tp_size: int) -> Partition:
    """Return gangs of neighbours: 8 by 2 is 01 23 45 67.

    Raises:
        TopologyError: `tp_size` does not divide `size`.
    """
    _check_divides("tp_size", tp_size, size, "the root gang")
    return _neighbours(size, tp_size)


def data_parallel_ranks(size: int, tp_size: int) -> Partition:
    """Return gangs of the ranks with the same place among their neighbours: 8 by 2 is 0246 1357.

    Raises:
        TopologyError: `tp_size` does not divide `size`.
    """
    _check_divides("tp_size", tp_size, size, "the root gang")
    return _counterparts(size, tp_size)


def sharded_ranks(size: int, intra_node_size: int) -> Partition:
    """Return the gangs of a data parallel gang whose ranks are on one node: 8 by 4 is 0123 4567.

    Raises:
        TopologyError: `intra_node_size` is less than 2, or does not divide `size`.
    """
    _check_divides("intra_node_size", intra_node_size, size, "the data parallel gang", least=2)
    return _neighbours(size, intra_node_size)


def replicated_ranks(size: int, intra_node_size: int) -> Partition:
    """Return the gangs of a data parallel gang whose ranks have the same place in their nodes: 8 by 4 is 04
    15 26 37.

    Raises:
        TopologyError: `intra_node_size` is less than 2, or does not divide `size`.
    """
    _check_divides("intra_node_size", intra_node_size, size, "the data parallel gang", least=2)
    return _counterparts(size, intra_node_size)


def _neighbours(size: int, width: int) -> Partition:
    return [list(range(start, start + width)) for start in range(0, size, width)]


def _counterparts(size: int, width: int) -> Partition:
    return [list(range(start, size, width)) for start in range(width)]


def _check_divides(name: str, part: int, size: int, whole: str, least: int = 1) -> None:
    if part >= least and size % part == 0:
        return
    sizes = [str(number) for number in range(least, size + 1) if size % number == 0]
    cure = f"take one of {', '.join(sizes)}" if sizes else f"it needs {least} processes or more"
    problem = f"must be {least} or more" if part < least else f"does not divide {whole}, whose size is {size}"
    raise TopologyError(f"{name} {part} {problem}: {cure}")
