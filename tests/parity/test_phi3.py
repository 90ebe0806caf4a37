"""Phi-3's fused tensors on each tensor-parallel rank, and its published configs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.architectures.config import ModelConfig
from models.architectures.phi3 import Phi3ForCausalLM
from models.loading.loader import load_model
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, Reference, assert_computes, prompt
from tests.parity.test_model_sharding import ranks
from tests.parity.variants.phi3 import VARIANTS


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_takes_its_heads_of_queries_keys_and_values_from_the_one_tensor(tmp_path: Path, size: int) -> None:
    path = make_checkpoint(tmp_path, VARIANTS[0].family)
    config = ModelConfig.from_checkpoint(path)
    weights = load_file(path / "model.safetensors")
    q, k, v = weights["model.layers.0.self_attn.qkv_proj.weight"].split([64, 32, 32])
    gate, up = weights["model.layers.0.mlp.gate_up_proj.weight"].chunk(2)
    for parallel in ranks(size):
        model = load_model(path, config, dtype=torch.float32, device=CPU, progress=False, parallel=parallel)
        assert isinstance(model, Phi3ForCausalLM)
        layer, rank = model.model.layers[0], parallel.rank
        # Four ranks hold two key-value heads: adjacent ranks hold the same one.
        shared = min(size, 2)
        kv_rank = rank * shared // size
        mine = [q.chunk(size)[rank], k.chunk(shared)[kv_rank], v.chunk(shared)[kv_rank]]
        torch.testing.assert_close(layer.self_attn.qkv_proj.weight, torch.cat(mine))
        mine = [gate.chunk(size)[rank], up.chunk(size)[rank]]
        torch.testing.assert_close(layer.mlp.gate_up_proj.weight, torch.cat(mine))


def test_a_config_as_published_is_read_like_transformers_reads_it(tmp_path: Path) -> None:
    """Version 4 spelling: the rope's base and the rotated fraction of a head are next to its scaling."""
    path = make_checkpoint(tmp_path, VARIANTS[1].family, **VARIANTS[1].overrides)
    rope = VARIANTS[1].overrides["rope_parameters"]
    edit_json(
        path / "config.json",
        rope_parameters=None,
        rope_theta=20000.0,
        partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]},
        original_max_position_embeddings=256,
    )
    tokens = prompt(80)
    model = PagedModel(path, max_model_len=256)
    assert_computes(Reference(path), tokens, model.logits(tokens))
