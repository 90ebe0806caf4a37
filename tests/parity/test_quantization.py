"""Checkpoints of each quantised format compute the same as their dequantised weights."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from models.architectures.config import ModelConfig
from models.config.fields import Fields
from models.layers.parameter import onednn_of
from models.quantization.config import METHODS
from models.quantization.dequantize import Dequantizer
from models.quantization.methods import parse_quantization
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import Family, edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel, assert_computes, prompt
from tests.parity.variants import all_variants
from tests.sweeps import some

FORMATS: dict[str, tuple[q.Quantize, dict[str, Any]]] = {
    "fp8 a scale a tensor": (q.fp8_tensor, q.FP8_CONFIG),
    "fp8 blocks": (q.fp8_block, q.FP8_BLOCK_CONFIG),
    "mxfp8": (q.mxfp8, {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}),
    "fbgemm": (q.fp8_channel, {"quant_method": "fbgemm_fp8"}),
    "compressed-tensors fp8 tensor": (
        q.fp8_tensor,
        q.compressed_tensors("float-quantized", type="float", strategy="tensor"),
    ),
    "compressed-tensors fp8 channel": (
        q.fp8_channel,
        q.compressed_tensors("float-quantized", type="float", strategy="channel"),
    ),
    "compressed-tensors fp8 blocks": (
        lambda weight: q.fp8_block(weight, "weight_scale"),
        q.compressed_tensors("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
    ),
    "compressed-tensors int8 channel": (q.int8_channel, q.compressed_tensors("int-quantized", strategy="channel")),
    "compressed-tensors int8 and rounded inputs": (
        q.int8_channel,
        q.compressed_tensors("int-quantized", strategy="channel", rounds_inputs=True),
    ),
    "compressed-tensors int8 asymmetric": (
        q.int8_asymmetric,
        q.compressed_tensors("int-quantized", strategy="channel", symmetric=False),
    ),
    "compressed-tensors int4 groups": (
        q.pack_quantized(),
        q.compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "compressed-tensors int4 groups, zero points": (
        q.pack_quantized(symmetric=False),
        q.compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    ),
    "compressed-tensors int4 groups, activation order": (
        q.pack_quantized(shuffled=True),
        q.compressed_tensors("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
    ),
    "compressed-tensors int8 packed, a scale a channel": (
        q.pack_quantized(bits=8, size=10**6),
        q.compressed_tensors("pack-quantized", num_bits=8, strategy="channel"),
    ),
    "compressed-tensors mxfp4": (
        lambda weight: ({f"weight{k[6:] or '_packed'}": v for k, v in q.mxfp4(weight)[0].items()}, q.mxfp4(weight)[1]),
        q.compressed_tensors("mxfp4-pack-quantized", type="float", num_bits=4, strategy="group", group_size=32),
    ),
    "compressed-tensors nvfp4": (
        q.nvfp4,
        q.compressed_tensors("nvfp4-pack-quantized", type="float", num_bits=4, strategy="tensor_group", group_size=16),
    ),
    "modelopt nvfp4": (
        lambda weight: q.nvfp4(weight, by_modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    ),
    "quark mxfp4": (q.mxfp4, q.quark_config("fp4", "per_group", group_size=32, scale_format="e8m0")),
    "quark fp8 tensor": (q.fp8_tensor, q.quark_config("fp8_e4m3", "per_tensor")),
    "quark fp8 channel": (q.fp8_channel, q.quark_config("fp8_e4m3", "per_channel")),
    "modelopt nvfp4, activations in 16 bits": (
        lambda weight: q.nvfp4(weight, by_modelopt=True),
        {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": ["lm_head"]},
    ),
    "modelopt fp8": (q.fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "modelopt fp8 channel": (
        lambda weight: q.reshaped(q.fp8_channel(weight), "weight_scale", (-1,)),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": ["lm_head"]},
    ),
    "modelopt fp8 blocks": (
        lambda weight: q.reshaped(
            q.fp8_block(weight, "weight_scale"), "weight_scale", (-(-len(weight) // 128), 1, -1, 1)
        ),
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": ["lm_head"]},
    ),
    "modelopt mxfp8": (
        lambda weight: q.mxfp8(weight, "weight_scale"),
        {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    ),
    "compressed-tensors mxfp8": (
        lambda weight: q.mxfp8(weight, "weight_scale"),
        q.compressed_tensors("mxfp8-quantized", type="float", strategy="group", group_size=32),
    ),
    "awq": (q.awq, q.AWQ_CONFIG),
    "gptq": (q.gptq(), q.gptq_config()),
    "gptq, zero points": (q.gptq(symmetric=False), q.gptq_config(sym=False)),
    "gptq, activation order": (q.gptq(shuffled=True), q.gptq_config(desc_act=True)),
    "gptq, second format": (q.gptq(zero_offset=0), q.gptq_config(checkpoint_format="gptq_v2")),
    "gptq int8": (q.gptq(bits=8), q.gptq_config(bits=8)),
    "gptq, one group": (q.gptq(size=10**6), q.gptq_config(group_size=-1)),
}

OF_EACH_LAYOUT = (
    *("fp8 a scale a tensor", "fp8 blocks", "mxfp8", "fbgemm", "compressed-tensors int8 asymmetric", "quark mxfp4"),
    *(
        "compressed-tensors int4 groups, zero points",
        "compressed-tensors int4 groups, activation order",
        "awq",
        "gptq",
    ),
    *("compressed-tensors nvfp4", "gptq, zero points", "gptq, activation order", "gptq int8"),
)
"""Formats whose tensors others have under other names."""


def assert_same_model(pair: q.Pair) -> None:
    tokens = prompt(40)
    assert_computes(PagedModel(pair.dense), tokens, PagedModel(pair.quantised).logits(tokens))


@pytest.fixture(scope="module")
def unrounded(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Logits of `prompt(40)` by the weights from which `write_pair` makes its two models."""
    sizes = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 8, "num_key_value_heads": 2}
    return PagedModel(make_checkpoint(tmp_path_factory.mktemp("exact"), **sizes)).logits(prompt(40))


