"""config.json and generation_config.json become a `ModelConfig`, or a sentence that names file, field and value."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from models.architectures.config import ModelConfig
from models.architectures.registry import ARCHITECTURES
from models.config.rope import RopeContext
from models.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
_LINEAR = {"rope_type": "linear", "factor": 2.0}


def parse(path: Path, generation: dict[str, Any] | None = None, **fields: Any) -> ModelConfig:
    config = {**LLAMA, "num_key_value_heads": fields.get("num_attention_heads", 4), **fields}
    (path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_checkpoint(path)


def refusal(path: Path, generation: dict[str, Any] | None = None, **fields: Any) -> str:
    with pytest.raises(CheckpointError) as error:
        parse(path, generation, **fields)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_optional_fields_take_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = parse(tmp_path, num_key_value_heads=..., max_position_embeddings=..., rms_norm_eps=...)
    assert config.num_key_value_heads == 4
    assert (config.max_model_len, config.rms_norm_eps) == (2048, 1e-6)
    assert config.head_dim == 16
    assert config.rope.theta == 10000.0
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (False, False, False)
    assert config.dtype == "float32"
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_null_means_missing(tmp_path: Path) -> None:
    assert parse(tmp_path, head_dim=None, num_key_value_heads=None, rope_scaling=None).head_dim == 16


def test_qwen3_heads_have_128_dimensions_by_default(tmp_path: Path) -> None:
    assert parse(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128
    assert parse(tmp_path, architectures=["Qwen3ForCausalLM"], head_dim=32).head_dim == 32


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_the_type_is_read_in_both_spellings(tmp_path: Path, name: str, value: str) -> None:
    assert parse(tmp_path, **{name: value}).dtype == "bfloat16"


def test_the_generation_config_names_the_tokens_first(tmp_path: Path) -> None:
    generation = {"eos_token_id": [7, 2, 7], "bos_token_id": 5}
    config = parse(tmp_path, generation, eos_token_id=2, bos_token_id=1)
    assert (config.bos_token_id, config.eos_token_ids) == (5, (7, 2))


def test_the_config_names_the_tokens_that_the_generation_config_does_not(tmp_path: Path) -> None:
    config = parse(tmp_path, {"temperature": 0.6}, eos_token_id=[2, 3], bos_token_id=1)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 3))


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096),
        ({"rope_type": "linear", "factor": 2.0}, 2048),
    ],
)
def test_the_context_is_what_the_rope_is_scaled_to(tmp_path: Path, rope: dict[str, Any], expected: int) -> None:
    assert parse(tmp_path, rope_scaling=rope).max_model_len == expected


@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_an_older_rope_scaling_next_to_rope_parameters_counts(tmp_path: Path, name: str) -> None:
    # transformers 5 saves rope_parameters, and published instructions for longer contexts say rope_scaling.
    saved = {"rope_type": "default", "rope_theta": 5e6}
    scaled = {name: "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    rope = parse(tmp_path, rope_parameters=saved, rope_scaling=scaled).rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("yarn", 5e6, 4.0)
    assert parse(tmp_path, rope_parameters=saved, rope_scaling=saved).rope.rope_type == "default"
    assert "rope_scaling" in refusal(
        tmp_path, rope_parameters={"full_attention": saved, "sliding_attention": saved}, rope_scaling=scaled
    )


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5, "beta_fast": 16.0, "truncate": False},
    ],
    ids=["llama3", "yarn"],
)
def test_an_older_rope_scaling_replaces_the_saved_scaling(tmp_path: Path, scaling: dict[str, Any]) -> None:
    kept = {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}
    instructed = {"rope_type": "yarn", "factor": 4.0}
    saved = {**kept, **scaling, "original_max_position_embeddings": 512}
    rope = parse(tmp_path, rope_parameters=saved, rope_scaling=instructed).rope
    assert rope == parse(tmp_path, rope_parameters={**kept, **instructed}).rope


def test_a_dynamic_rope_serves_its_original_context_unless_more_is_asked_for(tmp_path: Path) -> None:
    config = parse(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert (config.default_max_len, config.max_model_len) == (2048, 4096)
    assert (config.rope_context(2048), config.rope_context(2049)) == (None, RopeContext(2048, grows=True))
    yarn = parse(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024})
    assert (yarn.default_max_len, yarn.rope_context(4096)) == (4096, None)


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
    ],
)
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    assert f"config.json has no {name}" in refusal(tmp_path, **{name: ...})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vocab_size": 0}, "vocab_size of"),
        ({"hidden_size": "64"}, 'is "64"; it must be an integer from 1 to 2147483647'),
        ({"vocab_size": 2**31}, "is 2147483648; it must be an integer from 1 to 2147483647"),
        ({"max_position_embeddings": 1}, "is 1; it must be an integer from 2 to 2147483647"),
        ({"num_hidden_layers": True}, "is true; it must be an integer"),
        ({"rms_norm_eps": -1}, "is -1; it must be a number from 0"),
        ({"rms_norm_eps": float("nan")}, "is NaN; it must be a number from 0"),
        ({"num_key_value_heads": 3}, "is 3; it must be a divisor of num_attention_heads, 4"),
        ({"num_attention_heads": 7}, "is 7; it must be a divisor of hidden_size, 64"),
        ({"attention_bias": 1}, "is 1; it must be true or false"),
        ({"dtype": "int8"}, 'is "int8"; it must be one of float32, bfloat16, float16'),
        ({"is_causal": False}, "is false; it must be true: a generated token sees only earlier ones"),
        ({"hidden_act": "mish"}, 'is "mish"; it must be one of silu, swish, gelu, gelu_new'),
        ({"eos_token_id": -1}, "is -1; it must be a token id"),
        ({"eos_token_id": 2**31}, "is 2147483648; it must be a token id"),
        ({"rope_theta": 10**400}, "it must be a number above 0 and at most 1e+18"),
        (
            {"partial_rotary_factor": 1e308, "rope_scaling": _LINEAR},
            "is 1e+308; it must be a number above 0 and at most 1e+18",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 1e308}}, "is 1e+308; it must be a number above 0"),
        ({"layer_types": 3}, "layer_types of"),
        ({"head_dim": 15}, "rotates 15 dimensions of a head"),
        ({"partial_rotary_factor": 1.5, "rope_scaling": _LINEAR}, "rotates 24 dimensions of a head"),
        ({"rope_theta": 0.5}, "is 0.5; it must be a number above 1"),
        ({"rope_scaling": "linear"}, "rope_scaling of"),
        ({"rope_scaling": {"rope_type": "spiral"}}, 'is "spiral"; it must be one of default, linear, dynamic, yarn'),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling of"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor of rope_scaling of",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 2}},
            "it must be at least low_freq_factor, 4",
        ),
    ],
)
def test_an_invalid_field_is_named_with_its_value(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert said in refusal(tmp_path, **fields)


def test_an_invalid_generation_config_is_named(tmp_path: Path) -> None:
    assert "generation_config.json is" in refusal(tmp_path, {"eos_token_id": "stop"})


@pytest.mark.parametrize("architectures", [["GPT2LMHeadModel"], [], ..., "LlamaForCausalLM", [3]])
def test_an_unknown_architecture_is_refused_with_the_supported_ones(tmp_path: Path, architectures: Any) -> None:
    assert ", ".join(ARCHITECTURES) in refusal(tmp_path, architectures=architectures)


def test_an_unknown_quantisation_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    message = refusal(tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "quant_method of quantization_config of" in message
    assert 'is "bitsandbytes"; it must be one of fp8,' in message


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": 512}, (512, 512, 512)),
        ("MistralForCausalLM", {"sliding_window": None}, (None, None, None)),
        ("MistralForCausalLM", {}, (4096, 4096)),
        ("LlamaForCausalLM", {"sliding_window": 512}, (None, None, None)),
        ("MinistralForCausalLM", {}, (4096, 4096)),
        ("MinistralForCausalLM", {"sliding_window": None}, (None, None)),
        ("ExaoneMoeForCausalLM", {}, (4096, 4096, 4096, None)),
        ("ExaoneMoeForCausalLM", {"sliding_window": None}, (None, None)),
        ("Exaone4ForCausalLM", {}, (4096, 4096, 4096, None)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}, (None, 9, 9)),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 9}, (None, None, None)),
        ("GptOssForCausalLM", {"sliding_window": 128}, (128, None, 128)),
        ("Gemma3ForCausalLM", {"sliding_window": 512, "sliding_window_pattern": 3}, (512, 512, None)),
        ("Gemma3ForCausalLM", {}, (4096, 4096, 4096)),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention", "sliding_attention"]}, (None, 4096)),
        ("DeepseekV32ForCausalLM", {"layer_types": ["indexed_attention"] * 2}, (None, None)),
        ("DeepseekV32ForCausalLM", {"layer_types": ["deepseek_sparse_attention"] * 2}, (None, None)),
    ],
)
def test_each_layer_has_the_window_that_its_family_s_fields_give_it(
    tmp_path: Path, architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    found = parse(tmp_path, architectures=[architecture], num_hidden_layers=len(windows), head_dim=16, **fields)
    assert found.sliding_windows == windows


@pytest.mark.parametrize("architecture", list(ARCHITECTURES))
def test_defaults_have_the_names_that_fields_are_read_by(architecture: str) -> None:
    facts = ARCHITECTURES[architecture].facts
    assert not facts.defaults.keys() & facts.renamed.keys()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("llama3", 1e6, 16.0)),
        ({"rope_scaling": _LINEAR}, ("linear", 1e6, 2.0)),
        ({"rope_parameters": _LINEAR}, ("linear", 1e6, 2.0)),
        ({"rope_scaling": {**_LINEAR, "rope_theta": 5e5}}, ("linear", 5e5, 2.0)),
    ],
)
def test_cwm_has_a_rope_of_its_own_only_where_none_is_named(
    tmp_path: Path, fields: dict[str, Any], expected: tuple[str, float, float]
) -> None:
    rope = parse(tmp_path, architectures=["CwmForCausalLM"], **fields).rope
    assert (rope.rope_type, rope.theta, rope.factor) == expected


def test_solar_open_rotates_the_share_of_a_head_that_is_named(tmp_path: Path) -> None:
    config = parse(tmp_path, architectures=["SolarOpenForCausalLM"], partial_rotary_factor=0.5)
    assert (config.head_dim, config.rope.rotary_dim) == (128, 64)


@pytest.mark.parametrize(
    ("architecture", "fields", "rotated"),
    [
        ("MiniMaxM2ForCausalLM", {}, 8),
        ("MiniMaxText01ForCausalLM", {"attn_type_list": [0, 1]}, 8),
        ("MiniMaxForCausalLM", {}, 16),
        ("LlamaForCausalLM", {}, 16),
    ],
)
def test_rotary_dim_counts_where_the_models_own_code_reads_it(
    tmp_path: Path, architecture: str, fields: dict[str, Any], rotated: int
) -> None:
    config = parse(tmp_path, architectures=[architecture], head_dim=16, rotary_dim=8, **fields)
    assert config.rope.rotary_dim == rotated


def test_heads_that_are_never_shared_and_ropes_that_are_null_are_read_as_transformers_reads_them(
    tmp_path: Path,
) -> None:
    assert not parse(tmp_path, architectures=["NemotronHForCausalLM"], tie_word_embeddings=True).tie_word_embeddings
    rope = parse(tmp_path, architectures=["GptOssForCausalLM"], rope_scaling=None, rope_theta=10000.0).rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("yarn", 10000.0, 32.0)


def test_hunyuan_3_scales_and_shares_experts_by_default(tmp_path: Path) -> None:
    fields = parse(tmp_path, architectures=["HYV3ForCausalLM"], routed_scaling_factor=1.5).fields
    assert (fields.number("routed_scaling_factor"), fields.integer("n_shared_experts")) == (2.826, 1)
    fields = parse(tmp_path, architectures=["HYV3ForCausalLM"], router_scaling_factor=2.0, num_shared_experts=3).fields
    assert (fields.number("routed_scaling_factor"), fields.integer("n_shared_experts")) == (2.0, 3)


def test_gemma_4_unified_has_a_window_and_a_context_of_its_own(tmp_path: Path) -> None:
    config = parse(tmp_path, architectures=["Gemma4UnifiedForCausalLM"], max_position_embeddings=...)
    assert (config.sliding_windows, config.max_model_len) == ((1024, None), 262144)


def test_causality_that_is_null_is_causal(tmp_path: Path) -> None:
    assert not parse(tmp_path, is_causal=None).is_bidirectional


def test_ministral_has_no_biases_of_attention(tmp_path: Path) -> None:
    assert not parse(tmp_path, architectures=["MinistralForCausalLM"], attention_bias=True).attention_bias


_V4: dict[str, Any] = {"architectures": ["DeepseekV4ForCausalLM"], "num_attention_heads": 1}


@pytest.mark.parametrize(
    ("fields", "rates", "rotated"),
    [
        ({}, (4, 128), 64),
        ({"head_dim": 256}, (4, 128), 32),
        ({"head_dim": 256, "qk_rope_head_dim": 64}, (4, 128), 64),
        ({"compress_rates": {"compressed_sparse_attention": 8, "heavily_compressed_attention": None}}, (8, 128), 64),
        ({"compress_rates": {"compressed_sparse_attention": 8}, "compress_rate_csa": 2}, (2, 128), 64),
        ({"compress_rates": None, "compress_rate_hca": 64}, (4, 64), 64),
    ],
)
def test_deepseek_v4_reads_rates_and_rotated_dimensions_under_each_name(
    tmp_path: Path, fields: dict[str, Any], rates: tuple[int, int], rotated: int
) -> None:
    config = parse(tmp_path, **_V4, **fields)
    found = config.fields.section("compress_rates")
    assert found is not None
    names = ("compressed_sparse_attention", "heavily_compressed_attention")
    assert tuple(found.integer(name) for name in names) == rates
    assert config.rope.rotary_dim == rotated


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**_V4, "compress_rates": 4}, "is 4; it must be a JSON object"),
        ({**_V4, "compress_rates": {"compressed_sparse_attention": 0}}, "is 0; it must be an integer from 1"),
        ({**_V4, "compress_rate_hca": 0}, "compress_rate_hca of"),
        ({**_V4, "hidden_act": "mish"}, "hidden_act of"),
        (
            {"architectures": ["MiMoV2FlashForCausalLM"], "rope_parameters": {"rope_theta": 1e4}},
            "it must be an object with a rope for each of full_attention, sliding_attention",
        ),
    ],
)
def test_fields_of_one_architecture_are_named_with_their_value(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    assert said in refusal(tmp_path, **fields)


_GLM: dict[str, Any] = {"architectures": ["Glm5NextForCausalLM"], "layer_types": None, "num_hidden_layers": 5}


def test_glm_5_3_flash_reads_the_recurrent_layers_of_published_and_of_transformers_configs(tmp_path: Path) -> None:
    section = {"head_dim": 32, "num_heads": 6, "short_conv_kernel_size": 3, "gate_lower_bound": None}
    config = parse(tmp_path, **_GLM, linear_attn_config=section)
    names = ("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "linear_lower_bound")
    assert [config.fields.values[name] for name in names] == [32, 6, 3, -5.0]
    assert config.fields.strings("layer_types") == (*["linear_attention"] * 3, "indexed_attention", "linear_attention")
    section["safe_gate"] = False
    assert parse(tmp_path, **_GLM, linear_attn_config=section).fields.values["linear_lower_bound"] is None
    assert parse(tmp_path, **_GLM).fields.values["linear_lower_bound"] == -5.0
    kinds = ["full_attention"] * 5
    config = parse(tmp_path, **{**_GLM, "layer_types": kinds}, linear_lower_bound=None)
    assert config.fields.strings("layer_types") == ("indexed_attention",) * 5
    assert config.fields.values["linear_lower_bound"] is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"index_kpool_always_select_tail": False}, "index_kpool_always_select_tail of .* is false; it must be true"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim of .* is 64; it must be 0, the only one"),
    ],
)
def test_glm_5_3_flash_refuses_what_it_does_not_compute(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    assert re.search(said, refusal(tmp_path, **_GLM, **fields))


@pytest.mark.parametrize(
    ("lack_values", "said"),
    [(1, "a list of integers"), ([0], "1 in every sparse one"), ([0, 0], "1 in every sparse one"), (None, None)],
)
def test_the_index_of_minimax_m3_must_have_keys_alone(tmp_path: Path, lack_values: Any, said: str | None) -> None:
    sparse = {"sparse_attention_freq": [0, 1], "sparse_disable_index_value": lack_values}
    fields: dict[str, Any] = {"architectures": ["MiniMaxM3VLForCausalLM"], "sparse_attention_config": sparse}
    if said is None:
        assert parse(tmp_path, **fields).sliding_windows == (None, None)
    else:
        assert said in refusal(tmp_path, **fields)


def test_windows_that_cannot_be_are_refused(tmp_path: Path) -> None:
    assert "has no sliding_window" in refusal(tmp_path, layer_types=["sliding_attention"] * 2)
    assert "layer_types of" in refusal(tmp_path, layer_types=["chunked_attention"] * 2)
    assert "a list of 2 names" in refusal(tmp_path, layer_types=["full_attention"] * 3)


def test_a_sliding_window_that_is_switched_off_is_ignored(tmp_path: Path) -> None:
    fields = {"use_sliding_window": False, "sliding_window": 512, "layer_types": ["full_attention"] * 2}
    assert parse(tmp_path, **fields) == parse(tmp_path)


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a directory"):
        ModelConfig.from_checkpoint(tmp_path / "nowhere")


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.from_checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"config\.json (cannot be read|holds)"):
        ModelConfig.from_checkpoint(tmp_path)


def test_reading_a_config_needs_neither_torch_nor_transformers() -> None:
    code = "import sys, models.architectures.config; print({'torch', 'transformers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"
