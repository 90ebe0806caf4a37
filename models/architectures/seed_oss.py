"""Seed-OSS of ByteDance: Llama with biases of q, k and v, and a separate field for the bias of the output."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM
from models.architectures.registry import ConfigFacts, architecture


class SeedOssAttention(LlamaAttention):
    """Grouped-query attention with a separate option for the bias of the output projection."""

    @classmethod
    def output_bias(cls, config: ModelConfig) -> bool:
        """Whether the output projection has a bias."""
        return config.fields.boolean("attention_out_bias", False)


@architecture(
    "SeedOssForCausalLM", ConfigFacts(absent={"head_dim": 128}, defaults={"attention_bias": True}, has_mlp_bias=True)
)
class SeedOssForCausalLM(LlamaForCausalLM):
    """Seed-OSS with its language-model head."""

    attention: ClassVar[type[nn.Module]] = SeedOssAttention
