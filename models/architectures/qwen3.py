"""Qwen3: Llama with a norm on each query and key head."""

from typing import ClassVar

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture
from models.layers.norm import RMSNorm
from models.ops.types import HeadNorms
from models.parallel.tensor_parallel import TensorParallel


class Qwen3Attention(LlamaAttention):
    """Grouped-query attention that normalises queries and keys before it rotates them."""

    norm: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.q_norm = self.norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = self.norm(config.head_dim, config.rms_norm_eps)

    def head_norms(self) -> HeadNorms:
        """Norms of queries and keys, applied before the rotation."""
        return HeadNorms(self.q_norm.operand, self.k_norm.operand)


@architecture("Qwen3ForCausalLM", ConfigFacts(defaults={"head_dim": 128}))
class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with its language-model head."""

    attention: ClassVar[type[LlamaAttention]] = Qwen3Attention
