"""GLM-4: Llama with partial rotation of adjacent pairs; GLM-4-0414 has norms before and after each sublayer."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import (
    DecoderBody,
    LlamaAttention,
    LlamaForCausalLM,
    SandwichDecoderLayer,
    TwoRopesBody,
)
from models.architectures.registry import ConfigFacts, architecture
from models.parallel.tensor_parallel import TensorParallel


class GlmAttention(LlamaAttention):
    """Grouped-query attention with rotation of adjacent pairs, without a bias of the output projection."""

    rotates_pairs: ClassVar[bool] = True
    has_output_bias: ClassVar[bool] = False


_FACTS = ConfigFacts(
    defaults={"attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5, "rms_norm_eps": 0.00000015625},
    rotates_parts=True,
)


@architecture("GlmForCausalLM", _FACTS)
class GlmForCausalLM(LlamaForCausalLM):
    """GLM-4 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        f"{kind}_proj": ("qkv_proj", kind) for kind in "qkv"
    }
    attention: ClassVar[type[nn.Module]] = GlmAttention


@architecture("Glm4ForCausalLM", _FACTS)
class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4-0414 with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    """Module of the model -> its name in checkpoints."""

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""

        def make_layer(layer: int) -> nn.Module:
            return SandwichDecoderLayer(config, layer, self.attention, self.feed_forward, parallel)

        return TwoRopesBody(config, make_layer, parallel)
