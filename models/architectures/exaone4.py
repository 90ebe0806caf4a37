"""EXAONE 4: norms after attention and feed-forward; if some layers have windows, the others have no rotary
positions."""

from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.glm4_moe import corrected_experts
from models.architectures.llama import DecoderBody, LlamaForCausalLM, PostNormDecoderLayer, TwoRopesBody
from models.architectures.qwen3 import Qwen3Attention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.parallel.tensor_parallel import TensorParallel


class Exaone4Attention(Qwen3Attention):
    """Grouped-query attention with norms of queries and keys, with rotary positions in some layers."""

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether the layer has rotary positions."""
        return config.sliding_windows[layer] is not None or not config.fields.has("sliding_window")


def _windowed(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Whether each layer has a window. `sliding_window_pattern` is a period, whose last layer has none, or a string of
    L (window) and G (none) that is repeated; in the latter case the model's last layer has none either."""
    if not fields.has("sliding_window"):
        return [False] * num_layers
    pattern = fields.values.get("sliding_window_pattern", 4)
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        windowed = [pattern[layer % len(pattern)] == "L" for layer in range(num_layers)]
        return [*windowed[:-1], False]
    every = fields.integer("sliding_window_pattern", 4)
    return [(layer + 1) % every != 0 for layer in range(num_layers)]


@architecture(
    "Exaone4ForCausalLM",
    ConfigFacts(
        absent={"sliding_window": 4096},
        defaults={"rms_norm_eps": 1e-5},
        bias_field="",
        windowed_layers=_windowed,
    ),
)
class Exaone4ForCausalLM(LlamaForCausalLM):
    """EXAONE 4 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Exaone4Attention

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""

        def make_layer(layer: int) -> nn.Module:
            return PostNormDecoderLayer(config, layer, self.attention, self.feed_forward, parallel)

        return TwoRopesBody(config, make_layer, parallel)


@architecture(
    "ExaoneMoeForCausalLM",
    ConfigFacts(
        absent={"sliding_window": 4096},
        defaults={
            "first_k_dense_replace": 1,
            "n_group": 1,
            "n_shared_experts": 1,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.5,
            "topk_group": 1,
        },
        bias_field="",
        renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
        windowed_layers=_windowed,
    ),
)
class ExaoneMoeForCausalLM(LlamaForCausalLM):
    """K-EXAONE, a pre-norm model with experts, with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Exaone4Attention

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A dense network in the first layers, a mixture of experts in the others."""
        return corrected_experts(config, layer, parallel, correction_name="e_score_correction_bias")
