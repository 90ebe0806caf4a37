"""Bamba: Mamba-2 layers and, where the config names them, attention, each followed by a dense network."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import (
    MAMBA_DEFAULTS,
    HybridDecoderLayer,
    HybridForCausalLM,
    HybridModel,
    dt_limits,
    mamba_mixer,
    with_kv_heads,
)
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.layers.mamba2 import Mamba2Options
from models.parallel.tensor_parallel import TensorParallel


@architecture(
    "BambaForCausalLM",
    ConfigFacts(
        defaults={**MAMBA_DEFAULTS, "max_position_embeddings": 262144, "partial_rotary_factor": 0.5},
        complete=with_kv_heads,
        has_mlp_bias=True,
    ),
)
class BambaForCausalLM(HybridForCausalLM):
    """Bamba with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {
        "recurrent": "mamba",
        "post_attention_layernorm": "pre_ff_layernorm",
        "final_norm": "final_layernorm",
    }
    packed_modules_mapping = LlamaForCausalLM.packed_modules_mapping

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """All below the head."""
        fields = config.fields
        has_bias = fields.boolean("mamba_proj_bias", False)
        options = Mamba2Options(
            in_bias=has_bias,
            out_bias=has_bias,
            conv_bias=fields.boolean("mamba_conv_bias", True),
            eps=config.rms_norm_eps,
            dt_limits=dt_limits(fields),
        )
        attending = fields.integers("attn_layer_indices")

        def decoder_layer(layer: int) -> nn.Module:
            feed_forward = LlamaMLP(config, parallel)
            if layer in attending:
                return HybridDecoderLayer(config, feed_forward, self_attn=LlamaAttention(config, layer, parallel))
            return HybridDecoderLayer(config, feed_forward, recurrent=mamba_mixer(config, layer, parallel, options))

        return HybridModel(config, decoder_layer, parallel)
