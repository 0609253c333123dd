"""Quantized collectives over real Gloo: the error, the bytes that are sent, and equal bits on all ranks."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import AllreduceOptions, ReduceOp, ReduceScatterOptions

from tests.stores import serve_store
from tests.unit.process_group.conftest import Party
from torchft_like import collectives, quantization
from torchft_like.collectives import (
    ErrorFeedback,
    allocate_reduce_scatter_output,
    allreduce_quantized,
    get_padded_sizes,
    reduce_scatter_quantized,
)
from torchft_like.errors import CollectiveMismatchError
from torchft_like.process_group import ProcessGroup, ProcessGroupGloo, ProcessGroupWrapper
from torchft_like.process_group.collectives import Collective
from torchft_like.quantization import FORMATS, FP8, INT8, ROW, ROW_BYTES, SCALE_MIN, Format, rows_for

RANKS = 3
OPERATIONS = [ReduceOp.SUM, ReduceOp.AVG]


@pytest.fixture(scope="module")
def party() -> Iterator[Party]:
    party = Party(serve_store())
    yield party
    party.end()


@pytest.fixture(scope="module")
def groups(party: Party) -> Mapping[int, list[ProcessGroup]]:
    return {ranks: party.meet(ranks) for ranks in (1, 2, RANKS)}


def of_rank(rank: int, seed: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a rank; every other one has gaps in memory."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    tensors = []
    for number, shape in enumerate(shapes):
        tensor = torch.randn(*shape, generator=generator).mul_(4.0 ** (number % 5)).to(dtype)
        tensors.append(tensor.T.contiguous().T if number % 2 and tensor.dim() == 2 else tensor)
    return tensors


def bound(tensors: Sequence[Tensor], quantize_to: str, *, is_scattered: bool = False) -> float:
    """The greatest error of a sum of these, by the greatest magnitudes of all their rows."""
    part = 1 / 254 if quantize_to == "int8" else 1 / 17
    sent = sum(tensor.double().abs().amax().item() for tensor in tensors)
    total = torch.stack([tensor.double() for tensor in tensors]).sum(0).abs().amax().item()
    of_sum = 0.0 if is_scattered else part * (total + part * sent)
    return (part * sent + of_sum) * (1 + 2**-15) + torch.finfo(tensors[0].dtype).eps * 2 * total


@pytest.mark.parametrize("quantize_to", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@settings(max_examples=12)
@given(
    ranks=st.sampled_from([1, 2, RANKS]),
    seed=st.integers(0, 1000),
    shapes=st.lists(st.sampled_from([(0,), (1,), (257,), (5, 7), (300, 3), (2, 3, 41)]), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
@pytest.mark.agreement
def test_an_allreduce_is_within_its_bound_and_the_same_on_all_ranks(
    party: Party,
    groups: Mapping[int, list[ProcessGroup]],
    quantize_to: str,
    operation: Any,
    ranks: int,
    seed: int,
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
) -> None:
    def reduce(rank: int, group: ProcessGroup) -> list[Tensor]:
        tensors = of_rank(rank, seed, shapes, dtype)
        work = allreduce_quantized(tensors, operation, group, quantize_to=quantize_to)
        result = work.get_future().wait() if seed % 2 else work.result() if work.wait() else []
        assert all(one is other for one, other in zip(result, tensors, strict=True))
        return tensors

    results = party.together(groups[ranks], reduce)
    given_ = [of_rank(rank, seed, shapes, dtype) for rank in range(ranks)]
    for number, of_all in enumerate(zip(*given_, strict=True)):
        assert all(torch.equal(result[number], results[0][number]) for result in results)
        if of_all[0].numel():
            divisor = ranks if operation == ReduceOp.AVG else 1
            exact = torch.stack([tensor.double() for tensor in of_all]).sum(0) / divisor
            error = (results[0][number].double() - exact).abs().amax().item()
            assert error <= bound(of_all, quantize_to) / divisor


class Counted(ProcessGroupWrapper):
    """A group that counts the bytes which its rank gives it to send to the others."""

    sent = 0

    def _run(self, collective: Collective, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = collective.bind(args, kwargs)
        copies = {"alltoall_base": 1 / self.size(), "_allgather_base": 1}[collective.name]
        self.sent += round(call.inputs.nbytes * copies) * (self.size() - 1)
        return super()._run(collective, args, kwargs)


@pytest.mark.parametrize("quantize_to", FORMATS)
@pytest.mark.parametrize("count", [0, 1, 100_001])
def test_a_byte_and_a_part_of_a_scale_is_sent_for_each_number(
    party: Party, groups: Mapping[int, list[ProcessGroup]], quantize_to: str, count: int
) -> None:
    def reduce(rank: int, group: ProcessGroup) -> int:
        counted = Counted(pg=group)
        allreduce_quantized([torch.ones(count)], ReduceOp.SUM, counted, quantize_to=quantize_to).wait()
        return counted.sent

    owned = math.ceil(rows_for(count) / RANKS)
    assert party.together(groups[RANKS], reduce) == [2 * (RANKS - 1) * owned * ROW_BYTES] * RANKS
    if count > 1000:  # the bytes of an allreduce that sends each part once to its owner, and once from there
        assert 2 * (RANKS - 1) * owned * ROW_BYTES < 2 * (RANKS - 1) / RANKS * 4 * count / 3.9


@pytest.mark.parametrize("quantize_to", FORMATS)
def test_chunks_change_no_bit(
    party: Party, groups: Mapping[int, list[ProcessGroup]], quantize_to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(5 * ROW + 9,), (0,), (40, 30), (ROW,), (1,)]

    def reduce(rank: int, group: ProcessGroup) -> list[Tensor]:
        tensors = of_rank(rank, 1, shapes, torch.float32)
        allreduce_quantized(tensors, ReduceOp.AVG, group, quantize_to=quantize_to).wait()
        return tensors

    whole = party.together(groups[RANKS], reduce)
    for rows in (1, 2, 4):
        monkeypatch.setattr(collectives, "CHUNK_ROWS", rows)
        assert all(map(torch.equal, party.together(groups[RANKS], reduce)[0], whole[0]))


def test_nothing_is_left_to_do_on_the_quantizing_stream_once_the_last_collective_has_begun(
    party: Party, groups: Mapping[int, list[ProcessGroup]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU who waits for the work waits for the collectives, and for what came before them."""
    done: list[str] = []

    def noting(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any) -> Any:
            done.append(name)
            return act(*args)

        return note

    monkeypatch.setattr(collectives, "CHUNK_ROWS", 1)
    monkeypatch.setattr(collectives, "_issue", noting("collective", collectives._issue))
    for name in ("quantize", "dequantize", "reduce"):
        monkeypatch.setattr(quantization, name, noting(name, getattr(quantization, name)))
    allreduce_quantized([torch.ones(12 * ROW)], ReduceOp.SUM, groups[1][0])
    assert "dequantize" in done
    assert done[-1] == "collective"


