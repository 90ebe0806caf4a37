"""Architectures whose feed-forward layers are not gated: Arcee's AFM, NVIDIA's Nemotron and StarCoder2."""

from typing import ClassVar

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaModel, MakeNorm, plain_feed_forward
from models.architectures.registry import ALWAYS_WINDOWED, ConfigFacts, architecture
from models.layers.norm import LayerNorm, OffsetLayerNorm
from models.parallel.tensor_parallel import TensorParallel

_RELU2 = ("hidden_act", "relu2")


@architecture("ArceeForCausalLM", ConfigFacts(defaults={"rms_norm_eps": 1e-5}, activation=_RELU2, has_mlp_bias=True))
class ArceeForCausalLM(LlamaForCausalLM):
    """AFM with its language-model head."""

    feed_forward = staticmethod(plain_feed_forward)


class LayerNormModel(LlamaForCausalLM):
    """Llama with layer norms instead of RMS norms."""

    norm: ClassVar[MakeNorm] = LayerNorm

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return LlamaModel(config, self.attention, self.feed_forward, parallel, norm=type(self).norm)


_NEMOTRON = ConfigFacts(
    defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    rotates_parts=True,
    activation=_RELU2,
    eps_field="norm_eps",
    has_mlp_bias=True,
)


@architecture("NemotronForCausalLM", _NEMOTRON)
class NemotronForCausalLM(LayerNormModel):
    """Nemotron 3 and 4, and Minitron, with their language-model head."""

    norm: ClassVar[MakeNorm] = OffsetLayerNorm

    feed_forward = staticmethod(plain_feed_forward)


_STARCODER2 = ConfigFacts(
    defaults={"norm_epsilon": 1e-5, "tie_word_embeddings": True, "use_bias": True},
    fixed=ALWAYS_WINDOWED,
    activation=("hidden_act", "gelu_pytorch_tanh"),
    biases_field="use_bias",
    eps_field="norm_epsilon",
    is_windowed=True,
)


@architecture("Starcoder2ForCausalLM", _STARCODER2)
class Starcoder2ForCausalLM(LayerNormModel):
    """StarCoder2 with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {"up_proj": "c_fc", "down_proj": "c_proj"}
    """Module of the model -> its name in checkpoints."""

    feed_forward = staticmethod(plain_feed_forward)
