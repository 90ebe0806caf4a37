"""dots.llm1: GLM-4.5's experts, and attention with norms of queries and keys."""

from collections.abc import Sequence
from typing import ClassVar

from torch import nn

from models.architectures.glm4_moe import Glm4MoeForCausalLM
from models.architectures.qwen3 import Qwen3Attention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields


def _windowed(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Whether each layer has a window: layers from `max_window_layers` on, if windows are enabled."""
    first = fields.integer("max_window_layers", 62, minimum=0)
    return [fields.has("sliding_window") and layer >= first for layer in range(num_layers)]


_DEFAULTS = {
    "first_k_dense_replace": 0,
    "n_group": 1,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "topk_group": 1,
}


@architecture(
    "Dots1ForCausalLM",
    ConfigFacts(defaults=_DEFAULTS, renamed={"num_local_experts": "n_routed_experts"}, windowed_layers=_windowed),
)
class Dots1ForCausalLM(Glm4MoeForCausalLM):
    """dots.llm1 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Qwen3Attention
