"""DeepSeek-V4: compressed attention, hyper-connections, and experts that some layers select by token id."""

import dataclasses
from typing import Any, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.attention.context import get_forward_context
from models.config.fields import Fields
from models.config.rope import RopeConfig, parse_rope
from models.layers.base import CacheSpec
from models.layers.compressed import CompressedAttention, Compressor, EntryIndexer
from models.layers.hyper_connection import HyperConnection, HyperHead, repeated
from models.layers.linear import VocabParallelEmbedding
from models.layers.moe import ExpertNames, FusedMoE
from models.layers.norm import RMSNorm
from models.layers.rotary import RotaryEmbedding
from models.layers.routing import HashRouter, experts_per_token
from models.ops.activation import clipped_activation
from models.ops.columns import join_columns
from models.ops.types import Rotation
from models.parallel.tensor_parallel import TensorParallel

_WINDOW, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_KINDS = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}
"""Kinds of layers by their value in `compress_ratios` of published checkpoints."""
_RATES = {_SPARSE: ("compress_rate_csa", 4), _HEAVY: ("compress_rate_hca", 128)}
"""Number of tokens per compressed entry, by kind of layer: the field that overrides `compress_rates`, and the
default."""
_SHARE = 64 / 512
"""Default of the rotated share of a head's dimensions."""
_HASHED, _ROUTED = "hash_moe", "moe"
_DEFAULTS: dict[str, Any] = {
    "compress_rope_theta": 160000.0,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "num_key_value_heads": 1,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "swiglu_limit": 10.0,
}
_NAMES = {
    ".scale": ".weight_scale_inv",
    ".weight_scale_invs": ".scales",  # That of AWQ and GPTQ is no scale of DeepSeek's.
    "model.model.": "model.",
    "model.lm_head": "lm_head",
    "model.head": "lm_head",
    "model.embed.": "model.embed_tokens.",
    **{f"hc_head_{part}": f"model.hc_head.hc_{part}" for part in ("fn", "base", "scale")},
    ".attn.indexer.compressor.": ".self_attn.compressor.indexer.",
    ".attn.indexer.weights_proj": ".self_attn.compressor.indexer.scorer.weights_proj",
    ".attn.indexer.wq_b": ".self_attn.compressor.indexer.q_b_proj",
    ".attn.": ".self_attn.",
    ".ffn.": ".mlp.",
    ".attn_norm": ".input_layernorm",
    ".ffn_norm": ".post_attention_layernorm",
    ".hc_attn_": ".attn_hc.",
    ".hc_ffn_": ".ffn_hc.",
    ".attn_sink": ".sinks",
    ".ape": ".position_bias",
    ".self_attn.norm": ".self_attn.kv_norm",
    ".compressor.norm": ".compressor.kv_norm",
    ".indexer.norm": ".indexer.kv_norm",
    ".q_norm": ".q_a_norm",
    ".wq_a": ".q_a_proj",
    ".wq_b": ".q_b_proj",
    ".wkv": ".kv_proj",
    ".wgate": ".gate_proj",
    ".wo_a": ".o_a_proj",
    ".wo_b": ".o_b_proj",
    ".gate.bias": ".gate.e_score_correction_bias",
    ".shared_experts.w1": ".shared_experts.gate_proj",
    ".shared_experts.w2": ".shared_experts.down_proj",
    ".shared_experts.w3": ".shared_experts.up_proj",
}
"""Parts of names in published checkpoints, whose body has no prefix -> transformers' names; replaced in this order."""


def _complete(fields: Fields) -> Fields:
    """Add the fields that follow from others, with transformers' names."""
    values, count = dict(fields.values), fields.integer("num_hidden_layers")
    values["intermediate_size"] = fields.integer("moe_intermediate_size")
    rates = fields.section("compress_rates") or Fields({}, fields.where)
    values["compress_rates"] = {
        kind: fields.integer(own) if fields.has(own) else rates.integer(kind, default)
        for kind, (own, default) in _RATES.items()
    }
    if not fields.strings("layer_types") and fields.has("compress_ratios"):
        ratios = fields.integers("compress_ratios")[:count]
        if not set(ratios) <= _KINDS.keys():
            raise fields.invalid("compress_ratios", f"a list of {', '.join(map(str, _KINDS))}")
        values["layer_types"] = [_KINDS[ratio] for ratio in ratios]
        # The list has an additional value for each layer of multi-token prediction.
        values["mtp_layer_type"] = _KINDS.get((*fields.integers("compress_ratios"), 0)[count], _WINDOW)
    elif not fields.strings("layer_types"):
        values["layer_types"] = [_HEAVY if layer < 2 or layer % 2 == 0 else _SPARSE for layer in range(count)]
    if not fields.strings("mlp_layer_types"):
        name = "num_hash_layers" if fields.has("num_hash_layers") else "default_num_hash_layers"
        hashed = min(count, fields.integer(name, 3, minimum=0))
        values["mlp_layer_types"] = [_HASHED] * hashed + [_ROUTED] * (count - hashed)
    share = _SHARE
    if fields.has("qk_rope_head_dim"):
        share = fields.integer("qk_rope_head_dim") / fields.integer("head_dim")
    values["partial_rotary_factor"] = fields.number("partial_rotary_factor", share)
    # Layers without compressed entries have a separate, unscaled rope.
    given = fields.section("rope_parameters") or fields.section("rope_scaling") or Fields({}, fields.where)
    main, compressed = (given.section(name) for name in ("main", "compress"))
    if main is None or compressed is None:
        main = Fields({"rope_theta": fields.number("rope_theta")}, given.where)
        own = {name: value for name, value in given.values.items() if name != "rope_theta"}
        compressed = Fields({**own, "rope_theta": fields.number("compress_rope_theta")}, given.where)
    values.pop("rope_scaling", None)
    quantization = fields.section("quantization_config")
    if quantization is not None and fields.has("expert_dtype"):
        # V4 has `expert_dtype` at the top level, V4.1 in `quantization_config`.
        values["quantization_config"] = {"expert_dtype": fields.values["expert_dtype"], **quantization.values}
    values["rope_parameters"] = main.values
    # YaRN's frequencies are used without its attention factor.
    values["compress_rope"] = {"attention_factor": 1.0, **compressed.values}
    return Fields(values, fields.where)


