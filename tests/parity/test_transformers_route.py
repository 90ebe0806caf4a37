"""The general route: models of transformers, by their own code over our paged attention, compute the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from models.architectures.config import ModelConfig
from models.attention.backend import AttentionBatch
from models.errors import CheckpointError
from models.layers.base import KVCacheSpec, VectorCacheSpec
from models.loading.checkpoint import TransformersConfig, read_checkpoint_config
from models.loading.loader import load_model
from models.loading.transformers_attention import PagedAttention
from models.loading.transformers_model import TransformersModel
from models.loading.transformers_states import RecurrentStates
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.foreign_models import (
    ALSO_REFUSED,
    APERTUS,
    GLM_MOE_DSA,
    GPT2,
    REFUSED,
    REFUSED_CONFIGS,
    SERVED,
    Foreign,
)
from tests.parity.paged_model import CPU, PagedModel, Reference, Row, assert_computes, prompt
from tests.parity.test_architectures import GREEDY_TOKENS, LONG_TOKENS, generate
from tests.parity.test_worker_model_runner import runner_for
from tests.parity.variants import Variant, all_variants
from tests.sweeps import some, sweep

ONLY_OURS = {
    "MiniMaxForCausalLM": "MiniMax uses cache of its own",
    "MiniMaxM3VLForCausalLM": "layers of minimax_m3_sparse",
    "DeepseekV4ForCausalLM": "layers of",
    "Glm5NextForCausalLM": "recurrent states and an indexer",
    "Llama4ForCausalLM": "layers of chunked_attention",
    **dict.fromkeys(("BloomForCausalLM", "FalconForCausalLM", "GPTJForCausalLM"), "computes no attention through"),
    "MptForCausalLM": "alibi of .* is true",
}
"""Architectures that only our own code serves, with the reason."""


SHORT = {
    "GptOssForCausalLM",
    "DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM",
    "Lfm2ForCausalLM",
    "MiniMaxForCausalLM",
}
"""Architectures that have a class here, one of each kind of layer that no model of `SHORT_FOREIGN` has: sinks,
latents, tokens that an indexer selects, short convolutions, and a cache that only our code has."""
SHORT_FOREIGN = {
    "CodeGen",
    "Cohere2",
    "DiffLlama",
    "Gemma2",
    "GPT2",
    "GPTBigCode",
    "JetMoe",
    "OPT",
    "Phimoe",
    "Qwen2Moe",
    "RecurrentGemma",
    "Rwkv",
    "Starcoder2",
    "Zaya",
}
"""Models that each have a feature which others lack: positions, masks, windows, caps, experts, layouts."""


def representatives() -> list[object]:
    """The first and the last variant of each architecture that has a class here; short: the first of some."""
    by_name: dict[str, list[Variant]] = {}
    for variant in all_variants():
        by_name.setdefault(variant.architecture, []).append(variant)
    return [
        pytest.param(variant, marks=() if number == 0 and name in SHORT else pytest.mark.slow)
        for name, variants in by_name.items()
        for number, variant in enumerate((variants[0], variants[-1]))
    ]


@pytest.mark.parametrize(
    "foreign",
    [pytest.param(each, marks=() if each.stem in SHORT_FOREIGN else pytest.mark.slow) for each in SERVED],
    ids=lambda foreign: foreign.stem,
)
def test_a_model_without_a_class_here_computes_what_transformers_computes(foreign: Foreign, tmp_path: Path) -> None:
    path = foreign.checkpoint(tmp_path)
    prove(path, Reference(path), GREEDY_TOKENS if foreign.stem in SHORT_FOREIGN else LONG_TOKENS)


@pytest.mark.parametrize("variant", representatives(), ids=lambda variant: f"{variant.architecture}, {variant.name}")
def test_a_model_with_a_class_here_computes_the_same_by_both_routes(variant: Variant, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    # transformers limits time steps in prompts only.
    is_limited = "time_step_limit" in variant.overrides or variant.overrides.get("time_step_min", 0.0) > 1e-3
    reason = "limits its time steps to .* with model_impl kaon" if is_limited else ONLY_OURS.get(variant.architecture)
    if reason is not None:
        with pytest.raises(CheckpointError, match=reason):
            PagedModel(path, model_impl="transformers")
        return
    ours = PagedModel(path, model_impl="kaon")
    assert not isinstance(ours.model, TransformersModel)
    prove(path, ours)


LONG_ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "short_factor": [1.0 + 0.1 * step for step in range(8)],
        "long_factor": [2.0 + 0.5 * step for step in range(8)],
    },
}


@pytest.mark.parametrize("kind", LONG_ROPES)
def test_a_rope_that_depends_on_lengths_follows_each_sequence_s_own(kind: str, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, rope_parameters=LONG_ROPES[kind], max_position_embeddings=128)
    ours, general = (PagedModel(path, max_model_len=512, model_impl=route) for route in ("kaon", "transformers"))
    assert ours.rope == general.rope
    prompts = [prompt(60, seed=2), prompt(200, seed=3), prompt(128, seed=4), prompt(300, seed=5)]
    rows = [Row(list(tokens), slot=slot) for slot, tokens in enumerate(prompts)]
    together = general.step([(row, len(row.tokens)) for row in rows])
    for tokens, found in zip(prompts, together, strict=True):
        assert_computes(ours, tokens, found)


def test_indexed_attention_keeps_a_latent_and_an_index_key_a_token(tmp_path: Path) -> None:
    model = PagedModel(GLM_MOE_DSA.checkpoint(tmp_path), model_impl="transformers").model
    assert isinstance(model, TransformersModel)
    latents = [VectorCacheSpec(f"attention.{layer}", 40) for layer in range(3)]
    # The second layer attends to the first one's selection.
    assert model.kv_cache_layers() == [*latents, VectorCacheSpec("indexer.0", 24), VectorCacheSpec("indexer.2", 24)]


def test_an_adapter_of_what_expands_latents_finds_no_layer_where_tokens_are_chosen(tmp_path: Path) -> None:
    model = PagedModel(GLM_MOE_DSA.checkpoint(tmp_path), model_impl="transformers").model
    assert isinstance(model, TransformersModel)
    layers = model.linear_layers()
    assert "model.layers.0.self_attn.q_b_proj" in layers
    assert "model.layers.0.self_attn.kv_b_proj" not in layers


def test_keys_and_values_may_differ_in_size() -> None:
    query, key, value = torch.randn(1, 4, 3, 24), torch.randn(1, 2, 3, 24), torch.randn(1, 2, 3, 16)
    attention = PagedAttention(
        "x", query, key, value, scaling=None, sliding_window=None, softcap=None, has_sinks=False, dtype=torch.float32
    )
    assert attention.cache_spec == KVCacheSpec("x", 2, 24)


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        *(pytest.param(*each, id=each[0].stem) for each in REFUSED),
        *(pytest.param(*each, id=each[0].stem, marks=pytest.mark.slow) for each in ALSO_REFUSED),
    ],
)
def test_what_paged_attention_does_not_compute_is_refused_in_a_sentence(
    foreign: Foreign, reason: str, tmp_path: Path
) -> None:
    path = foreign.checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=reason) as refusal:
        PagedModel(path, model_impl="transformers")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("kind", REFUSED_CONFIGS)
def test_a_configuration_that_is_not_served_is_refused_in_a_sentence(kind: str, tmp_path: Path) -> None:
    architecture, reason = REFUSED_CONFIGS[kind]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture]}))
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint_config(tmp_path, "transformers")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "yet_to_come"}, "transformers cannot read .*yet_to_come"),
        (
            {"model_type": "yet_to_come", "auto_map": {"AutoConfig": "a.B"}},
            "code from the checkpoint, which is never run",
        ),
        ({"is_encoder_decoder": True}, "only decoder-only models"),
        ({"add_cross_attention": True}, "only decoder-only models"),
        ({"model_type": "vit"}, "must be a causal language model"),
    ],
)
def test_a_config_that_is_not_of_a_decoder_is_refused_in_a_sentence(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = GPT2.checkpoint(tmp_path)
    edit_json(path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=reason):
        read_checkpoint_config(path)


def test_a_tensor_that_is_missing_is_named_rather_than_made_up(tmp_path: Path) -> None:
    path = APERTUS.checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor.*model\.layers\.1\.mlp\.up_proj\.weight"):
        PagedModel(path)


def test_a_weight_that_is_not_a_number_is_the_cause_in_the_message(tmp_path: Path) -> None:
    path = APERTUS.checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="are NaN in float32: a weight or a scale is NaN"):
        PagedModel(path)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    path = APERTUS.checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config={"quant_method": "unheard-of"})
    with pytest.raises(CheckpointError, match=r'quant_method of .* is "unheard-of"; it must be one of'):
        PagedModel(path)


def test_a_padding_token_outside_the_vocabulary_is_named(tmp_path: Path) -> None:
    path = APERTUS.checkpoint(tmp_path)
    edit_json(path / "config.json", pad_token_id=100_000)
    with pytest.raises(CheckpointError, match=r"pad_token_id of .* is 100000; it must be a token of the vocabulary"):
        PagedModel(path)


def test_causality_that_is_null_is_causal(tmp_path: Path) -> None:
    path, tokens = make_checkpoint(tmp_path), prompt(20)
    edit_json(path / "config.json", is_causal=None)
    assert_computes(Reference(path), tokens, PagedModel(path, model_impl="transformers").logits(tokens))


def test_ranks_that_would_each_run_the_whole_model_are_refused(tmp_path: Path) -> None:
    path = APERTUS.checkpoint(tmp_path)
    parallel = TensorParallel(0, 2, cast(Any, object()))
    with pytest.raises(CheckpointError, match="tensor_parallel_size is 2"):
        load_model(
            path, read_checkpoint_config(path), dtype=torch.float32, device=CPU, progress=False, parallel=parallel
        )


def test_a_state_between_tokens_that_no_config_names_is_found_by_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = APERTUS.checkpoint(tmp_path)
    own = transformers.models.apertus.modeling_apertus.ApertusMLP.forward
    monkeypatch.setattr(
        transformers.models.apertus.modeling_apertus.ApertusMLP,
        "forward",
        lambda self, x: own(self, x) + x.roll(1, dims=1),
    )
    with pytest.raises(CheckpointError, match="gives other logits in a batch than alone"):
        PagedModel(path)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.slow) for each in range(1, 10))])
@pytest.mark.parametrize("stem", ["Dbrx", "JetMoe", "MiMoV2Flash"])
def test_experts_that_roundings_change_are_no_reason_for_a_refusal(stem: str, seed: int, tmp_path: Path) -> None:
    path = next(each for each in SERVED if each.stem == stem).checkpoint(tmp_path, seed=seed)
    assert isinstance(PagedModel(path, dtype=torch.bfloat16, model_impl="transformers").model, TransformersModel)


def of_own_step(positions: torch.Tensor) -> torch.Tensor:
    """Positions that begin at 0 in each step, as in models that count them themselves."""
    return positions - positions.min()


def later_by_one(positions: torch.Tensor) -> torch.Tensor:
    """Positions that are too large by one after a sequence's first 3 tokens."""
    return positions + (positions > 2)


