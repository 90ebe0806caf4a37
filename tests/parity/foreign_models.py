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
    config: str = ""
    """The class of its configuration; empty for that of its prefix."""

    @property
    def architecture(self) -> str:
        """Its name in config.json."""
        return f"{self.stem}{self.head}"

    def checkpoint(self, directory: Path, **overrides: Any) -> Path:
        """A small one with random weights."""
        config = getattr(transformers, self.config or f"{self.stem}Config")
        family = Family(config, getattr(transformers, self.architecture))
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

# Attention over convolved queries and keys; half of each value is the previous token's.
ZAYA = Foreign("Zaya", {**_EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 24})
_STATES = [
    ZAYA,
    Foreign("Rwkv", {"context_length": 512, "attention_hidden_size": 64}),
    Foreign("xLSTM", {"num_heads": 4, "embedding_dim": 128, "hidden_size": 128}),
    Foreign(
        "RecurrentGemma",
        {
            "block_types": ["recurrent", "attention"],
            "lru_width": 64,
            "attention_window_size": 20,
            "num_hidden_layers": 3,
        },
    ),
    Foreign(
        "Zamba",
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "num_hidden_layers": 4,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "attention_hidden_size": 128,
            "attention_head_dim": 32,
            "mamba_dt_rank": 8,
        },
    ),
]
"""Models with recurrent states, each of which transformers keeps in another way."""
SERVED += _STATES

_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 48,
}
_SMALL_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
SERVED += [
    # Attention by a method of their own.
    Foreign("CodeGen", {"rotary_dim": 8, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "n_ctx": 512}),
    Foreign(
        "GPTNeo",
        {"attention_types": [[["global", "local"], 1]], "window_size": 20, "num_layers": 2, "num_heads": 4},
    ),
    Foreign("GPTNeoXJapanese"),
    Foreign("OpenAIGPT", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}, head="LMHeadModel"),
    # An attention module that is called several times a token.
    Foreign("DiffLlama"),
    Foreign("HrmText"),
    Foreign("AXK1", {**_MLA, **_ROUTED}),
    Foreign("AXK2", {**_INDEXED, "gated_norm_rank": 8}),
    Foreign("Dots3Note", {**_INDEXED, "shared_experts_intermediate_size": 48}, config="Dots3NoteTextConfig"),
    Foreign(
        "Kolibri1",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 48,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    Foreign("Laguna"),
    Foreign(
        "LongcatFlash",
        {
            **_MLA,
            "num_layers": 1,
            "ffn_hidden_size": 112,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 48,
        },
    ),
    Foreign("Mellum"),
    Foreign("MiniCPM3", _MLA),
    Foreign("ModernBertDecoder", {"bos_token_id": 1, "local_attention": 40}),
    Foreign("Youtu", _MLA),
    Foreign(
        "Dbrx",
        {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        },
    ),
    Foreign(
        "CohereCompass",
        {
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        config="CohereCompassTextConfig",
    ),
    Foreign("BertGeneration", {"is_decoder": True}, head="Decoder"),
    Foreign(
        "Phi4Multimodal",
        {
            "bos_token_id": 1,
            "partial_rotary_factor": 1.0,
            "vision_config": {
                **_SMALL_TOWER,
                "num_hidden_layers": 1,
                "crop_size": 28,
                "image_size": 28,
                "patch_size": 14,
            },
            "audio_config": {
                **_SMALL_TOWER,
                "num_blocks": 1,
                "ext_pw_out_channel": 32,
                "nemo_conv_channels": 32,
                "input_size": 8,
            },
        },
    ),
]

_DECODER = {
    "d_model": 64,
    "is_encoder_decoder": False,
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 112 for part in ("encoder", "decoder")},
}

SERVED += [
    Foreign("Whisper", _DECODER),
    *(Foreign(stem) for stem in ("Afmoe", "AriaText", "Beam", "BioGpt", "BitNet", "Cohere2Moe", "FlexOlmo", "Flint")),
    *(Foreign(stem) for stem in ("Fuyu", "GraniteMoeSWA", "GraniteMoeShared", "GraniteSWA", "Helium", "HyperCLOVAX")),
    *(Foreign(stem) for stem in ("Jais2", "Moshi", "NanoChat", "Olmo", "Persimmon", "VaultGemma")),
    Foreign("CTRL", head="LMHeadModel"),
]

