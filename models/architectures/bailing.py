"""Ling 3.0: Kimi Linear's delta rule with a bounded decay, latent attention with gated heads, and experts."""

import json
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.deepseek_v2 import DeepseekV2ForCausalLM
from models.architectures.kimi_linear import RENAMED, KimiLatentAttention, KimiLinearForCausalLM
from models.architectures.llama import DecoderBody
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.delta_rule import DeltaMixer, DeltaShape
from models.layers.linear import ColumnParallelLinear
from models.layers.mla import MLAAttention
from models.layers.norm import RMSNorm
from models.ops.activation import gate_heads
from models.parallel.tensor_parallel import TensorParallel

_NAMES = MappingProxyType(
    {
        ".attention.": ".self_attn.",
        ".self_attn.dense": ".self_attn.o_proj",
        ".forget_gate.": ".",
        ".gate.expert_bias": ".gate.e_score_correction_bias",
        "model.word_embeddings.": "model.embed_tokens.",
    }
)
"""Parts of module names in published checkpoints and in transformers' adapters -> the model's."""


class BailingDeltaAttention(DeltaMixer):
    """The delta rule with a decay for each dimension of a key, which has a lower bound."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        fields, size = config.fields, config.hidden_size
        heads, dim = config.num_attention_heads, fields.integer("linear_head_dim")
        taps = fields.integer("short_conv_kernel_size", minimum=2)
        bound = _bound(fields) if fields.boolean("kda_safe_gate", True) else 0.0
        shape = DeltaShape(
            size, heads, heads, dim, dim, taps, decays=dim, most=1.0, bound=bound, activation=config.activation
        )
        super().__init__(f"model.layers.{layer}.self_attn", shape, parallel)
        self.f_proj = ColumnParallelLinear(size, heads * dim, parallel=parallel)
        self.g_proj = ColumnParallelLinear(size, heads * dim, parallel=parallel)
        self.b_proj = ColumnParallelLinear(size, heads, parallel=parallel)
        self.o_norm = RMSNorm(dim, config.rms_norm_eps)

    def gates(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `DeltaMixer`."""
        return self.f_proj(hidden), self.b_proj(hidden), self.g_proj(hidden)

    def gated(self, read: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """See `DeltaMixer`."""
        by_head = len(read), self.heads, self.shape.value_dim
        return gate_heads(self.o_norm(read.view(by_head)), gate.view(by_head)).view(len(read), -1)


class BailingLatentAttention(KimiLatentAttention):
    """Latent attention whose heads have output gates."""

    def __init__(self, config: ModelConfig, layer: int, parallel: TensorParallel) -> None:
        super().__init__(config, layer, parallel)
        self.g_proj = ColumnParallelLinear(config.hidden_size, config.num_attention_heads, parallel=parallel)

    def gated(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """See `MLAAttention`."""
        return gate_heads(attended, self.g_proj(hidden))


def _bound(fields: Fields) -> float:
    bound = fields.values.get("kda_lower_bound", -5.0)
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e3 <= bound < 0:
        raise fields.invalid("kda_lower_bound", "a number below 0 and at least -1000")
    return -float(bound)


def _complete(fields: Fields) -> Fields:
    """Add the kinds of layers, and the size of the delta rule's heads, which published configs have in `head_dim`."""
    values = dict(fields.values)
    values.setdefault("linear_head_dim", fields.integer("head_dim", 128))
    if not fields.has("layer_types"):
        group = fields.integer("layer_group_size", 6)
        layers = range(fields.integer("num_hidden_layers"))
        values["layer_types"] = ["linear_attention" if (layer + 1) % group else "full_attention" for layer in layers]
    # transformers' classes ignore these fields: queries have no latent, and the head is never tied.
    values |= {"q_lora_rank": None, "rope_interleave": True, "tie_word_embeddings": False}
    if fields.has(_OF_AUTHORS):
        values |= _as_authors(fields)
    return Fields(values, fields.where)


_OF_AUTHORS = "gated_attention_proj_granularity_type"
"""A field of published configs, which name the class of the authors' code (`BailingMoeV3ForCausalLM`)."""
_WANTED = {_OF_AUTHORS: "head_wise", "no_kda_lora": True, "num_kv_heads_for_linear_attn": 0}
"""Fields of published configs with the only values that all published models have."""
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _as_authors(fields: Fields) -> dict[str, Any]:
    """Return the fields that the authors' code reads in another way than transformers' class.

    Queries may have a latent, all of `qk_rope_head_dim` is rotated whatever `partial_rotary_factor` is, and layers
    past the last whole group attend.
    """
    for name, wanted in _WANTED.items():
        if fields.values.get(name, wanted) != wanted:
            raise fields.invalid(name, f"{json.dumps(wanted)}, as in all published checkpoints")
    for name in _LIMITS:
        limits = fields.values.get(name)
        if any(limits) if isinstance(limits, list) else limits:
            raise fields.invalid(name, "null or zeros: activations are not limited")
    width = fields.integer("moe_intermediate_size")
    if fields.integer("moe_shared_expert_intermediate_size", width) != width:
        raise fields.invalid("moe_shared_expert_intermediate_size", f"moe_intermediate_size, {width}")
    found: dict[str, Any] = {"q_lora_rank": fields.values.get("q_lora_rank"), "partial_rotary_factor": None}
    for name in ("rope_parameters", "rope_scaling"):
        section = fields.section(name)
        if section is not None:
            found[name] = {key: value for key, value in section.values.items() if key != "partial_rotary_factor"}
    if not fields.has("layer_types"):
        group, count = fields.integer("layer_group_size", 6), fields.integer("num_hidden_layers")
        attends = [(layer + 1) % group == 0 or layer >= count // group * group for layer in range(count)]
        found["layer_types"] = ["full_attention" if each else "linear_attention" for each in attends]
    return found


@architecture(
    "BailingHybridForCausalLM",
    ConfigFacts(
        defaults={
            "first_k_dense_replace": 2,
            "n_group": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-6,
            "rope_theta": 6e6,
            "routed_scaling_factor": 2.5,
            "short_conv_kernel_size": 4,
            "topk_group": 4,
        },
        complete=_complete,
        renamed=RENAMED,
        head_dim_field="qk_rope_head_dim",
        layer_kinds=frozenset({"linear_attention"}),
        names=_NAMES,
    ),
)
class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Ling 3.0 with its language-model head."""

    renamed_parts: ClassVar[MappingProxyType[str, str]] = _NAMES
    caching: ClassVar[tuple[type[nn.Module], ...]] = (MLAAttention, BailingDeltaAttention)
    attention: ClassVar[type[nn.Module]] = BailingLatentAttention
    delta_attention: ClassVar[type[nn.Module]] = BailingDeltaAttention
    feed_forward = staticmethod(DeepseekV2ForCausalLM.feed_forward)

    def body(self, config: ModelConfig, parallel: TensorParallel) -> DecoderBody:
        """The body of the model: all modules except the head."""
        return self.hybrid_body(config, parallel)