@sweep(2, wrong=[of_own_step, later_by_one], dtype=[torch.bfloat16, torch.float32], stem=["Apertus", "JetMoe"])
def test_wrong_positions_are_found_in_any_dtype(
    stem: str,
    dtype: torch.dtype,
    wrong: Callable[[torch.Tensor], torch.Tensor],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = next(each for each in SERVED if each.stem == stem).checkpoint(tmp_path)
    own = TransformersModel.forward
    monkeypatch.setattr(TransformersModel, "forward", lambda self, ids, positions: own(self, ids, wrong(positions)))
    with pytest.raises(CheckpointError, match="gives other logits in a batch than alone"):
        PagedModel(path, dtype=dtype)


@pytest.mark.parametrize("stem", ["Apertus", "GPT2", "JetMoe"])
def test_keys_of_another_sequence_are_found_in_16_bits(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(each for each in SERVED if each.stem == stem).checkpoint(tmp_path)
    monkeypatch.setattr(
        "models.loading.transformers_model.AttentionBatch",
        lambda **fields: AttentionBatch(**{**fields, "block_tables": np.roll(fields["block_tables"], 1, axis=0)}),
    )
    with pytest.raises(CheckpointError, match="gives other logits in a batch than alone"):
        PagedModel(path, dtype=torch.bfloat16)


@pytest.mark.parametrize("stem", ["RecurrentGemma", "Zaya"])
def test_states_of_another_sequence_are_found_in_16_bits(
    stem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(each for each in SERVED if each.stem == stem).checkpoint(tmp_path)
    own = RecurrentStates.write
    monkeypatch.setattr(
        RecurrentStates, "write", lambda self, part, output: own(self, part._replace(after=part.after ^ 1), output)
    )
    with pytest.raises(CheckpointError, match="gives other logits in a batch than alone"):
        PagedModel(path, dtype=torch.bfloat16)


def test_a_window_in_calls_that_their_masks_do_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Foreign("Starcoder2", {"sliding_window": 24}).checkpoint(tmp_path)
    starcoder2 = transformers.models.starcoder2.modeling_starcoder2
    monkeypatch.setattr(starcoder2, "create_sliding_window_causal_mask", starcoder2.create_causal_mask)
    with pytest.raises(CheckpointError, match="a sliding window of 24 tokens in its calls"):
        PagedModel(path, model_impl="transformers")


def test_the_context_is_as_long_as_the_table_of_positions(tmp_path: Path) -> None:
    path = GPT2.checkpoint(tmp_path, max_position_embeddings=48)
    assert read_checkpoint_config(path).max_model_len == 48


def test_our_code_runs_what_it_has_by_default(tmp_path: Path) -> None:
    native = make_checkpoint(tmp_path / "native")
    foreign = APERTUS.checkpoint(tmp_path / "foreign")
    assert isinstance(read_checkpoint_config(native), ModelConfig)
    assert isinstance(read_checkpoint_config(native, "transformers"), TransformersConfig)
    assert isinstance(read_checkpoint_config(foreign), TransformersConfig)
    with pytest.raises(CheckpointError, match="architectures"):
        read_checkpoint_config(foreign, "kaon")


@pytest.mark.parametrize(
    "stem", some(["CodeGen", "Gemma2", "GPTNeo", "GPTNeoXJapanese", "OpenAIGPT", "Rwkv", "xLSTM"], "Gemma2", "Rwkv")
)
def test_bfloat16_errs_no_more_than_transformers_own(stem: str, tmp_path: Path) -> None:
    path = next(each for each in SERVED if each.stem == stem).checkpoint(tmp_path)
    tokens = prompt(60, seed=3)
    exact = Reference(path).logits(tokens).log_softmax(-1)
    theirs = (Reference(path, dtype=torch.bfloat16).logits(tokens).float().log_softmax(-1) - exact).abs()
    ours = (PagedModel(path, dtype=torch.bfloat16).logits(tokens).log_softmax(-1) - exact).abs()
    assert ours.mean() < 1.25 * theirs.mean()


@pytest.mark.parametrize(("stem", "by_token"), [("RecurrentGemma", True), ("Zaya", False)])
def test_a_state_that_prompts_ignore_is_found_in_16_bits_where_it_changes_little(
    stem: str, by_token: bool, tmp_path: Path
) -> None:
    """As in published models, whose layers each add little to the residual stream."""
    path = next(each for each in SERVED if each.stem == stem).checkpoint(tmp_path)
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if name.endswith((".linear_out.weight", ".out_proj.weight", ".o_proj.weight")):
            tensors[name] *= 0.1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    model = PagedModel(path, dtype=torch.bfloat16).model
    assert isinstance(model, TransformersModel)
    assert model.states is not None
    assert model.states.by_token == by_token


def prove(path: Path, reference: Reference | PagedModel, count: int = GREEDY_TOKENS) -> None:
    """Log probabilities, and greedy tokens alone and in batches with chunks, decodes, prefix hits and preemption."""
    model = PagedModel(path, model_impl="transformers")
    assert isinstance(model.model, TransformersModel)
    for length in (1, 37, 90):
        tokens = prompt(length, seed=length)
        assert_computes(reference, tokens, model.logits(tokens))
    shared = prompt(40, seed=5)
    prompts = [prompt(37), shared + prompt(21, seed=6), shared + prompt(3, seed=7), prompt(70, seed=8)]
    runner = runner_for(path, scheduling_policy="mixed", max_num_batched_tokens=48, model_impl="transformers")
    found = generate(runner, prompts, count=count)
    assert {len(tokens) for tokens in found} == {count}
    assert found == reference.argmax_tokens(prompts, found)
    assert model.greedy(prompts[0], count) == found[0]
