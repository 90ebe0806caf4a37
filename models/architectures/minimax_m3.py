"""MiniMax-M3: dense attention layers, then block-sparse ones; routed and shared experts with clamped SwiGLU."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import DecoderBody, LlamaForCausalLM, LlamaMLP, LlamaModel
from models.architectures.qwen3 import Qwen3Attention
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.attention import Attention
from models.layers.base import CacheSpec
from models.layers.block_sparse import BlockIndexer, BlockSparseAttention
from models.layers.linear import MergedColumnParallelLinear
from models.layers.moe import ExpertNames, FusedMoE, SparseMoE
from models.layers.norm import OffsetRMSNorm, RMSNorm
from models.layers.routing import GroupedRouter, experts_per_token
from models.ops.activation import GatedActivation, clamped_swiglu
from models.ops.block_selection import BlockChoice
from models.parallel.tensor_parallel import TensorParallel

_SPARSE = "minimax_m3_sparse"
"""The name of block-sparse layers in `layer_types`."""
_VALUELESS = "sparse_disable_index_value"
"""The field of `sparse_attention_config` with a flag per layer whether the index has keys but no values."""
_PUBLISHED = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
"""transformers' name of a field -> its name in `sparse_attention_config` of published checkpoints."""
_WANTED: dict[str, Any] = {
    "scoring_func": "sigmoid",
    "qk_norm_type": "per_head",
    "use_qk_norm": True,
    "use_gemma_norm": True,
    "use_routing_bias": True,
    "attention_output_gate": False,
    "n_shared_experts": 1,
}
_WANTED_SPARSE: dict[str, Any] = {"use_sparse_attention": True, "sparse_score_type": "max", "sparse_init_block": 0}
"""The implemented value of each option, which is also the default of a missing field."""
_GATE_UP = {"gate_proj.weight": 0, "up_proj.weight": 1}, {"gate_up_proj.weight": None}
"""Names of a gated network's first weight: in published checkpoints, and in text-only ones saved by transformers."""
_DEFAULTS = {
    "dense_intermediate_size": 12288,
    "head_dim": 128,
    "index_block_size": 128,
    "index_head_dim": 128,
    "index_local_blocks": 1,
    "index_n_heads": 4,
    "index_topk_blocks": 16,
    "intermediate_size": 3072,
    "num_experts_per_tok": 4,
    "num_local_experts": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e6,
    "routed_scaling_factor": 2.0,
    "shared_intermediate_size": 3072,
}


def _complete(fields: Fields) -> Fields:
    """Add the fields of published checkpoints under transformers' names."""
    values = dict(fields.values)
    sparse = fields.section("sparse_attention_config")
    for section, wanted in ((fields, _WANTED), (sparse, _WANTED_SPARSE)):
        for name, value in wanted.items():
            if section is not None and section.has(name) and section.values[name] != value:
                raise section.invalid(name, f"{value}, the only one that is implemented".lower())
    if sparse is not None:
        values |= {ours: sparse.integer(theirs) for ours, theirs in _PUBLISHED.items() if sparse.has(theirs)}
        if sparse.has("sparse_attention_freq") and not fields.has("layer_types"):
            kinds = _kinds(sparse, "sparse_attention_freq", ("full_attention", _SPARSE))
            values["layer_types"] = kinds
            lack_values = sparse.integers(_VALUELESS) if sparse.has(_VALUELESS) else (1,) * len(kinds)
            without = [number == 1 for number in lack_values] + [False] * (len(kinds) - len(lack_values))
            if not all(each or kind != _SPARSE for each, kind in zip(without, kinds, strict=False)):
                raise sparse.invalid(_VALUELESS, "a list with a number for each layer, 1 in every sparse one")
    if fields.has("moe_layer_freq") and not fields.has("mlp_layer_types"):
        values["mlp_layer_types"] = _kinds(fields, "moe_layer_freq", ("dense", "sparse"))
    if fields.string("hidden_act", "swigluoai") not in ("swigluoai", "silu"):
        raise fields.invalid("hidden_act", "swigluoai")
    # The activation is determined by other fields; this one is ignored.
    values["hidden_act"] = "silu"
    # transformers reads only `partial_rotary_factor`, and saves this field with its default.
    values.pop("rotary_dim", None)
    return Fields(values, fields.where)


def _kinds(fields: Fields, name: str, kinds: tuple[str, str]) -> list[str]:
    """Convert a list of a 0 or 1 per layer to the names in `kinds`."""
    found = fields.integers(name)
    if not set(found) <= {0, 1}:
        raise fields.invalid(name, "a list of 0 or 1, one per layer")
    return [kinds[number] for number in found]


