"""OLMo 2 and 3: norms after attention and feed-forward instead of before, and norms over all heads of a token."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import (
    DecoderBody,
    LlamaAttention,
    LlamaForCausalLM,
    PostNormDecoderLayer,
    TwoRopesBody,
)
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.config.rope import RopeConfig, parse_rope
from models.layers.norm import HeadsRMSNorm
from models.ops.columns import join_columns
from models.parallel.tensor_parallel import TensorParallel

_THETA = 500000.0


class HeadsNormAttention(LlamaAttention):
    """Grouped-query attention with one norm over all query heads of a token, and one over all key heads."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        parts, dim, eps = self.qkv_proj.parts, config.head_dim, config.rms_norm_eps
        heads = (("q", config.num_attention_heads), ("k", config.num_key_value_heads))
        self.q_norm, self.k_norm = (
            HeadsRMSNorm(dim, span.first // dim, span.local // dim, whole, eps, parallel)
            for part, whole in heads
            for span in parts[part].spans
        )

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        dim = self.head_dim
        sizes = [self.num_heads * dim, self.num_kv_heads * dim, self.num_kv_heads * dim]
        q, k, v = self.qkv_proj(hidden).split(sizes, dim=1)
        q, k = self.q_norm(join_columns(q)), self.k_norm(join_columns(k))
        q, k, v = (self.limited(x).view(len(hidden), -1, dim) for x in (q, k, v))
        attended = self.attn(q, k, v, rotation=(cos, sin) if self.rotates else None)
        return self.o_proj(attended.view(len(hidden), -1))  # type: ignore[no-any-return]

    def limited(self, x: torch.Tensor) -> torch.Tensor:
        """Limit queries, keys or values before their rotation. # [tokens, features] -> the same"""
        return x


_OLMO2 = ConfigFacts(defaults={"rms_norm_eps": 1e-5})
_OLMO3 = ConfigFacts(
    defaults={"rms_norm_eps": 1e-5, "rope_theta": _THETA, "sliding_window": 4096}, full_attention_every=4
)


@architecture("Olmo2ForCausalLM", _OLMO2)
@architecture("Olmo3ForCausalLM", _OLMO3)
class OlmoForCausalLM(LlamaForCausalLM):
    """OLMo 2 or 3 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = HeadsNormAttention

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model. Only layers without a window use the scaled rope."""

        def make_layer(layer: int) -> nn.Module:
            return PostNormDecoderLayer(config, layer, self.attention, self.feed_forward, parallel)

        has_windows = any(window is not None for window in config.sliding_windows)
        return TwoRopesBody(config, make_layer, parallel, local_rope=_local_rope(config) if has_windows else None)


def _local_rope(config: ModelConfig) -> RopeConfig:
    """Read the rope of windowed layers: the same theta without scaling, with the names of transformers 5 or 4."""
    fields = config.fields
    by_kind = fields.section("rope_parameters")
    own = by_kind.section("sliding_attention") if by_kind is not None else None
    return parse_rope(
        fields,
        head_dim=config.head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=Fields({"rope_theta": config.rope.theta}, fields.where) if own is None else own,
    )
