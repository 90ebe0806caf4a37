"""Code World Model: Llama 3.1 in which three of four layers have sliding-window attention."""

from collections.abc import Sequence
from typing import Any

from models.architectures.llama import LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields

_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def _windowed(fields: Fields, num_layers: int) -> Sequence[bool]:
    """Whether each layer has a window: all but the first of each four layers."""
    return [fields.has("sliding_window") and layer % 4 != 0 for layer in range(num_layers)]


def _complete(fields: Fields) -> Fields:
    """Add the default rope if config.json has no section for it."""
    if fields.values.get("rope_parameters") or fields.values.get("rope_scaling"):
        return fields
    return Fields({**fields.values, "rope_parameters": _ROPE}, fields.where)


_FACTS = ConfigFacts(
    defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 8192},
    complete=_complete,
    bias_field="",
    has_mlp_bias=True,
    windowed_layers=_windowed,
)


@architecture("CwmForCausalLM", _FACTS)
class CwmForCausalLM(LlamaForCausalLM):
    """Code World Model with its language-model head."""