class MiniMaxM3Attention(Qwen3Attention):
    """Grouped-query attention with norms of queries and keys, to all tokens or to selected blocks of tokens."""

    norm: ClassVar[type[RMSNorm]] = OffsetRMSNorm

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.indexer: BlockIndexer | None = None
        if config.fields.strings("layer_types")[layer : layer + 1] != (_SPARSE,):
            return
        fields, name = config.fields, f"model.layers.{layer}.self_attn"
        num_heads, head_dim = fields.integer("index_n_heads"), fields.integer("index_head_dim")
        if num_heads != config.num_key_value_heads:
            raise fields.invalid("index_n_heads", f"num_key_value_heads, {config.num_key_value_heads}")
        if head_dim < config.rope.rotary_dim:
            raise fields.invalid("index_head_dim", f"at least {config.rope.rotary_dim}, the rotated dimensions")
        top_k = fields.integer("index_topk_blocks")
        num_local = fields.integer("index_local_blocks", minimum=0)
        if num_local > top_k:
            raise fields.invalid("index_local_blocks", f"at most index_topk_blocks, {top_k}")
        self.indexer = BlockIndexer(f"{name}.indexer", config.hidden_size, num_heads, head_dim, config.rms_norm_eps)
        # If there are fewer KV heads than ranks, consecutive ranks hold the same head.
        first = parallel.rank * num_heads // parallel.size
        self.attn = BlockSparseAttention(
            name,
            num_kv_heads=self.num_kv_heads,
            head_dim=config.head_dim,
            indexer=self.indexer,
            index_heads=slice(first, first + self.num_kv_heads),
            max_len=config.max_model_len,
            choice=BlockChoice(fields.integer("index_block_size"), top_k, num_local),
        )

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """# [tokens, hidden_size], 2 x [tokens, 1, rotary_dim] -> [tokens, hidden_size]"""
        if self.indexer is None:
            return super().forward(hidden, cos, sin)
        assert isinstance(self.attn, BlockSparseAttention)
        qkv = self.qkv_proj(hidden).view(len(hidden), -1, self.head_dim)
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        indexed = self.indexer(hidden, (cos, sin))
        attended = self.attn.over_blocks(q, k, v, *indexed, norms=self.head_norms(), rotation=(cos, sin))
        return self.o_proj(attended.view(len(hidden), -1))  # type: ignore[no-any-return]


class MiniMaxM3MLP(LlamaMLP):
    """A feed-forward layer with the clamped SwiGLU."""

    def __init__(
        self, config: ModelConfig, parallel: TensorParallel, *, intermediate_size: int, reduces: bool = True
    ) -> None:
        super().__init__(config, parallel, intermediate_size=intermediate_size, reduces=reduces)
        self.activation = _activation(config)
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [intermediate_size] * 2, parallel=parallel, sources=_GATE_UP
        )


def _activation(config: ModelConfig) -> GatedActivation:
    fields = config.fields
    alpha, limit = fields.number("swiglu_alpha", 1.702), fields.number("swiglu_limit", 7.0)
    return partial(clamped_swiglu, alpha=alpha, limit=limit)


_FACTS = ConfigFacts(
    defaults=_DEFAULTS,
    complete=_complete,
    renamed={"num_experts": "num_local_experts"},
    rotates_parts=True,
    bias_field="",
    layer_kinds=frozenset({_SPARSE}),
    names={
        ".block_sparse_moe.": ".mlp.",
        ".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        **{f".index_{each}.": f".indexer.{each}." for each in ("q_proj", "k_proj", "q_norm", "k_norm")},
    },
)


@architecture("MiniMaxM3VLForCausalLM", _FACTS)
class MiniMaxM3ForCausalLM(LlamaForCausalLM):
    """MiniMax-M3's language model with its head."""

    packed_modules_mapping: ClassVar[dict[str, tuple[str, str | int]]] = {
        each: ("qkv_proj", each[0]) for each in ("q_proj", "k_proj", "v_proj")
    }
    attention: ClassVar[type[nn.Module]] = MiniMaxM3Attention

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return LlamaModel(config, self.attention, self.feed_forward, parallel, norm=OffsetRMSNorm)

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Routed and shared experts in sparse layers, a dense network in the others."""
        fields, size = config.fields, config.hidden_size
        kinds = fields.strings("mlp_layer_types") or ("sparse",) * config.num_hidden_layers
        if len(kinds) != config.num_hidden_layers or not set(kinds) <= {"dense", "sparse"}:
            raise fields.invalid("mlp_layer_types", "a list of dense or sparse, one per layer")
        if kinds[layer] == "dense":
            return MiniMaxM3MLP(config, parallel, intermediate_size=fields.integer("dense_intermediate_size"))
        num_experts = fields.integer("num_local_experts")
        gate = GroupedRouter(
            size,
            num_experts,
            experts_per_token(fields, num_experts),
            renormalize=True,
            scaling_factor=fields.number("routed_scaling_factor"),
        )
        names = ExpertNames(gate="w1", up="w3", down="w2")
        experts = FusedMoE(
            size,
            config.intermediate_size,
            num_experts,
            activation=_activation(config),
            names=names,
            parallel=parallel,
        )
        shared = MiniMaxM3MLP(
            config, parallel, intermediate_size=fields.integer("shared_intermediate_size"), reduces=False
        )
        return SparseMoE(gate, experts, shared)

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of all layers' keys and values, and of the sparse layers' index keys, in order."""
        return [module.cache_spec for module in self.modules() if isinstance(module, Attention | BlockIndexer)]
