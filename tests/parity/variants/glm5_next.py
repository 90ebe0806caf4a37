"""The text part of GLM-5.3-Flash, of which transformers has no causal language model."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.glm5_next import Glm5NextPreTrainedModel, Glm5NextTextConfig, Glm5NextTextModel

from tests.parity.checkpoints import Family
from tests.parity.variants import Variant


class Glm5NextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    """transformers' text model with a head."""

    config: Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: Glm5NextTextConfig) -> None:
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, position_ids: Any = None, **kwargs: Any) -> CausalLMOutputWithPast:
        output = self.model(input_ids, position_ids=position_ids, **kwargs)
        return CausalLMOutputWithPast(
            logits=self.lm_head(output.last_hidden_state), past_key_values=output.past_key_values
        )


AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextForCausalLM, exist_ok=True)

_LINEAR, _INDEXED = "linear_attention", "indexed_attention"
# With few heads, many pools score exactly 0 in the indexer, and which of them are selected is not defined.
_GLM = Family(
    Glm5NextTextConfig,
    Glm5NextForCausalLM,
    {
        "num_hidden_layers": 3,
        "layer_types": [_LINEAR, _INDEXED, _INDEXED],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared"],
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "v_head_dim": 20,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "index_topk": 16,
        "index_kpool": 4,
        "index_n_heads": 16,
        "index_head_dim": 24,
        "hc_sinkhorn_iters": 5,
        "swiglu_limit": 3.0,
    },
)

VARIANTS = [
    Variant("Glm5NextForCausalLM", "four pools of four tokens, one layer shares the selection", _GLM, {}),
    Variant(
        "Glm5NextForCausalLM",
        "pools of five tokens, three streams, decays without a bound, groups of experts, biases, tied",
        _GLM,
        {
            "layer_types": [_INDEXED, _LINEAR, _INDEXED],
            "indexer_types": ["full"] * 3,
            "mlp_layer_types": ["sparse"] * 3,
            "hc_mult": 3,
            "index_kpool": 5,
            "index_topk": 15,
            "index_head_dim": 8,
            "linear_lower_bound": None,
            "linear_conv_kernel_dim": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "Glm5NextForCausalLM",
        "pools larger than the cache's blocks, all selected, six heads of 12, wide states, layers by their order",
        _GLM,
        {
            "num_hidden_layers": 4,
            "layer_types": None,
            "mlp_layer_types": None,
            "indexer_types": None,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "qk_nope_head_dim": 12,
            "linear_num_heads": 3,
            "linear_head_dim": 32,
            "index_kpool": 20,
            "index_topk": 160,
            "num_experts_per_tok": 6,
            "norm_topk_prob": False,
        },
    ),
    Variant(
        "Glm5NextForCausalLM",
        "two pools of 16 tokens, as many as the cache's blocks have",
        _GLM,
        {"index_kpool": 16, "index_topk": 32},
    ),
]
