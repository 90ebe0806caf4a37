"""Phi-3.5-MoE: Mixtral with layer norms, biases, LongRoPE, and two experts selected by SparseMixer."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaModel
from models.architectures.registry import ALWAYS_WINDOWED, ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.norm import LayerNorm
from models.layers.routing import SparseMixerRouter
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import TensorParallel

_LONG, _SHORT = "long_mscale", "short_mscale"


def _complete(config: Fields) -> Fields:
    """Add LongRoPE's attention factor under its common name. The config has one for short and one for long contexts,
    which must be equal."""
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    rope = config.section(name)
    kind = "default" if rope is None else rope.string("rope_type", rope.string("type", "default"))
    if rope is None or kind == "default":
        return config
    if kind not in ("longrope", "su"):
        raise rope.invalid("rope_type" if rope.has("rope_type") else "type", '"default" or "longrope"')
    if rope.number(_LONG) != (scale := rope.number(_SHORT)):
        raise rope.invalid(_LONG, f"equal to {_SHORT}, {scale:g}")
    return Fields({**config.values, name: {**rope.values, "attention_factor": scale}}, config.where)


@architecture(
    "PhimoeForCausalLM",
    ConfigFacts(
        defaults={"rope_theta": 1e6, "rms_norm_eps": 1e-5, "router_jitter_noise": 0.01, "num_local_experts": 16},
        fixed=ALWAYS_WINDOWED,
        complete=_complete,
        is_windowed=True,
    ),
)
class PhimoeForCausalLM(LlamaForCausalLM):
    """Phi-3.5-MoE with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {"mlp": "block_sparse_moe"}
    """Module of the model -> its name in checkpoints."""

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return LlamaModel(config, self.attention, self.feed_forward, parallel, norm=LayerNorm)

    @staticmethod
    def head_bias(config: ModelConfig) -> bool:
        """Whether the logits have a bias."""
        return config.fields.boolean("lm_head_bias", False)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts in every layer."""
        del layer
        num_experts = config.fields.integer("num_local_experts", minimum=2)
        jitter = config.fields.number("router_jitter_noise", may_be_zero=True)
        gate = SparseMixerRouter(config.hidden_size, num_experts, jitter=jitter)
        experts = FusedMoE(
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            activation=gated_activation(config.activation),
            names=ExpertNames(gate="w1", up="w3", down="w2"),
            parallel=parallel,
        )
        return SparseMoE(gate, experts)
