"""Latent attention and its indexer: results of parts equal those of the whole, and a wrong checkpoint is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from engine.runner.kv_cache import LayerCaches
from models.architectures.config import ModelConfig
from models.attention.backend import AttentionBatch, select_backend
from models.attention.context import Context, forward_context, set_kv_cache_data
from models.errors import CheckpointError
from models.layers.rotary import RotaryEmbedding
from models.loading.loader import load_model
from models.ops.types import VectorCache
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, Row, assert_computes, distribution, prompt
from tests.parity.test_model_sharding import ranks
from tests.parity.tolerance import assert_within
from tests.parity.variants import Variant
from tests.parity.variants.deepseek import VARIANTS

BLOCK_SIZE = 16
V2, V3, V32 = (
    next(variant for variant in VARIANTS if variant.architecture == name)
    for name in ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM")
)


def checkpoint_of(variant: Variant, directory: Path, **overrides: Any) -> Path:
    return make_checkpoint(directory, variant.family, **{**variant.overrides, **overrides})


def in_chunks(path: Path, tokens: list[int], chunk: int) -> torch.Tensor:
    """Logits of a prompt prefilled in chunks, whose last eight tokens are decoded one by one. # [len(tokens), V]"""
    model, row = PagedModel(path), Row(tokens)
    parts = []
    while row.computed < len(tokens) - 8:
        parts += model.step([(row, min(chunk, len(tokens) - 8 - row.computed))])
    while row.computed < len(tokens):
        parts += model.step([(row, 1)], num_decodes=1)
    return torch.cat(parts)


