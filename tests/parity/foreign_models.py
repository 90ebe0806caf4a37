"""Models of transformers that have no class here: those that the general route is proven on, and refused ones."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import transformers

from tests.parity.checkpoints import Family, make_checkpoint


class Foreign(NamedTuple):
    """A model by the stem of its names in transformers."""

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
OLMO2 = Foreign("Olmo2")

SERVED = [
    Foreign("Cohere", {"logit_scale": 0.25, "use_qk_norm": True}),
    Foreign("Cohere2", {"sliding_window": 20, "sliding_window_pattern": 2, "num_hidden_layers": 4}),
    Foreign("Ernie4_5"),
    GEMMA2,
    GPT2,
    Foreign("GPTBigCode"),
    Foreign("GPTNeoX", {"rotary_pct": 0.5}),
    Foreign("Granite", {"logits_scaling": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5}),
    Foreign("JetMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
    Foreign("Nemotron"),
    OLMO2,
    Foreign("Olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    Foreign("OPT", {"word_embed_proj_dim": 64, "ffn_dim": 112}),
    Foreign("Phi", {"partial_rotary_factor": 0.5}),
    Foreign("SmolLM3", {"no_rope_layers": [1, 0]}),
    Foreign("StableLm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    Foreign("Starcoder2", {"sliding_window": 24}),
]

_OF_ITS_OWN = "computes no attention through transformers' attention interface"
REFUSED = [
    (Foreign("Bert", head="LMHeadModel"), "masks other tokens"),
    (Foreign("Bloom"), _OF_ITS_OWN),
    (Foreign("DiffLlama"), "several times a token"),
    (Foreign("Doge"), "gives its attention attention_mask"),
    (Foreign("GPTJ", {"rotary_dim": 8}), _OF_ITS_OWN),
    (Foreign("Lfm2", {"layer_types": ["conv", "full_attention"]}), "has layers of conv"),
    (Foreign("Mamba"), "has layers of linear_attention"),
    (Foreign("Mpt", {"attn_config": {"alibi": True}}), "alibi of .* is true"),
]
"""With a part of the sentence."""
