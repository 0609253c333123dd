"""Which states one job can train, and how the first difference of two others is told."""

from __future__ import annotations

import pytest

from lighthouse.core.state_form import StateForm, bounded, first_difference, form_of_rows

WEIGHT, BIAS = ("model.a.weight", "float32 [128, 64]"), ("model.a.bias", "float32 [128]")
MOMENT = ("optim.state[0].exp_avg", "float32 [128, 64]")
SECOND = ("optim.state[1].exp_avg", "float32 [128]")


def told(own: StateForm, other: StateForm) -> str:
    difference = first_difference(own, other)
    return "" if difference is None else difference.sentence("b", "a")


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (
            (("model.a.weight", "float32 [256, 64]"), BIAS),
            "model.a.weight is float32 [256, 64] in b and float32 [128, 64] in a",
        ),
        (
            (("model.a.weight", "bfloat16 [128, 64]"), BIAS),
            "model.a.weight is bfloat16 [128, 64] in b and float32 [128, 64] in a",
        ),
        ((WEIGHT,), "model.a.bias is missing in b and float32 [128] in a"),
        ((WEIGHT, BIAS, ("ema.w", "float32 [1]")), "ema.w is float32 [1] in b and missing in a"),
        ((), "model.a.weight is missing in b and float32 [128, 64] in a"),
    ],
)
def test_the_first_difference_of_two_models_is_told(own: tuple[tuple[str, str], ...], sentence: str) -> None:
    assert told(form_of_rows(own), form_of_rows((WEIGHT, BIAS, MOMENT))) == sentence


def test_entries_of_a_list_that_both_have_are_compared() -> None:
    own, other = [("[0]", "float32 [4]"), ("[1]", "float32 [4]")], [("[0]", "float32 [8]")]
    assert told(form_of_rows(own), form_of_rows(other)) == "[0] is float32 [4] in b and float32 [8] in a"
    assert told(form_of_rows(own[:1]), form_of_rows(own)) == ""


def test_a_bounded_form_keeps_the_tensors_with_names_and_the_hash_of_all() -> None:
    form = form_of_rows((MOMENT, WEIGHT, BIAS, SECOND))
    cut = bounded(form, len("".join(WEIGHT)) + 5)
    assert list(cut.rows) == ["model.a.weight"]
    assert (cut.digest, cut.left_out) == (form.digest, 3)
    assert bounded(form, 10_000) is form
    assert bounded(cut, 10_000) == cut


def test_states_that_differ_in_what_was_left_out_differ_by_their_hash() -> None:
    cut = [bounded(form_of_rows((WEIGHT, row)), len("".join(WEIGHT))) for row in (BIAS, ("c", "float32 [1]"))]
    text = "the state is of one form beyond its first 1 tensors in b and of another one in a"
    assert told(*cut) == text
    assert told(cut[0], cut[0]) == ""


def test_a_tensor_that_may_have_been_left_out_is_not_missing() -> None:
    whole = form_of_rows((WEIGHT, BIAS))
    cut = bounded(whole, len("".join(WEIGHT)))
    assert told(whole, cut) == told(cut, whole) == ""
