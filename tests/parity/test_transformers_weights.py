"""Quantised checkpoints on the general route compute the same as their dequantised weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models.errors import CheckpointError
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import Family, edit_json
from tests.parity.foreign_models import APERTUS, GPT2
from tests.parity.paged_model import PagedModel, assert_computes, prompt
from tests.parity.test_quantization import FORMATS
from tests.parity.variants.gpt_oss import VARIANTS

GRANITE_FAMILY = Family(transformers.GraniteConfig, transformers.GraniteForCausalLM)
OLMOE = Family(transformers.OlmoeConfig, transformers.OlmoeForCausalLM)
WIDE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 288, "num_attention_heads": 8}
EXPERTS: dict[str, Any] = {**WIDE, "head_dim": 20, "intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("family", [GRANITE_FAMILY, OLMOE], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["fp8 blocks", "compressed-tensors int4 groups", "awq", "gptq"])
def test_a_quantised_checkpoint_computes_what_its_dense_twin_computes(
    tmp_path: Path, name: str, family: Family
) -> None:
    fields = WIDE if family is GRANITE_FAMILY else EXPERTS
    pair = q.write_pair(tmp_path, *FORMATS[name], family=family, **fields)
    q.scatter(pair.quantised)
    tokens = prompt(40)
    found = PagedModel(pair.quantised, model_impl="transformers").logits(tokens)
    assert_computes(PagedModel(pair.dense, model_impl="transformers"), tokens, found)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"), r"lacks 1 tensor .*up_proj\.scales"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.qweight"), r"lacks 1 tensor .*up_proj\.qweight"),
        (lambda tensors: tensors.pop("model.norm.weight"), r"lacks 1 tensor \(model\.norm\.weight\)"),
        (lambda tensors: tensors.update(stray=torch.zeros(2)), r"holds 1 tensor \(stray\)"),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.scales": torch.zeros(3, 4)}),
            r"up_proj\.scales has shape \[3, 4\]",
        ),
    ],
)
def test_a_damaged_one_is_refused_in_a_sentence(tmp_path: Path, damage: Any, reason: str) -> None:
    path = q.write_pair(tmp_path, *FORMATS["awq"], family=GRANITE_FAMILY, **WIDE).quantised
    q.change(path, damage)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        PagedModel(path, model_impl="transformers")
    assert "\n" not in str(refusal.value)


def test_transposed_weights_are_refused_rather_than_taken_the_wrong_way(tmp_path: Path) -> None:
    path = GPT2.checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=q.AWQ_CONFIG)
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel keeps its weights transposed"):
        PagedModel(path)


def test_8_bit_experts_in_one_stack_are_refused(tmp_path: Path) -> None:
    path = q.write_pair(tmp_path, *FORMATS["fp8 blocks"], family=OLMOE, **EXPERTS).quantised
    leaves = {"weight": "", "weight_scale_inv": "_scale_inv"}
    q.stack_experts(path, ("gate_proj", "up_proj"), "gate_up_proj", leaves=leaves)
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj in .* is torch\.float8_e4m3fn"):
        PagedModel(path, model_impl="transformers")


def test_gpt_oss_as_it_is_published_computes_the_same_by_both_routes(tmp_path: Path) -> None:
    overrides = {"intermediate_size": 64, **VARIANTS[0].overrides}
    pair = q.write_gpt_oss_pair(tmp_path, VARIANTS[0].family, **overrides)
    tokens = prompt(40)
    found = PagedModel(pair.quantised, model_impl="transformers").logits(tokens)
    assert_computes(PagedModel(pair.dense, model_impl="transformers"), tokens, found)
    assert_computes(PagedModel(pair.quantised, model_impl="kaon"), tokens, found)


def test_experts_as_gpt_oss_has_them_are_refused_for_another_model(tmp_path: Path) -> None:
    path = APERTUS.checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(CheckpointError, match=r"quant_method mxfp4 .* ApertusForCausalLM has others"):
        PagedModel(path)
