"""Ministral 3: Mistral whose queries grow with the position, beyond the context before scaling."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture
from models.attention.context import get_forward_context
from models.config.fields import Fields
from models.parallel.tensor_parallel import TensorParallel

_BETA = "llama_4_scaling_beta"


class Ministral3Attention(LlamaAttention):
    """Grouped-query attention with a factor of each query: `1 + beta * log(1 + floor(position / length))`."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        rope = config.fields.section("rope_parameters") or Fields({}, config.fields.where)
        self.beta = rope.number(_BETA) if rope.values.get(_BETA) else 0.0
        self.length = config.rope.original_max_len

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        if not self.beta:
            return super().forward(hidden, cos, sin)
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        spans = (get_forward_context().context.positions // self.length).float()
        q = q * (1 + self.beta * torch.log1p(spans))[:, None, None].to(q.dtype)
        attended = self.attn(q, k, v, rotation=(cos, sin))
        return self.o_proj(attended.view(len(hidden), -1))  # type: ignore[no-any-return]


@architecture("Ministral3ForCausalLM", ConfigFacts(defaults={"head_dim": 128}, is_windowed=True))
class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Ministral3Attention
