"""DeepSeek-V2, V3 and V3.2, GLM-4.7-Flash, GLM-5 and Mistral 4: latent attention, shared and routed experts.

In V3.2 and GLM-5 an indexer selects the tokens to attend to; some layers of GLM-5 reuse the previous layer's
selection. Mistral 4 scales queries by position beyond the original context, as Ministral 3 does.
"""

import math
from typing import ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaForCausalLM, LlamaMLP
from models.architectures.ministral3 import QueryGrowth
from models.architectures.registry import INDEXED_LAYERS, LATENT_HEAD, ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.base import CacheSpec
from models.layers.mla import LightningIndexer, MLAAttention, MLAShape
from models.layers.moe import FusedMoE, SparseMoE
from models.layers.routing import GroupedRouter, Scoring, experts_per_token, groups_of_experts
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import TensorParallel

_V2, _V32, _GLM5 = "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"
_MISTRAL4 = "Mistral4ForCausalLM"
_GREEDY, _GROUPED, _CORRECTED = "greedy", "group_limited_greedy", "noaux_tc"


class DeepseekAttention(MLAAttention):
    """Latent attention, with an indexer or with scaled queries in architectures that have them."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        name = f"model.layers.{layer}.self_attn"
        is_indexed = config.architecture in (_V32, _GLM5)
        shares = config.architecture == _GLM5 and shares_selection(config, layer)
        indexer = _indexer(config, f"{name}.indexer") if is_indexed and not shares else None
        super().__init__(name, mla_shape(config), indexer=indexer, shares_selection=shares, parallel=parallel)
        self.growth = QueryGrowth(config) if config.architecture == _MISTRAL4 else None

    def query_scales(self) -> torch.Tensor | None:
        """Factors of the step's queries. # [tokens, 1] float32"""
        return None if self.growth is None else self.growth.scales()


_ADJACENT_PAIRS = {"rope_interleave": True}
_EXPERTS = {"num_local_experts": "n_routed_experts"}
_EXPERTS_OR_OLD = {**_EXPERTS, "num_experts": "n_routed_experts"}
_V2_FACTS = ConfigFacts(
    defaults={"first_k_dense_replace": 0},
    renamed={"num_experts": "n_routed_experts"},
    fixed=_ADJACENT_PAIRS,
    head_dim_field=LATENT_HEAD,
    has_mlp_bias=True,
)
_V3_DEFAULTS = {"first_k_dense_replace": 3, "n_group": 8, "num_experts_per_tok": 8, "topk_group": 4}
_V3_FACTS = ConfigFacts(defaults=_V3_DEFAULTS, renamed=_EXPERTS, head_dim_field=LATENT_HEAD)
_V32_FACTS = ConfigFacts(
    defaults={**_V3_DEFAULTS, "index_topk": 2048},
    renamed=_EXPERTS_OR_OLD,
    fixed=_ADJACENT_PAIRS,
    head_dim_field=LATENT_HEAD,
    layer_kinds=INDEXED_LAYERS,
)

_GLM5_FACTS = ConfigFacts(
    defaults={"first_k_dense_replace": 3, "n_group": 1, "n_shared_experts": 1, "topk_group": 1},
    renamed=_EXPERTS_OR_OLD,
    fixed=_ADJACENT_PAIRS,
    head_dim_field=LATENT_HEAD,
    layer_kinds=INDEXED_LAYERS,
)


