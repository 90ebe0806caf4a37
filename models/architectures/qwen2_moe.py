"""Qwen2-MoE: Qwen2 with routed experts and a gated shared expert."""

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaMLP
from models.architectures.qwen2 import Qwen2ForCausalLM
from models.architectures.qwen3_moe import is_sparse
from models.architectures.qwen3_next import Qwen3NextSparseBlock
from models.architectures.registry import ConfigFacts, architecture
from models.parallel.tensor_parallel import TensorParallel


@architecture(
    "Qwen2MoeForCausalLM",
    ConfigFacts(
        defaults={"qkv_bias": True, "max_window_layers": 28, "sliding_window": 4096, "use_sliding_window": False},
        bias_field="qkv_bias",
    ),
)
class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """Qwen2-MoE with its language-model head."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts, or a dense network in some layers."""
        if not is_sparse(config.fields, layer):
            return LlamaMLP(config, parallel)
        return Qwen3NextSparseBlock(config, parallel)
