"""Faults of a quantised checkpoint are reported in a sentence that names them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.config import Config, PrecisionConfig
from engine.core.startup import PhaseClock, start_model
from models.architectures.config import ModelConfig
from models.errors import CheckpointError
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel
from tests.parity.test_quantization import FORMATS, first_family


def refusal(run: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as error:
        run()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_missing_companion_is_named(tmp_path: Path) -> None:
    pair = q.write_pair(tmp_path, *FORMATS["awq"])
    q.change(pair.quantised, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.qzeros"))
    said = refusal(lambda: PagedModel(pair.quantised))
    assert "lacks 1 tensor (model.layers.1.mlp.up_proj.qzeros), which LlamaForCausalLM needs" in said


def test_a_scale_beside_a_dense_weight_is_left_over(tmp_path: Path) -> None:
    pair = q.write_pair(tmp_path, *FORMATS["fp8 blocks"])
    name = "model.layers.0.mlp.up_proj.weight"
    q.change(pair.quantised, lambda tensors: tensors.update({name: tensors[name].float()}))
    assert "holds 1 tensor (model.layers.0.mlp.up_proj.weight_scale_inv)" in refusal(
        lambda: PagedModel(pair.quantised)
    )


def test_an_excluded_module_that_is_quantised_is_named(tmp_path: Path) -> None:
    config = q.FP8_CONFIG | {"ignored_layers": ["model.layers.0.mlp"]}
    pair = q.write_pair(tmp_path, q.fp8_tensor, config)
    assert "names no quantisation of it" in refusal(lambda: PagedModel(pair.quantised))


@pytest.mark.parametrize(
    ("name", "tensor", "value", "said"),
    [
        (
            "fp8 blocks",
            "weight_scale_inv",
            torch.ones(2, 2),
            "weight_scale has shape [2, 2], but the quantisation in config.json means [3, 2]",
        ),
        ("fp8 blocks", "weight", torch.zeros(288, 160, dtype=torch.int8), "weight is torch.int8, but"),
        (
            "awq",
            "scales",
            torch.ones(4, 288),
            "has shape [4, 288], but the quantisation in config.json means [5, 288]",
        ),
        ("awq", "qweight", torch.zeros(160, 36), "qweight is torch.float32"),
        ("gptq", "qzeros", torch.zeros(5, 4, dtype=torch.int32), "means [5, 36]"),
        ("gptq, activation order", "g_idx", torch.full((160,), 7, dtype=torch.int32), "values below 5"),
        ("compressed-tensors int4 groups", "weight_packed", torch.zeros(288, 3, dtype=torch.int32), "means [288, 20]"),
        ("quark mxfp4", "weight_scale", torch.zeros(288, 4, dtype=torch.uint8), "means [288, 5]"),
    ],
)
def test_tensors_that_do_not_fit_one_another_are_named(
    tmp_path: Path, name: str, tensor: str, value: torch.Tensor, said: str
) -> None:
    pair = q.write_pair(tmp_path, *FORMATS[name])
    module = "model.layers.0.mlp.up_proj"
    q.change(pair.quantised, lambda tensors: tensors.update({f"{module}.{tensor}": value}))
    message = refusal(lambda: PagedModel(pair.quantised))
    assert module in message
    assert said in message


def test_an_activation_order_that_the_configuration_denies_is_refused(tmp_path: Path) -> None:
    pair = q.write_pair(tmp_path, q.gptq(shuffled=True), q.gptq_config(desc_act=False))
    assert "proj.g_idx orders inputs by activation, but" in refusal(lambda: PagedModel(pair.quantised))


def test_a_stack_whose_parts_share_blocks_is_refused(tmp_path: Path) -> None:
    pair = q.write_pair(
        tmp_path,
        q.fp8_block,
        q.FP8_BLOCK_CONFIG,
        module=lambda module: module.endswith(("gate_proj", "up_proj", "down_proj")),
        family=first_family("Qwen3MoeForCausalLM"),
        moe_intermediate_size=160,
    )
    q.stack_experts(
        pair.quantised, ("gate_proj", "up_proj"), "gate_up_proj", leaves={"weight_scale_inv": "_scale_inv"}
    )
    name = "model.layers.0.mlp.experts.gate_up_proj_scale_inv"
    q.change(pair.quantised, lambda tensors: tensors.update({name: tensors[name][:, :3]}))
    said = refusal(lambda: PagedModel(pair.quantised))
    assert said.startswith(f"{name} has shape [8, 3, 1], where the model needs 8 experts, each with rows for 2 equal")


def test_a_scale_of_a_cache_that_no_layer_has_is_left_over(tmp_path: Path) -> None:
    pair = q.write_pair(tmp_path, *FORMATS["fp8 blocks"])
    name = "model.layers.2.self_attn.k_scale"
    q.change(pair.quantised, lambda tensors: tensors.update({name: torch.tensor(0.5)}))
    assert f"holds 1 tensor ({name}), which" in refusal(lambda: PagedModel(pair.quantised))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (q.FP8_BLOCK_CONFIG | {"expert_dtype": "int4"}, 'is "int4"; it must be "fp8" or "fp4"'),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 'is "bitsandbytes"; it must be one of fp8'),
        ({"load_in_4bit": True}, "quant_method of quantization_config of"),
        (q.FP8_CONFIG | {"fmt": "e5m2"}, "fmt of quantization_config of"),
        (q.FP8_BLOCK_CONFIG | {"weight_block_size": [128]}, "must be a list of 2 integers above 0"),
        (q.AWQ_CONFIG | {"version": "gemv"}, "version of"),
        (q.AWQ_CONFIG | {"bits": 3}, "bits of"),
        (q.AWQ_CONFIG | {"zero_point": False}, "zero_point of"),
        (q.gptq_config(bits=3), "is 3; it must be 4 or 8"),
        (q.gptq_config(checkpoint_format="marlin"), 'is "marlin"; it must be "gptq" or "gptq_v2"'),
        (
            q.compressed_tensors("nvfp4-pack-quantized", type="float", num_bits=4),
            "it must be 16, with a strategy of groups",
        ),
        (q.compressed_tensors("marlin-24"), "'marlin-24'"),
        (q.compressed_tensors("int-quantized", strategy="token"), "strategy of"),
        (q.compressed_tensors("int-quantized", num_bits=4), "num_bits of"),
        (q.compressed_tensors("float-quantized"), 'is "int"; it must be "float"'),
        (q.compressed_tensors("int-quantized", ignore=("re:(",)), "which is not a regular expression"),
        (
            q.compressed_tensors("int-quantized") | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "format of sparsity_config of",
        ),
        (q.compressed_tensors("int-quantized") | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (q.quark_config("int4", "per_group", group_size=32), 'is "int4"; it must be "fp4" or "fp8_e4m3"'),
        (q.quark_config("fp4", "per_group", group_size=16), "is 16; it must be 32"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, 'is "NVFP4_AWQ"; it must be one of FP8, FP8_PER'),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "is 32; it must be 16 for NVFP4"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "it must be an object of modules, with quant_algo MIXED_PRECISION",
        ),
    ],
)
def test_a_scheme_that_cannot_be_read_is_named(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=config)
    message = refusal(lambda: ModelConfig.from_checkpoint(path))
    assert said in message
    assert str(path) in message


@pytest.mark.parametrize(("wanted", "accepted"), [("auto", True), ("awq", True), ("gptq", False), ("none", False)])
def test_the_asked_for_quantisation_must_be_the_checkpoints(tmp_path: Path, wanted: Any, accepted: bool) -> None:
    path = q.write_pair(tmp_path, q.awq, q.AWQ_CONFIG).quantised
    config = Config(model=str(path), quantization_config=PrecisionConfig(quantization=wanted), max_model_len=64)
    if accepted:
        start_model(config, PhaseClock(0.0))
        return
    with pytest.raises(ValueError, match=rf"quantization is {wanted}, but that of .* is awq; set it to auto"):
        start_model(config, PhaseClock(0.0))


def test_a_dense_checkpoint_is_not_quantised_on_the_way(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path)
    config = Config(model=str(path), quantization_config=PrecisionConfig(quantization="fp8"), max_model_len=64)
    with pytest.raises(ValueError, match=r"quantization is fp8, but that of .* is none; set it to auto"):
        start_model(config, PhaseClock(0.0))
