"""Phi-3 and Phi-4: Llama whose checkpoints store q, k and v as one tensor, and gate and up as another."""

from typing import ClassVar

from models.architectures.llama import LlamaForCausalLM
from models.architectures.registry import ALWAYS_WINDOWED, ConfigFacts, architecture


@architecture(
    "Phi3ForCausalLM", ConfigFacts(fixed=ALWAYS_WINDOWED, bias_field="", is_windowed=True, rotates_parts=True)
)
class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {}
