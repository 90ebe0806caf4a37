"""GLM-5.3-Flash: Kimi Linear's delta rule, latent attention to selected pools of tokens, and hyper-connections."""

from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.deepseek_v2 import DeepseekV2ForCausalLM, shares_selection
from models.architectures.deepseek_v4 import hyper_connections
from models.architectures.kimi_linear import KimiDeltaAttention
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.base import CacheSpec, VectorCacheSpec
from models.layers.compressed import PoolIndexer
from models.layers.hyper_connection import mean_of, repeated
from models.layers.linear import VocabParallelEmbedding
from models.layers.mla import MLAAttention, MLAShape
from models.layers.moe import FusedMoE
from models.layers.norm import RMSNorm
from models.ops.activation import clipped_activation
from models.ops.cpu import runtime
from models.parallel.tensor_parallel import TensorParallel

_RECURRENT, _INDEXED = "linear_attention", "indexed_attention"
_ROTATED = 32
"""Number of dimensions, all zero, that stand for the rotated part of queries and keys, which these layers do not have
and kernels of GPUs need."""
_SECTION = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
    "gate_lower_bound": "linear_lower_bound",
}
"""Fields of `linear_attn_config` in published configs -> transformers' names."""
_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "index_head_dim": 128,
    "index_kpool": 16,
    "index_n_heads": 32,
    "index_topk": 2048,
    "kv_lora_rank": 512,
    "linear_conv_kernel_dim": 4,
    "linear_head_dim": 128,
    "linear_num_heads": 64,
    "max_position_embeddings": 1048576,
    "n_group": 1,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 256,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
    "topk_group": 1,
    "v_head_dim": 256,
}
_NAMES = MappingProxyType(
    {
        ".forget_gate.": ".",
        ".hc_attn_": ".attn_hc.",
        ".hc_ffn_": ".ffn_hc.",
        ".index_kpool_compress_ape": ".position_bias",
        ".index_kpool_compress_gate": ".pool_gate.weight",
    }
)
"""Parts of names in checkpoints and in transformers' adapters -> the model's."""


def _complete(fields: Fields) -> Fields:
    """Add the fields that follow from others, with transformers' names."""
    values = dict(fields.values)
    values.setdefault("linear_lower_bound", -5.0)
    section = fields.section("linear_attn_config")
    if section is not None:
        values |= {new: section.values[old] for old, new in _SECTION.items() if old in section.values}
        if values["linear_lower_bound"] is None and section.boolean("safe_gate", True):
            values["linear_lower_bound"] = -5.0
    layers = range(fields.integer("num_hidden_layers"))
    kinds = fields.strings("layer_types") or [_INDEXED if layer % 4 == 3 else _RECURRENT for layer in layers]
    values["layer_types"] = [_INDEXED if kind == "full_attention" else kind for kind in kinds]
    for name, wanted in (("qk_rope_head_dim", 0), ("index_kpool_always_select_tail", True)):
        if fields.has(name) and fields.values[name] != wanted:
            raise fields.invalid(name, f"{wanted}, the only one that is implemented".lower())
    # Nothing is rotated: the size of a head and the rope are not used.
    values |= {"head_dim": 2, "rope_parameters": None, "rope_scaling": None}
    return Fields(values, fields.where)


class Glm5NextDeltaAttention(KimiDeltaAttention):
    """Kimi's delta rule, whose decays may have a bound."""

    @staticmethod
    def bound(fields: Fields) -> float:
        """See `KimiDeltaAttention`."""
        bound = fields.values["linear_lower_bound"]
        if bound is None:
            return 0.0
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e3 <= bound < 0:
            raise fields.invalid("linear_lower_bound", "null, or a number below 0 and at least -1000")
        return -float(bound)


