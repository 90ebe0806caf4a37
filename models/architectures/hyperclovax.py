"""HyperCLOVA X: Granite with norms also after attention and after the feed-forward layer."""

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.granite import GraniteForCausalLM
from models.architectures.llama import DecoderBody, SandwichDecoderLayer, TwoRopesBody
from models.architectures.registry import ConfigFacts, architecture
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


@architecture("HyperCLOVAXForCausalLM", ConfigFacts(defaults={"rms_norm_eps": 1e-6}, has_mlp_bias=True))
class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    """HyperCLOVA X with its language-model head."""

    checkpoint_modules: dict[str, str]  # Of instances, as a layer has two or four norms.

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        # A factor, where Granite's is a divisor.
        self.logit_scale = config.fields.number("logits_scaling", 1.0)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        if not fields.boolean("use_post_norm", True):
            return super().body(config, parallel)
        self.checkpoint_modules = {
            "post_attention_layernorm": "post_norm1",
            "pre_feedforward_layernorm": "post_attention_layernorm",
            "post_feedforward_layernorm": "post_norm2",
        }
        residual_scale = fields.number("residual_multiplier", 1.0)

        def make_layer(layer: int) -> nn.Module:
            attention, feed_forward = self.attention, self.feed_forward
            return SandwichDecoderLayer(
                config, layer, attention, feed_forward, parallel, residual_scale=residual_scale
            )

        return TwoRopesBody(config, make_layer, parallel, embed_scale=fields.number("embedding_multiplier", 1.0))