@pytest.mark.parametrize("name", FORMATS)
def test_each_format_computes_what_its_dense_weights_compute(
    tmp_path: Path, name: str, unrounded: torch.Tensor
) -> None:
    quantize, config = FORMATS[name]
    pair = q.write_pair(tmp_path, quantize, config)
    assert_same_model(pair)
    # The weights differ from those that were quantised: rounding is not undone, and not skipped.
    assert not torch.allclose(unrounded, PagedModel(pair.dense).logits(prompt(40)), atol=1e-3)


def test_gptq_layers_with_a_bias_keep_it(tmp_path: Path) -> None:
    """The format stores zeros for those without one."""
    pair = q.write_pair(tmp_path, *FORMATS["gptq"], attention_bias=True)
    stored = load_file(pair.quantised / "model.safetensors")
    assert stored["model.layers.0.self_attn.q_proj.bias"].any()
    assert not stored["model.layers.0.mlp.up_proj.bias"].any()
    assert_same_model(pair)


@pytest.mark.parametrize("name", some(FORMATS, *OF_EACH_LAYOUT))
def test_a_weight_is_the_same_in_one_piece_and_in_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = q.write_pair(tmp_path, *FORMATS[name]).quantised
    whole = PagedModel(path).model
    monkeypatch.setattr("models.quantization.layouts._CHUNK_ELEMENTS", 1)
    for found, expected in zip(PagedModel(path).model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_every_method_has_a_format_proven() -> None:
    assert {config["quant_method"] for _, config in FORMATS.values()} | {"mxfp4"} == set(METHODS)


@pytest.mark.parametrize("name", ["fp8 blocks", "awq", "gptq, activation order", "compressed-tensors int4 groups"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_weights_tensors_may_be_in_any_files_in_any_order(tmp_path: Path, name: str, seed: int) -> None:
    pair = q.write_pair(tmp_path, *FORMATS[name])
    q.scatter(pair.quantised, seed=seed)
    assert_same_model(pair)


def test_bfloat16_weights_are_the_exact_ones_rounded_once(tmp_path: Path) -> None:
    pair = q.write_pair(tmp_path, q.fp8_block, q.FP8_BLOCK_CONFIG)
    quantised, dense = (PagedModel(path, dtype=torch.bfloat16).model for path in pair)
    for found, expected in zip(quantised.parameters(), dense.parameters(), strict=True):
        packed = onednn_of(found), onednn_of(expected)
        by_onednn = [each.to_dense() for each in packed if each is not None]
        assert torch.equal(*(by_onednn or (found, expected)))


def test_gpt_oss_experts_become_what_transformers_makes_of_them() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (3, 10, 4), generator=generator, dtype=torch.uint8)
    config = parse_quantization(Fields({"quantization_config": {"quant_method": "mxfp4"}}, "config.json"))
    stack = "model.layers.0.mlp.experts.down_proj"
    stage = Dequantizer(config, torch.float32, {stack}.__contains__)
    named = {f"{stack}_blocks": blocks, f"{stack}_bias": torch.ones(3, 10), f"{stack}_scales": scales}
    found = dict(stage.dense(named.items()))
    assert list(found) == [f"{stack}_bias", stack]
    assert torch.equal(found[stack], convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


def first_family(architecture: str) -> Family:
    return next(variant.family for variant in all_variants() if variant.architecture == architecture)


@pytest.mark.parametrize("scattered", [False, True])
def test_gpt_oss_as_published_computes_what_its_dense_weights_compute(tmp_path: Path, scattered: bool) -> None:
    pair = q.write_gpt_oss_pair(tmp_path, first_family("GptOssForCausalLM"), intermediate_size=96)
    if scattered:
        q.scatter(pair.quantised)
    assert_same_model(pair)


@pytest.mark.parametrize("name", ["compressed-tensors fp8 channel", "quark mxfp4", "compressed-tensors nvfp4"])
@pytest.mark.parametrize(
    ("architecture", "interleaved"),
    [("GptOssForCausalLM", False), ("GptOssForCausalLM", True), ("Llama4ForCausalLM", False)],
)
def test_stacks_may_be_linear_layers_for_each_expert(
    tmp_path: Path, architecture: str, name: str, interleaved: bool
) -> None:
    """As llm-compressor takes these stacks apart, and as Quark does, which leaves gpt-oss' gate and up in one."""
    quantize, config = FORMATS[name]
    sizes = {"intermediate_size": 96} if architecture == "GptOssForCausalLM" else {"intermediate_size": 64}
    pair = q.write_pair(tmp_path, quantize, config, module=lambda _: False, family=first_family(architecture), **sizes)
    q.stacks_to_linear_layers(pair, quantize, interleaved=interleaved, halves=architecture == "Llama4ForCausalLM")
    assert_same_model(pair)


@pytest.mark.parametrize("name", ["compressed-tensors fp8 channel", "compressed-tensors fp8 blocks"])
def test_granites_stacks_of_linear_layers_may_be_fp8(tmp_path: Path, name: str) -> None:
    """As IBM and Red Hat publish them: `input_linear.weight_scale` for all experts."""
    quantize, config = FORMATS[name]
    pair = q.write_pair(
        tmp_path,
        quantize,
        config,
        module=lambda _: False,
        family=first_family("GraniteMoeHybridForCausalLM"),
        intermediate_size=128,
    )
    tensors, dense = (load_file(path / "model.safetensors") for path in pair)
    stacks = [name for name in tensors if "block_sparse_moe" in name and "put_linear" in name]
    for module in [name.removesuffix(".weight") for name in stacks]:
        made = [quantize(expert) for expert in tensors.pop(f"{module}.weight")]
        tensors |= {f"{module}.{leaf}": torch.stack([parts[leaf] for parts, _ in made]) for leaf in made[0][0]}
        dense[f"{module}.weight"] = torch.stack([meant for _, meant in made])
    save_file(tensors, pair.quantised / "model.safetensors")
    save_file(dense, pair.dense / "model.safetensors")
    assert_same_model(pair)


@pytest.mark.parametrize("inside", [False, True])
def test_deepseek_v4_as_published_computes_what_its_dense_weights_compute(tmp_path: Path, inside: bool) -> None:
    assert_same_model(deepseek_v4_as_published(tmp_path, inside=inside))


def deepseek_v4_as_published(path: Path, *, inside: bool = False, **fields: Any) -> q.Pair:
    """Routed experts in FP4, products of the attention in FP8; V4.1 names the former in the section."""
    config = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    pair = q.write_pair(
        path,
        q.deepseek_v4_fp8,
        {**config, "expert_dtype": "fp4"} if inside else config,
        module=lambda name: re.search(r"\.(attn|indexer)\.w[qko]|\.experts\.\d+\.w[123]$", name) is not None,
        by_leaf=dict.fromkeys(("w1", "w2", "w3"), q.deepseek_v4_fp4),
        family=first_family("DeepseekV4ForCausalLM"),
        **{"intermediate_size": 96, **fields},
    )
    for each in pair:
        q.change(each, _as_published)
    if not inside:
        edit_json(pair.quantised / "config.json", expert_dtype="fp4")
    return pair


def _as_published(tensors: q.Tensors) -> None:
    """The names of published DeepSeek-V4, whose body has no prefix."""
    names = {
        "model.embed_tokens.": "embed.",
        "model.hc_head.hc_": "hc_head_",
        "model.": "",
        ".attn.norm.": ".attn.kv_norm.",
    }
    for name in list(tensors):
        new = name
        for old, own in names.items():
            new = new.replace(old, own)
        tensors[new] = tensors.pop(name)


@pytest.mark.parametrize(
    ("architecture", "name", "fields"),
    [
        ("DeepseekV3ForCausalLM", "fp8 blocks", {"hidden_size": 160}),
        ("Qwen3MoeForCausalLM", "gptq", {"moe_intermediate_size": 64}),
        ("Qwen3MoeForCausalLM", "compressed-tensors int8 channel", {}),
        ("Glm4MoeForCausalLM", "compressed-tensors fp8 channel", {}),
        ("MixtralForCausalLM", "awq", {"intermediate_size": 64}),
        ("MixtralForCausalLM", "quark mxfp4", {"intermediate_size": 96}),
    ],
)
def test_experts_of_each_format_are_dequantised_one_by_one(
    tmp_path: Path, architecture: str, name: str, fields: dict[str, Any]
) -> None:
    experts = (".w1", ".w2", ".w3", "gate_proj", "up_proj", "down_proj")
    quantize, config = FORMATS[name]
    family = first_family(architecture)
    pair = q.write_pair(
        tmp_path, quantize, config, module=lambda module: module.endswith(experts), family=family, **fields
    )
    assert any("experts" in tensor for tensor in load_file(pair.quantised / "model.safetensors"))
    q.scatter(pair.quantised)
    assert_same_model(pair)


@pytest.mark.parametrize(
    ("config", "is_quantised"),
    [
        (q.compressed_tensors("int-quantized", ignore=("lm_head", "model.layers.1.mlp.down_proj")), "down"),
        (q.compressed_tensors("int-quantized", ignore=("lm_head", r"re:.*layers\.1\..*down_proj$")), "down"),
        (q.quark_config("fp8_e4m3", "per_channel") | {"exclude": ["lm_head", "*layers.1.*down_proj"]}, "down"),
        (q.FP8_CONFIG | {"modules_to_not_convert": ["lm_head", "down_proj"]}, "all down"),
    ],
)
def test_excluded_modules_are_dense(tmp_path: Path, config: dict[str, Any], is_quantised: str) -> None:
    quantize = q.int8_channel if config["quant_method"] == "compressed-tensors" else q.fp8_channel
    if "config_groups" in config:
        config["config_groups"]["group_0"]["weights"]["strategy"] = "channel"
    dense = "down_proj" if is_quantised == "all down" else "layers.1.mlp.down_proj"
    pair = q.write_pair(
        tmp_path, quantize, config, module=lambda name: name.endswith("_proj") and not name.endswith(dense)
    )
    assert_same_model(pair)
    parsed = ModelConfig.from_checkpoint(pair.quantised).quantization
    assert parsed is not None
    assert parsed.for_layer("model.layers.1.mlp.down_proj") is None
    assert (parsed.for_layer("model.layers.0.mlp.down_proj") is None) == (is_quantised == "all down")
    assert parsed.for_layer("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("leaves", [("weight_scale_inv",), ("weight", "weight_scale_inv")])
@pytest.mark.parametrize(
    ("architecture", "names", "fields"),
    [
        ("Qwen3MoeForCausalLM", ("gate_proj", "up_proj", "down_proj"), {"moe_intermediate_size": 40}),
        ("DeepseekV3ForCausalLM", ("gate_proj", "up_proj", "down_proj"), {"moe_intermediate_size": 160}),
        ("MixtralForCausalLM", ("w1", "w3", "w2"), {"intermediate_size": 160}),
    ],
)
def test_fp8_experts_may_be_stacked_or_just_their_scales_as_transformers_saves_them(
    tmp_path: Path,
    architecture: str,
    names: tuple[str, str, str],
    fields: dict[str, Any],
    leaves: tuple[str, ...],
    scattered: bool,
) -> None:
    pair = q.write_pair(
        tmp_path,
        q.fp8_block,
        q.FP8_BLOCK_CONFIG,
        module=lambda module: module.endswith(names),
        family=first_family(architecture),
        **fields,
    )
    gate, up, down = names
    endings = {leaf: leaf.removeprefix("weight") for leaf in leaves}
    q.stack_experts(pair.quantised, (gate, up), "gate_up_proj", leaves=endings)
    q.stack_experts(pair.quantised, (down,), "down_proj", leaves=endings)
    stored = load_file(pair.quantised / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj_scale_inv") for name in stored)
    if scattered:
        q.scatter(pair.quantised)
    assert_same_model(pair)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_fp8_scales_may_be_bare_exponents(tmp_path: Path, dtype: torch.dtype) -> None:
    def quantize(weight: torch.Tensor) -> tuple[q.Tensors, torch.Tensor]:
        scale = torch.full((-(-weight.shape[0] // 128), -(-weight.shape[1] // 128)), 2.0**-7)
        stored = (weight * 2**7).to(torch.float8_e4m3fn)
        scales = scale.to(torch.float8_e8m0fnu).view(dtype)
        return {"weight": stored, "weight_scale_inv": scales}, stored.float() / 2**7

    assert_same_model(q.write_pair(tmp_path, quantize, q.FP8_BLOCK_CONFIG | {"scale_fmt": "ue8m0"}))


def test_scales_of_activations_are_not_needed(tmp_path: Path) -> None:
    def quantize(weight: torch.Tensor) -> tuple[q.Tensors, torch.Tensor]:
        parts, meant = q.fp8_tensor(weight)
        scales = {"weight_scale_inv": parts["weight_scale"], "activation_scale": torch.tensor(0.25)}
        return {"weight": parts["weight"], **scales}, meant

    assert_same_model(q.write_pair(tmp_path, quantize, q.FP8_CONFIG | {"weight_block_size": None}))


def test_a_checkpoint_may_quantise_nothing_but_its_cache(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    config = q.compressed_tensors("naive-quantized") | {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}
    edit_json(path / "config.json", quantization_config=config)
    tokens = prompt(40)
    exact = PagedModel(path).logits(tokens)
    for side in ("k", "v"):
        scale = {f"model.layers.{layer}.self_attn.{side}_scale": torch.tensor([0.5]) for layer in range(2)}
        q.change(path, lambda tensors, scale=scale: tensors.update(scale))  # type: ignore[misc]
    assert_computes(PagedModel(path), tokens, exact)


def test_targets_distinguish_the_formats_of_modules(tmp_path: Path) -> None:
    config = q.compressed_tensors("int-quantized", strategy="channel") | {"format": "mixed-precision"}
    int8 = config["config_groups"]["group_0"] | {"format": "int-quantized", "targets": ["re:.*mlp.*"]}
    int4 = {
        "targets": ["re:.*self_attn.*"],
        "format": "pack-quantized",
        "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
    }
    config["config_groups"] = {"group_0": int8, "group_1": int4}
    pack = q.pack_quantized()
    pair = q.write_pair(
        tmp_path,
        lambda weight: pack(weight) if weight.shape[0] <= 160 >= weight.shape[1] else q.int8_channel(weight),
        config,
    )
    assert_same_model(pair)


def test_gptq_modules_may_have_bits_of_their_own_or_none(tmp_path: Path) -> None:
    config = q.gptq_config(dynamic={"-:.*v_proj": {}, "+:.*mlp.*": {"bits": 8}})
    four, eight = q.gptq(), q.gptq(bits=8)
    pair = q.write_pair(
        tmp_path,
        lambda weight: eight(weight) if 288 in weight.shape else four(weight),
        config,
        module=lambda name: name.endswith("_proj") and not name.endswith("v_proj"),
    )
    assert_same_model(pair)


def test_modelopts_own_file_beside_config_json_counts(tmp_path: Path) -> None:
    pair = q.write_pair(tmp_path, q.fp8_tensor, {})
    edit_json(pair.quantised / "config.json", quantization_config=None)
    (pair.quantised / "hf_quant_config.json").write_text(
        '{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}'
    )
    assert_same_model(pair)


def test_the_older_name_of_the_section_counts(tmp_path: Path) -> None:
    config = q.compressed_tensors("int-quantized", strategy="channel")
    del config["quant_method"]
    assert_same_model(q.write_pair(tmp_path, q.int8_channel, config, section="compression_config"))
