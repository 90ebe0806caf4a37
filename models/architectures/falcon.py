"""Falcon of TII: grouped projections, attention and feed-forward in parallel in most models, rotary or ALiBi."""

from typing import ClassVar

import torch
from torch import nn

from models.architectures.alibi import AlibiAttention, power_slopes
from models.architectures.config import ModelConfig
from models.architectures.llama import (
    DecoderBody,
    FeedForward,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    MakeNorm,
    ParallelDecoderLayer,
    plain_feed_forward,
)
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.alibi import AlibiEmbedding
from models.layers.norm import LayerNorm, RMSNorm
from models.ops.norm import add_rows
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel


class FalconAttention(LlamaAttention):
    """Rotary attention whose projections are one tensor, grouped by KV head."""

    is_grouped: ClassVar[bool] = True


class FalconAlibiAttention(AlibiAttention):
    """Attention with ALiBi, whose slopes are rounded to bfloat16 and scaled with the scores."""

    is_grouped: ClassVar[bool] = True

    @staticmethod
    def slopes(config: ModelConfig) -> torch.Tensor:
        """The slopes of all heads. # [heads] float32"""
        slopes = power_slopes(config.num_attention_heads).bfloat16().float()
        return slopes.mul(config.head_dim**-0.5)


class TwoNormsDecoderLayer(ParallelDecoderLayer):
    """Attention and feed-forward in parallel, each with a norm of its own."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        attention: type[nn.Module],
        feed_forward: FeedForward,
        parallel: TensorParallel,
        *,
        norm: MakeNorm = RMSNorm,
        residual_scale: float = 1.0,
    ) -> None:
        """See `LlamaDecoderLayer`."""
        super().__init__(config, layer, attention, feed_forward, parallel, norm=norm, residual_scale=residual_scale)
        self.ln_mlp = norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LlamaDecoderLayer`."""
        hidden, residual = self.input_layernorm.add_norm(hidden, residual, self.residual_scale)
        attended, fed_forward = self.self_attn(hidden, cos, sin), self.mlp(self.ln_mlp(residual))
        if self.input_layernorm.sums.size > 1:
            return add_rows(attended, fed_forward), residual
        return fed_forward, add_rows(residual, attended, self.residual_scale)


def _is_new(fields: Fields) -> bool:
    """Whether the layers are those of Falcon-40B and later models."""
    return fields.boolean("new_decoder_architecture", False)


def _has_two_norms(fields: Fields) -> bool:
    """Whether attention and feed-forward each have a norm of their own."""
    return _is_new(fields) and fields.integer("num_ln_in_parallel_attn", 2) == 2


def _complete(fields: Fields) -> Fields:
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_kv_heads", heads)
    if not _is_new(fields) and fields.boolean("multi_query", True):
        kv_heads = 1
    size = fields.integer("ffn_hidden_size", 4 * fields.integer("hidden_size"))
    return Fields({**fields.values, "num_key_value_heads": kv_heads, "intermediate_size": size}, fields.where)


@architecture(
    "FalconForCausalLM",
    ConfigFacts(
        defaults={"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        complete=_complete,
        head_dim_field="",
        eps_field="layer_norm_epsilon",
        activation=("activation", "gelu"),
        biases_field="bias",
    ),
)
class FalconForCausalLM(LlamaForCausalLM):
    """Falcon with its language-model head."""

    checkpoint_modules: dict[str, str] = {  # noqa: RUF012, replaced by instances, not changed
        "down_proj": "dense_4h_to_h",
        "embed_tokens": "word_embeddings",
        "layers": "h",
        "model": "transformer",
        "norm": "ln_f",
        "o_proj": "dense",
        "qkv_proj": "query_key_value",
        "self_attn": "self_attention",
        "up_proj": "dense_h_to_4h",
    }
    """Module of the model -> its name in checkpoints."""
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {}

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        super().__init__(config, parallel)
        if _has_two_norms(config.fields):
            self.checkpoint_modules = {**self.checkpoint_modules, "input_layernorm": "ln_attn"}

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        has_alibi = fields.boolean("alibi", False)
        layer: type[LlamaDecoderLayer] = LlamaDecoderLayer
        if _has_two_norms(fields):
            layer = TwoNormsDecoderLayer
        elif _is_new(fields) or fields.boolean("parallel_attn", True):
            layer = ParallelDecoderLayer
        attention = FalconAlibiAttention if has_alibi else FalconAttention
        body = LlamaModel(config, attention, self.feed_forward, parallel, decoder_layer=layer, norm=LayerNorm)
        if has_alibi:
            body.rotary_emb = AlibiEmbedding(config.head_dim, config.max_model_len)
        return body

    feed_forward = staticmethod(plain_feed_forward)
