"""Checkpoints of text and images, or under other names: they compute what the same text model computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.architectures.config import ModelConfig
from models.architectures.registry import ARCHITECTURES, TEXT_PARTS
from models.errors import CheckpointError
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, assert_same_distribution, prompt
from tests.parity.variants import all_variants, recurrent

_OLD, _NEW = "language_model.", "model.language_model."
_TEXT_FIELDS_OF_THE_WHOLE = ("architectures", "dtype", "eos_token_id", "tie_word_embeddings")


def wrap(text: Path, whole: Path, architecture: str, kind: str, *, prefix: str, **further: object) -> None:
    """Writes the checkpoint of several parts whose text part is `text`, as transformers or an older version does."""
    whole.mkdir()
    tensors = {}
    for name, tensor in load_file(text / "model.safetensors").items():
        is_head = prefix == _NEW and name.startswith("lm_head")
        tensors[name if is_head else prefix + name.removeprefix("model." if prefix == _NEW else "")] = tensor
    tensors["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, whole / "model.safetensors", {"format": "pt"})
    fields = json.loads((text / "config.json").read_text())
    config = {name: fields.pop(name) for name in _TEXT_FIELDS_OF_THE_WHOLE if name in fields}
    config |= {"architectures": [architecture], "text_config": {**fields, "model_type": kind}, "vision_config": {}}
    (whole / "config.json").write_text(json.dumps({**config, **further}))


_CASES = [(whole, kind, text) for whole, kinds in TEXT_PARTS.items() for kind, text in kinds.items()]


@pytest.mark.parametrize(("whole", "kind", "text"), _CASES, ids=lambda name: name)
def test_the_text_part_computes_what_the_text_model_computes(whole: str, kind: str, text: str, tmp_path: Path) -> None:
    variant = next(each for each in all_variants() if each.architecture == text)
    alone = make_checkpoint(tmp_path / "text", variant.family, **variant.overrides)
    tokens = prompt(20)
    expected = PagedModel(alone).logits(tokens)
    for number, prefix in enumerate((_OLD, _NEW)):
        wrap(alone, tmp_path / str(number), whole, kind, prefix=prefix)
        model = PagedModel(tmp_path / str(number))
        assert model.config.architecture == text
        assert torch.equal(model.logits(tokens), expected)


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
    """MiniMax-Text-01 and M1 name their classes, kinds of layers and factors otherwise than transformers."""
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


@pytest.mark.parametrize("name", ["IQuestCoderForCausalLM", "InternLM3ForCausalLM"])
def test_llama_runs_under_other_names(tmp_path: Path, name: str) -> None:
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", architectures=[name])
    assert ModelConfig.from_checkpoint(path).architecture == "LlamaForCausalLM"
