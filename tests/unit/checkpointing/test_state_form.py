"""The forms of the states of real models and optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lighthouse.core.state_form import first_difference
from torchft_like.manager.state_registry import form_of


def a_model(width: int = 4, depth: int = 2, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    layers = [torch.nn.Linear(3, width), *(torch.nn.Linear(width, width) for _ in range(depth - 1))]
    return torch.nn.Sequential(*layers, torch.nn.BatchNorm1d(width)).to(dtype)


def state_of(
    model: torch.nn.Module,
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW,
    steps: int = 0,
    **options: Any,
) -> dict[str, object]:
    """What an ordinary script registers, after so many steps of its optimizer."""
    optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step(lambda: 0.0)
    return {"default": {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": steps}}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adagrad, {}),
        (torch.optim.LBFGS, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_a_fresh_optimizer_does_not_differ_from_one_that_has_stepped(
    kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    fresh, stepped = (form_of(state_of(a_model(), kind, steps, **options)) for steps in (0, 3))
    assert first_difference(fresh, stepped) is None
    assert first_difference(stepped, fresh) is None
    assert fresh.digest == stepped.digest


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (a_model(width=8), "model.0.weight"),
        (a_model(depth=3), "model.2.weight"),
        (a_model(dtype=torch.float64), "model.0.weight"),
    ],
)
def test_another_model_differs_before_and_after_steps(other: torch.nn.Module, path: str) -> None:
    for steps in (0, 2):
        difference = first_difference(form_of(state_of(other)), form_of(state_of(a_model(), steps=steps)))
        assert difference is not None
        assert difference.path == path


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({"seen": torch.arange(3)}, {"seen": torch.arange(99)}),
        ({"history": torch.empty(0)}, {"history": torch.ones(7)}),
        ({"history": []}, {"history": [torch.ones(7)]}),
        ({"best": None}, {"best": torch.ones(2, 2)}),
        ({"ema": {}}, {"ema": {"w": torch.ones(2)}}),
        ({}, {"w": torch.ones(2)}),
        ({"loss": 0.5}, {"loss": torch.tensor(0.5)}),
        ({"rng": b"1", "names": ["a"]}, {"rng": b"22", "names": ["a", "b"]}),
        ({(0, 1): torch.ones(2)}, {(0, 2): torch.ones(3)}),
    ],
)
def test_what_differs_in_the_course_of_a_run_is_no_difference(own: Any, other: Any) -> None:
    forms = form_of({"mine": own}), form_of({"mine": other})
    assert first_difference(*forms) is None
    assert first_difference(*reversed(forms)) is None


def test_a_value_inside_itself_ends_the_walk() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert form_of({"default": {"w": torch.ones(2), "loop": loop}}).rows["w"] == "float32 [2]"
