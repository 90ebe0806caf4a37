"""Models of transformers that have no class here: those that test the general route, and refused ones."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers

from tests.parity.checkpoints import Family, make_checkpoint


class Foreign(NamedTuple):
    """A model by the prefix of its names in transformers."""

    stem: str
    overrides: Mapping[str, Any] = MappingProxyType({})
    head: str = "ForCausalLM"

    @property
    def architecture(self) -> str:
        """Its name in config.json."""
        return f"{self.stem}{self.head}"

    def checkpoint(self, directory: Path, **overrides: Any) -> Path:
        """A small one with random weights."""
        family = Family(getattr(transformers, f"{self.stem}Config"), getattr(transformers, self.architecture))
        return make_checkpoint(directory, family, **{**self.overrides, **overrides})


GPT2 = Foreign("GPT2", head="LMHeadModel")
GEMMA2 = Foreign("Gemma2", {"sliding_window": 20, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0})
APERTUS = Foreign("Apertus")

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_INDEXED = {
    **_MLA,
    "index_n_heads": 16,
    "index_head_dim": 24,
    "index_topk": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
}

# A model with a class here, which the tests run by the general route as well.
GLM_MOE_DSA = Foreign("GlmMoeDsa", {**_INDEXED, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"]})

SERVED = [
    APERTUS,
    Foreign("Arcee"),
    Foreign("Cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    Foreign("Cohere2", {"sliding_window": 20, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    Foreign("Dots1", {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    Foreign("Exaone4", {"sliding_window": 20, "sliding_window_pattern": 4, "num_hidden_layers": 4}),
    GEMMA2,
    Foreign("Glm4"),
    GPT2,
    Foreign("GPTBigCode"),
    Foreign("GPTNeoX", {"rotary_pct": 0.5}),
    Foreign("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    Foreign("GraniteMoe", _EXPERTS),
    Foreign("HunYuanDenseV1"),
    Foreign("JetMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
    Foreign(
        "MiMoV2Flash",
        {
            **_EXPERTS,
            "n_group": 1,
            "topk_group": 1,
            "v_head_dim": 16,
            "sliding_window": 20,
            "attention_value_scale": 0.7,
        },
    ),
    Foreign("Nemotron"),
    Foreign("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    Foreign("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 112}),
    Foreign("Phi", {"partial_rotary_factor": 0.5}),
    # Its sliding window is in its masks only.
    Foreign("Phimoe", {**_EXPERTS, "sliding_window": 20}),
    # It makes masks of a sliding window that no layer uses.
    Foreign("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 48}),
    Foreign(
        "SolarOpen",
        {
            **_EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    Foreign("StableLm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    Foreign("Starcoder2", {"sliding_window": 24}),
]

COMPARED = [
    *(Foreign(stem) for stem in ("Afmoe", "AriaText", "Beam", "BioGpt", "BitNet", "Cohere2Moe", "FlexOlmo", "Flint")),
    *(Foreign(stem) for stem in ("Fuyu", "GraniteMoeSWA", "GraniteMoeShared", "GraniteSWA", "Helium", "HyperCLOVAX")),
    *(Foreign(stem) for stem in ("Jais2", "Moshi", "NanoChat", "Olmo", "Persimmon", "VaultGemma")),
    Foreign("CTRL", head="LMHeadModel"),
]
"""Models of the general route of which only prompts are compared."""

_OF_ITS_OWN = "computes no attention through transformers' attention interface"
REFUSED = [
    (Foreign("Bamba"), "has layers of linear_attention"),
    (Foreign("Bart"), "takes no position_ids"),
    (Foreign("Bert", head="LMHeadModel"), "not causal"),
    (Foreign("Bloom"), _OF_ITS_OWN),
    (Foreign("DiffLlama"), "several times a token"),
    (Foreign("Doge"), "an attention_mask of its own"),
    (Foreign("GPTJ", {"rotary_dim": 8}), _OF_ITS_OWN),
    (Foreign("Lfm2", {"layer_types": ["conv", "full_attention"]}), "has layers of conv"),
    (Foreign("HYV4", _INDEXED), "sinks over selected tokens"),
    (Foreign("Jamba"), "has layers of linear_attention"),
    (Foreign("Mamba"), "has layers of linear_attention"),
    (Foreign("Mpt", {"attn_config": {"alibi": True}}), "alibi of .* is true"),
]
"""Refused models, with a part of the error message."""
_NOT_CAUSAL = ("BigBirdPegasus", "Camembert", "Data2VecText", "Electra", "Ernie", "RoCBert", "Roberta")
_OWN_ATTENTION = ("BigBird", "CpmAnt", "GPTNeoXJapanese", "Git", "MegatronBert", "Mvp", "RemBert", "RoFormer", "Rwkv")
ALSO_REFUSED = [
    *((Foreign(stem), "not causal") for stem in (*_NOT_CAUSAL, "RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL")),
    *(
        (Foreign(stem), "takes no position_ids")
        for stem in ("Blenderbot", "BlenderbotSmall", "MBart", "Marian", "Pegasus")
    ),
    *((Foreign(stem), _OF_ITS_OWN) for stem in (*_OWN_ATTENTION, "TrOCR", "XGLM", "xLSTM")),
    (Foreign("OpenAIGPT", head="LMHeadModel"), _OF_ITS_OWN),
    (Foreign("HrmText"), "several times a token"),
    (Foreign("RecurrentGemma"), "has layers of linear_attention"),
    (Foreign("Zaya"), "has layers of hybrid"),
]
"""More of them, in the long form: each is refused for a reason that one of `REFUSED` has."""