@pytest.mark.parametrize("variant", [V3, V32], ids=["V3", "V3.2"])
def test_bounds_on_memory_change_no_number(variant: Variant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = checkpoint_of(variant, tmp_path)
    tokens = prompt(120)
    unbounded = distribution(PagedModel(path), tokens)
    monkeypatch.setattr("models.attention.cpu.MAX_LATENT_ELEMENTS", 1)
    monkeypatch.setattr("models.attention.cpu.MAX_MASK_ELEMENTS", 1000)
    monkeypatch.setattr("models.attention.cpu_plan.MAX_MASK_ELEMENTS", 1000)
    monkeypatch.setattr("models.attention.cpu.MAX_INDEX_SCORES", 1)
    assert_within(in_chunks(path, tokens, 50).log_softmax(-1), *unbounded)


@pytest.mark.parametrize("variant", [V3, V32], ids=["V3", "V3.2"])
@pytest.mark.parametrize("absorbed", [True, False])
def test_absorbed_and_expanded_latents_give_the_same(
    variant: Variant, absorbed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint_of(variant, tmp_path)
    tokens = prompt(90)
    cheaper = distribution(PagedModel(path), tokens)
    monkeypatch.setattr("models.attention.cpu._Heads.absorbing_is_cheaper", lambda *_: absorbed)
    assert_within(PagedModel(path).logits(tokens).log_softmax(-1), *cheaper)
    assert_within(in_chunks(path, tokens, 33).log_softmax(-1), *cheaper)


def run_layer(layer: nn.Module, config: ModelConfig, specs: list[Any], hidden: torch.Tensor) -> torch.Tensor:
    """One prefill of a decoder layer's attention. # [tokens, hidden_size]"""
    backend, length = select_backend(CPU), len(hidden)
    caches = LayerCaches(specs, backend, block_size=BLOCK_SIZE, num_slots=1, dtype=torch.float32, device=CPU)
    blocks = -(-length // BLOCK_SIZE)
    metadata = backend.build_metadata(
        AttentionBatch(
            query_lens=np.array([length]),
            seq_lens=np.array([length]),
            block_tables=np.arange(blocks, dtype=np.int32)[None],
            slot_mapping=np.arange(length),
            num_decodes=0,
        )
    )
    positions = torch.arange(length)
    cos, sin = RotaryEmbedding(config.rope, config.max_model_len)(positions)
    set_kv_cache_data(caches.allocate(blocks))
    context = Context(positions=positions, is_prefill=True, batch_size=1)
    with torch.inference_mode(), forward_context(metadata, context):
        output: torch.Tensor = layer(hidden, cos, sin)
    set_kv_cache_data({})
    return output


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("variant", [V2, V3, V32], ids=["V2", "V3", "V3.2"])
def test_heads_of_all_ranks_add_up_to_the_layer_over_the_same_latents(
    variant: Variant, size: int, tmp_path: Path
) -> None:
    path = checkpoint_of(variant, tmp_path)
    config = ModelConfig.from_checkpoint(path)
    hidden = torch.randn(40, config.hidden_size, generator=torch.Generator().manual_seed(0))

    def part(parallel: Any) -> tuple[torch.Tensor, torch.Tensor, list[Any]]:
        model: Any = load_model(path, config, dtype=torch.float32, device=CPU, progress=False, parallel=parallel)
        specs = model.kv_cache_layers()
        last = model.model.layers[-1]
        with torch.inference_mode():
            return run_layer(last.self_attn, config, specs, hidden), last.mlp(hidden), specs

    attended, fed, specs = part(ranks(1)[0])
    parts = [part(parallel) for parallel in ranks(size)]
    torch.testing.assert_close(sum(one[0] for one in parts), attended, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(sum(one[1] for one in parts), fed, atol=1e-4, rtol=1e-4)
    assert all(one[2] == specs for one in parts)


def test_the_cache_holds_one_latent_and_one_rotated_key_a_token(tmp_path: Path) -> None:
    model = PagedModel(checkpoint_of(V32, tmp_path)).model
    assert [(spec.name, spec.dim) for spec in model.kv_cache_layers()] == [
        (f"model.layers.{layer}.self_attn{part}", dim)
        for layer in range(2)
        for part, dim in (("", 32 + 8), (".indexer", 24))
    ]


def test_the_indexer_selects_the_best_scores_of_what_each_token_sees() -> None:
    """Two decodes and two spans, with and without context; some with fewer tokens than the selection."""
    generator = torch.Generator().manual_seed(0)
    heads, dim, top_k = 3, 4, 6
    lengths, counts = [30, 4, 25, 20], [1, 1, 7, 20]
    blocks = np.arange(8, dtype=np.int32).reshape(4, 2)[:, ::-1].copy()
    keys = [torch.randn(length, dim, generator=generator) for length in lengths]
    backend = select_backend(CPU)
    vectors = torch.full((8, BLOCK_SIZE, dim), torch.nan)
    slots = []
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        at = blocks[row][np.arange(length) // BLOCK_SIZE] * BLOCK_SIZE + np.arange(length) % BLOCK_SIZE
        vectors.view(-1, dim)[torch.from_numpy(at[: length - count]).long()] = keys[row][: length - count]
        slots.append(at[length - count :])
    metadata = backend.build_metadata(
        AttentionBatch(
            query_lens=np.array(counts),
            seq_lens=np.array(lengths),
            block_tables=blocks,
            slot_mapping=np.concatenate(slots).astype(np.int64),
            num_decodes=2,
        )
    )
    q = torch.randn(sum(counts), heads, dim, generator=generator)
    weights = torch.randn(sum(counts), heads, generator=generator)
    new_keys = torch.cat([rows[-count:] for rows, count in zip(keys, counts, strict=True)])
    selected = backend.index_top_k(q, weights, new_keys, VectorCache(vectors), metadata, top_k)
    assert selected is not None
    assert selected.shape == (sum(counts), top_k)
    token = 0
    for rows, length, count in zip(keys, lengths, counts, strict=True):
        for position in range(length - count, length):
            seen = rows[: position + 1]
            scores = ((q[token] @ seen.T).relu() * weights[token][:, None]).sum(0)
            found = sorted(position for position in selected[token].tolist() if position >= 0)
            worst = scores[found].min()
            assert len(found) == min(top_k, position + 1)
            assert (scores > worst + 1e-5).sum() < top_k
            token += 1


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    path = checkpoint_of(V3, tmp_path)
    expected = PagedModel(path).logits(prompt(20))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(2, 3)
    tensors["model.layers.3.mlp.experts.0.gate_proj.weight"] = torch.ones(2, 3)
    save_file(tensors, path / "model.safetensors")
    edit_json(path / "config.json", num_nextn_predict_layers=1)
    assert_computes(PagedModel(path), prompt(20), expected)
    edit_json(path / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"holds 2 tensors \(model\.layers\.3\.eh_proj\.weight"):
        PagedModel(path)


def test_the_older_spelling_of_a_published_config_means_the_same(tmp_path: Path) -> None:
    """`rope_scaling` with `type`, as DeepSeek publishes it; no `mlp_layer_types`."""
    path = checkpoint_of(V3, tmp_path)
    expected = PagedModel(path).logits(prompt(100))
    scaling = {
        "type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    edit_json(
        path / "config.json",
        rope_parameters=None,
        rope_scaling=scaling,
        rope_theta=10000,
        moe_layer_freq=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        rope_interleave=None,
    )
    assert_computes(PagedModel(path), prompt(100), expected)


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        (V3, {"topk_method": "greedy"}, r'topk_method of .*config\.json is "greedy"; it must be noaux_tc'),
        (V3, {"scoring_func": "softmax"}, r'scoring_func of .* is "softmax"; it must be sigmoid for DeepseekV3'),
        (V3, {"n_group": 5}, r"n_group of .* is 5; it must be a divisor of n_routed_experts, 16"),
        (V3, {"n_group": 16}, r"n_group of .* is 16; .*, for 2 or more a group"),
        (V3, {"topk_group": 5}, r"topk_group of .* is 5; it must be at most n_group, 4"),
        (V3, {"num_experts_per_tok": 9}, r"num_experts_per_tok of .* is 9; it must be at most 8, the experts that"),
        (V3, {"kv_lora_rank": None}, r"has no kv_lora_rank, which the model needs"),
        (V2, {"norm_topk_prob": True}, r"norm_topk_prob of .* is true; it must be false for DeepseekV2ForCausalLM"),
        (V32, {"index_head_dim": 6}, r"index_head_dim of .* is 6; it must be at least qk_rope_head_dim, 8"),
        (V32, {"mlp_layer_types": ["dense"]}, r'mlp_layer_types of .* is \["dense"\]; it must be a list of dense or'),
        (V32, {"q_lora_rank": None}, r"has no q_lora_rank, which the model needs"),
    ],
)
def test_a_checkpoint_that_would_be_computed_wrong_is_refused_in_a_sentence(
    variant: Variant, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = checkpoint_of(variant, tmp_path)
    edit_json(path / "config.json", **change)
    with pytest.raises(CheckpointError, match=message):
        PagedModel(path)
