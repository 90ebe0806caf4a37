"""OLMo 2 and 3: norms after attention and feed-forward instead of before, and one over all heads of a token."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaForCausalLM, LlamaMLP, TwoRopesBody
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.config.rope import RopeConfig, parse_rope
from models.layers.linear import VocabParallelEmbedding
from models.layers.norm import HeadsRMSNorm, RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.ops.columns import join_columns
from models.parallel.tensor_parallel import TensorParallel

_THETA = 500000.0


class HeadsNormAttention(LlamaAttention):
    """Grouped-query attention that normalises all queries of a token together, and all keys."""

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
        q, k, v = (x.view(len(hidden), -1, dim) for x in (q, k, v))
        attended = self.attn(q, k, v, rotation=(cos, sin))
        return self.o_proj(attended.view(len(hidden), -1))  # type: ignore[no-any-return]


class OlmoDecoderLayer(nn.Module):
    """Attention and feed-forward, each with a norm after it, with residual connections."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.is_local = config.sliding_windows[layer] is not None
        self.self_attn = HeadsNormAttention(config, layer, parallel)
        self.mlp = LlamaMLP(config, parallel)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        # The norm's sum overwrites its second operand, which the layer has read.
        hidden = self.post_attention_layernorm.norm_add(self.self_attn(hidden, cos, sin), hidden)
        return self.post_feedforward_layernorm.norm_add(self.mlp(hidden), hidden)


class OlmoModel(TwoRopesBody):
    """Embedding, decoder layers and final norm. Stretched ropes are of the layers without a window alone."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        self.local_rotary_emb = RotaryEmbedding(_local_rope(config), config.max_model_len)
        self.layers = nn.ModuleList(
            OlmoDecoderLayer(config, layer, parallel) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


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
        """All below the head."""
        return OlmoModel(config, parallel)


def _local_rope(config: ModelConfig) -> RopeConfig:
    """The windowed layers' rope: the same theta, never stretched; under the names of transformers' version 5 or 4."""
    fields = config.fields
    by_kind = fields.section("rope_parameters")
    own = by_kind.section("sliding_attention") if by_kind is not None else None
    return parse_rope(
        fields,
        head_dim=config.head_dim,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        parameters=Fields({"rope_theta": config.rope.theta}, fields.where) if own is None else own,
    )
