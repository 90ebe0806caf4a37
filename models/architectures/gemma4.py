"""Gemma 4's text model: two kinds of layers with different head sizes, per-layer inputs, and shared keys and
values."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaMLP, soft_cap
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.config.rope import RopeConfig, parse_rope
from models.layers.attention import Attention
from models.layers.linear import (
    ColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm, UnitRMSNorm
from models.layers.parameter import WeightPart, empty_parameter, load_whole, require_shape
from models.layers.rotary import RotaryEmbedding
from models.layers.routing import SoftmaxRouter
from models.ops.activation import ACTIVATIONS, activate, gated_activation
from models.ops.types import Gating, HeadNorms, Rotation
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel

if TYPE_CHECKING:
    from models.ops.self_test import Case

_LOCAL, _FULL = "sliding_attention", "full_attention"
_ROPES = {
    _LOCAL: {"rope_type": "default", "rope_theta": 10000.0},
    _FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


class Gemma4Attention(nn.Module):
    """Grouped-query attention with normalised queries, keys and values.

    `config`: that of this layer. Values may be the unnormalised keys. `cache_of`: an earlier layer whose keys and
    values the layer reads; None if it has its own.
    """

    def __init__(self, config: ModelConfig, layer: int, cache_of: int | None, parallel: TensorParallel) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        is_local = config.sliding_windows[layer] is not None
        own = "qk" if config.fields.boolean("attention_k_eq_v", False) and not is_local else "qkv"
        self.kinds = own if cache_of is None else "q"
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            parallel=parallel,
            kinds=self.kinds,
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim,
            config.hidden_size,
            bias=config.attention_bias,
            parallel=parallel,
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        if cache_of is None:
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.v_norm = UnitRMSNorm(config.head_dim, config.rms_norm_eps)
        self.attn = Attention(
            _layer_name(layer),
            num_kv_heads=self.num_kv_heads,
            head_dim=config.head_dim,
            scale=1.0,
            sliding_window=config.sliding_windows[layer],
            cache_of=None if cache_of is None else _layer_name(cache_of),
        )

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, head_dim] -> [tokens, hidden_size]"""
        tokens, q_norm = len(hidden), self.q_norm.operand
        projected = self.qkv_proj(hidden).view(tokens, -1, self.head_dim)
        if self.kinds == "q":
            attended = self.attn(projected, None, None, norms=HeadNorms(q_norm, q_norm), rotation=rotation)
            return self.o_proj(attended.view(tokens, -1))  # type: ignore[no-any-return]
        sizes = [self.num_heads, *[self.num_kv_heads] * (len(self.kinds) - 1)]
        q, k, *values = projected.split(sizes, dim=1)
        v = self.v_norm(values[0] if values else k)
        attended = self.attn(q, k, v, norms=HeadNorms(q_norm, self.k_norm.operand), rotation=rotation)
        return self.o_proj(attended.view(tokens, -1))  # type: ignore[no-any-return]


