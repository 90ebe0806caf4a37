"""Options of architectures that hardly any published checkpoint has, compared with transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.config.defaults import has_own_head
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, Row, assert_computes, prompt
from tests.parity.variants import all_variants

_OPTIONS: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"hidden_act": "gelu"},
    "BambaForCausalLM": {"hidden_act": "relu", "mamba_conv_bias": None},
    "BloomForCausalLM": {"apply_residual_connection_post_layernorm": True},
    "CwmForCausalLM": {"mlp_bias": True},
    "DeepseekV2ForCausalLM": {"mlp_bias": True},
    "DeepseekV3ForCausalLM": {"norm_topk_prob": None, "rope_interleave": None},
    "DeepseekV4ForCausalLM": {"hidden_act": "gelu", "swiglu_limit": 0.5},
    "Ernie4_5_MoeForCausalLM": {"use_bias": True},
    "FalconForCausalLM": {"parallel_attn": None},
    "FalconH1ForCausalLM": {"hidden_act": "gelu"},
    "FalconMambaForCausalLM": {"hidden_act": "gelu_pytorch_tanh"},
    "GemmaForCausalLM": {"hidden_act": "gelu_python"},
    "Glm5NextForCausalLM": {"hidden_act": "relu", "swiglu_limit": 0.5},
    "GraniteMoeHybridForCausalLM": {"hidden_act": "gelu", "mamba_d_conv": 1},
    "JambaForCausalLM": {"hidden_act": "gelu", "mamba_d_conv": 1},
    "KimiLinearForCausalLM": {"hidden_act": "gelu"},
    "Mamba2ForCausalLM": {"hidden_act": "gelu"},
    "Lfm2ForCausalLM": {"conv_L_cache": 1},
    "Llama4ForCausalLM": {"num_experts_per_tok": 2},
    "LlamaForCausalLM": {"rms_norm_eps": 0.0, "hidden_act": "gelu_python_tanh"},
    "LlamaForCausalLM, exact GELU": {"hidden_act": "gelu_python"},
    "MambaForCausalLM": {"hidden_act": "relu"},
    "MiniMaxForCausalLM": {"hidden_act": "gelu"},
    "MiniMaxForCausalLM, window": {"sliding_window": 9},
    "NemotronHForCausalLM": {"mlp_hidden_act": "gelu", "mamba_hidden_act": "gelu_pytorch_tanh"},
    "OlmoHybridForCausalLM": {"hidden_act": "gelu"},
    "OlmoeForCausalLM": {"clip_qkv": 0.7},
    "PhimoeForCausalLM": {"router_jitter_noise": 0.0},
    "Qwen3NextForCausalLM": {"hidden_act": "gelu"},
    "Qwen3_5ForCausalLM": {"hidden_act": "gelu"},
    "Qwen3_5MoeForCausalLM": {"hidden_act": "relu"},
}
_QUICK = ("NemotronHForCausalLM", "Qwen3_5ForCausalLM")


@pytest.mark.parametrize(
    "option", [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in _OPTIONS]
)
def test_a_rare_option_is_computed_as_transformers_does(option: str, tmp_path: Path) -> None:
    variant = next(each for each in all_variants() if each.architecture == option.partition(",")[0])
    plain, path = tmp_path / "plain", tmp_path / "option"
    make_checkpoint(plain, variant.family, **variant.overrides)
    make_checkpoint(path, variant.family, **{**variant.overrides, **_OPTIONS[option]})
    reference, model, tokens = Reference(path), PagedModel(path, model_impl="kaon"), prompt(40)
    assert not torch.allclose(reference.logits(tokens), Reference(plain).logits(tokens), atol=1e-3)
    assert_computes(reference, tokens, model.logits(tokens))
    row = Row(tokens)
    parts = [*model.step([(row, 23)]), *model.step([(row, 15)])]
    parts += [*model.step([(row, 1)], num_decodes=1), *model.step([(row, 1)], num_decodes=1)]
    assert_computes(reference, tokens, torch.cat(parts))


_IGNORED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_local_experts": 3, "rope_interleave": False},
    "DeepseekV32ForCausalLM": {"rope_interleave": False},
    "DeepseekV3ForCausalLM": {"num_experts": 3},
    "Exaone4ForCausalLM": {"attention_bias": True},
    "GlmMoeDsaForCausalLM": {"rope_interleave": False, "indexer_rope_interleave": False},
    "Gemma4ForCausalLM": {"partial_rotary_factor": 0.5},
    "HYV3ForCausalLM": {"n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    "Lfm2ForCausalLM": {"hidden_act": "relu"},
    "Lfm2MoeForCausalLM": {"hidden_act": "relu"},
    "Lfm3ForCausalLM": {"hidden_act": "relu"},
    "MiniMaxM2ForCausalLM": {"attention_bias": True},
    "Ministral3ForCausalLM, queries that grow early, window, tied": {
        "layer_types": ["full_attention", "sliding_attention"]
    },
    "MistralForCausalLM": {"attention_bias": True, "use_sliding_window": True},
    "MixtralForCausalLM, sliding window": {"attention_bias": True, "use_sliding_window": True},
    "Phi3ForCausalLM": {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True},
    "Qwen2ForCausalLM": {"attention_bias": False},
    "Qwen3_5MoeForCausalLM": {"norm_topk_prob": False},
    "Starcoder2ForCausalLM": {"layer_types": ["full_attention", "sliding_attention"]},
}
_NULL = {
    "Ernie4_5ForCausalLM": "head_dim",
    "GraniteMoeForCausalLM": "attention_multiplier",
    "GraniteMoeHybridForCausalLM": "attention_multiplier",
    "KimiLinearForCausalLM": "moe_renormalize",
    "SeedOssForCausalLM": "head_dim",
}


@pytest.mark.parametrize(
    ("option", "fields"),
    [
        pytest.param(option, fields, marks=() if option == "Phi3ForCausalLM" else pytest.mark.slow)
        for option, fields in [*_IGNORED.items(), *((each, {name: None}) for each, name in _NULL.items())]
    ],
)
def test_fields_of_a_file_have_the_meaning_that_they_have_for_transformers(
    option: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    architecture, _, name = option.partition(", ")
    variant = next(each for each in all_variants() if each.architecture == architecture and name in ("", each.name))
    path, tokens = make_checkpoint(tmp_path, variant.family, **variant.overrides), prompt(40)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))
    assert_computes(Reference(path), tokens, PagedModel(path, model_impl="kaon").logits(tokens))


_OTHER_NAMES = {
    "DeepseekV3ForCausalLM": ("n_routed_experts", "num_local_experts"),
    "Dots1ForCausalLM": ("n_routed_experts", "num_local_experts"),
    "Ernie4_5_MoeForCausalLM": ("moe_k", "num_experts_per_tok"),
    "Glm4MoeForCausalLM": ("n_routed_experts", "num_local_experts"),
    "GlmMoeDsaForCausalLM": ("n_routed_experts", "num_experts"),
    "GptOssForCausalLM": ("num_local_experts", "num_experts"),
    "HunYuanMoEV1ForCausalLM": ("moe_topk", "num_experts_per_tok"),
    "MiniMaxM2ForCausalLM": ("num_local_experts", "num_experts"),
    "MixtralForCausalLM": ("num_local_experts", "num_experts"),
    "OlmoeForCausalLM": ("num_experts", "num_local_experts"),
}


@pytest.mark.parametrize("shard", [b"\xff" * 16, (2).to_bytes(8, "little") + b"[]", (1 << 45).to_bytes(8, "little")])
def test_a_damaged_head_counts_as_none_until_it_is_loaded(shard: bytes, tmp_path: Path) -> None:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "a.safetensors").write_bytes(shard)
    assert not has_own_head(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", _OTHER_NAMES)
def test_a_field_may_have_the_other_name_that_transformers_reads(architecture: str, tmp_path: Path) -> None:
    variant = next(each for each in all_variants() if each.architecture == architecture)
    path, tokens = make_checkpoint(tmp_path, variant.family, **variant.overrides), prompt(20)
    name, other = _OTHER_NAMES[architecture]
    edit_json(path / "config.json", **{name: None, other: json.loads((path / "config.json").read_text())[name]})
    assert_computes(Reference(path), tokens, PagedModel(path, model_impl="kaon").logits(tokens))


@pytest.mark.parametrize(
    ("head", "dtype", "is_own"),
    [
        ("the same", torch.bfloat16, False),
        ("one number differs", torch.bfloat16, True),
        ("the same", torch.float32, False),
        ("one number differs", torch.float32, True),
        ("the same bytes", torch.float16, True),
        ("the same bytes", torch.int8, True),
    ],
)
def test_a_head_is_its_own_if_a_number_differs_whatever_the_types(
    head: str, dtype: torch.dtype, is_own: bool, tmp_path: Path
) -> None:
    embedding = torch.randn(2100, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    own = embedding.view(dtype)[:, :512].clone() if head == "the same bytes" else embedding.to(dtype, copy=True)
    own[-1, -1] += head == "one number differs"
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": own}, tmp_path / "model.safetensors")
    assert has_own_head(tmp_path) is is_own


@pytest.mark.parametrize("max_shard_size", ["1GB", "80KB"])
def test_a_head_is_not_tied_to_an_embedding_that_differs(max_shard_size: str, tmp_path: Path) -> None:
    path, tokens = make_checkpoint(tmp_path / "own", max_shard_size=max_shard_size), prompt(20)
    edit_json(path / "config.json", tie_word_embeddings=True)
    model = PagedModel(path)
    assert not model.config.tie_word_embeddings
    assert_computes(Reference(path), tokens, model.logits(tokens))
