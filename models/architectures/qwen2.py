"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from typing import ClassVar

from models.architectures.llama import LlamaAttention, LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture


class Qwen2Attention(LlamaAttention):
    """Grouped-query attention whose output projection has no bias."""

    has_output_bias: ClassVar[bool] = False


@architecture("Qwen2ForCausalLM", ConfigFacts(fixed={"attention_bias": True}))
class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 with its language-model head."""

    attention: ClassVar[type[LlamaAttention]] = Qwen2Attention
