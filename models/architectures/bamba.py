"""Bamba: Mamba-2 layers, and attention in the layers that the config lists, each followed by a dense network."""

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.hybrid import (
    MAMBA_DEFAULTS,
    HybridDecoderLayer,
    HybridForCausalLM,
    HybridModel,
    mamba_mixer,
    mamba_options,
    with_kv_heads,
)
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.parallel.tensor_parallel import TensorParallel


@architecture(
    "BambaForCausalLM",
    ConfigFacts(
        defaults={**MAMBA_DEFAULTS, "max_position_embeddings": 262144, "partial_rotary_factor": 0.5},
        rotates_parts=True,
        complete=with_kv_heads,
        has_mlp_bias=True,
    ),
)
class BambaForCausalLM(HybridForCausalLM):
    """Bamba with its language-model head."""

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        options, attending = mamba_options(config), config.fields.integers("attn_layer_indices")

        def decoder_layer(layer: int) -> nn.Module:
            feed_forward = LlamaMLP(config, parallel)
            if layer in attending:
                return HybridDecoderLayer(config, feed_forward, self_attn=LlamaAttention(config, layer, parallel))
            return HybridDecoderLayer(config, feed_forward, recurrent=mamba_mixer(config, layer, parallel, options))

        return HybridModel(config, decoder_layer, parallel)
