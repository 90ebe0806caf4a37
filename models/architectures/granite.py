"""IBM's Granite 3: Llama with factors of embeddings, scores, residuals and logits; dense or with experts."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaForCausalLM, LlamaModel
from models.architectures.registry import ConfigFacts, architecture
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.routing import SoftmaxRouter, experts_per_token
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class GraniteAttention(LlamaAttention):
    """Grouped-query attention with the scale of the config."""

    @staticmethod
    def score_scale(config: ModelConfig) -> float:
        """The scale of the attention scores."""
        return config.fields.number("attention_multiplier", config.head_dim**-0.5)


DEFAULTS = {"rms_norm_eps": 1e-6}
ABSENT = {"attention_multiplier": 1.0}
"""See `ConfigFacts.absent`: null is the scale of other models."""


@architecture("GraniteForCausalLM", ConfigFacts(defaults=DEFAULTS, absent=ABSENT, has_mlp_bias=True))
class GraniteForCausalLM(LlamaForCausalLM):
    """Granite 3 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = GraniteAttention

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        self.logit_scale = 1.0 / config.fields.number("logits_scaling", 1.0)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return LlamaModel(
            config,
            self.attention,
            self.feed_forward,
            parallel,
            embed_scale=config.fields.number("embedding_multiplier", 1.0),
            residual_scale=config.fields.number("residual_multiplier", 1.0),
        )


@architecture("GraniteMoeForCausalLM", ConfigFacts(defaults=DEFAULTS, absent=ABSENT))
class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite 3 with experts, with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {"mlp": "block_sparse_moe", "gate": "router.layer"}
    """Module of the model -> its name in checkpoints."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts in every layer."""
        del layer
        fields = config.fields
        num_experts = fields.integer("num_local_experts", 8)
        gate = SoftmaxRouter(config.hidden_size, num_experts, experts_per_token(fields, num_experts), renormalize=True)
        experts = FusedMoE(
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            activation=gated_activation(config.activation),
            names=ExpertNames(stacked_gate_up="input_linear.weight", stacked_down="output_linear.weight"),
            parallel=parallel,
        )
        return SparseMoE(gate, experts)
