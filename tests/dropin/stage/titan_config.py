"""A configuration for torchtitan 0.3.0's `--module`, as its users write them.

The debug model attends by FlexAttention, which torch cannot differentiate on a CPU. This one attends
by torch's dense attention under the same mask, and is otherwise torchtitan's own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torchtitan.experiments.torchft.llama3 import model_registry
from torchtitan.experiments.torchft.llama3.config_registry import llama3_torchft_debugmodel
from torchtitan.experiments.torchft.trainer import FaultTolerantTrainer
from torchtitan.models.common.attention import FlexAttention


class DenseAttention(FlexAttention):
    """Attention by `scaled_dot_product_attention`; tensors are batch, length, heads, width."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(  # torchtitan places the tensors by these names
        self,
        q_BLNH: torch.Tensor,  # noqa: N803
        k_BLNH: torch.Tensor,  # noqa: N803
        v_BLNH: torch.Tensor,  # noqa: N803
        *,
        attention_masks: BlockMask,
        **_options: Any,
    ) -> torch.Tensor:
        batch, length = q_BLNH.shape[:2]
        mask = create_mask(attention_masks.mask_mod, batch, None, length, length, q_BLNH.device)
        query, key, value = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def debug_model() -> FaultTolerantTrainer.Config:
    config = llama3_torchft_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = DenseAttention.Config()
    return config
