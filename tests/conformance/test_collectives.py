"""Every function of `torch.distributed` that takes `async_op`: what comes out is what torch's own gives."""

from __future__ import annotations

import re

import pytest

from torchft_like.process_group.collectives import COLLECTIVES, POINT_TO_POINT

from .calls import CALLS, REDUCING, REDUCTIONS
from .fleet import Fleet
from .forms import FORMS
from .scene import CONJUGATED, IN_INFERENCE_MODE, KINDS, LAYOUTS, MODES, Kind
from .subjects import PAIR, PRESENT, Subject

pytestmark = pytest.mark.integration

# What a form does with these layouts it does with others, too: with gaps, plain elements, a call in inference
# mode. That each call moves them is shown above.
LIKE_OTHERS = ("transposed", "offset", "inference")
# No layout is looked at by the reduction; an average is another way, as it may be divided afterwards.
LAID_OUT = [case for case in FORMS if not case.endswith(", MAX")]


@pytest.mark.parametrize("case", CALLS)
def test_kinds_of_tensors_give_torchs_results(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    fleet.assert_like_torch(subject.name, min(PAIR, world), case, subject.kinds(KINDS))


@pytest.mark.parametrize("case", CALLS)
def test_works_and_futures_give_torchs_results(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    fleet.assert_like_torch(subject.name, world, case, modes=MODES)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_are_torchs(fleet: Fleet, subject: Subject, world: int, reduction: str) -> None:
    for name in REDUCING:
        fleet.assert_like_torch(subject.name, world, f"{name} {reduction}")


def test_every_call_has_every_form_that_its_arguments_can_have() -> None:
    """Gaps, and the mode in which the call is made, are kinds: each form is run with all of them."""
    rows = [row for row in COLLECTIVES if row.tensor_places and row.name not in POINT_TO_POINT]
    for row in rows:
        forms = [form.removeprefix(row.name) for form in FORMS if re.match(rf"{row.name} ", form)]
        assert any("sparse" in form for form in forms), row.name
        assert any(re.search("same|in place|one tensor", form) for form in forms), row.name
        takes_lists = (row.input or row.output).depth > 0  # type: ignore[union-attr]
        assert not takes_lists or len(forms) > 2, row.name
    assert {"strided", "transposed", "inference", IN_INFERENCE_MODE} <= set(LAYOUTS)


# A wrapper hands all arguments on alike: the first form of each method stands for the others.
FIRST_FORMS = {case.split()[0]: case for case in reversed(FORMS)}.values()


@pytest.mark.parametrize(
    ("subject", "case"),
    [
        pytest.param(subject, case, id=f"{subject.name}-{case}")
        for subject in PRESENT
        for case in (FIRST_FORMS if subject.wraps else FORMS)
    ],
)
def test_forms_of_arguments_mean_torchs_calls(fleet: Fleet, subject: Subject, world: int, case: str) -> None:
    is_refused = fleet.assert_like_torch(subject.name, world, case, modes=["wait"])
    if subject.looks and case in LAID_OUT and not is_refused:  # what spoils the group does so in every layout
        kinds = [Kind(layout=layout) for layout in LAYOUTS if layout not in LIKE_OTHERS]
        if "coalescing" not in case:  # in which torch's functions stumble over them
            kinds.append(CONJUGATED)
        fleet.assert_like_torch(subject.name, world, case, kinds, ["wait"])
