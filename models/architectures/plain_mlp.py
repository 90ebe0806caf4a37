"""Architectures whose feed-forward layers are not gated: Arcee's AFM, NVIDIA's Nemotron and StarCoder2."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaModel, MakeNorm, PlainMLP
from models.architectures.registry import ConfigFacts, architecture
from models.layers.norm import LayerNorm, OffsetLayerNorm
from models.parallel.tensor_parallel import TensorParallel

_RELU2 = ("hidden_act", "relu2")


@architecture("ArceeForCausalLM", ConfigFacts(defaults={"rms_norm_eps": 1e-5}, activation=_RELU2, has_mlp_bias=True))
class ArceeForCausalLM(LlamaForCausalLM):
    """AFM with its language-model head."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """The feed-forward layer of the decoder layer with this index."""
        del layer  # All layers have the same feed-forward layer.
        return PlainMLP(config, parallel)


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

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """The feed-forward layer of the decoder layer with this index."""
        del layer  # All layers have the same feed-forward layer.
        return PlainMLP(config, parallel)


_STARCODER2 = ConfigFacts(
    defaults={"norm_epsilon": 1e-5, "tie_word_embeddings": True, "use_bias": True},
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

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """The feed-forward layer of the decoder layer with this index."""
        del layer  # All layers have the same feed-forward layer.
        return PlainMLP(config, parallel)
