"""Values of fields that a config.json may leave out, as transformers' config classes have them. Imports no torch.

Those that only one architecture reads are in its `ConfigFacts`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from models.config.fields import Fields
from models.config.weight_files import read_header

_LEFT_OUT: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "ArceeForCausalLM": {"max_position_embeddings": 4096},
        "BailingHybridForCausalLM": {
            "num_key_value_heads": 32,
            "max_position_embeddings": 262144,
            "qk_rope_head_dim": 64,
        },
        "CwmForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        "DeepseekV2ForCausalLM": {
            "routed_scaling_factor": 1.0,
            "n_shared_experts": 2,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-06,
            "qk_rope_head_dim": 64,
        },
        "DeepseekV32ForCausalLM": {
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 163840,
            "rms_norm_eps": 1e-06,
        },
        "DeepseekV3ForCausalLM": {
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-06,
        },
        "Dots1ForCausalLM": {"max_position_embeddings": 2048},
        "Ernie4_5ForCausalLM": {"num_key_value_heads": 2, "max_position_embeddings": 131072},
        "Ernie4_5_MoeForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 131072},
        "Exaone4ForCausalLM": {"max_position_embeddings": 2048},
        "ExaoneMoeForCausalLM": {"max_position_embeddings": 2048},
        "Glm4ForCausalLM": {"num_key_value_heads": 2, "max_position_embeddings": 131072},
        "Glm4MoeForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05},
        "Glm4MoeLiteForCausalLM": {
            "routed_scaling_factor": 1.8,
            "n_shared_experts": 1,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-05,
        },
        "GlmForCausalLM": {"num_key_value_heads": 2, "max_position_embeddings": 131072},
        "GlmMoeDsaForCausalLM": {
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "qk_rope_head_dim": 64,
            "max_position_embeddings": 202752,
            "rms_norm_eps": 1e-05,
        },
        "GptOssForCausalLM": {
            "num_key_value_heads": 8,
            "sliding_window": 128,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        "GraniteForCausalLM": {"max_position_embeddings": 2048},
        "GraniteMoeForCausalLM": {"max_position_embeddings": 2048},
        "HYV3ForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        "HunYuanDenseV1ForCausalLM": {"max_position_embeddings": 2048},
        "HunYuanMoEV1ForCausalLM": {"max_position_embeddings": 2048},
        "HyperCLOVAXForCausalLM": {"max_position_embeddings": 2048},
        "KimiLinearForCausalLM": {"qk_rope_head_dim": 64, "max_position_embeddings": 1048576},
        "Llama4ForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        "LlamaForCausalLM": {"max_position_embeddings": 2048, "rms_norm_eps": 1e-06},
        "MiMoV2FlashForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 131072},
        "MiniMaxForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        "MiniMaxM2ForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 196608},
        "MiniMaxM3VLForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 524288},
        "Ministral3ForCausalLM": {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "MinistralForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-06},
        "MistralForCausalLM": {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-06,
            "sliding_window": 4096,
        },
        "Mistral4ForCausalLM": {
            "max_position_embeddings": 1048576,
            "rms_norm_eps": 1e-06,
            "qk_rope_head_dim": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        "MixtralForCausalLM": {
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
        },
        "NemotronForCausalLM": {"max_position_embeddings": 4096},
        "Olmo2ForCausalLM": {"max_position_embeddings": 2048},
        "Olmo3ForCausalLM": {"max_position_embeddings": 2048},
        "OlmoHybridForCausalLM": {"max_position_embeddings": 65536},
        "OlmoeForCausalLM": {"max_position_embeddings": 4096},
        "Phi3ForCausalLM": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-05},
        "PhimoeForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        "Qwen2ForCausalLM": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "Qwen2MoeForCausalLM": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "Qwen3ForCausalLM": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "Qwen3MoeForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "Qwen3NextForCausalLM": {"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "Qwen3_5ForCausalLM": {"num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "Qwen3_5MoeForCausalLM": {"num_key_value_heads": 2, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "SeedOssForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 524288, "rms_norm_eps": 1e-06},
        "SmolLM3ForCausalLM": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-06},
        "SolarOpenForCausalLM": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
        "StableLmForCausalLM": {"max_position_embeddings": 4096},
        "Starcoder2ForCausalLM": {"num_key_value_heads": 2, "max_position_embeddings": 4096},
    }
)
_SIZES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "GemmaForCausalLM": {
            "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 16, "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192,
        },
        "LlamaForCausalLM": {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 32000,
        },
        "MistralForCausalLM": {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "vocab_size": 32000,
        },
        "Qwen2ForCausalLM": {
            "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 32, "vocab_size": 151936,
        },
    }
)  # fmt: skip
"""Of text parts alone, whose configurations name what differs from the default."""
_QWEN2_VL: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_size": 8192,
        "intermediate_size": 29568, "num_hidden_layers": 80, "num_attention_heads": 64, "vocab_size": 152064,
    }
)  # fmt: skip
OF_TEXT_KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "cosmos3_edge_text": {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "hidden_act": "relu2",
            "rope_theta": 1e8, "head_dim": 128,
        },
        "glm4v_moe_text": {"max_position_embeddings": 65536, "attention_bias": True},
        "glm4v_text": {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        "glm_ocr_text": {
            "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
        "granite_docling_text": {
            "num_key_value_heads": 4, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True, "embedding_multiplier": 12.0, "logits_scaling": 4.0,
            "residual_multiplier": 0.263, "attention_multiplier": 0.015625,
        },
        "hyperclovax": {"tie_word_embeddings": True},
        "paddleocr_vl_text": {
            "num_key_value_heads": 2, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
            "head_dim": 128, "tie_word_embeddings": True, "hidden_size": 1024, "intermediate_size": 3072,
            "num_hidden_layers": 18, "num_attention_heads": 16, "vocab_size": 103424,
        },
        "qwen2_5_omni_text": {
            "num_key_value_heads": 4, "rope_theta": 1e6, "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 152064,
        },
        "qwen2_5_vl_text": _QWEN2_VL,
        "qwen2_vl_text": _QWEN2_VL,
        "qwen3_omni_moe_text": {"rope_theta": 1e6, "norm_topk_prob": True},
        "qwen3_vl_moe_text": {"num_key_value_heads": 16, "max_position_embeddings": 128000, "rope_theta": 5e5},
        "qwen3_vl_text": {"num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 5e5},
    }
)  # fmt: skip
"""By `model_type` of text parts whose values differ from those of the architecture that runs them."""
_FIXED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "glm4v_text": {"attention_bias": True},
        "glm_ocr_text": {"attention_bias": False},
        "qwen3_vl_moe_text": {"norm_topk_prob": True},
    }
)
"""By `model_type` of text parts: values that transformers' code always has, whatever config.json says."""
_HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embeddings.weight")
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PIECE = 1 << 20
"""Elements, or bytes, of two tensors that are compared at a time."""
_ROPES = frozenset({"rope_parameters", "rope_scaling"})