class DeepseekV4MoE(nn.Module):
    """Routed experts and a shared expert."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        fields, size = config.fields, config.hidden_size
        kinds = fields.strings("mlp_layer_types")
        if len(kinds) != config.num_hidden_layers or not set(kinds) <= {_HASHED, _ROUTED}:
            raise fields.invalid("mlp_layer_types", f"a list of {_HASHED} or {_ROUTED}, one per layer")
        activation = clipped_activation(config.activation, fields.number("swiglu_limit"))
        count = fields.integer("n_routed_experts")
        self.gate = HashRouter(
            size,
            count,
            experts_per_token(fields, count),
            scaling_factor=fields.number("routed_scaling_factor"),
            vocab_size=config.vocab_size if kinds[layer] == _HASHED else None,
        )
        self.experts = FusedMoE(
            size,
            config.intermediate_size,
            count,
            activation=activation,
            names=ExpertNames(gate="w1", up="w3", down="w2"),
            parallel=parallel,
        )
        self.shared_experts = LlamaMLP(config, parallel, reduces=False)
        self.shared_experts.activation = activation

    def forward(self, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], [tokens] int64 -> [tokens, hidden_size]"""
        weights, ids = self.gate(hidden, input_ids)
        return self.experts(hidden, weights, ids, self.shared_experts(hidden))  # type: ignore[no-any-return]


