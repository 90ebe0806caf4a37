"""gpt-oss in parts: the shard of a tensor-parallel rank, and published configs."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GptOssForCausalLM as ReferenceModel

from models.architectures.config import ModelConfig
from models.architectures.gpt_oss import GptOssForCausalLM
from models.errors import CheckpointError
from models.loading.loader import load_model
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, Reference, assert_computes, prompt
from tests.parity.quantized_checkpoints import write_gpt_oss_pair
from tests.parity.test_model_sharding import ranks
from tests.parity.variants.gpt_oss import VARIANTS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(path, VARIANTS[0].family, num_key_value_heads=4, **VARIANTS[0].overrides)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_hold_the_sinks_of_their_heads_and_their_part_of_each_expert(checkpoint: Path, size: int) -> None:
    config = ModelConfig.from_checkpoint(checkpoint)
    weights = load_file(checkpoint / "model.safetensors")
    reference = ReferenceModel.from_pretrained(checkpoint, dtype=torch.float32).model.layers[1].mlp
    hidden = torch.randn(7, config.hidden_size, generator=torch.Generator().manual_seed(0))
    sinks, total = [], torch.zeros_like(hidden)
    for parallel in ranks(size):
        model = load_model(checkpoint, config, dtype=torch.float32, device=CPU, progress=False, parallel=parallel)
        assert isinstance(model, GptOssForCausalLM)
        layer = model.model.layers[1]
        sinks.append(layer.self_attn.sinks)
        with torch.inference_mode():
            total += layer.mlp(hidden)
    torch.testing.assert_close(torch.cat(sinks), weights["model.layers.1.self_attn.sinks"])
    with torch.inference_mode():
        torch.testing.assert_close(total, reference(hidden[None])[0][0], atol=1e-4, rtol=1e-4)


def test_a_config_as_published_is_read_like_transformers_reads_it(tmp_path: Path) -> None:
    """Version 4 spelling, and without the fields that only newer versions write."""
    path = make_checkpoint(tmp_path, VARIANTS[0].family, **VARIANTS[0].overrides)
    rope = dict(VARIANTS[0].overrides["rope_parameters"])
    edit_json(
        path / "config.json",
        rope_parameters=None,
        rope_theta=rope.pop("rope_theta"),
        rope_scaling=rope,
        layer_types=None,
        swiglu_alpha=None,
        swiglu_limit=None,
        attention_bias=None,
    )
    assert ModelConfig.from_checkpoint(path).sliding_windows == (24, None)
    tokens = prompt(60)
    assert_computes(Reference(path), tokens, PagedModel(path).logits(tokens))


def test_experts_as_published_in_mxfp4_compute_what_the_dense_ones_do(tmp_path: Path) -> None:
    overrides = {"intermediate_size": 64, **VARIANTS[0].overrides}
    pair = write_gpt_oss_pair(tmp_path, VARIANTS[0].family, **overrides)
    tokens = prompt(60)
    found = PagedModel(pair.quantised).logits(tokens)
    assert_computes(PagedModel(pair.dense), tokens, found)
    assert_computes(Reference(pair.dense), tokens, found)


def test_experts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, VARIANTS[0].family)
    narrower = replace(ModelConfig.from_checkpoint(path), intermediate_size=40)
    edit_json(path / "config.json", num_experts_per_tok=9)
    with pytest.raises(CheckpointError, match=r"num_experts_per_tok .* is 9; it must be at most 8, the experts"):
        PagedModel(path)
    edit_json(path / "config.json", num_experts_per_tok=3)
    with pytest.raises(CheckpointError, match=r"experts.down_proj in .* where the model needs \[8, 40, 64\]"):
        load_model(path, narrower, dtype=torch.float32, device=CPU, progress=False)
