"""Qwen3: Llama with a norm on each query and key head."""

from typing import ClassVar

import torch
from torch import nn

from models.layers.norm import RMSNorm
from models.layers.rotary import rotate
from models.llama import LlamaAttention, LlamaForCausalLM
from models.model_config import ModelConfig
from models.parallel import TensorParallel


class Qwen3Attention(LlamaAttention):
    """Grouped-query attention that normalises queries and keys before it rotates them."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.q_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm: nn.Module = RMSNorm(config.head_dim, config.rms_norm_eps)

    def position(self, qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys normalised, with their positions. # [tokens, heads + kv_heads, head_dim]"""
        q, k = self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])
        return rotate(q, cos, sin), rotate(k, cos, sin)


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with its language-model head."""

    attention: ClassVar[type[LlamaAttention]] = Qwen3Attention