_LITE_FACTS = ConfigFacts(
    defaults={"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    head_dim_field=LATENT_HEAD,
    rotates_parts=True,
    renamed=_EXPERTS,
)


def _rotated_parts(config: Fields) -> Fields:
    """Mistral 4's `partial_rotary_factor` is the share of `qk_rope_head_dim`, which is rotated whole, in a head."""
    rope, nope = config.integer("qk_rope_head_dim"), config.integer("qk_nope_head_dim")
    values = dict(config.values)
    for name in ("rope_parameters", "rope_scaling"):
        section = config.section(name)
        if section is not None and section.has("partial_rotary_factor"):
            if round(section.number("partial_rotary_factor") * (rope + nope)) != rope:
                raise section.invalid(
                    "partial_rotary_factor", f"{rope / (rope + nope)}, the share of qk_rope_head_dim"
                )
            values[name] = {key: value for key, value in section.values.items() if key != "partial_rotary_factor"}
    return Fields(values, config.where)


_MISTRAL4_FACTS = ConfigFacts(
    defaults={
        "first_k_dense_replace": 0,
        "n_group": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
    },
    complete=_rotated_parts,
    head_dim_field=LATENT_HEAD,
    renamed=_EXPERTS,
)


@architecture(_V2, _V2_FACTS)
@architecture("DeepseekV3ForCausalLM", _V3_FACTS)
@architecture(_V32, _V32_FACTS)
@architecture(_GLM5, _GLM5_FACTS)
@architecture("Glm4MoeLiteForCausalLM", _LITE_FACTS)
@architecture(_MISTRAL4, _MISTRAL4_FACTS)
class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """DeepSeek-V2, V3 or V3.2, GLM-4.7-Flash, GLM-5 or Mistral 4, with its language-model head."""

    attention: ClassVar[type[nn.Module]] = DeepseekAttention

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Routed and shared experts in sparse layers, a dense network in the others."""
        fields = config.fields
        if not is_sparse(fields, layer):
            return LlamaMLP(config, parallel)
        size, num_experts = fields.integer("moe_intermediate_size"), fields.integer("n_routed_experts")
        num_shared = fields.integer("n_shared_experts", 0, minimum=0)
        shared = None
        if num_shared:
            shared = LlamaMLP(config, parallel, intermediate_size=size * num_shared, reduces=False)
        activation = gated_activation(config.activation)
        experts = FusedMoE(config.hidden_size, size, num_experts, activation=activation, parallel=parallel)
        return SparseMoE(_router(config, num_experts), experts, shared)

    def kv_cache_layers(self) -> list[CacheSpec]:
        """The cache specs of latents and, in models with indexers, of the indexers' keys, in order of layers."""
        return [module.cache_spec for module in self.modules() if isinstance(module, MLAAttention | LightningIndexer)]


def mla_shape(config: ModelConfig) -> MLAShape:
    """Read the sizes of latent attention from the config."""
    fields = config.fields
    nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    if config.rope.rotary_dim != rope:
        where = fields.section("rope_parameters") or fields.section("rope_scaling") or fields
        raise where.invalid("partial_rotary_factor", "1: a part of qk_rope_head_dim is not rotated alone")
    return MLAShape(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        q_lora_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=fields.integer("v_head_dim"),
        scale=(nope + rope) ** -0.5 * _yarn_scale(config),
        bias=config.attention_bias,
        interleaved=fields.boolean("rope_interleave", True),
    )


def _indexer(config: ModelConfig, name: str) -> LightningIndexer:
    fields = config.fields
    head_dim, rope = fields.integer("index_head_dim"), fields.integer("qk_rope_head_dim")
    if head_dim < rope:
        raise fields.invalid("index_head_dim", f"at least qk_rope_head_dim, {rope}")
    return LightningIndexer(
        name,
        hidden_size=config.hidden_size,
        q_lora_rank=fields.integer("q_lora_rank"),
        num_heads=fields.integer("index_n_heads"),
        head_dim=head_dim,
        top_k=fields.integer("index_topk"),
        max_len=config.max_model_len,
        interleaved=config.architecture == _GLM5,
    )


def shares_selection(config: ModelConfig, layer: int) -> bool:
    """Whether the layer reuses the previous layer's selection of tokens (GLM-5 and later)."""
    fields, num_layers = config.fields, config.num_hidden_layers
    if layer >= num_layers:
        return False
    name = "indexer_types" if fields.has("indexer_types") else "index_topk_pattern"
    if not fields.has(name):
        offset = fields.integer("index_skip_topk_offset", 2, minimum=0)
        return max(layer - offset + 1, 0) % fields.integer("index_topk_freq", 1) != 0
    pattern = fields.values[name]
    kinds: list[str] = [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    if len(kinds) < num_layers or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise fields.invalid(name, f"{num_layers} times full or shared or more, the first of them full")
    return kinds[layer] == "shared"


def _yarn_scale(config: ModelConfig) -> float:
    """Return YaRN's additional factor of the attention scores; `mscale_all_dim` applies to both queries and keys."""
    scaling = config.fields.section("rope_parameters") or config.fields.section("rope_scaling")
    if scaling is None or config.rope.rope_type == "default" or not scaling.values.get("mscale_all_dim"):
        return 1.0
    if config.rope.factor <= 1:
        return 1.0
    return (0.1 * scaling.number("mscale_all_dim") * math.log(config.rope.factor) + 1.0) ** 2


def is_sparse(fields: Fields, layer: int) -> bool:
    """Whether the layer has experts; layers past the last one, which are for multi-token prediction, have them."""
    if layer >= fields.integer("num_hidden_layers"):
        return True
    kinds = fields.strings("mlp_layer_types")
    if kinds:
        if len(kinds) != fields.integer("num_hidden_layers") or not set(kinds) <= {"dense", "sparse"}:
            raise fields.invalid("mlp_layer_types", "a list of dense or sparse, one per layer")
        return kinds[layer] == "sparse"
    first = fields.integer("first_k_dense_replace", minimum=0)
    return layer >= first and layer % fields.integer("moe_layer_freq", 1) == 0


def _router(config: ModelConfig, num_experts: int) -> GroupedRouter:
    fields = config.fields
    is_v2, is_mistral = config.architecture == _V2, config.architecture == _MISTRAL4
    methods = (_GREEDY, _GROUPED) if is_v2 else (_GREEDY,) if is_mistral else (_CORRECTED,)
    method = fields.string("topk_method", methods[0])
    if method not in methods:
        raise fields.invalid("topk_method", f"{' or '.join(methods)} for {config.architecture}")
    if is_mistral and fields.integer("topk_group") < fields.integer("n_group"):
        # Without a correction bias, our routers judge a group by its best expert, transformers by its two best ones.
        raise fields.invalid("topk_group", "n_group: all groups of experts are eligible")
    scoring: Scoring = "softmax" if is_v2 or is_mistral else "sigmoid"
    if fields.string("scoring_func", scoring) != scoring:
        raise fields.invalid("scoring_func", f"{scoring} for {config.architecture}")
    renormalize = fields.boolean("norm_topk_prob", not is_v2)
    if is_v2 and renormalize:
        # Implementations of V2 disagree on whether the scaling factor applies to normalised weights.
        raise fields.invalid("norm_topk_prob", f"false for {config.architecture}")
    num_groups, top_groups = 1, 1
    if method != _GREEDY:
        num_groups, top_groups = groups_of_experts(fields, num_experts, corrected=not is_v2)
    return GroupedRouter(
        config.hidden_size,
        num_experts,
        experts_per_token(fields, num_experts // num_groups * top_groups),
        renormalize=renormalize,
        scoring=scoring,
        has_correction_bias=method == _CORRECTED,
        num_groups=num_groups,
        top_groups=top_groups,
        scaling_factor=fields.number("routed_scaling_factor"),
    )
