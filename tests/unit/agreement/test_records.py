"""What ranks say before data moves, in records of one length."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_like.core.agreement.rules import disagreement
from torchft_like.core.agreement.statements import (
    CALL_BYTES_MAX,
    NUMBER_MAX,
    PAYLOAD_BYTES_MAX,
    RECORD_BYTES,
    Statement,
    decode,
    pack,
    pack_statement,
    specification,
    unpack,
)

HERE = Statement("all_gatherv", inputs=("float32[*, 4]",), terms=(("dim", "0"),))


def told(statement: Statement) -> Statement:
    """As the other ranks get it."""
    return decode(unpack(pack_statement(statement)).call)


def test_what_is_long_is_cut_and_differs_where_the_whole_does() -> None:
    one, other = (told(Statement("x", terms=(("sizes", "1, " * 3000 + end),))) for end in "12")
    assert len(one.text()) < 200
    found = disagreement([one, other])
    assert found is not None
    assert found.aspect == "sizes"
    many = [Statement("x", terms=tuple((f"name {n}", "v" * 60 + end) for n in range(99))) for end in "12"]
    one, other = map(told, many)
    found = disagreement([one, other])
    assert found is not None
    assert found.aspect == "arguments"
    assert disagreement([one, one]) is None
    lists = [Statement("x", inputs=tuple(f"float32[{n}, {end}]" for n in range(999))) for end in "12"]
    one, other = map(told, lists)
    assert disagreement([one, other]) is not None


@pytest.mark.parametrize("length", [10, 80, 400, 900, 1500])
@pytest.mark.parametrize("character", ["v", "ü", "\U0001f600"], ids=ascii)
def test_records_of_the_same_call_begin_alike_whatever_else_a_rank_says(character: str, length: int) -> None:
    statement = Statement("all_gatherv", terms=(("sizes", character * length), ("shape", "[*, 4]")))
    bare = unpack(pack_statement(statement))
    full = unpack(pack_statement(statement, NUMBER_MAX - 1, b"p" * PAYLOAD_BYTES_MAX))
    assert bare.call == full.call


@pytest.mark.parametrize("character", ["ü", "\0", '"', "\n", "\ud800", "\\"])
def test_a_long_reason_is_cut(character: str) -> None:
    data = pack_statement(HERE.refused(ValueError(character * 5000)))
    assert len(data) == RECORD_BYTES
    assert unpack(data).refuses
    reason = decode(unpack(data).call).refusal
    assert reason is not None
    assert reason.startswith("ValueError: ")
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("call", "number", "payload"),
    [
        (b"x" * (CALL_BYTES_MAX + 1), 0, b""),
        (b"", NUMBER_MAX, b""),
        (b"", -1, b""),
        (b"", 0, b"x" * (PAYLOAD_BYTES_MAX + 1)),
    ],
)
def test_too_much_for_a_record_is_refused(call: bytes, number: int, payload: bytes) -> None:
    with pytest.raises(ValueError, match="too much"):
        pack(call, number, payload)


@given(st.binary(max_size=RECORD_BYTES) | st.just(b"\xff" * RECORD_BYTES))
def test_foreign_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(unpack(data).call)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_byte_that_changed_never_crashes(at: int, value: int) -> None:
    data = bytearray(pack_statement(HERE))
    data[at] = value
    with contextlib.suppress(ValueError):
        decode(unpack(bytes(data)).call)


@pytest.mark.parametrize(
    ("other", "aspect"),
    [
        (Statement("broadcast_object", inputs=HERE.inputs, terms=HERE.terms), "operation"),
        (Statement(HERE.operation, inputs=("int8[*, 4]",), terms=HERE.terms), "dtype"),
        (Statement(HERE.operation, inputs=("float32[*, 5]",), terms=HERE.terms), "shape"),
        (Statement(HERE.operation, inputs=HERE.inputs, terms=(("dim", "1"),)), "dim"),
        (Statement(HERE.operation, inputs=HERE.inputs), "arguments"),
        (HERE.refused(TypeError("no tensor")), "arguments"),
    ],
)
def test_what_differs_is_named_with_who_said_what(other: Statement, aspect: str) -> None:
    for statements in ([HERE, HERE, other], [other, HERE]):
        found = disagreement(statements)
        assert found is not None
        assert found.aspect == aspect
        assert found.calls == {rank: said.text() for rank, said in enumerate(statements)}


def test_a_call_is_told_in_a_line() -> None:
    assert HERE.text() == "all_gatherv float32[*, 4] dim 0"
    assert HERE.refused(TypeError("no tensor")).text() == "all_gatherv: TypeError: no tensor"
    assert specification("torch.float32", (3, 4), 0) == "float32[*, 4]"
    assert specification("torch.int8", ()) == "int8[]"
