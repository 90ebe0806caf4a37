"""The common parts of models with recurrent layers and attention: body, layers, and the sizes of Mamba-2."""

from collections.abc import Callable
from typing import ClassVar, cast

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaAttention, LlamaForCausalLM
from models.config.fields import Fields
from models.layers.attention import Attention
from models.layers.base import CacheSpec
from models.layers.linear import VocabParallelEmbedding
from models.layers.mamba2 import Mamba2Mixer, Mamba2Options, Mamba2Shape
from models.layers.norm import RMSNorm, round_for_reader
from models.layers.rotary import RotaryEmbedding
from models.layers.short_conv import ShortConv
from models.parallel.tensor_parallel import TensorParallel

RECURRENT_KINDS = frozenset({"linear_attention", "mamba"})
"""Names in `layer_types` of Mamba-2 layers; the second is that of transformers 4."""
LAYER_KINDS = RECURRENT_KINDS | {"attention"}
"""Names in `layer_types` other than those of attention layers in transformers 5."""


class HybridDecoderLayer(nn.Module):
    """A recurrent layer or attention, then a feed-forward layer, each with a norm before it and a residual."""

    def __init__(
        self,
        config: ModelConfig,
        feed_forward: nn.Module | None,
        *,
        self_attn: nn.Module | None = None,
        recurrent: nn.Module | None = None,
        residual_multiplier: float = 1.0,
    ) -> None:
        """`residual_multiplier`: factor of the outputs that are added to the residual stream."""
        super().__init__()
        self.self_attn, self.recurrent, self.feed_forward = self_attn, recurrent, feed_forward
        self.residual_multiplier = residual_multiplier
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for part, norm in ((self_attn, self.input_layernorm), (feed_forward, self.post_attention_layernorm)):
            if part is not None:
                round_for_reader(part, norm)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors; the layer's output is the second plus the first times the multiplier, which the next
        norm adds.

        # 2 x [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> 2 x [tokens, hidden_size]
        """
        hidden, residual = self.input_layernorm.add_norm(hidden, residual, self.residual_multiplier)
        hidden = self.mix(hidden, cos, sin)
        hidden, residual = self.post_attention_layernorm.add_norm(hidden, residual, self.residual_multiplier)
        return self.feed(hidden), residual

    def feed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the feed-forward layer. # [tokens, hidden_size] -> [tokens, hidden_size]"""
        assert self.feed_forward is not None, "a layer without one computes it in a subclass"
        return self.feed_forward(hidden)  # type: ignore[no-any-return]

    def mix(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Compute the recurrent layer or attention. # [tokens, hidden_size] -> [tokens, hidden_size]"""
        if self.recurrent is not None:
            return self.recurrent(hidden)  # type: ignore[no-any-return]
        assert self.self_attn is not None, "a layer is recurrent or attends"
        return self.self_attn(hidden, cos, sin)  # type: ignore[no-any-return]


class OnePartDecoderLayer(nn.Module):
    """One sublayer with a norm before it and a residual connection."""

    def __init__(self, config: ModelConfig, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        round_for_reader(mixer, self.norm)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two tensors whose sum, computed by the next norm, is the layer's output. # [tokens, hidden_size]"""
        hidden, residual = self.norm.add_norm(hidden, residual)
        attends = isinstance(self.mixer, LlamaAttention)
        return self.mixer(hidden, cos, sin) if attends else self.mixer(hidden), residual


class HybridModel(DecoderBody):
    """Embedding, decoder layers and final norm."""

    def __init__(
        self,
        config: ModelConfig,
        decoder_layer: Callable[[int], nn.Module],
        parallel: TensorParallel,
        *,
        embedding_multiplier: float = 1.0,
        residual_multiplier: float = 1.0,
    ) -> None:
        super().__init__()
        self.residual_multiplier = residual_multiplier
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, scale=embedding_multiplier, parallel=parallel
        )
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        self.layers = nn.ModuleList(decoder_layer(layer) for layer in range(config.num_hidden_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        cos, sin = self.rotary_emb(positions)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, cos, sin)
        assert residual is not None, "a model has at least one layer"
        return self.final_norm.add_norm(hidden, residual, self.residual_multiplier)[0]


class HybridForCausalLM(LlamaForCausalLM):
    """A model of recurrent layers and attention with its language-model head."""

    checkpoint_modules: ClassVar[dict[str, str]] = {
        "recurrent": "mamba",
        "post_attention_layernorm": "pre_ff_layernorm",
        "final_norm": "final_layernorm",
    }
    """Module of the model -> its name in Bamba's checkpoints, and in those of families with the same structure."""
    caching: ClassVar[tuple[type[nn.Module], ...]] = (Attention, Mamba2Mixer, ShortConv)
    """The layers with a `cache_spec`."""

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of the layers, in order."""
        return [cast(CacheSpec, module.cache_spec) for module in self.modules() if isinstance(module, self.caching)]


_MAMBA_FIELDS: dict[str, object] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
MAMBA_DEFAULTS = {**_MAMBA_FIELDS, "rms_norm_eps": 1e-5}
"""Defaults of Bamba and the families with the same structure."""


def with_kv_heads(fields: Fields) -> Fields:
    """Default to eight key-value heads if config.json omits them; null means one per query head."""
    if "num_key_value_heads" in fields.values:
        return fields
    return Fields({**fields.values, "num_key_value_heads": 8}, fields.where)


def mamba_mixer(
    config: ModelConfig,
    layer: int,
    parallel: TensorParallel,
    options: Mamba2Options,
    *,
    inner: int | None = None,
) -> Mamba2Mixer:
    """Build the Mamba-2 layer of Bamba and of families with the same field names.

    `inner`: number of features of all heads, by default `mamba_expand` times the hidden size.
    """
    fields = config.fields
    heads, groups = fields.integer("mamba_n_heads"), fields.integer("mamba_n_groups")
    if inner is None:
        inner = fields.integer("mamba_expand") * config.hidden_size
    if inner % heads:
        raise fields.invalid("mamba_n_heads", f"a divisor of the {inner} features of all heads")
    dim = inner // heads
    if fields.values.get("mamba_d_head", "auto") not in ("auto", None, dim):
        raise fields.invalid("mamba_d_head", f"{dim}: {inner} features shared by mamba_n_heads, {heads}")
    require_divisor(fields, "mamba_n_groups", groups, "mamba_n_heads", heads)
    shape = Mamba2Shape(
        config.hidden_size,
        heads,
        dim,
        groups,
        fields.integer("mamba_d_state"),
        fields.integer("mamba_d_conv"),
    )
    return Mamba2Mixer(f"model.layers.{layer}.mamba", shape, options, parallel)


def mamba_options(config: ModelConfig) -> Mamba2Options:
    """Read the options of Bamba's and Granite 4's Mamba-2 layers."""
    fields = config.fields
    has_bias = fields.boolean("mamba_proj_bias", False)
    return Mamba2Options(
        in_bias=has_bias,
        out_bias=has_bias,
        conv_bias=fields.boolean("mamba_conv_bias", True),
        eps=config.rms_norm_eps,
        dt_limits=dt_limits(fields),
        activation=config.activation,
    )


def require_divisor(fields: Fields, name: str, value: int, whole_name: str, whole: int) -> None:
    """Raise `CheckpointError` unless `value` divides `whole`."""
    if whole % value:
        raise fields.invalid(name, f"a divisor of {whole_name}, {whole}")


def dt_limits(fields: Fields) -> tuple[float, float]:
    """Read the limits of time steps in config.json; the upper limit may be infinite."""
    name = "time_step_limit"
    value = fields.values.get(name)
    if value is None:
        return 0.0, float("inf")
    # JSON has no infinity: transformers writes a string, or an object with a string.
    pair = [_number(item) for item in value] if isinstance(value, list) and len(value) == 2 else [None]
    least, most = pair[0], pair[-1]
    if least is None or most is None or not 0 <= least <= most:
        raise fields.invalid(name, "a list of two numbers, from 0 on and in order")
    return least, most


def _number(value: object) -> float | None:
    if isinstance(value, dict) and value.get("__float__") == "Infinity":
        return float("inf")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
