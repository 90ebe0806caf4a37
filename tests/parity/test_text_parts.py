"""Checkpoints of text and images, or under other names, compute the same as their text model."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig

from models.architectures.config import ModelConfig, text_name
from models.architectures.registry import ARCHITECTURES, TEXT_PARTS
from models.config.defaults import OF_TEXT_KINDS
from models.config.fields import Fields
from models.errors import CheckpointError
from models.loading.loader import make_model
from tests.parity.checkpoints import Family, edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, assert_same_distribution, prompt
from tests.parity.variants import all_variants, recurrent
from tests.sweeps import some

_OLD, _NEW, _TEXT_MODEL = "language_model.", "model.language_model.", "model.text_model."
_TEXT_FIELDS_OF_THE_WHOLE = ("architectures", "dtype", "eos_token_id", "tie_word_embeddings")


def wrap(text: Path, whole: Path, architecture: str, kind: str, *, prefix: str, **further: object) -> None:
    """Writes the checkpoint of several parts whose text part is `text`, as transformers or an older version does."""
    whole.mkdir()
    tensors = {}
    for name, tensor in load_file(text / "model.safetensors").items():
        is_head = prefix != _OLD and name.startswith("lm_head")
        inner = name if prefix == _OLD else name.removeprefix("model.").removeprefix("backbone.")
        tensors[name if is_head else prefix + inner] = tensor
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    fields = json.loads((text / "config.json").read_text())
    config = {name: fields.pop(name) for name in _TEXT_FIELDS_OF_THE_WHOLE if name in fields}
    config |= {"architectures": [architecture], "text_config": {**fields, "model_type": kind}, "vision_config": {}}
    (whole / "config.json").write_text(json.dumps({**config, **further}))


_LANGUAGE_MODELS = 3
"""An architecture of more kinds of text parts takes any."""
COMPARED = ("Cosmos3", "Glm46V", "Glm4v", "GlmOcr", "Granite4", "GraniteDocling", "HCX", "HyperCLOVAX", "PaddleOCR")
"""Those that are compared with transformers' own whole below."""
SHORT = ("Idefics3ForConditionalGeneration", "LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration")
_CASES = [
    pytest.param(
        whole,
        kind,
        text,
        marks=()
        if (len(kinds) <= _LANGUAGE_MODELS or whole in SHORT) and not whole.startswith(COMPARED)
        else pytest.mark.slow,
    )
    for whole, kinds in TEXT_PARTS.items()
    for number, (kind, text) in enumerate(kinds.items())
    if number == 0 or len(kinds) <= _LANGUAGE_MODELS or whole == SHORT[1]
]


_FIXED: dict[str, dict[str, bool]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm_ocr_text": {"attention_bias": False},
}
"""Fields of text models that a kind of text part always has so."""


@pytest.mark.parametrize(("whole", "kind", "text"), _CASES, ids=lambda name: name)
def test_the_text_part_computes_what_the_text_model_computes(whole: str, kind: str, text: str, tmp_path: Path) -> None:
    variant = next(each for each in all_variants() if each.architecture == text)
    alone = make_checkpoint(tmp_path / "text", variant.family, **variant.overrides, **_FIXED.get(kind, {}))
    tokens = prompt(20)
    expected = PagedModel(alone).logits(tokens)
    for number, prefix in enumerate((_OLD, _NEW, _TEXT_MODEL) if whole == SHORT[0] else (_OLD, _NEW)):
        wrap(alone, tmp_path / str(number), whole, kind, prefix=prefix)
        model = PagedModel(tmp_path / str(number))
        assert model.config.architecture == text
        assert torch.equal(model.logits(tokens), expected)


class Whole(NamedTuple):
    """A small model of transformers that reads images too, of which the text is computed."""

    name: str
    """Of its classes, before `Config` and `ForConditionalGeneration`."""
    vision: dict[str, Any]
    text: dict[str, Any] = {}  # noqa: RUF012
    further: dict[str, Any] = {}  # noqa: RUF012


