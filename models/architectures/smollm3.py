"""SmolLM3: Llama in which one layer of four has no rotary positions (Yang et al., 2025)."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields


class SmolLM3Attention(LlamaAttention):
    """Grouped-query attention, with rotary positions or without any."""

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether the layer has rotary positions: a 1 in `no_rope_layers`."""
        return rotates_layer(config.fields, layer, config.num_hidden_layers)


def rotates_layer(fields: Fields, layer: int, num_layers: int) -> bool:
    """Whether the layer has rotary positions, by `no_rope_layers` or else `no_rope_layer_interval`."""
    flags = fields.integers("no_rope_layers")
    if not flags:
        return (layer + 1) % fields.integer("no_rope_layer_interval", 4) != 0
    if len(flags) < num_layers or not set(flags) <= {0, 1}:
        raise fields.invalid("no_rope_layers", f"a list of {num_layers} numbers, each 0 or 1")
    return flags[layer] == 1


_DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}


@architecture("SmolLM3ForCausalLM", ConfigFacts(defaults=_DEFAULTS, has_mlp_bias=True))
class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM3 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = SmolLM3Attention
