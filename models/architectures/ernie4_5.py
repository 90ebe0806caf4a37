"""Ernie 4.5: Llama with rotation of adjacent pairs; dense or with experts."""

from typing import ClassVar

from torch import nn

from models.architectures.config import ModelConfig
from models.architectures.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from models.architectures.registry import ConfigFacts, architecture
from models.config.fields import Fields
from models.layers.moe import FusedMoE, SparseMoE
from models.layers.routing import GroupedRouter
from models.ops.activation import gated_activation
from models.parallel.tensor_parallel import TensorParallel


class Ernie4_5Attention(LlamaAttention):
    """Grouped-query attention whose heads are rotated as adjacent pairs."""

    rotates_pairs: ClassVar[bool] = True


_LEAST_SUM = 1e-6
_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True}


@architecture(
    "Ernie4_5ForCausalLM", ConfigFacts(absent={"head_dim": 128}, defaults=_DEFAULTS, biases_field="use_bias")
)
class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """Ernie 4.5 with its language-model head."""

    attention: ClassVar[type[nn.Module]] = Ernie4_5Attention


_MOE_FACTS = ConfigFacts(
    defaults={**_DEFAULTS, "moe_k": 6},
    renamed={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    biases_field="use_bias",
)


@architecture("Ernie4_5_MoeForCausalLM", _MOE_FACTS)
class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """Ernie 4.5 with experts, with its language-model head."""

    @staticmethod
    def head_bias(config: ModelConfig) -> bool:
        """Whether the logits have a bias."""
        return config.attention_bias

    @staticmethod
    def feed_forward(config: ModelConfig, layer: int, parallel: TensorParallel) -> nn.Module:
        """Routed and shared experts; some layers have a dense network instead."""
        fields = config.fields
        if not _is_sparse(fields, layer, config.num_hidden_layers):
            return LlamaMLP(config, parallel)
        num_experts, size = fields.integer("moe_num_experts"), fields.integer("moe_intermediate_size")
        top_k = fields.integer("moe_k")
        if top_k > num_experts:
            raise fields.invalid("moe_k", f"at most moe_num_experts, {num_experts}")
        if fields.number("moe_norm_min", 1e-12, may_be_zero=True) > _LEAST_SUM:
            raise fields.invalid("moe_norm_min", f"at most {_LEAST_SUM:g}: sums of weights are not limited")
        gate = GroupedRouter(
            config.hidden_size,
            num_experts,
            top_k,
            renormalize=True,
            scoring="softmax",
            correction_name="moe_statics.e_score_correction_bias",
        )
        num_shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
        shared = None
        if num_shared:
            shared = LlamaMLP(config, parallel, intermediate_size=size * num_shared, reduces=False)
        activation = gated_activation(config.activation)
        experts = FusedMoE(config.hidden_size, size, num_experts, activation=activation, parallel=parallel)
        return SparseMoE(gate, experts, shared)


def _is_sparse(fields: Fields, layer: int, num_layers: int) -> bool:
    """Whether the layer has experts: each `moe_layer_interval`-th one from the start to the end index (-1: the
    last)."""
    last = fields.integer("moe_layer_end_index", -1, minimum=-1)
    first = fields.integer("moe_layer_start_index", 1, minimum=0)
    is_due = (layer + 1) % fields.integer("moe_layer_interval", 1) == 0
    return is_due and first <= layer <= (num_layers - 1 if last < 0 else last)
