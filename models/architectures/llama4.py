"""Llama 4's text model: chunked attention, layers without positions, and experts whose input is scaled."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.architectures.smollm3 import rotates_layer
from models.attention.context import get_forward_context
from models.config.fields import Fields
from models.layers.moe import FusedMoE, is_stacked
from models.layers.norm import UnitRMSNorm
from models.layers.parameter import WeightPart
from models.layers.rotary import position_scales
from models.layers.routing import GroupedRouter, experts_per_token
from models.ops.activation import gated_activation
from models.ops.norm import scale_rows
from models.ops.types import HeadNorms
from models.parallel.tensor_parallel import TensorParallel


class Llama4Attention(LlamaAttention):
    """Grouped-query attention within chunks of positions; layers without rotary positions scale queries by
    position."""

    rotates_pairs: ClassVar[bool] = True
    is_chunked: ClassVar[bool] = True
    # With a scaled rope, the rotation also multiplies by a factor, which the norm after it cancels.
    is_rotated_first: ClassVar[bool] = True

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        fields = config.fields
        has_norm = self.rotates and fields.boolean("use_qk_norm", True)
        self.qk_norm = UnitRMSNorm(config.head_dim, config.rms_norm_eps) if has_norm else None
        self.growth = 0.0
        if not self.rotates and fields.boolean("attn_temperature_tuning", True):
            self.growth, self.length = fields.number("attn_scale", 0.1), fields.integer("floor_scale", 8192)

    @staticmethod
    def is_rotated(config: ModelConfig, layer: int) -> bool:
        """Whether the layer has rotary positions: a 1 in `no_rope_layers`."""
        return rotates_layer(config.fields, layer, config.num_hidden_layers)

    def head_norms(self) -> HeadNorms | None:
        """Norms of queries and keys."""
        return None if self.qk_norm is None else HeadNorms(self.qk_norm.operand, self.qk_norm.operand)

    def query_scales(self) -> torch.Tensor | None:
        """Factors of the step's queries. # [tokens, 1] float32"""
        if not self.growth:
            return None
        return position_scales(get_forward_context().context.positions, self.growth, self.length, first=1)


class Llama4Experts(FusedMoE):
    """Experts stored as stacks [experts, in_features, out_features], or one by one as linear layers."""

    has_plain_stacks = False

    def _load_gate_up(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: WeightPart) -> None:
        super()._load_gate_up(parameter, loaded.transpose(1, 2) if is_stacked(shard) else loaded, shard)

    def _load_down(self, parameter: nn.Parameter, loaded: torch.Tensor, shard: WeightPart) -> None:
        super()._load_down(parameter, loaded.transpose(1, 2) if is_stacked(shard) else loaded, shard)


class Llama4MoE(nn.Module):
    """Routed experts, whose inputs are scaled by the router's scores, and a shared expert."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        fields, size = config.fields, config.hidden_size
        num_experts = fields.integer("num_local_experts", 16)
        top_k = experts_per_token(fields.with_defaults({"num_experts_per_tok": 1}), num_experts)
        self.router = GroupedRouter(size, num_experts, top_k, renormalize=False, has_correction_bias=False)
        self.experts = Llama4Experts(
            size,
            config.intermediate_size,
            num_experts,
            activation=gated_activation(config.activation),
            parallel=parallel,
        )
        self.shared_expert = LlamaMLP(config, parallel, reduces=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size] -> [tokens, hidden_size]"""
        scores, ids = self.router(hidden)
        shared: torch.Tensor | None = self.shared_expert(hidden)
        if ids.shape[1] == 1:
            return self._routed(hidden, scores, ids, shared)
        # Each expert of a token reads an input of its own.
        out = torch.zeros_like(hidden)
        for expert in range(ids.shape[1]):
            own = slice(expert, expert + 1)
            out += self._routed(hidden, scores[:, own].contiguous(), ids[:, own].contiguous(), shared)
            shared = None
        return out

    def _routed(
        self, hidden: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, shared: torch.Tensor | None
    ) -> torch.Tensor:
        scaled, weights = scale_rows(hidden, scores)
        return self.experts(scaled, weights, ids, shared)  # type: ignore[no-any-return]


def _chunked(fields: Fields, num_layers: int) -> Sequence[bool]:
    return [rotates_layer(fields, layer, num_layers) for layer in range(num_layers)]


_FACTS = ConfigFacts(
    defaults={
        "attention_chunk_size": 8192,
        "head_dim": 128,
        "intermediate_size_mlp": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
    },
    windows=("chunked_attention", "attention_chunk_size"),
    windowed_layers=_chunked,
)


@architecture("Llama4ForCausalLM", _FACTS)
class Llama4ForCausalLM(LlamaForCausalLM):
    """Llama 4's text model with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Llama4Attention
    checkpoint_modules: ClassVar[dict[str, str]] = {"mlp": "feed_forward"}
    """Module of the model -> its name in checkpoints."""

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """A mixture of experts, or a dense network in some layers."""
        fields = config.fields
        if fields.has("moe_layers"):
            is_sparse = layer in fields.integers("moe_layers")
        else:
            is_sparse = (layer + 1) % fields.integer("interleave_moe_layer_step", 1) == 0
        if is_sparse:
            return Llama4MoE(config, parallel)
        return LlamaMLP(config, parallel, intermediate_size=fields.integer("intermediate_size_mlp"))
