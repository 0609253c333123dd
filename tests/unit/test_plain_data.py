"""What travels as plain data comes back as it was; what does not is named; bytes that are none do no harm."""

from __future__ import annotations

import math
import struct
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from torchft_like.dtypes import DTYPES
from torchft_like.errors import PlainDataError
from torchft_like.plain_data import (
    DEPTH_MAX,
    DIMENSIONS_MAX,
    EQUAL_HASHES_MAX,
    INLINE_BYTES_MAX,
    LEAVES_MAX,
    MESSAGES,
    STATES,
    STRUCTURE_BYTES_MAX,
    VALUES_MAX,
    Layout,
    Leaf,
    Limits,
    Shard,
    Structure,
    TensorLeaves,
    as_tensor,
    bytes_of,
    decode,
    dissect,
    encode,
    write,
)


def _deep(levels: int) -> tuple[object, ...]:
    """A tuple in a tuple in a tuple."""
    found: tuple[object, ...] = ()
    for _ in range(levels):
        found = (found,)
    return found


PLAIN = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**63,
    -(2**63) - 1,
    10**100,
    0.0,
    -0.0,
    1.5,
    math.inf,
    5e-324,
    "",
    "größer ✓",
    "half a pair \ud800",
    "x" * (INLINE_BYTES_MAX + 1),
    b"",
    b"\x00\xff",
    b"x" * INLINE_BYTES_MAX,
    b"y" * (INLINE_BYTES_MAX + 1),
    [],
    (),
    {},
    [1, [2, (3, None)], {"a": [True]}],
    {"z": 1, "a": 2, 3: "int", None: 0, (1, ("b",)): 2.5, b"k": False},
    ("nested", {"deeper": ({"still": [b"q" * 10_000, "r" * 10_000]},)}),
]


def _freed() -> torch.Tensor:
    """Return a tensor as FSDP leaves it between two uses."""
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


REFUSED = [
    ({"a": [0, 1, 2, {1, 2}]}, r"a\[3\] is a set.*`list"),
    ([np.float64(3)], r"\[0\] is a numpy.float64.*`\.item\(\)`"),
    ({3: torch.Size([1])}, r"\[3\] is a torch.Size.*`tuple"),
    (OrderedDict(), r"the value is a collections.OrderedDict.*`dict"),
    (sys.version_info, r"version_info.*`tuple"),
    (bytearray(b"x"), r"bytearray.*`bytes"),
    (1j, r"complex.*real"),
    (torch.float32, r"torch.dtype.*str"),
    (object(), r"object.*What travels"),
    (torch.eye(2).to_sparse(), r"layout.*to_dense"),
    (torch.eye(2).to_mkldnn(), r"layout.*to_dense"),
    (torch.empty(2, device="meta"), r"on meta that has no memory"),
    (torch.nn.Parameter(torch.empty(2, device="meta")), r"on meta that has no memory"),
    (_freed(), r"has no memory \(.*FSDP"),
    (torch.nn.LazyLinear(2).weight, r"UninitializedParameter.*that has data"),
    (torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), r"nested.*unbind"),
    (np.array(["text"]), r"only numbers travel.*tolist"),
    (np.array([object()]), r"only numbers travel"),
    ({frozenset(): 1}, r"key of type frozenset"),
    ({(1, 1j): 1}, r"key of type tuple"),
    (2 * [VALUES_MAX // 2 * [None]], r"values: put numbers into an array"),
    ([torch.empty(0)] * (LEAVES_MAX + 1), r"one tensor too many"),
    (torch.empty([1] * (DIMENSIONS_MAX + 1)), r"has 65 dimensions.*flatten"),
    (torch.empty([1] * 256), r"has 256 dimensions"),
    (torch.empty(2**41, 0), r"is empty and has the shape \(2199023255552, 0\).*flatten"),
    ([np.empty((2**41, 0))], r"\[0\] is empty and has the shape"),
    ({_deep(3 * sys.getrecursionlimit()): 1}, r"\] is under a key of type tuple"),
    ({10**5000: {1}}, r"\[int\] is a set"),
    (["x" * 4095] * (STRUCTURE_BYTES_MAX // 4096), r"takes 6717\d+ bytes beside tensors"),
]


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantized_tensor_is_refused_with_its_own_cure() -> None:
    with pytest.raises(PlainDataError, match=r"quantized.*dequantize"):
        dissect([torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)])


def assemble(structure: bytes, leaves: Sequence[Leaf]) -> object:
    return Structure(structure, MESSAGES).value(TensorLeaves(map(as_tensor, leaves)))


class _Bytes:
    """Leaves from the bytes of leaves."""

    def __init__(self, leaves: list[bytes]) -> None:
        self._next = iter(leaves)

    def tensor(self, spec: object) -> torch.Tensor:
        return torch.frombuffer(bytearray(next(self._next)), dtype=spec.dtype).view(spec.shape)  # type: ignore[attr-defined]

    def memory(self, _: int) -> bytearray:
        return bytearray(next(self._next))

    def data(self, _: int) -> bytes:
        return next(self._next)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.40}")
def test_plain_values_come_back_as_they_were(value: object) -> None:
    structure, leaves = dissect(value)
    assert repr(assemble(structure, leaves)) == repr(value)
    assert repr(
        Structure(structure, MESSAGES).value(_Bytes([bytes(bytes_of(leaf)) for leaf in leaves]))
    ) == repr(value)


def test_not_a_number_comes_back_as_one() -> None:
    found = assemble(*dissect(math.nan))
    assert isinstance(found, float)
    assert math.isnan(found)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (4, 3)], ids=str)
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    structure, (travels,) = dissect([tensor])
    (spec,) = Structure(structure, MESSAGES).specs
    assert (spec.dtype, spec.shape, spec.device_type) == (dtype, shape, "cpu")
    assert spec.nbytes == tensor.numel() * dtype.itemsize
    assert isinstance(travels, torch.Tensor)
    assert assemble(structure, [travels]) == [travels]
    assert travels.data_ptr() == tensor.data_ptr()  # no copy
    if tensor.numel():
        found = Structure(structure, MESSAGES).value(_Bytes([bytes(bytes_of(tensor))]))[0]  # type: ignore[index]
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("code", ["<f4", ">i4", "|b1", "<c16", "|u1", "<f2"])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 4)], ids=str)
def test_arrays_come_back_writable(code: str, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(code)
    for given in (array, array.T, _read_only(array)):
        structure, tensors = dissect({"a": given})
        found = assemble(structure, tensors)["a"]  # type: ignore[index]
        assert (found.dtype, found.shape) == (given.dtype, given.shape)
        assert np.array_equal(found, given)
        assert found.flags.writeable


def _read_only(array: np.ndarray) -> np.ndarray:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[pattern for _, pattern in REFUSED])
def test_what_does_not_travel_is_named_with_a_cure(value: object, message: str) -> None:
    with pytest.raises(PlainDataError, match=message):
        dissect(value)


