"""The form of a state that a script registered, or that a peer sent: its tensors' shapes and dtypes.

What counts are tensors that can be parameters: those of floating point and complex numbers that have
elements, a DTensor by its whole shape and its placement. Others do not: a tensor of integers may be a buffer
of tokens, of another length in every step. Nothing here touches a value, so the cost is that of a walk
through the containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from lighthouse.core.state_form import StateForm, form_of_rows
from torchft_like.checkpointing.shards import is_dtensor, layout_of
from torchft_like.plain_data import DEPTH_MAX, Layout, Shard

_DEFAULT_KEY = "default"  # of the functions that the Manager was made with; it would only lengthen the paths


def form_of(state: Mapping[str, object]) -> StateForm:
    """Return the form of a whole state: by key what a registered function returned, or what a peer sent."""
    return form_of_rows(
        row for key, part in state.items() for row in _rows("" if key == _DEFAULT_KEY else key, part)
    )


def _rows(path: str, value: object, depth: int = 0) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor | Shard):
        yield path, _description(value)
    elif isinstance(value, dict) and value and depth < DEPTH_MAX:
        for key, item in value.items():
            name = f".{key}" if isinstance(key, str) else f"[{key!r:.100}]"
            yield from _rows(path + name if path else name.removeprefix("."), item, depth + 1)
    elif isinstance(value, list | tuple) and depth < DEPTH_MAX:
        for index, item in enumerate(value):
            if isinstance(item, torch.Tensor | Shard | dict | list | tuple):
                yield from _rows(f"{path}[{index}]", item, depth + 1)
    else:
        yield path, ""


def _description(value: torch.Tensor | Shard) -> str:
    if isinstance(value, Shard):
        return f"{_name(value.local.dtype)} {_cut(value.layout)}"
    if is_dtensor(value):
        return f"{_name(value.dtype)} {_cut(layout_of(value))}"
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return ""
    return f"{_name(value.dtype)} {list(value.shape)}"


def _cut(layout: Layout) -> str:
    """Describe how a DTensor is cut; the dimensions of its mesh that hold copies may be elastic."""
    cuts = [
        f"{placement} of {size}"
        for placement, size in zip(layout.placements, layout.mesh_shape, strict=True)
        if placement != "R"
    ]
    return f"{list(layout.shape)} placed {', '.join(cuts) or 'whole'}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
