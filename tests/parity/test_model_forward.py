"""Llama and Qwen3 compute the same as transformers, for all shapes and divisions of a prompt into steps."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from models.attention import cpu_plan
from models.attention.backend import AttentionMetaData
from models.attention.context import Context, forward_context, get_forward_context
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, Row, assert_computes, prompt
from tests.sweeps import some

SHAPES: dict[str, dict[str, Any]] = {
    "one KV head a query head": {"num_key_value_heads": 4},
    "two query heads a KV head": {"num_key_value_heads": 2},
    "one KV head": {"num_key_value_heads": 1},
    "seven query heads a KV head": {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 56},
    "heads of 64": {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48},
    "heads of 48": {"head_dim": 48},
    "tied embeddings": {"tie_word_embeddings": True},
    "attention bias": {"attention_bias": True},
    "odd vocabulary": {"vocab_size": 1009},
    "steep rope": {"rope_theta": 1_000_000.0},
}
LLAMA_SHAPES: dict[str, dict[str, Any]] = {
    "MLP bias": {"mlp_bias": True},
    "both biases": {"mlp_bias": True, "attention_bias": True},
}
CASES = [
    pytest.param(family, overrides, id=f"{family}, {name}")
    for family in ("llama", "qwen3")
    for name, overrides in {**SHAPES, **(LLAMA_SHAPES if family == "llama" else {})}.items()
]


@pytest.fixture(scope="module", params=some(["llama", "qwen3"], "qwen3"))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize(("family", "overrides"), CASES)
def test_prompt_log_probabilities_and_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, family: Any, overrides: dict[str, Any]
) -> None:
    path = make_checkpoint(tmp_path, family, **overrides)
    model, reference = PagedModel(path), Reference(path)
    tokens = prompt(37)
    assert_computes(reference, tokens, model.logits(tokens))
    found = [model.greedy(tokens, 32)]
    assert found == reference.argmax_tokens([tokens], found)


def test_weights_saved_in_bfloat16_are_computed_in_float32_on_request(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    model, reference = PagedModel(path), Reference(path)
    assert model.config.dtype == "bfloat16"
    assert_computes(reference, prompt(37), model.logits(prompt(37)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_float32(checkpoint: Path, dtype: torch.dtype) -> None:
    tokens = prompt(40)
    half, full = PagedModel(checkpoint, dtype=dtype), PagedModel(checkpoint)
    row = Row(tokens)
    pieces = [half.step([(row, count)], num_decodes=int(count == 1))[0] for count in (20, 19, 1)]
    expected = full.logits(tokens).log_softmax(-1)
    error = (torch.cat(pieces).log_softmax(-1) - expected).abs()
    assert error.mean() < 0.02 * expected.abs().mean()


@pytest.mark.parametrize("block_size", [1, 16, 32, 64])
def test_any_mix_of_chunks_and_decodes_equals_the_whole_prompt(checkpoint: Path, block_size: int) -> None:
    model = PagedModel(checkpoint, block_size=block_size, num_blocks=640 if block_size == 1 else 64)
    rows = [Row(prompt(length, seed=length)) for length in (70, 33, 90, 48, 16, 1)]
    got: dict[int, list[torch.Tensor]] = {index: [] for index in range(len(rows))}

    def step(*spans: tuple[int, int], num_decodes: int = 0) -> None:
        logits = model.step([(rows[index], count) for index, count in spans], num_decodes=num_decodes)
        for (index, _), of_row in zip(spans, logits, strict=True):
            got[index].append(of_row)

    step((0, 69), (1, 15))
    step((0, 1), (1, 2), (2, 31), (5, 1), num_decodes=1)
    step((1, 1), (2, 1), (3, 47), (4, 16), num_decodes=2)
    step((2, 1), (1, 1), (3, 1), num_decodes=3)
    step((1, 1), (2, 57), num_decodes=1)
    step((1, 13))
    for index, row in enumerate(rows):
        assert row.computed == len(row.tokens)
        assert_computes(model, row.tokens, torch.cat(got[index]))


def test_rows_of_very_different_lengths_decode_together(checkpoint: Path) -> None:
    model = PagedModel(checkpoint, num_blocks=128)
    rows = [Row(prompt(length, seed=length)) for length in (5, 400, 17, 300, 64, 130, 2, 399)]
    model.step([(row, len(row.tokens) - 1) for row in rows])
    together = model.step([(row, 1) for row in rows], num_decodes=len(rows))
    for row, logits in zip(rows, together, strict=True):
        assert_computes(model, row.tokens, logits[-1:])


def test_bounded_scratch_memory_changes_no_result(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that heads are gathered one by one and queries are processed in chunks of a few."""
    monkeypatch.setattr(cpu_plan, "MAX_GATHERED_VECTORS", 64)
    monkeypatch.setattr(cpu_plan, "MAX_MASK_ELEMENTS", 700)
    model = PagedModel(checkpoint)
    rows = [Row(prompt(length, seed=length)) for length in (100, 99, 20)]
    logits = [[], [], []]
    for counts, num_decodes in (((10, 98, 5), 0), ((89, 1, 14), 0), ((1, 0, 1), 2)):
        active = [index for index, count in enumerate(counts) if count]
        for index, found in zip(
            active,
            model.step([(rows[index], counts[index]) for index in active], num_decodes=num_decodes),
            strict=True,
        ):
            logits[index].append(found)
    for row, found in zip(rows, logits, strict=True):
        assert_computes(model, row.tokens, torch.cat(found))


def test_a_row_of_not_a_number_spoils_no_other_row(checkpoint: Path) -> None:
    """The bad row's blocks are reused unchanged."""
    model = PagedModel(checkpoint)
    bad, good = Row(prompt(20)), Row(prompt(37, seed=1))
    model.step([(bad, 20)])
    for layer in model.cache.values():
        layer.k_cache[bad.blocks], layer.v_cache[bad.blocks] = torch.nan, torch.inf
    bad.tokens.append(1)
    model.step([(good, 36)])
    spoiled, found = model.step([(bad, 1), (good, 1)], num_decodes=2)
    assert not spoiled.isfinite().all()
    assert_computes(model, good.tokens, found[-1:])


def test_a_row_is_computed_alike_alone_and_among_32(checkpoint: Path) -> None:
    model = PagedModel(checkpoint, num_blocks=256)
    rows = [Row(prompt(20 + index, seed=index)) for index in range(32)]
    model.step([(row, len(row.tokens) - 1) for row in rows])
    together = model.step([(row, 1) for row in rows], num_decodes=32)
    for row, found in zip(rows, together, strict=True):
        assert_computes(model, row.tokens, found[-1:])


def test_a_step_of_another_thread_is_not_restored() -> None:
    metadata, context = cast(AttentionMetaData, None), cast(Context, None)
    outer, inner = (forward_context(metadata, context) for _ in range(2))
    outer.__enter__()
    thread = threading.Thread(target=inner.__enter__)
    thread.start()
    thread.join()
    for step in (outer, inner):
        step.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="outside a step"):
        get_forward_context()


def test_running_a_model_outside_a_step_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(RuntimeError, match="outside a step"):
        PagedModel(checkpoint).model(torch.tensor([1]), torch.tensor([0]))