def test_a_nested_tensor_is_refused() -> None:
    with warnings.catch_warnings(action="ignore"):  # it is a prototype of torch's
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(PlainDataError, match=r"nested tensor.*unbind"):
        dissect([nested])


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append({"again": loop})
    with pytest.raises(PlainDataError, match="contains itself"):
        dissect(loop)


def test_a_small_value_that_unfolds_to_a_large_one_is_refused() -> None:
    value: object = "x" * 4000
    for _ in range(DEPTH_MAX - 1):
        value = [value, value]
    with pytest.raises(PlainDataError, match=r"together|more than"):
        dissect(value)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{value!r:.40}")
def test_every_truncated_structure_is_refused(value: object) -> None:
    structure, tensors = dissect(value)
    for length in range(0, len(structure), max(1, len(structure) // 200)):
        with pytest.raises(PlainDataError):
            assemble(structure[:length], tensors)
    with pytest.raises(PlainDataError):
        assemble(structure + b"\x00", tensors)


def test_a_structure_that_speaks_of_too_large_tensors_is_refused() -> None:
    structure = dissect(torch.zeros(3))[0]
    huge = structure.replace(struct.pack("<Q", 3), struct.pack("<Q", 2**60))
    assert huge != structure
    with pytest.raises(PlainDataError, match="shape"):
        Structure(huge, MESSAGES)


@pytest.mark.parametrize(
    "value", [1j, OrderedDict(a=1), torch.Size([2]), torch.float16, torch.device("cpu")], ids=repr
)
def test_a_message_may_not_bring_what_only_states_hold(value: object) -> None:
    structure, _ = write([value], STATES)
    with pytest.raises(PlainDataError, match="does not belong there"):
        assemble(structure, [])


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(a=1),
        Counter(a=1),
        torch.nn.Linear(1, 1).state_dict(),
        torch.ones(2, 3).t(),
        Shard(torch.ones(1), Layout((2,), (2,), (), ("S(0)",)), 0),
    ],
    ids=["ordered dict", "counter", "state dict", "permuted", "shard"],
)
def test_as_many_values_are_written_as_can_be_read(value: object) -> None:
    def fits(values: int) -> bool:
        schema = replace(STATES, limits=Limits(values=values))
        try:
            structure, leaves = write([value], schema)
        except PlainDataError:
            return False
        Structure(structure, schema).value(TensorLeaves(map(as_tensor, leaves)))
        return True

    assert [fits(values) for values in range(64)].index(True) > 1


def test_another_version_is_refused_by_its_first_bytes() -> None:
    structure = dissect([1])[0]
    assert structure.startswith(b"PTD2")
    with pytest.raises(PlainDataError, match=r"of another version.*same version"):
        assemble(structure.replace(b"PTD2", b"PTD1"), [])


@pytest.mark.parametrize("make", [lambda n: n * (2**61 - 1) << 61, lambda n: (n * (2**61 - 1) << 61, "x")])
def test_keys_that_were_chosen_to_have_equal_hashes_are_refused(make: Callable[[int], object]) -> None:
    """A dict of 100,000 of them takes minutes to make."""
    keys = [make(number + 1) for number in range(EQUAL_HASHES_MAX + 2)]
    assert len(set(map(hash, keys))) == 1
    value = dict.fromkeys(keys)
    with pytest.raises(PlainDataError, match="equal hashes"):
        assemble(*dissect(value))
    del value[keys[0]]
    assert assemble(*dissect(value)) == value


def test_values_without_leaves_come_back_from_where_they_begin() -> None:
    values = [value for value in PLAIN if not isinstance(value, dict)]
    data = encode(values)
    assert repr(decode(b"before" + data, 6, len(values))) == repr(values)
    assert decode(b"before", 6, 0) == []
    for start, count in ((6, len(values) + 1), (6, len(values) - 1), (7, len(values))):
        with pytest.raises(PlainDataError):
            decode(b"before" + data, start, count)
    with pytest.raises(PlainDataError, match=r"\[1\]\.a is a torch\.Tensor"):
        encode([0, {"a": torch.ones(1)}])