class DeepseekV4DecoderLayer(nn.Module):
    """Attention and experts, each with a norm before it, between hyper-connections."""

    def __init__(self, config: ModelConfig, layer: int, rotary: RotaryEmbedding, parallel: TensorParallel) -> None:
        """`rotary`: the rope of compressed entries, and of layers that have such entries."""
        super().__init__()
        self.is_compressed = config.fields.strings("layer_types")[layer] != _WINDOW
        self.self_attn = _attention(config, layer, rotary, parallel)
        self.mlp = DeepseekV4MoE(config, layer, parallel)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc, self.ffn_hc = hyper_connections(config), hyper_connections(config)

    def forward(self, streams: torch.Tensor, input_ids: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """# [tokens, N, hidden_size], [tokens] int64 -> [tokens, N, hidden_size]"""
        hidden, *how = self.attn_hc(streams)
        streams = self.attn_hc.spread(self.self_attn(self.input_layernorm(hidden), rotation), streams, *how)
        hidden, *how = self.ffn_hc(streams)
        return self.ffn_hc.spread(self.mlp(self.post_attention_layernorm(hidden), input_ids), streams, *how)


def hyper_connections(config: ModelConfig) -> HyperConnection:
    """Build the connections around one part of a layer."""
    fields = config.fields
    return HyperConnection(
        config.hidden_size,
        fields.integer("hc_mult"),
        fields.integer("hc_sinkhorn_iters"),
        fields.number("hc_eps"),
        config.rms_norm_eps,
    )


def _attention(
    config: ModelConfig, layer: int, rotary: RotaryEmbedding, parallel: TensorParallel
) -> CompressedAttention:
    fields, name = config.fields, f"model.layers.{layer}.self_attn"
    kind, size, eps = fields.strings("layer_types")[layer], config.hidden_size, config.rms_norm_eps
    rates = fields.section("compress_rates")
    assert rates is not None, "the configuration is complete"
    compressor: Compressor | None = None
    indexer: EntryIndexer | None = None
    if kind != _WINDOW:
        rate, overlaps = rates.integer(kind), kind == _SPARSE
        compressor = Compressor(f"{name}.compressor", size, config.head_dim, rate, rotary, eps, overlaps=overlaps)
    if kind == _SPARSE:
        dim = fields.integer("index_head_dim")
        if dim < config.rope.rotary_dim:
            raise fields.invalid("index_head_dim", f"at least {config.rope.rotary_dim}, the rotated dimensions")
        indexer = EntryIndexer(
            f"{name}.compressor.indexer",
            size,
            dim,
            rates.integer(kind),
            rotary,
            eps,
            q_lora_rank=fields.integer("q_lora_rank"),
            num_heads=fields.integer("index_n_heads"),
            top_k=fields.integer("index_topk"),
            max_len=config.max_model_len,
        )
    groups = fields.integer("o_groups")
    if config.num_attention_heads % groups:
        raise fields.invalid("o_groups", f"a divisor of num_attention_heads, {config.num_attention_heads}")
    return CompressedAttention(
        name,
        hidden_size=size,
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_lora_rank=fields.integer("q_lora_rank"),
        window=fields.integer("sliding_window"),
        output_groups=groups,
        output_rank=fields.integer("o_lora_rank"),
        eps=eps,
        compressor=compressor,
        indexer=indexer,
        parallel=parallel,
    )


def further_layer(config: ModelConfig) -> ModelConfig:
    """Return the configuration extended by one layer of multi-token prediction."""
    fields, count = config.fields, config.num_hidden_layers
    kinds = [*fields.strings("layer_types"), fields.string("mtp_layer_type", _WINDOW)]
    routed = [*fields.strings("mlp_layer_types"), _ROUTED]
    values = {**fields.values, "layer_types": kinds, "mlp_layer_types": routed}
    return dataclasses.replace(config, num_hidden_layers=count + 1, fields=Fields(values, fields.where))


class DeepseekV4Model(DecoderBody):
    """Embedding, decoder layers, the sum of the residual streams, and the final norm."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.count = config.fields.integer("hc_mult")
        # Drafters read the last layer's output; each stream is stored like the hidden states of one layer.
        self.kept_streams = range(config.num_hidden_layers, config.num_hidden_layers + self.count)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.rotary_emb = RotaryEmbedding(config.rope, config.max_model_len)
        self.compress_rotary_emb = RotaryEmbedding(compress_rope(config), config.max_model_len)
        self.layers = nn.ModuleList(
            DeepseekV4DecoderLayer(config, layer, self.compress_rotary_emb, parallel)
            for layer in range(config.num_hidden_layers)
        )
        self.hc_head = HyperHead(config.hidden_size, self.count, config.fields.number("hc_eps"), config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        streams = repeated(embedded, self.count)
        plain, compressed = self.rotary_emb(positions), self.compress_rotary_emb(positions)
        for layer in self.layers:
            streams = layer(streams, input_ids, compressed if layer.is_compressed else plain)
        context = get_forward_context()
        for index, number in enumerate(self.kept_streams):
            if number in context.stream_layers:
                context.streams[number] = join_columns(streams[:, index])
        return self.norm(self.hc_head(streams))  # type: ignore[no-any-return]


def compress_rope(config: ModelConfig) -> RopeConfig:
    """Return the rope of compressed entries, and of layers that have such entries."""
    parameters = config.fields.section("compress_rope")
    assert parameters is not None, "the configuration is complete"
    rope = parse_rope(
        config.fields,
        head_dim=config.head_dim,
        max_position_embeddings=config.fields.integer("max_position_embeddings"),
        parameters=parameters,
    )
    if rope.rope_type not in ("default", "linear", "yarn", "llama3"):
        raise parameters.invalid("rope_type", "default, linear, yarn or llama3: entries are rotated once")
    return rope


_FACTS = ConfigFacts(
    defaults=_DEFAULTS,
    complete=_complete,
    rotates_parts=True,
    layer_kinds=frozenset({_SPARSE, _HEAVY}),
    body_prefix="",
    names=_NAMES,
)


@architecture("DeepseekV4ForCausalLM", _FACTS)
class DeepseekV4ForCausalLM(LlamaForCausalLM):
    """DeepSeek-V4 with its language-model head."""

    renamed_parts: ClassVar[dict[str, str]] = _NAMES
    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        "gate_proj": ("gate_up_proj", 0),
        "up_proj": ("gate_up_proj", 1),
    }

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        fields = config.fields
        for name, wanted in (
            ("scoring_func", "sqrtsoftplus"),
            ("norm_topk_prob", True),
            ("n_shared_experts", 1),
            ("num_key_value_heads", 1),
            ("attention_bias", False),
            ("mlp_bias", False),
        ):
            if fields.has(name) and fields.values[name] != wanted:
                raise fields.invalid(name, f"{wanted}, the only one that is implemented".lower())
        return DeepseekV4Model(config, parallel)

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of keys, compressed entries and the inputs of entries, in order of layers."""
        layers = [module for module in self.modules() if isinstance(module, CompressedAttention)]
        return [spec for layer in layers for spec in layer.cache_specs]