def of_text_kind(section: Fields, kind: str) -> Fields:
    """The configuration of a text part with the values and names of the architecture that runs it."""
    defaults = {name: value for name, value in OF_TEXT_KINDS.get(kind, {}).items() if not section.has(name)}
    values = {**section.values, **defaults}
    values |= _FIXED.get(kind, {})
    if kind == "glm4v_text" or (kind in ("glm4v_moe_text", "glm_ocr_text") and not section.has("head_dim")):
        values["head_dim"] = section.integer("hidden_size") // section.integer("num_attention_heads")
    if kind == "paddleocr_vl_text":
        values["attention_bias"] = values["mlp_bias"] = section.boolean("use_bias", False)
    return Fields(values, section.where)


def has_own_head(checkpoint: Path) -> bool:
    """Whether the checkpoint has weights of a language-model head that no embedding has: transformers then ties the
    two in no case. Damaged files are reported when they are loaded."""
    single, index = checkpoint / "model.safetensors", checkpoint / "model.safetensors.index.json"
    try:
        if single.is_file():
            files = dict.fromkeys(read_header(single).tensors, single.name)
        else:
            weight_map = Fields.from_file(index).section("weight_map") if index.is_file() else None
            files = {} if weight_map is None else dict(weight_map.values)
        name = next((name for name in files if name.endswith(_HEAD)), None)
        if name is None:
            return False
        head = _stored(checkpoint / files[name], name)
        embeddings = (_stored(checkpoint / files[each], each) for each in files if each.endswith(_EMBEDDINGS))
        return not any(_are_equal(head, each) for each in embeddings)
    except (OSError, ValueError, LookupError, TypeError):
        return False


class _Stored(NamedTuple):
    """A tensor in a file."""

    file: Path
    dtype: str
    shape: list[int]
    start: int
    num_bytes: int


def _stored(file: Path, name: str) -> _Stored:
    header = read_header(file)
    tensor = header.tensors[name]
    first, end = tensor.data_offsets
    return _Stored(file, tensor.dtype, tensor.shape, header.end + first, end - first)


def _are_equal(one: _Stored, other: _Stored) -> bool:
    """Whether two tensors have the same values. Of different types, only those that need no scales are compared."""
    is_alike = one.dtype == other.dtype
    if one.shape != other.shape or not (is_alike or {one.dtype, other.dtype} <= _FLOAT_BYTES.keys()):
        return False
    count = one.num_bytes if is_alike else math.prod(one.shape)
    widths = [1 if is_alike else _FLOAT_BYTES[each.dtype] for each in (one, other)]
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        for start in range(0, count, _PIECE):
            number = min(_PIECE, count - start)
            found, compared = first.read(number * widths[0]), second.read(number * widths[1])
            if len(found) < number * widths[0] or len(compared) < number * widths[1]:
                raise ValueError(f"{one.file} or {other.file} ends before its tensors")
            if is_alike:
                is_equal = found == compared
            else:
                is_equal = np.array_equal(_numbers(found, one.dtype), _numbers(compared, other.dtype))
            if not is_equal:
                return False
    return True


def _numbers(data: bytes, dtype: str) -> npt.NDArray[Any]:
    if dtype == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, f"<f{_FLOAT_BYTES[dtype]}")


def with_left_out(config: Fields, architecture: str, *, is_text_part: bool) -> Fields:
    """`config` with values of fields that it does not have. A field that is null has a value, but a rope."""
    values = {**_LEFT_OUT.get(architecture, {}), **(_SIZES.get(architecture, {}) if is_text_part else {})}
    if any(config.has(name) for name in _ROPES):
        values.pop("rope_parameters", None)
    own = {name: value for name, value in config.values.items() if value is not None or name not in _ROPES}
    return Fields({**values, **own}, config.where)
