"""Qwen3.5 and its successors: Qwen3-Next with dense networks or experts, and separately stored projections."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaForCausalLM, LlamaMLP
from models.architectures.qwen3_next import (
    FACTS,
    Qwen3NextDecoderLayer,
    Qwen3NextForCausalLM,
    Qwen3NextSparseBlock,
)
from models.architectures.registry import ConfigFacts, architecture
from models.layers.gated_delta_net import GatedDeltaNet
from models.parallel.tensor_parallel import TensorParallel


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    """A delta net or attention, then a dense network."""

    has_grouped_projections: ClassVar[bool] = False

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A dense network, in every layer."""
        del layer
        return LlamaMLP(config, parallel)


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    """A delta net or attention, then experts."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Routed experts and a shared one, in every layer."""
        del layer
        return Qwen3NextSparseBlock(config, parallel)


@architecture("Qwen3_5ForCausalLM", FACTS)
class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5 with its language-model head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        **LlamaForCausalLM.packed_modules_mapping,
        **GatedDeltaNet.packed_modules_mapping,
    }
    decoder_layer: ClassVar[type[Qwen3NextDecoderLayer]] = Qwen3_5DecoderLayer


# `intermediate_size` is unused: no layer is dense, and config.json lacks the field.
_MOE_FACTS = ConfigFacts(
    defaults={**FACTS.defaults, "intermediate_size": 1},
    fixed={"norm_topk_prob": True},
    rotates_parts=True,
    layer_kinds=FACTS.layer_kinds,
)


@architecture("Qwen3_5MoeForCausalLM", _MOE_FACTS)
class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts, with its language-model head."""

    decoder_layer: ClassVar[type[Qwen3NextDecoderLayer]] = Qwen3_5MoeDecoderLayer
