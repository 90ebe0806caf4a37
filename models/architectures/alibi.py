"""BLOOM and MPT, whose positions are the biases of ALiBi (Press et al., 2022)."""

import json
import math
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import (
    DecoderBody,
    FeedForward,
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    plain_feed_forward,
)
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.errors import CheckpointError
from models.layers.alibi import AlibiEmbedding, AlibiHeads, num_extra_dims
from models.layers.norm import LayerNorm
from models.parallel.tensor_parallel import TensorParallel


def power_slopes(heads: int) -> torch.Tensor:
    """The slopes of BLOOM's heads: powers of one number, and for other counts than powers of 2, the missing ones from
    between those of twice as many heads. # [heads] float32"""
    count = 2 ** math.floor(math.log2(heads))
    exponents = [8 * head / count for head in range(1, count + 1)]
    exponents += [8 * head / (2 * count) for head in range(1, 2 * (heads - count), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=torch.float32)


class AlibiAttention(LlamaAttention):
    """Attention with ALiBi in the place of rotary positions."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        """Raises `CheckpointError` for attention in both directions, since biases are signed distances."""
        if config.is_bidirectional:
            raise CheckpointError(
                f"{config.fields.where} asks for attention in both directions, which {config.architecture} does not "
                "have in this release"
            )
        super().__init__(config, layer, parallel)
        own = slice(parallel.rank * self.num_heads, (parallel.rank + 1) * self.num_heads)
        scale = self.score_scale(config) or config.head_dim**-0.5
        self.biases = AlibiHeads(self.slopes(config)[own], self.num_kv_heads, config.head_dim, scale)

    @staticmethod
    def slopes(config: ModelConfig) -> torch.Tensor:
        """The slopes of all heads. # [heads] float32"""
        return power_slopes(config.num_attention_heads)

    @staticmethod
    def num_extra_dims(config: ModelConfig) -> int:
        """Elements that `prepared` adds to queries and keys."""
        return num_extra_dims(config.head_dim)

    def prepared(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the dimensions of the biases. # [tokens, heads, head_dim] each"""
        return self.biases(q, k)  # type: ignore[no-any-return]


class AlibiForCausalLM(LlamaForCausalLM):
    """Layer norms, feed-forward layers without a gate, and attention with ALiBi."""

    attention: ClassVar[type[nn.Module]] = AlibiAttention
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {}
    model_class: ClassVar[type[LlamaModel]] = LlamaModel
    has_norm_biases: ClassVar[bool] = True
    """Whether the norms have biases."""

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        norm = partial(LayerNorm, bias=self.has_norm_biases)
        # A field of BLOOM.
        is_normed = config.fields.boolean("apply_residual_connection_post_layernorm", False)
        layer = NormedResidualDecoderLayer if is_normed else LlamaDecoderLayer
        body = self.model_class(config, self.attention, self.feed_forward, parallel, decoder_layer=layer, norm=norm)
        body.rotary_emb = AlibiEmbedding(config.head_dim, config.max_model_len)
        return body

    feed_forward = staticmethod(plain_feed_forward)


class BloomModel(LlamaModel):
    """A body whose embeddings are normalised."""

    def __init__(
        self,
        config: ModelConfig,
        attention: type[nn.Module],
        feed_forward: FeedForward,
        parallel: TensorParallel,
        **options: Any,
    ) -> None:
        """See `LlamaModel`."""
        super().__init__(config, attention, feed_forward, parallel, **options)
        self.embed_norm = LayerNorm(config.hidden_size, config.rms_norm_eps)

    def embedded(self, input_ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input. # [tokens] int64 -> [tokens, hidden_size]"""
        return self.embed_norm(super().embedded(input_ids))  # type: ignore[no-any-return]


class NormedResidualDecoderLayer(LlamaDecoderLayer):
    """A decoder layer whose residual connections begin after the norms."""

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LlamaDecoderLayer`."""
        normed, _ = self.input_layernorm.add_norm(hidden, residual)
        normed, _ = self.post_attention_layernorm.add_norm(self.self_attn(normed, cos, sin), normed)
        return self.mlp(normed), normed


class BloomAttention(AlibiAttention):
    """Attention with ALiBi whose projections are one tensor, in which each head has a query, a key and a value."""

    is_grouped: ClassVar[bool] = True


def _with_sizes(fields: Fields) -> Fields:
    """Add the sizes that follow from others, whatever unused fields contain."""
    sizes = {
        "intermediate_size": 4 * fields.integer("hidden_size"),
        "num_key_value_heads": fields.integer("num_attention_heads"),
    }
    return Fields({**fields.values, **sizes}, fields.where)


def _complete_bloom(fields: Fields) -> Fields:
    if fields.boolean("slow_but_exact", False) and fields.integer("pretraining_tp", 1) > 1:
        raise fields.invalid("slow_but_exact", "false: with pretraining_tp above 1, transformers then drops biases")
    return _with_sizes(fields)


@architecture(
    "BloomForCausalLM",
    ConfigFacts(
        defaults={
            "has_biases": True,
            "hidden_size": 64,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
            "tie_word_embeddings": True,
            "vocab_size": 250880,
        },
        complete=_complete_bloom,
        renamed={
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
        },
        head_dim_field="",
        eps_field="layer_norm_epsilon",
        activation=("", "gelu_pytorch_tanh"),
        biases_field="has_biases",
        body_prefix="",
        names={"model.transformer.": "model.", "model.lm_head.": "lm_head.", "model.score.": "score."},
    ),
)
class BloomForCausalLM(AlibiForCausalLM):
    """BLOOM and BLOOMZ with their language-model head."""

    attention: ClassVar[type[nn.Module]] = BloomAttention
    model_class: ClassVar[type[LlamaModel]] = BloomModel
    body_prefix: ClassVar[str] = ""
    renamed_parts: ClassVar[dict[str, str]] = {"transformer.": ""}
    checkpoint_modules: ClassVar[dict[str, str]] = {
        "down_proj": "dense_4h_to_h",
        "embed_norm": "word_embeddings_layernorm",
        "embed_tokens": "word_embeddings",
        "layers": "h",
        "norm": "ln_f",
        "o_proj": "dense",
        "qkv_proj": "query_key_value",
        "self_attn": "self_attention",
        "up_proj": "dense_h_to_4h",
    }
    """Module of the model -> its name in checkpoints, some of which have `transformer.` before it."""


class MptAttention(AlibiAttention):
    """Attention with ALiBi, whose queries, keys and values are clamped in some models."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        section = config.fields.section("attn_config")
        self.limit = section.number("clip_qkv") if section is not None and section.values.get("clip_qkv") else None

    def projected(self, hidden: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values. # [tokens, hidden_size] -> [tokens, features]"""
        qkv: torch.Tensor = self.qkv_proj(hidden)
        return qkv if self.limit is None else qkv.clamp(-self.limit, self.limit)

    @staticmethod
    def slopes(config: ModelConfig) -> torch.Tensor:
        """The slopes of all heads: powers of one number, and for other counts than powers of 2, every second one of
        the next power's first. # [heads] float32"""
        heads, section = config.num_attention_heads, config.fields.section("attn_config")
        largest = 8.0 if section is None else section.number("alibi_bias_max", 8.0)
        count = 2 ** math.ceil(math.log2(heads))
        slopes = [2.0 ** -(largest * head / count) for head in range(1, count + 1)]
        if count != heads:
            slopes = (slopes[1::2] + slopes[::2])[:heads]
        return torch.tensor(slopes, dtype=torch.float32)

    @staticmethod
    def score_scale(config: ModelConfig) -> float | None:
        """The scale of the attention scores; None for `head_dim ** -0.5`."""
        section = config.fields.section("attn_config")
        return section.number("softmax_scale") if section is not None and section.has("softmax_scale") else None


_MPT_WANTED = {"alibi": True, "attn_type": "multihead_attention", "prefix_lm": False, "qk_ln": False}
"""Fields of `attn_config` with the only values that transformers' model computes."""
_MPT_NORMS = ("low_precision_layernorm", "layernorm")


def _complete_mpt(fields: Fields) -> Fields:
    section = fields.section("attn_config") or Fields({}, fields.where)
    for name, wanted in _MPT_WANTED.items():
        if section.has(name) and section.values[name] != wanted:
            raise section.invalid(name, json.dumps(wanted))
    if not fields.boolean("no_bias", True):
        raise fields.invalid("no_bias", "true, as in all published checkpoints")
    # transformers' model ignores both.
    if fields.has("logit_scale"):
        raise fields.invalid("logit_scale", "null: logits are not scaled")
    if fields.string("norm_type", "layernorm") not in _MPT_NORMS:
        raise fields.invalid("norm_type", " or ".join(_MPT_NORMS))
    return _with_sizes(fields)


@architecture(
    "MptForCausalLM",
    ConfigFacts(
        defaults={
            "hidden_size": 2048,
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        complete=_complete_mpt,
        renamed={
            "d_model": "hidden_size",
            "max_seq_len": "max_position_embeddings",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
        },
        head_dim_field="",
        eps_field="layer_norm_epsilon",
        activation=("", "gelu"),
    ),
)
class MptForCausalLM(AlibiForCausalLM):
    """MPT with its language-model head."""

    attention: ClassVar[type[nn.Module]] = MptAttention
    checkpoint_modules: ClassVar[dict[str, str]] = {
        "embed_tokens": "wte",
        "input_layernorm": "norm_1",
        "layers": "blocks",
        "mlp": "ffn",
        "model": "transformer",
        "norm": "norm_f",
        "o_proj": "out_proj",
        "post_attention_layernorm": "norm_2",
        "qkv_proj": "Wqkv",
        "self_attn": "attn",
    }
    """Module of the model -> its name in checkpoints."""
    has_norm_biases: ClassVar[bool] = False
