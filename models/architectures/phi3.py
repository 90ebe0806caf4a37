"""Phi-3 and Phi-4: Llama whose checkpoint holds queries, keys and values, and gate and up, as one tensor each."""

from typing import ClassVar

from models.architectures.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {}