@pytest.mark.parametrize("quantize_to", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.parametrize("chunk_rows", [2, 1000])
def test_with_error_feedback_all_results_add_up_to_all_tensors(
    party: Party,
    groups: Mapping[int, list[ProcessGroup]],
    quantize_to: str,
    operation: Any,
    chunk_rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But for what is left of the last call; an infinity in one of them is forgotten."""
    shapes, calls = [(5 * ROW + 9,), (0,), (40, 30), (1,)], 6
    monkeypatch.setattr(collectives, "CHUNK_ROWS", chunk_rows)

    def reduce(rank: int, group: ProcessGroup) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        feedback = ErrorFeedback()
        given, results = [torch.zeros(*shape) for shape in shapes], [torch.zeros(*shape) for shape in shapes]
        for call in range(calls):
            tensors = of_rank(rank, call, shapes, torch.float32)
            if call == 0:
                tensors[3][0] = torch.inf
            added = [tensor.clone() for tensor in tensors]
            allreduce_quantized(
                tensors, operation, group, quantize_to=quantize_to, error_feedback=feedback
            ).wait()
            if call > 0:
                for totals, more in ((given, added), (results, tensors)):
                    for total, one in zip(totals, more, strict=True):
                        total.add_(one)
            else:
                assert tensors[3].isnan().all()
                left_at_first = [left.clone() for left in feedback._left]
        left = [left - first for left, first in zip(feedback._left, left_at_first, strict=True)]
        return given, [each.view(shape) for each, shape in zip(left, shapes, strict=True)], results

    of_ranks = party.together(groups[RANKS], reduce)
    for number in range(len(shapes)):
        given, left, results = (torch.stack([of[kind][number] for of in of_ranks]) for kind in range(3))
        factor = RANKS if operation == ReduceOp.AVG else 1
        torch.testing.assert_close(results[0] * factor + left.sum(0), given.sum(0), atol=3e-3, rtol=1e-5)
        if given.numel() > RANKS:  # without it the two would differ by more
            assert left.sum(0).abs().amax() > 0.01


def test_what_a_call_has_left_does_not_count_before_it_is_accepted() -> None:
    feedback, flat = ErrorFeedback(), [torch.ones(3)]
    feedback.begin(flat)[1][0].fill_(5.0)
    assert not feedback.begin(flat)[0][0].any(), "the first call failed"
    feedback.begin(flat)[1][0].fill_(7.0)
    feedback.accept()
    feedback.accept()
    assert torch.equal(feedback.begin(flat)[0][0], torch.full((3,), 7.0))
    with pytest.raises(ValueError, match="a feedback of its own"):
        feedback.begin([torch.ones(4)])


@pytest.mark.parametrize("quantize_to", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, RANKS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_each_rank_gets_its_part_of_a_reduce_scatter(
    party: Party,
    groups: Mapping[int, list[ProcessGroup]],
    quantize_to: str,
    operation: Any,
    ranks: int,
    dtype: torch.dtype,
) -> None:
    shapes = [(7,), (4, 300), (1, 2, 3)]
    inputs = [of_rank(rank, 2, shapes, dtype) for rank in range(ranks)]

    def reduce(rank: int, group: ProcessGroup) -> Tensor:
        output, sizes = allocate_reduce_scatter_output(inputs[rank], ranks)
        assert sizes == get_padded_sizes(inputs[rank], ranks)
        options = ReduceScatterOptions()
        options.reduceOp = operation
        reduce_scatter_quantized(output, inputs[rank], options, group, quantize_to=quantize_to).wait()
        return output

    divisor = ranks if operation == ReduceOp.AVG else 1
    sizes = get_padded_sizes(inputs[0], ranks)
    limit = sum(bound(of, quantize_to, is_scattered=True) for of in zip(*inputs, strict=True)) / divisor
    for rank, output in enumerate(party.together(groups[ranks], reduce)):
        wanted = []
        for of_all, size in zip(zip(*inputs, strict=True), sizes, strict=True):
            padded = torch.zeros(size)
            padded.view(-1)[: of_all[0].numel()] = torch.stack(of_all).float().sum(0).reshape(-1) / divisor
            wanted.append(padded.chunk(ranks)[rank].reshape(-1))
        assert output.dtype == dtype
        torch.testing.assert_close(output.float(), torch.cat(wanted), atol=limit, rtol=0)


def test_a_reduce_scatter_of_nothing_is_nothing_and_an_infinity_makes_its_row_nan(
    party: Party, groups: Mapping[int, list[ProcessGroup]]
) -> None:
    def reduce(rank: int, group: ProcessGroup) -> list[bool]:
        empty = torch.empty(0)
        reduce_scatter_quantized(empty, [torch.empty(0, 3)], ReduceOp.SUM, group).wait()
        given, output = torch.ones(RANKS * 2, ROW), torch.empty(2, ROW)
        if rank == 1:
            given[3, 5] = torch.inf
        reduce_scatter_quantized(output, [given], ReduceOp.SUM, group).wait()
        return [row.isnan().all().item() for row in output]

    assert party.together(groups[RANKS], reduce) == [[False, False], [False, True], [False, False]]


def test_padded_sizes_are_multiples_of_the_ranks() -> None:
    tensors = [torch.empty(3), torch.empty(4, 5), torch.empty(0, 2)]
    assert get_padded_sizes(tensors, 2) == [(4, 1), (4, 5), (0, 2)]


def test_ranks_that_quantize_to_different_formats_are_told(party: Party) -> None:
    def reduce(rank: int, group: ProcessGroup) -> str:
        with pytest.raises(CollectiveMismatchError) as raised:
            allreduce_quantized([torch.ones(4)], ReduceOp.SUM, group, quantize_to=list(FORMATS)[rank])
        return raised.value.aspect

    made = party.meet(2, lambda: ProcessGroupGloo(30, check_collectives=True))
    assert party.together(made, reduce) == ["dtype"] * 2


def options_of(operation: Any) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = operation
    return options


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda pg: allreduce_quantized([torch.ones(1)], ReduceOp.MAX, pg),
            NotImplementedError,
            "SUM and AVG",
        ),
        (
            lambda pg: allreduce_quantized([torch.ones(1)], options_of(ReduceOp.MIN), pg),
            NotImplementedError,
            "SUM and AVG",
        ),
        (
            lambda pg: allreduce_quantized([torch.ones(1, dtype=torch.int32)], ReduceOp.SUM, pg),
            ValueError,
            "int32",
        ),
        (lambda pg: allreduce_quantized([torch.eye(2).to_sparse()], ReduceOp.SUM, pg), ValueError, "sparse"),
        (
            lambda pg: allreduce_quantized([torch.ones(1)], ReduceOp.SUM, pg, quantize_to="int2"),
            ValueError,
            "no format 'int2' to quantize to; there are fp8, int8",
        ),
        (
            lambda pg: reduce_scatter_quantized(torch.ones(3), [torch.ones(4)], ReduceOp.SUM, pg),
            ValueError,
            "has 3 elements",
        ),
    ],
)
def test_what_cannot_be_quantized_is_refused(
    groups: Mapping[int, list[ProcessGroup]],
    call: Callable[[ProcessGroup], object],
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        call(groups[1][0])


def test_fp8_is_the_default_as_in_torchft() -> None:
    assert [FP8.name, INT8.name] == list(FORMATS)


# Rows of bytes: the error of every number is within the row_bound that `quantization` states.


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SLACK = 1 + 2**-15  # a tie is decided wrongly where the quotient was rounded, in float32


def bytes_of(numbers: Tensor, to: Format) -> Tensor:
    rows = torch.full((rows_for(numbers.numel()), ROW_BYTES), 255, dtype=torch.uint8)
    quantization.quantize(numbers, rows, to)
    return rows


def there_and_back(numbers: Tensor, to: Format, dtype: torch.dtype = torch.float64) -> Tensor:
    read = torch.full_like(numbers, -1, dtype=dtype)
    quantization.dequantize(bytes_of(numbers, to), read, to)
    return read


def row_bound(numbers: Tensor, to: Format) -> Tensor:
    """The greatest error of each number, in float64."""
    magnitudes = numbers.double().abs()
    largest = torch.cat([part.amax().expand(len(part)) for part in torch.split(magnitudes, ROW)])
    if to is INT8:
        return (largest / 254).clamp(min=SCALE_MIN / 2) * SLACK
    return torch.maximum(magnitudes / 17, (largest / 458_752).clamp(min=SCALE_MIN / 1024)) * SLACK


@st.composite
def some_numbers(draw: st.DrawFn) -> Tensor:
    """Numbers of any magnitude that the dtype has, in rows of different ones."""
    dtype = draw(st.sampled_from(DTYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 3 * ROW + 1))
    exponents = torch.linspace(*draw(st.tuples(st.integers(-45, 37), st.integers(-45, 37))), count)
    numbers = torch.randn(count, dtype=torch.float64, generator=generator) * 10.0**exponents
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return numbers.clamp(-limit, limit).to(dtype)


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
@settings(max_examples=200)
@given(some_numbers())
def test_no_number_is_wrong_by_more_than_the_bound(to: Format, numbers: Tensor) -> None:
    read = there_and_back(numbers, to)
    assert ((read - numbers.double()).abs() <= row_bound(numbers, to)).all()


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_the_bound_is_reached(to: Format) -> None:
    """A looser one would let a coarser format pass."""
    numbers = torch.linspace(-1, 1, 100 * ROW)
    numbers[::ROW] = 1.0
    worst = ((there_and_back(numbers, to) - numbers.double()).abs() / row_bound(numbers, to)).amax()
    assert 0.99 < worst <= 1


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_makes_its_row_nan_and_no_other(
    to: Format, bad: float, dtype: torch.dtype
) -> None:
    numbers = torch.ones(4 * ROW - 9, dtype=dtype)
    numbers[ROW + 3] = numbers[-1] = bad
    rows = torch.split(there_and_back(numbers, to, dtype), ROW)
    assert [row.isnan().all().item() for row in rows] == [False, True, False, True]
    assert torch.equal(torch.cat([rows[0], rows[2]]), torch.ones(2 * ROW, dtype=dtype))


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_zeros_stay_zeros_and_are_sent_as_zeros(to: Format) -> None:
    assert torch.equal(there_and_back(torch.zeros(ROW + 1), to), torch.zeros(ROW + 1, dtype=torch.float64))
    codes = bytes_of(torch.full((1,), 5.0), to)[0, 4:]
    assert codes[0] != 0
    assert not codes[1:].any()
    assert bytes_of(torch.empty(0), to).shape == (0, ROW_BYTES)


def test_the_codes_of_fp8_are_torchs() -> None:
    """All of them, by their bytes; those of NaN are in no row whose scale is a number."""
    rows = torch.zeros(1, ROW_BYTES, dtype=torch.uint8)
    rows[0, :4] = torch.tensor([0, 0, 128, 63])  # 1.0
    rows[0, 4:] = codes = torch.arange(256, dtype=torch.uint8)
    read, torchs = torch.empty(ROW), codes.view(torch.float8_e4m3fn).float()
    quantization.dequantize(rows, read, FP8)
    assert torch.equal(read[~torchs.isnan()], torchs[~torchs.isnan()])


@pytest.mark.parametrize("to", FORMATS.values(), ids=FORMATS)
def test_sums_are_those_of_the_numbers_that_were_sent(to: Format) -> None:
    numbers = torch.randn(3, 2 * ROW, generator=torch.Generator().manual_seed(3))
    parts = torch.stack([bytes_of(each, to) for each in numbers])
    sent = torch.stack([there_and_back(each, to) for each in numbers])
    for divide_by in (None, 2):
        total = torch.full((2, ROW), torch.nan)
        quantization.add_up(parts, total, divide_by, to)
        expected = sent.sum(0) / (divide_by or 1)
        torch.testing.assert_close(total.view(-1).double(), expected, atol=1e-6, rtol=1e-6)
        rows, lost = torch.empty(2, ROW_BYTES, dtype=torch.uint8), torch.full((2, ROW), torch.nan)
        quantization.reduce(parts, rows, divide_by, to, lost)
        assert torch.equal(rows, bytes_of(total.view(-1), to))
        assert torch.equal(lost.view(-1), total.view(-1) - there_and_back(total.view(-1), to, torch.float32))


COMPARE = """
import torch
from torchft_like import quantization, quantization_kernels as kernels
dtypes = (torch.float32, torch.float16)
format = quantization.format_named("{to}")
print(quantization.agree(kernels, torch.device("cpu"), format, dtypes))
"""


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="triton is not installed")
@pytest.mark.parametrize("to", FORMATS)
def test_kernels_do_what_torch_does(to: str) -> None:
    """In triton's interpreter, for which the process must be set up before anything in it imports triton."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", COMPARE.format(to=to)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.stdout == "True\n", done.stderr