class Glm5NextLatentAttention(MLAAttention):
    """Latent attention without positions to the tokens of selected pools, and to those after the last whole pool."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        fields, name = config.fields, f"model.layers.{layer}.self_attn"
        nope, rank = fields.integer("qk_nope_head_dim"), fields.integer("kv_lora_rank")
        shape = MLAShape(
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            q_lora_rank=fields.integer("q_lora_rank"),
            kv_lora_rank=rank,
            qk_nope_head_dim=nope,
            qk_rope_head_dim=0,
            v_head_dim=fields.integer("v_head_dim"),
            scale=nope**-0.5,
            bias=config.attention_bias,
            interleaved=False,
            latent_eps=config.rms_norm_eps,
        )
        shares = shares_selection(config, layer)
        indexer = None if shares else _indexer(config, f"{name}.indexer")
        super().__init__(name, shape, indexer=indexer, shares_selection=shares, parallel=parallel)
        self.padding = 0 if runtime.active() else _ROTATED
        self.cache_spec = VectorCacheSpec(name, rank + self.padding, is_latent=True)

    def _attend(self, *tokens: torch.Tensor, shared: tuple[torch.Tensor, ...]) -> torch.Tensor:
        q, latent, *indexed = tokens
        if self.padding:
            q, latent = F.pad(q, (0, self.padding)), F.pad(latent, (0, self.padding))
        return super()._attend(q, latent, *indexed, shared=shared)


def _indexer(config: ModelConfig, name: str) -> PoolIndexer:
    fields = config.fields
    rate, top_k = fields.integer("index_kpool"), fields.integer("index_topk")
    if top_k % rate:
        raise fields.invalid("index_topk", f"a multiple of index_kpool, {rate}")
    return PoolIndexer(
        name,
        hidden_size=config.hidden_size,
        q_lora_rank=fields.integer("q_lora_rank"),
        num_heads=fields.integer("index_n_heads"),
        head_dim=fields.integer("index_head_dim"),
        rate=rate,
        num_pools=top_k // rate,
        max_len=config.max_model_len,
    )


class Glm5NextDecoderLayer(nn.Module):
    """A delta rule or attention, then a feed-forward layer, each with a norm before it, between hyper-connections."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.is_recurrent = config.fields.strings("layer_types")[layer] == _RECURRENT
        mixer = Glm5NextDeltaAttention if self.is_recurrent else Glm5NextLatentAttention
        self.self_attn = mixer(config, layer, parallel)
        self.mlp = Glm5NextForCausalLM.feed_forward(config, layer, parallel)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc, self.ffn_hc = hyper_connections(config), hyper_connections(config)

    def forward(self, streams: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, N, hidden_size], 2 x [tokens, 1, rotated] -> [tokens, N, hidden_size]"""
        hidden, *how = self.attn_hc(streams)
        hidden = self.input_layernorm(hidden)
        mixed = self.self_attn(hidden) if self.is_recurrent else self.self_attn(hidden, cos, sin)
        streams = self.attn_hc.spread(mixed, streams, *how)
        hidden, *how = self.ffn_hc(streams)
        return self.ffn_hc.spread(self.mlp(self.post_attention_layernorm(hidden)), streams, *how)


class Glm5NextModel(DecoderBody):
    """Embedding, decoder layers, the mean of the residual streams, and the final norm."""

    def __init__(self, config: ModelConfig, parallel: TensorParallel) -> None:
        super().__init__()
        self.count = config.fields.integer("hc_mult")
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel=parallel)
        self.layers = nn.ModuleList(
            Glm5NextDecoderLayer(config, layer, parallel) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        latents = [each for each in self.modules() if isinstance(each, Glm5NextLatentAttention)]
        self.padding = max((each.padding for each in latents), default=0)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """# 2 x [tokens] int64 -> [tokens, hidden_size]"""
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        streams = repeated(embedded, self.count)
        angles = torch.zeros(len(positions), 1, self.padding, device=positions.device)
        for layer in self.layers:
            streams = layer(streams, angles, angles)
        return self.norm(mean_of(streams))  # type: ignore[no-any-return]


@architecture(
    "Glm5NextForCausalLM",
    ConfigFacts(
        defaults=_DEFAULTS,
        absent={"linear_lower_bound": -5.0},
        complete=_complete,
        renamed={"num_local_experts": "n_routed_experts"},
        layer_kinds=frozenset({_RECURRENT, _INDEXED}),
        names=_NAMES,
    ),
)
class Glm5NextForCausalLM(LlamaForCausalLM):
    """The text part of GLM-5.3-Flash with its language-model head."""

    renamed_parts: ClassVar[MappingProxyType[str, str]] = _NAMES

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return Glm5NextModel(config, parallel)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Routed and shared experts in sparse layers, a dense network in the others, with clipped activations.

        That of routed experts is SiLU, whatever `hidden_act` says.
        """
        made = DeepseekV2ForCausalLM.feed_forward(config, layer, parallel)
        limit = config.fields.number("swiglu_limit")
        for part in made.modules():
            if isinstance(part, LlamaMLP | FusedMoE):
                name = "silu" if isinstance(part, FusedMoE) else config.activation
                part.activation = clipped_activation(name, limit)
        return made

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of states, latents, pools and what these are made of, in order of layers."""
        specs: list[CacheSpec] = []
        for module in self.modules():
            if isinstance(module, Glm5NextDeltaAttention | Glm5NextLatentAttention):
                specs.append(module.cache_spec)
            elif isinstance(module, PoolIndexer):
                specs += (module.tokens_spec, module.entries_spec)
        return specs
