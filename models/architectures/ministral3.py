"""Ministral 3: Mistral with queries scaled by position beyond the original context."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM
from models.architectures.registry import ALWAYS_WINDOWED, ConfigFacts, architecture
from models.attention.context import get_forward_context
from models.config.fields import Fields
from models.layers.rotary import position_scales
from models.parallel.tensor_parallel import TensorParallel

_BETA = "llama_4_scaling_beta"


class QueryGrowth:
    """The growth of queries beyond the original context: `1 + beta * log(1 + floor(position / length))`."""

    def __init__(self, config: ModelConfig) -> None:
        fields = config.fields
        rope = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.where)
        self._beta = rope.number(_BETA) if rope.values.get(_BETA) else 0.0
        self._length = config.rope.original_max_len

    def scales(self) -> torch.Tensor | None:
        """Return the factors of the step's queries; None if they do not grow. # [tokens, 1] float32"""
        if not self._beta:
            return None
        return position_scales(get_forward_context().context.positions, self._beta, self._length)


class Ministral3Attention(LlamaAttention):
    """Grouped-query attention whose queries grow beyond the original context."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.growth = QueryGrowth(config)

    def query_scales(self) -> torch.Tensor | None:
        """Factors of the step's queries. # [tokens, 1] float32"""
        return self.growth.scales()


_FACTS = ConfigFacts(defaults={"head_dim": 128}, fixed=ALWAYS_WINDOWED, bias_field="", is_windowed=True)


@architecture("Ministral3ForCausalLM", _FACTS)
class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Ministral3Attention
