"""Mixtral: Mistral with mixtures of experts as feed-forward layers."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaForCausalLM
from models.architectures.registry import ALWAYS_WINDOWED, ConfigFacts, architecture
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.routing import SoftmaxRouter, experts_per_token
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import TensorParallel

_FACTS = ConfigFacts(
    fixed=ALWAYS_WINDOWED, renamed={"num_experts": "num_local_experts"}, bias_field="", is_windowed=True
)


@architecture("MixtralForCausalLM", _FACTS)
class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {"mlp": "block_sparse_moe"}
    """Module of the model -> its name in checkpoints."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts in every layer."""
        del layer
        num_experts = config.fields.integer("num_local_experts")
        gate = SoftmaxRouter(
            config.hidden_size, num_experts, experts_per_token(config.fields, num_experts), renormalize=True
        )
        names = ExpertNames(gate="w1", up="w3", down="w2")
        experts = FusedMoE(
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            activation=gated_activation(config.activation),
            names=names,
            parallel=parallel,
        )
        return SparseMoE(gate, experts)