class Gemma4Router(nn.Module):
    """Selects experts by the normalised input, and scales the weights by a factor per expert."""

    def __init__(self, config: ModelConfig, num_experts: int, top_k: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.norm.weight = empty_parameter(size, weight_loader=self._load_scale, sources=({"scale": None},))
        self.proj = SoftmaxRouter(size, num_experts, top_k, renormalize=True, scales_name="per_expert_scale")

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """# [tokens, hidden_size] -> [tokens, top_k] float32, [tokens, top_k] int64"""
        return self.proj(self.norm(hidden))  # type: ignore[no-any-return]

    @staticmethod
    def _load_scale(parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
        load_whole(parameter, loaded.float() * parameter.shape[0] ** -0.5, part)


class LayerInputsLayer(nn.Module):
    """A layer whose input of its own, if any, is multiplied by an activation."""

    own_size: int
    """0 without such an input."""
    activation: int

    def kernel_cases(self, dtype: torch.dtype, max_tokens: int) -> "Iterator[Case]":
        """Yield the comparison of this activation with torch."""
        from models.ops.triton.cases.elementwise import ActivationCase

        del max_tokens
        if self.own_size:
            yield ActivationCase(self.own_size, Gating(self.activation), dtype)


class Gemma4DecoderLayer(LayerInputsLayer):
    """Attention and feed-forward, each between two norms, with optional parallel experts and a per-layer input."""

    def __init__(self, config: ModelConfig, layer: int, cache_of: int | None, parallel: TensorParallel) -> None:
        super().__init__()
        fields, size, eps = config.fields, config.hidden_size, config.rms_norm_eps
        self.is_local = config.sliding_windows[layer] is not None
        self.self_attn = Gemma4Attention(_of_layer(config, layer), layer, cache_of, parallel)
        is_wide = cache_of is not None and fields.boolean("use_double_wide_mlp", False)
        self.mlp = LlamaMLP(config, parallel, intermediate_size=config.intermediate_size * (2 if is_wide else 1))
        self.input_layernorm = RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.pre_feedforward_layernorm = RMSNorm(size, eps)
        self.post_feedforward_layernorm = RMSNorm(size, eps)
        self.layer_scalar = empty_parameter(1, weight_loader=self._load_scale)
        self.scale = 1.0
        """The value of `layer_scalar`, read when it is loaded."""
        self.own_size = fields.integer("hidden_size_per_layer_input", minimum=0)
        self.activation = ACTIVATIONS[config.activation]
        if self.own_size:
            self.per_layer_input_gate = ColumnParallelLinear(size, self.own_size)
            self.per_layer_projection = ColumnParallelLinear(self.own_size, size)
            self.post_per_layer_input_norm = RMSNorm(size, eps)
        self.has_experts = fields.boolean("enable_moe_block", False)
        if self.has_experts:
            num_experts, top_k = fields.integer("num_experts"), fields.integer("top_k_experts")
            if top_k > num_experts:
                raise fields.invalid("top_k_experts", f"at most num_experts, {num_experts}")
            self.router = Gemma4Router(config, num_experts, top_k)
            self.experts = FusedMoE(
                size,
                fields.integer("moe_intermediate_size"),
                num_experts,
                activation=gated_activation(config.activation),
                parallel=parallel,
            )
            self.post_feedforward_layernorm_1 = RMSNorm(size, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(size, eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(size, eps)

    def forward(self, hidden: torch.Tensor, own: torch.Tensor | None, rotation: Rotation) -> torch.Tensor:
        """`own`: the per-layer input, if any. # [tokens, hidden_size], [tokens, own_size] -> [tokens, hidden_size]"""
        attended = self.self_attn(self.input_layernorm(hidden), rotation)
        hidden = self.post_attention_layernorm.norm_add(attended, hidden)
        fed_forward = self.mlp(self.pre_feedforward_layernorm(hidden))
        if self.has_experts:
            dense = self.post_feedforward_layernorm_1(fed_forward)
            sparse = self.experts(self.pre_feedforward_layernorm_2(hidden), *self.router(hidden))
            fed_forward = self.post_feedforward_layernorm_2.norm_add(sparse, dense)
        if own is None:
            return self.post_feedforward_layernorm.norm_add(fed_forward, hidden, self.scale)
        hidden = self.post_feedforward_layernorm.norm_add(fed_forward, hidden)
        gated = activate(self.per_layer_input_gate(hidden), self.activation, own)
        return self.post_per_layer_input_norm.norm_add(self.per_layer_projection(gated), hidden, self.scale)

    def _load_scale(self, parameter: nn.Parameter, loaded: torch.Tensor, part: WeightPart) -> None:
        require_shape(loaded, (1,))
        load_whole(parameter, loaded, part)
        self.scale = float(loaded[0])


class LayerInputsBody(DecoderBody):
    """A body with a scaled embedding, and optional per-layer inputs."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        fields, size = config.fields, config.hidden_size
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, size, scale=_root(size), parallel=parallel)
        self.num_layers = config.num_hidden_layers
        self.own_size = fields.integer("hidden_size_per_layer_input", minimum=0)
        if self.own_size:
            self.embed_tokens_per_layer = VocabParallelEmbedding(
                fields.integer("vocab_size_per_layer_input"),
                self.num_layers * self.own_size,
                scale=_root(self.own_size),
                num_ids=config.vocab_size,
                parallel=parallel,
            )
            self.per_layer_model_projection = ColumnParallelLinear(size, self.num_layers * self.own_size)
            # The projection's scale, 1 / sqrt(hidden_size), is cancelled by the norm except in its epsilon.
            self.per_layer_projection_norm = RMSNorm(self.own_size, config.rms_norm_eps * size)

    def own_inputs(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Compute the per-layer inputs from token ids and embeddings. # -> [tokens, layers, own_size]"""
        shape = len(input_ids), self.num_layers, self.own_size
        of_token = self.embed_tokens_per_layer(input_ids).view(shape)
        projected = self.per_layer_model_projection(embedded).view(shape)
        return self.per_layer_projection_norm.norm_add(projected, of_token, 2**-0.5)


class Gemma4Model(LayerInputsBody):
    """Scaled embedding, per-layer inputs, decoder layers and final norm."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__(config, parallel)
        self.rotary_emb = RotaryEmbedding(_rope(config, _FULL), config.max_model_len)
        self.local_rotary_emb = RotaryEmbedding(_rope(config, _LOCAL), config.max_model_len)
        caches = caches_of(config)
        self.layers = nn.ModuleList(
            Gemma4DecoderLayer(config, layer, caches[layer], parallel) for layer in range(self.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        hidden: torch.Tensor = self.embed_tokens(input_ids)
        own = self.own_inputs(input_ids, hidden) if self.own_size else None
        everywhere, nearby = self.rotary_emb(positions), self.local_rotary_emb(positions)
        for number, layer in enumerate(self.layers):
            hidden = layer(hidden, None if own is None else own[:, number], nearby if layer.is_local else everywhere)
        return self.norm(hidden)  # type: ignore[no-any-return]


def unread_of_shared_layers(fields: Fields) -> tuple[str, ...]:
    """Return prefixes of unused tensors: key and value projections of layers that read another layer's cache."""
    count, shared = fields.integer("num_hidden_layers"), fields.integer("num_kv_shared_layers", 0, minimum=0)
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    layers = range(max(0, count - shared), count)
    return tuple(f"model.layers.{layer}.self_attn.{name}." for layer in layers for name in names)


_FACTS = ConfigFacts(
    defaults={
        "head_dim": 256,
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _ROPES,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    },
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    full_attention_every=6,
    last_layer_is_full=True,
    unread=unread_of_shared_layers,
)


_UNIFIED_DEFAULTS = {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024}
_UNIFIED_FACTS = replace(_FACTS, defaults={**_FACTS.defaults, **_UNIFIED_DEFAULTS})


@architecture("Gemma4ForCausalLM", _FACTS)
@architecture("Gemma4UnifiedForCausalLM", _UNIFIED_FACTS)
class Gemma4ForCausalLM(LlamaForCausalLM):
    """Gemma 4's text model with its language-model head."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel = SINGLE_RANK) -> None:
        fields = config.fields
        if fields.has("use_bidirectional_attention") and fields.string("use_bidirectional_attention", "") != "vision":
            raise fields.invalid("use_bidirectional_attention", 'null or "vision": a token sees only earlier ones')
        super().__init__(config, parallel)
        self.soft_cap = soft_cap(fields, "final_logit_softcapping")

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return Gemma4Model(config, parallel)


def _layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn"


def _root(size: int) -> float:
    """Return the square root of a size, rounded to the model's dtype as in training."""
    return torch.tensor(size**0.5, device="cpu").item()


def _of_layer(config: ModelConfig, layer: int) -> ModelConfig:
    """Return the configuration of one layer; full-attention layers have other heads than windowed ones."""
    fields, head_dim, kv_heads = config.fields, config.head_dim, config.num_key_value_heads
    by_layer = fields.section("per_layer_config")
    if by_layer is not None:
        own = by_layer.section(str(layer)) or Fields({}, by_layer.where)
        if unknown := set(own.values) - {"head_dim", "num_key_value_heads"}:
            raise own.invalid(min(unknown), "left out: only head_dim and num_key_value_heads differ between layers")
        head_dim = own.integer("head_dim", head_dim)
        kv_heads = own.integer("num_key_value_heads", kv_heads)
    elif config.sliding_windows[layer] is None:
        head_dim = fields.integer("global_head_dim", 512)
        if fields.boolean("attention_k_eq_v", False):
            kv_heads = fields.integer("num_global_key_value_heads", kv_heads)
    if config.num_attention_heads % kv_heads:
        raise fields.invalid("num_attention_heads", f"a multiple of the {kv_heads} key heads of layer {layer}")
    return replace(config, head_dim=head_dim, num_key_value_heads=kv_heads)


def _rope(config: ModelConfig, kind: str) -> RopeConfig:
    """Read the rope of one kind of layers."""
    layers = [layer for layer, window in enumerate(config.sliding_windows) if (window is None) == (kind == _FULL)]
    head_dims = {_of_layer(config, layer).head_dim for layer in layers}
    if len(head_dims) > 1:
        raise config.fields.invalid("per_layer_config", f"one head_dim for all layers of {kind}")
    ropes = config.fields.section("rope_parameters")
    parameters = None if ropes is None else ropes.section(kind)
    if parameters is None and head_dims:
        raise config.fields.invalid("rope_parameters", f"an object with {kind}")
    return parse_rope(
        config.fields,
        head_dim=min(head_dims, default=config.head_dim),
        max_position_embeddings=config.fields.integer("max_position_embeddings"),
        parameters=Fields(_ROPES[kind], config.fields.where) if parameters is None else parameters,
    )


def caches_of(config: ModelConfig) -> Mapping[int, int | None]:
    """Map each layer to the earlier layer whose keys and values it reads, or None if it has its own."""
    fields, count = config.fields, config.num_hidden_layers
    first = count - fields.integer("num_kv_shared_layers", 0, minimum=0, maximum=count - 1)
    windows = config.sliding_windows
    found: dict[int, int | None] = dict.fromkeys(range(first))
    for layer in range(first, count):
        sources = [each for each in range(first) if (windows[each] is None) == (windows[layer] is None)]
        if not sources:
            raise fields.invalid("num_kv_shared_layers", "such that layers of each kind have keys of their own")
        found[layer] = sources[-1]
    return found
