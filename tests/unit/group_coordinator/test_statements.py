"""What ranks say before data moves."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_like.errors import CollectiveMismatchError, GroupCoordinatorError
from torchft_like.group_coordinator.statements import (
    PAYLOAD_BYTES_MAX,
    STATEMENT_BYTES,
    Statement,
    check,
    decode,
    encode,
)

HERE = Statement("all_gatherv", (("dtype", "float32"), ("shape", "[*, 4]"), ("dim", "0")), (3,))

_texts = st.text(max_size=60)
_statements = st.builds(
    Statement,
    st.sampled_from(["a", "broadcast_object"]),
    st.lists(st.tuples(_texts, _texts), max_size=5).map(tuple),
    st.lists(st.integers(0, 2**62 - 1), max_size=8).map(tuple),
    st.binary(max_size=200),
    st.none() | _texts,
)


@given(_statements)
def test_what_is_short_arrives_as_it_was_said(statement: Statement) -> None:
    data = encode(statement)
    assert len(data) == STATEMENT_BYTES
    found = decode(data)
    assert found.counts == statement.counts
    assert found.payload == statement.payload
    if len(str(statement)) < 100 and str(statement).isascii():
        assert found == statement


def test_what_is_long_is_cut_and_differs_where_the_whole_does() -> None:
    long = [
        Statement("x", (("sizes", "1, " * 3000 + end),), payload=b"p" * PAYLOAD_BYTES_MAX) for end in "12"
    ]
    one, other = (decode(encode(statement)) for statement in long)
    assert len(str(one)) < 200
    with pytest.raises(CollectiveMismatchError, match="sizes"):
        check({0: one, 1: other})
    many = [Statement("x", tuple((f"name {n}", "v" * 60 + end) for n in range(99))) for end in "12"]
    one, other = (decode(encode(statement)) for statement in many)
    with pytest.raises(CollectiveMismatchError, match="arguments"):
        check({0: one, 1: other})
    check({0: one, 1: one})


@pytest.mark.parametrize("length", [10, 80, 400, 900, 1500])
@pytest.mark.parametrize("character", ["v", "ü", "\U0001f600"], ids=ascii)
def test_the_same_terms_agree_whatever_else_a_rank_says(character: str, length: int) -> None:
    terms = (("sizes", character * length), ("shape", "[*, 4]"))
    full = (2**62 - 1,) * 8, b"p" * PAYLOAD_BYTES_MAX
    said = [encode(Statement("all_gatherv", terms, *own)) for own in (((), b""), full)]
    assert [len(data) for data in said] == [STATEMENT_BYTES] * 2
    check(dict(enumerate(map(decode, said))))


@pytest.mark.parametrize("character", ["ü", "\0", '"', "\n", "\ud800", "\\"])
def test_a_long_reason_is_cut(character: str) -> None:
    data = encode(HERE.refused(ValueError(character * 5000)))
    assert len(data) == STATEMENT_BYTES
    found = decode(data)
    assert found.refusal is not None
    assert found.refusal.startswith("ValueError: ")
    assert len(found.refusal) < 300


@pytest.mark.parametrize("counts", [(1,) * 9, (0,)])
def test_too_much_for_a_statement_is_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="too much"):
        encode(Statement("x", (), counts, b"x" * (PAYLOAD_BYTES_MAX + len(counts) % 2)))


@given(st.binary(max_size=STATEMENT_BYTES) | st.just(b"\xff" * STATEMENT_BYTES))
def test_foreign_bytes_are_an_error(data: bytes) -> None:
    with pytest.raises(GroupCoordinatorError, match="no statement"):
        decode(data)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_byte_that_changed_never_crashes(at: int, value: int) -> None:
    data = bytearray(encode(HERE))
    data[at] = value
    with contextlib.suppress(GroupCoordinatorError):
        decode(bytes(data))


def test_statements_that_agree_pass() -> None:
    check({0: HERE, 1: Statement(HERE.operation, HERE.terms, (9,)), 2: HERE})


@pytest.mark.parametrize(
    ("other", "aspect"),
    [
        (Statement("broadcast_object", HERE.terms), "operation"),
        (Statement(HERE.operation, (("dtype", "int8"), *HERE.terms[1:])), "dtype"),
        (Statement(HERE.operation, (*HERE.terms[:2], ("dim", "1"))), "dim"),
        (Statement(HERE.operation, HERE.terms[:2]), "arguments"),
        (HERE.refused(TypeError("no tensor")), "arguments"),
    ],
)
def test_what_differs_is_named_with_who_said_what(other: Statement, aspect: str) -> None:
    for statements in ({0: HERE, 1: HERE, 2: other}, {0: other, 1: HERE}):
        with pytest.raises(CollectiveMismatchError) as caught:
            check(statements)
        assert caught.value.aspect == aspect
        assert caught.value.calls == {rank: str(said) for rank, said in statements.items()}
