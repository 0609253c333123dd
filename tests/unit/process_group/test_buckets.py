"""torch's DistributedDataParallel over a group whose members come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.unit.process_group.conftest import Party
from torchft_like.process_group import ProcessGroupGloo


class UsedInAnotherOrder(nn.Module):
    """Layers that are used in another order than they are declared in."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 2)
        self.first = nn.Linear(4, 8)
        self.middle = nn.Linear(8, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.middle(self.first(inputs).tanh()).tanh())
        return outputs


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(inputs).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}],
    ids=str,
)
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_newcomer_and_those_that_have_stepped_average_the_gradients_of_the_same_parameters(
    party: Party, options: dict[str, Any], is_moved: bool
) -> None:
    groups, inputs = [party.own(ProcessGroupGloo(30)) for _ in range(2)], torch.randn(2, 2, 4)
    plain, models = UsedInAnotherOrder(), []
    for group in groups:
        group.configure(party.prefix(), 0, 1)
        module = UsedInAnotherOrder()
        module.load_state_dict(plain.state_dict())
        model = DistributedDataParallel(module, process_group=group, **options)
        if is_moved:
            model._update_process_group(group)  # type: ignore[no-untyped-call]
        models.append(model)
    for _ in range(3):
        gradients(models[0], inputs[0])
    party.configure(groups)
    each = [gradients(plain, part) for part in inputs]
    averages = [(one + other) / 2 for one, other in zip(*each, strict=True)]
    for _ in range(2):
        for got in party.together(models, lambda rank, model: gradients(model, inputs[rank])):
            torch.testing.assert_close(got, averages)