_OF_ITS_OWN = "computes no attention through transformers' attention interface"
REFUSED = [
    (Foreign("Bart"), "takes no position_ids"),
    (Foreign("Bert", head="LMHeadModel"), "not causal"),
    (Foreign("Bloom"), _OF_ITS_OWN),
    (Foreign("Doge"), "an attention_mask of its own"),
    (Foreign("GPTJ", {"rotary_dim": 8}), _OF_ITS_OWN),
    (Foreign("HYV4", _INDEXED), "sinks over selected tokens"),
    (Foreign("Mpt", {"attn_config": {"alibi": True}}), "alibi of .* is true"),
]
"""Refused models, with a part of the error message."""
_INKLING = {
    **_ROUTED,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 20,
}
_BLT = {
    "encoder_hash_byte_group_vocab": 64,
    "encoder_hash_byte_group_nb_functions": 1,
    "encoder_hash_byte_group_size": [3],
    **{
        f"{part}_config": {
            "vocab_size": 307,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 512,
        }
        for part in ("patcher", "encoder", "decoder", "global")
    },
}
_NOT_CAUSAL = ("BigBirdPegasus", "Camembert", "Data2VecText", "Electra", "Ernie", "RoCBert", "Roberta")
_OWN_ATTENTION = ("BigBird", "CpmAnt", "Git", "MegatronBert", "Mvp", "RemBert", "RoFormer", "TrOCR", "XGLM")
ALSO_REFUSED = [
    *((Foreign(stem), "not causal") for stem in (*_NOT_CAUSAL, "RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL")),
    *(
        (Foreign(stem), "takes no position_ids")
        for stem in ("Blenderbot", "BlenderbotSmall", "MBart", "Marian", "Pegasus")
    ),
    *((Foreign(stem), _OF_ITS_OWN) for stem in _OWN_ATTENTION),
    (Foreign("XLM", {"emb_dim": 64, "n_layers": 2, "n_heads": 4}, head="WithLMHeadModel"), _OF_ITS_OWN),
    (
        Foreign(
            "Reformer",
            {"is_decoder": True, "attn_layers": ["local"], "axial_pos_embds": False},
            head="ModelWithLMHead",
        ),
        _OF_ITS_OWN,
    ),
    (Foreign("PLBart", _DECODER), "takes no position_ids"),
    (Foreign("Xmod", {"is_decoder": True, "default_language": "en_XX"}), "counts positions from pad_token_id"),
    (Foreign("Inkling", _INKLING, config="InklingTextConfig"), "gives its attention position_bias"),
    (Foreign("Inkling2", _INKLING, config="Inkling2TextConfig"), "gives its attention position_bias and sinks"),
    (
        Foreign(
            "Qwen4Exp",
            {
                **_EXPERTS,
                **{f"linear_num_{part}_heads": 2 for part in ("key", "value")},
                **{f"linear_{part}_head_dim": 16 for part in ("key", "value")},
                "shared_expert_intermediate_size": 48,
                "hc_lowrank": 16,
                "indexer_n_heads": 4,
                "indexer_kv_heads": 1,
                "indexer_head_dim": 16,
                "indexer_budget": 16,
                "indexer_compress_ratio": 4,
                "layer_types": ["linear_attention", "indexed_attention"],
            },
            config="Qwen4ExpTextConfig",
        ),
        "recurrent states and an indexer",
    ),
    (Foreign("Emu3", {"bos_token_id": 1}, config="Emu3TextConfig"), "must be a causal language model"),
    (Foreign("Mllama", {"bos_token_id": 1}, config="MllamaTextConfig"), "must be a causal language model"),
    (Foreign("Blt", _BLT), "not causal"),
]
"""More of them, in the long form."""
REFUSED_CONFIGS = {
    "gemma4_assistant": ("Gemma4AssistantForCausalLM", "a drafter that reads hidden states"),
    "gemma4_unified_assistant": ("Gemma4UnifiedAssistantForCausalLM", "a drafter that reads hidden states"),
    "musicgen": ("MusicgenForCausalLM", "is an encoder and a decoder"),
    "musicgen_melody": ("MusicgenMelodyForCausalLM", "is an encoder and a decoder"),
    "prophetnet": ("ProphetNetForCausalLM", "is an encoder and a decoder"),
    "xlnet": ("XLNetLMHeadModel", "max_position_embeddings of .* is -1"),
}
"""Models that are refused by their configuration: by type, the architecture and a part of the error message."""
