"""Jamba: Mamba layers and periodic attention layers without positions, each followed by a dense network or experts."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import HybridDecoderLayer, HybridForCausalLM, HybridModel, with_kv_heads
from models.architectures.llama import DecoderBody, LlamaMLP
from models.architectures.mamba import mamba_rank
from models.architectures.nemotron_h import NemotronHAttention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.attention import Attention
from models.layers.mamba import MambaMixer, MambaShape
from models.layers.moe import FusedMoE, SparseMoE
from models.layers.routing import SoftmaxRouter, experts_per_token
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import TensorParallel


@architecture(
    "JambaForCausalLM",
    ConfigFacts(
        defaults={
            "attn_layer_offset": 4,
            "attn_layer_period": 8,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
            "mamba_expand": 2,
            "max_position_embeddings": 262144,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-6,
        },
        complete=with_kv_heads,
        renamed={"num_local_experts": "num_experts"},
    ),
)
class JambaForCausalLM(HybridForCausalLM):
    """Jamba with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {**HybridForCausalLM.checkpoint_modules, "gate": "router"}
    caching: ClassVar[tuple[type[nn.Module], ...]] = (Attention, MambaMixer)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields

        def decoder_layer(layer: int) -> nn.Module:
            feed_forward = self.feed_forward(config, layer, parallel)
            if _is_due(fields, "attn", layer):
                return HybridDecoderLayer(config, feed_forward, self_attn=NemotronHAttention(config, layer, parallel))
            return HybridDecoderLayer(config, feed_forward, recurrent=_mixer(config, layer, parallel))

        return HybridModel(config, decoder_layer, parallel)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Experts in some layers, if the model has more than one expert, and a dense network in the others."""
        fields = config.fields
        num_experts = fields.integer("num_experts")
        if num_experts == 1 or not _is_due(fields, "expert", layer):
            return LlamaMLP(config, parallel)
        top_k = experts_per_token(fields, num_experts)
        gate = SoftmaxRouter(config.hidden_size, num_experts, top_k, renormalize=False)
        activation = gated_activation(config.activation)
        experts = FusedMoE(
            config.hidden_size, config.intermediate_size, num_experts, activation=activation, parallel=parallel
        )
        return SparseMoE(gate, experts)


def _is_due(fields: Fields, kind: str, layer: int) -> bool:
    """Whether the layer is the one of its period that is of that kind."""
    period = fields.integer(f"{kind}_layer_period")
    return layer % period == fields.integer(f"{kind}_layer_offset", minimum=0)


def _mixer(config: ModelConfig, layer: int, parallel: TensorParallel) -> MambaMixer:
    fields = config.fields
    shape = MambaShape(
        config.hidden_size,
        fields.integer("mamba_expand") * config.hidden_size,
        fields.integer("mamba_d_state"),
        fields.integer("mamba_d_conv"),
        mamba_rank(fields, "mamba_dt_rank"),
        bias=fields.boolean("mamba_proj_bias", False),
        conv_bias=fields.boolean("mamba_conv_bias", True),
        norms="weighted",
        eps=config.rms_norm_eps,
        activation=config.activation,
    )
    return MambaMixer(f"model.layers.{layer}.mamba", shape, parallel)