_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_LAYERS = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
_FEW_EXPERTS = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "num_hidden_layers": 3,
}  # fmt: skip
_FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.5,
    "residual_multiplier": 0.7,
    "attention_multiplier": 0.2,
}
_QWEN3_MOE = {
    "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
}  # fmt: skip
WHOLES = [
    Whole(
        "Glm4v",
        {**_TOWER, "out_hidden_size": 64, "num_heads": 2},
        {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}, "head_dim": None},
    ),
    Whole(
        "Glm4v",
        _TOWER,
        {
            "rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]},
            "num_key_value_heads": 1,
            # transformers' code has biases whatever config.json says.
            "attention_bias": False,
        },
    ),
    Whole(
        "Glm46V",
        {"model_type": "glm4v_moe_vision", **_TOWER},
        {
            "model_type": "glm4v_moe_text",
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
            **_FEW_EXPERTS,
        },
    ),
    Whole("Glm4vMoe", _TOWER, {"rope_parameters": {**_ROPE, "mrope_section": [2, 1, 1]}, **_FEW_EXPERTS}),
    Whole(
        "GlmOcr",
        _TOWER,
        {
            "head_dim": 24,
            "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [4, 4, 4]},
            # transformers' code has none.
            "attention_bias": True,
        },
    ),
    Whole(
        "PaddleOCRVL",
        _LAYERS,
        {"use_bias": True, "rope_parameters": {**_ROPE, "rope_theta": 5e5, "mrope_section": [2, 3, 3]}},
        {"tie_word_embeddings": False},
    ),
    Whole("PaddleOCRVL", _LAYERS, {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}),
    Whole("GraniteDocling", {**_LAYERS, "out_hidden_size": 64}, {"attention_bias": True, "mlp_bias": True}),
    Whole(
        "Granite4Vision",
        {"model_type": "clip_vision_model", **_LAYERS, "hidden_size": 64, "image_size": 32, "patch_size": 8},
        _FACTORS,
        {"deepstack_layer_map": [], "downsample_rate": "1/4"},
    ),
    Whole("Cosmos3Omni", _TOWER, {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}),
    Whole("Cosmos3Edge", _LAYERS, {"rope_parameters": {**_ROPE, "mrope_section": [3, 3, 2]}}),
    Whole("HyperCLOVAXVisionV2", _TOWER, _FACTORS),
    Whole("HyperCLOVAXVisionV2", _TOWER, {"head_dim": None, "use_post_norm": False, "logits_scaling": 2.0}),
    Whole("Qwen3VLMoe", _TOWER, _QWEN3_MOE),
    # transformers' code divides by the sum whatever config.json says.
    Whole("Qwen3VLMoe", _TOWER, {**_QWEN3_MOE, "norm_topk_prob": False}),
    Whole(
        "Qwen3OmniMoeThinker", _TOWER, _QWEN3_MOE,
        {"audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}},
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    "whole",
    some(WHOLES, *{each.name: each for each in WHOLES}.values()),
    ids=lambda whole: f"{whole.name}, {len(whole.text)} fields",
)
def test_the_text_part_computes_what_transformers_whole_computes(whole: Whole, tmp_path: Path) -> None:
    """Of a text, the three positions of a token are equal, whatever part of a head each of them rotates."""
    config_class = getattr(transformers, f"{whole.name}Config")
    model_class = getattr(transformers, f"{whole.name}ForConditionalGeneration")

    def config(**fields: Any) -> PreTrainedConfig:
        text = {name: value for name, value in {**fields, **whole.text}.items() if value is not None}
        return config_class(text_config=text, vision_config=whole.vision, **whole.further)  # type: ignore[no-any-return]

    path = make_checkpoint(tmp_path, Family(config, model_class))  # type: ignore[arg-type]
    reference, tokens = model_class.from_pretrained(path).eval(), prompt(40)
    with torch.inference_mode():
        expected = reference(input_ids=torch.tensor([tokens])).logits[0]
    model = PagedModel(path)
    assert model.config.is_text_part
    assert_same_distribution(model.logits(tokens), expected)


_SIZES_OF_KINDS: dict[str, dict[str, int]] = {
    "cosmos3_edge_text": {"hidden_size": 4096},
    "glm4v_moe_text": {"head_dim": 128},
    "qwen3_omni_moe_text": {"num_attention_heads": 32},
    "qwen3_vl_text": {"hidden_size": 8192},
}
"""Where transformers' own defaults do not fit each other, or a head's size also follows from the others."""
_SIZES = {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}
_EXPERTS = {"moe_intermediate_size", "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"}
_OF_CLASSES_WITH_SIZES = ("paddleocr_vl_text", "qwen2_5_omni_text", "qwen2_5_vl_text", "qwen2_vl_text")


@pytest.mark.parametrize("kind", OF_TEXT_KINDS)
def test_fields_that_a_text_part_leaves_out_have_the_values_of_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The configuration is the same, and so is all that the model reads of the fields while it is built.

    Sizes that no published checkpoint leaves out are required.
    """
    found: dict[str, Any] = {}

    def recording(read: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(self: Fields, name: str, *args: Any, **options: Any) -> Any:
            found[name] = read(self, name, *args, **options)
            return found[name]

        return recorded

    for method in ("integer", "number", "boolean", "string", "strings", "integers"):
        monkeypatch.setattr(Fields, method, recording(getattr(Fields, method)))

    def read(values: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
        (tmp_path / "config.json").write_text(json.dumps({"architectures": [whole], "text_config": values}))
        config = ModelConfig.from_checkpoint(tmp_path)
        found.clear()
        with torch.device("meta"):
            make_model(dataclasses.replace(config, num_hidden_layers=2, sliding_windows=(None, None)))
        return config, dict(found)

    whole = next(name for name, kinds in TEXT_PARTS.items() if next(iter(kinds)) == kind)
    own = _SIZES_OF_KINDS.get(kind, {})
    complete = CONFIG_MAPPING[kind](**own).to_dict()
    expected = read(complete)
    required = _EXPERTS | (set() if kind in _OF_CLASSES_WITH_SIZES else _SIZES)
    for name in complete.keys() - own.keys() - {"bos_token_id", "eos_token_id", "tie_word_embeddings"}:
        left_out = {field: value for field, value in complete.items() if field != name}
        if name in required:
            with pytest.raises(CheckpointError, match="has no"):
                read(left_out)
        else:
            assert read(left_out) == expected, name


@pytest.mark.parametrize("max_shard_size", ["1GB", "50KB"])
def test_a_head_of_its_own_is_used_where_config_json_ties_none(tmp_path: Path, max_shard_size: str) -> None:
    """PaddleOCR-VL's classes tie by default; transformers uses the weights of a head that is in the file all the
    same."""
    path = make_checkpoint(tmp_path, max_shard_size=max_shard_size)
    tokens = prompt(20)
    expected = PagedModel(path).logits(tokens)
    names = {"architectures": ["PaddleOCRVLForConditionalGeneration"], "model_type": "paddleocr_vl"}
    edit_json(path / "config.json", **names, tie_word_embeddings=None)
    model = PagedModel(path)
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.logits(tokens), expected)


@pytest.mark.parametrize("layers", ["blocks", "encoder.layers"])
def test_names_as_transformers_saves_them_are_those_of_the_text_part(layers: str) -> None:
    name = "0.self_attn.o_proj.weight"
    assert text_name(f"language_model.model.{layers}.{name}") == f"model.layers.{name}"
    assert text_name(f"model.vision_tower.{layers}.{name}") is None


@pytest.mark.parametrize(
    ("published", "own"),
    [
        ("layers.0.self_attn.to_q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("layers.0.self_attn.to_out.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("layers.0.self_attn.norm_k.weight", "model.layers.0.self_attn.k_norm.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.0.self_attn.add_q_proj.weight", None),
        ("layers.0.self_attn.norm_added_k.weight", None),
        ("layers.0.mlp_moe_gen.up_proj.weight", None),
        ("norm_moe_gen.weight", None),
        ("model.language_model.time_embedder.mlp.weight", None),
        ("blocks.0.attn.qkv.weight", None),
        ("model.language_model.model.layers.0.post_norm1.weight", "model.layers.0.post_norm1.weight"),
        ("model.language_model.lm_head.weight", "lm_head.weight"),
        ("model.vision_projector.weight", None),
    ],
)
def test_names_of_cosmos_and_hyperclova_as_published(published: str, own: str | None) -> None:
    assert text_name(published) == own


def test_paddleocr_is_read_as_it_was_published(tmp_path: Path) -> None:
    """The fields of the text part are next to the others, and its tensors have the names of a text model's."""
    path = make_checkpoint(tmp_path, attention_bias=True, mlp_bias=True)
    tokens = prompt(20)
    expected = PagedModel(path).logits(tokens)
    tensors = load_file(path / "model.safetensors") | {"mlp_AR.linear_1.weight": torch.zeros(4, 4)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_json(
        path / "config.json",
        architectures=["PaddleOCRVLForConditionalGeneration"],
        model_type="paddleocr_vl",
        attention_bias=None,
        mlp_bias=None,
        use_bias=True,
        vision_config={"num_hidden_layers": 2},
    )
    found = PagedModel(path)
    assert found.config.is_text_part
    assert torch.equal(found.logits(tokens), expected)


def test_qwen2_vl_is_read_as_it_was_published(tmp_path: Path) -> None:
    """The fields of the text part are next to the others, and its tensors have the names of a text model's."""
    variant = next(each for each in all_variants() if each.architecture == "Qwen2ForCausalLM")
    path = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    tokens = prompt(20)
    expected = PagedModel(path).logits(tokens)
    tensors = load_file(path / "model.safetensors") | {"visual.patch_embed.proj.weight": torch.zeros(4, 4)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    edit_json(
        path / "config.json",
        architectures=["Qwen2VLForConditionalGeneration"],
        model_type="qwen2_vl",
        rope_parameters=None,
        rope_theta=10000.0,
        rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        vision_config={"depth": 2},
    )
    assert torch.equal(PagedModel(path).logits(tokens), expected)


@pytest.mark.parametrize(
    ("whole", "kind", "text"),
    [
        ("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni_text", "Qwen2ForCausalLM"),
        ("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe_text", "Qwen3MoeForCausalLM"),
    ],
)
def test_the_thinker_of_an_omni_model_is_its_text_part(whole: str, kind: str, text: str, tmp_path: Path) -> None:
    """The talker, which makes sounds of the thinker's text, has tensors of like names, which are not read."""
    variant = next(each for each in all_variants() if each.architecture == text)
    alone = make_checkpoint(tmp_path / "text", variant.family, **variant.overrides)
    tokens = prompt(20)
    expected = PagedModel(alone).logits(tokens)
    wrap(alone, tmp_path / "whole", whole, kind, prefix="model.")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    named = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    named |= {f"talker.{name}": torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(named, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    thinker = {"text_config": config.pop("text_config"), "vision_config": config.pop("vision_config")}
    talker = {"text_config": {"model_type": "qwen3_omni_moe_talker_text"}}
    config |= {"thinker_config": thinker, "talker_config": talker}
    (tmp_path / "whole" / "config.json").write_text(json.dumps(config))
    model = PagedModel(tmp_path / "whole")
    assert model.config.architecture == text
    assert torch.equal(model.logits(tokens), expected)


def test_a_text_configuration_may_name_only_what_differs_from_the_default(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
            }
        )
    )
    found = ModelConfig.from_checkpoint(tmp_path)
    assert (found.hidden_size, found.num_hidden_layers, found.vocab_size) == (4096, 32, 32000)
    assert found.is_text_part


def test_what_a_quantised_whole_excludes_is_named_as_the_text_part_has_it(tmp_path: Path) -> None:
    text = make_checkpoint(tmp_path / "text", "qwen3")
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.language_model.layers.1.mlp", "model.visual.merger", "lm_head"],
    }
    wrap(
        text,
        tmp_path / "whole",
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl_text",
        prefix=_NEW,
        quantization_config=quantization,
    )
    found = ModelConfig.from_checkpoint(tmp_path / "whole").quantization
    assert found is not None
    assert found.for_layer("model.layers.0.mlp.up_proj") is not None
    assert found.for_layer("model.layers.1.mlp.up_proj") is None


def test_a_text_part_without_a_model_here_is_refused(tmp_path: Path) -> None:
    text = make_checkpoint(tmp_path / "text", "qwen3")
    wrap(text, tmp_path / "whole", "Gemma3ForConditionalGeneration", "qwen3", prefix=_NEW)
    with pytest.raises(CheckpointError, match=r'model_type of .* is "qwen3"; it must be one of gemma3_text'):
        ModelConfig.from_checkpoint(tmp_path / "whole")


def test_every_text_part_has_a_model_here() -> None:
    assert {text for kinds in TEXT_PARTS.values() for text in kinds.values()} <= set(ARCHITECTURES)


def test_minimax_runs_under_the_names_that_it_was_published_with(tmp_path: Path) -> None:
    """MiniMax-Text-01 and M1 have other names for classes, kinds of layers and factors than transformers."""
    variant = next(each for each in recurrent.VARIANTS if each.architecture == "MiniMaxForCausalLM")
    path = make_checkpoint(tmp_path, variant.family, **{**variant.overrides, "mlp_alpha_factor": 2.5})
    reference, tokens = Reference(path), prompt(40)
    expected = reference.logits(tokens)
    config = json.loads((path / "config.json").read_text())
    names = {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}
    changes: dict[str, Any] = {
        f"layernorm_{new}_{factor}": config.pop(f"{old}_{factor}_factor", 1)
        for old, new in names.items()
        for factor in ("alpha", "beta")
    }
    changes["attn_type_list"] = [int(kind == "full_attention") for kind in config.pop("layer_types")]
    changes |= {"architectures": ["MiniMaxText01ForCausalLM"], "postnorm": True, "shared_intermediate_size": 0}
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    assert_same_distribution(PagedModel(path).logits(tokens), expected, 1e-3)


_LING = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "gated_attention_proj_granularity_type": "head_wise",
    "no_kda_lora": True,
    "expert_swiglu_limit_list": None,
    "moe_shared_expert_intermediate_size": 48,
    "num_kv_heads_for_linear_attn": 0,
    "partial_rotary_factor": 0.5,
}
"""Fields of published Ling 3.0, next to those that transformers saves."""


@pytest.mark.parametrize("has_latent", [False, True])
def test_ling_runs_under_the_name_that_it_was_published_with(tmp_path: Path, has_latent: bool) -> None:
    """Its queries may have a latent, which transformers' class has not: here one that changes nothing."""
    variant = next(each for each in recurrent.VARIANTS if each.architecture == "BailingHybridForCausalLM")
    path = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    tensors = load_file(path / "model.safetensors")
    for name in [each for each in tensors if each.endswith("kv_a_proj_with_mqa.weight")]:
        attention = name.removesuffix("kv_a_proj_with_mqa.weight")
        layer = attention.removesuffix("attention.").removesuffix("self_attn.")
        tensors[f"{layer}input_layernorm.weight"].fill_(1)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    reference, tokens = Reference(path), prompt(40)
    expected = reference.logits(tokens)
    config = json.loads((path / "config.json").read_text())
    rope = {**config["rope_parameters"], "partial_rotary_factor": 0.5}
    edit_json(path / "config.json", **_LING, rope_parameters=rope, q_lora_rank=64 if has_latent else None)
    if has_latent:
        for name in [each for each in tensors if each.endswith("kv_a_proj_with_mqa.weight")]:
            attention = name.removesuffix("kv_a_proj_with_mqa.weight")
            tensors[f"{attention}q_b_proj.weight"] = tensors.pop(f"{attention}q_proj.weight")
            tensors[f"{attention}q_a_proj.weight"] = torch.eye(64)
            tensors[f"{attention}q_a_layernorm.weight"] = torch.ones(64)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert_same_distribution(PagedModel(path).logits(tokens), expected, 1e-3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gated_attention_proj_granularity_type": "element_wise"}, 'must be "head_wise"'),
        ({"no_kda_lora": False}, "no_kda_lora"),
        ({"expert_swiglu_limit_list": [0, 7.0]}, "activations are not limited"),
        ({"share_expert_swiglu_limit_list": 7.0}, "activations are not limited"),
        ({"moe_shared_expert_intermediate_size": 96}, "must be moe_intermediate_size, 48"),
    ],
)
def test_what_no_published_ling_has_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    variant = next(each for each in recurrent.VARIANTS if each.architecture == "BailingHybridForCausalLM")
    path = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    edit_json(path / "config.json", **{**_LING, **changes})
    with pytest.raises(CheckpointError, match=said):
        ModelConfig.from_checkpoint(path)


@pytest.mark.parametrize("name", ["IQuestCoderForCausalLM", "InternLM3ForCausalLM"])
def test_llama_runs_under_other_names(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", architectures=[name])
    assert ModelConfig.from_checkpoint(path).architecture == "LlamaForCausalLM"
