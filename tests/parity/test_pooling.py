"""Embeddings, classes and scores equal transformers' in float32 to 1e-5, in any batch.

The reference is transformers' own model, alone on each prompt, with sentence-transformers' modules written out.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from engine.messages import PoolingParams
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from engine.text.tokenizer import Tokenizer
from models.architectures.pooling import read_pooling
from models.errors import CheckpointError
from tests.parity.ahead import Ahead
from tests.parity.checkpoints import Family, edit_json, make_checkpoint
from tests.parity.embedding_checkpoints import (
    ENCODER_FAMILIES,
    add_modules,
    embedding_gemma,
    encoder,
    qwen3_classifier,
    qwen3_embedding,
    qwen3_reranker,
)
from tests.parity.foreign_models import APERTUS, GEMMA2, Foreign
from tests.parity.pooling_engine import PoolingEngine, load_pooling
from tests.parity.variants import Variant, older
from tests.sweeps import sweep

TOLERANCE = 1e-5
LENGTHS = (1, 3, 17, 40, 64)
RAW = PoolingParams(activate=False)
OLDER = list({each.architecture: each for each in reversed(older.VARIANTS)}.values())
"""The first variant of each."""


def prompts(count: int = 307) -> list[list[int]]:
    return [[(3 + 31 * row + 7 * column) % (count - 3) + 3 for column in range(n)] for row, n in enumerate(LENGTHS)]


def hidden_states(path: Path, token_ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers' final hidden states. # [n, H]"""
    model = AutoModel.from_pretrained(path, dtype=dtype).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).last_hidden_state[0].float()


def logits(path: Path, token_ids: list[int], types: list[int] | None = None) -> npt.NDArray[np.float32]:
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    given: dict[str, Any] = {} if types is None else {"token_type_ids": torch.tensor([types])}
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), **given).logits[0].numpy()


def unit(vector: torch.Tensor) -> npt.NDArray[np.float32]:
    return (vector / vector.norm()).numpy()


def assert_close(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> None:
    assert found.shape == expected.shape
    assert float(np.abs(found - expected).max()) <= TOLERANCE


# -- language models --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_embedding(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def expected(embedder: Path) -> list[npt.NDArray[np.float32]]:
    return [unit(hidden_states(embedder, each)[-1]) for each in prompts()]


@pytest.mark.parametrize("budget", [512, 16, 7])
def test_the_last_token_is_pooled_whole_and_in_chunks(
    embedder: Path, expected: list[npt.NDArray[np.float32]], budget: int
) -> None:
    engine = PoolingEngine(load_pooling(embedder, max_num_batched_tokens=budget, max_num_seqs=min(8, budget)))
    ran = engine.run(prompts())
    for vector, reference in zip(ran.vectors, expected, strict=True):
        assert_close(vector, reference)
    assert max(map(sum, ran.steps)) <= budget


def test_many_short_prompts_are_one_step(embedder: Path) -> None:
    ran = PoolingEngine(load_pooling(embedder, num_kvcache_blocks=256)).run([[3 + i, 5, 9 + i] for i in range(64)])
    assert len(ran.vectors) == 64
    assert len(ran.steps) == 1


def test_prompts_of_one_prefix_compute_it_once(embedder: Path, expected: list[npt.NDArray[np.float32]]) -> None:
    engine = PoolingEngine(load_pooling(embedder))
    first = engine.run(prompts())
    again = engine.run(prompts())
    assert sum(map(sum, again.steps)) < sum(map(sum, first.steps)) / 4
    for vector, reference in zip(again.vectors, expected, strict=True):
        assert_close(vector, reference)


@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_the_company_of_others_changes_neither(
    embedder: Path, expected: list[npt.NDArray[np.float32]], policy: str
) -> None:
    settings = {"task": ("generate", "embed"), "scheduling_policy": policy, "max_num_batched_tokens": 32}
    generating = [[5, 9, 200, 17], [7] * 20]
    loaded = load_pooling(embedder, max_num_seqs=16, **settings)
    alone = PoolingEngine(loaded).run([], generating=generating)
    together = PoolingEngine(loaded).run(prompts(), generating=generating)
    assert together.texts == alone.texts
    for vector, reference in zip(together.vectors, expected, strict=True):
        assert_close(vector, reference)


@pytest.mark.parametrize("preempt_after", [1, 3])
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_preempted_prompts_begin_again(tmp_path: Path, preempt_after: int, mode: str) -> None:
    path = add_modules(qwen3_embedding(tmp_path), mode)
    engine = PoolingEngine(load_pooling(path, max_num_batched_tokens=16, max_num_seqs=8))
    ran = engine.run(prompts(), preempt_after=preempt_after)
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        states = hidden_states(path, prompt)
        assert_close(vector, unit(states[-1] if mode == "lasttoken" else states.mean(0)))


def test_a_prompt_that_was_cached_for_generation_is_pooled_from_there(
    embedder: Path, expected: list[npt.NDArray[np.float32]]
) -> None:
    engine = PoolingEngine(load_pooling(embedder, task=("generate", "embed")))
    engine.run([], generating=prompts())
    ran = engine.run(prompts())
    assert sum(map(sum, ran.steps)) < sum(LENGTHS) / 4
    for vector, reference in zip(ran.vectors, expected, strict=True):
        assert_close(vector, reference)


@pytest.mark.parametrize("budget", [512, 16])
@pytest.mark.parametrize(
    "modes",
    [("cls_token",), ("max_tokens",), ("mean_tokens",), ("cls_token", "max_tokens", "mean_tokens", "lasttoken")],
    ids="+".join,
)
def test_every_mode_of_pooling_also_in_chunks(tmp_path: Path, modes: tuple[str, ...], budget: int) -> None:
    path = add_modules(qwen3_embedding(tmp_path), *modes, normalize=False)
    ran = PoolingEngine(load_pooling(path, max_num_batched_tokens=budget, max_num_seqs=8)).run(prompts())
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        states = hidden_states(path, prompt)
        parts = {
            "cls_token": states[0],
            "max_tokens": states.amax(0),
            "mean_tokens": states.mean(0),
            "lasttoken": states[-1],
        }
        assert_close(vector, torch.cat([parts[mode] for mode in modes]).numpy())


def test_a_dense_layer_comes_before_the_norm(tmp_path: Path) -> None:
    path = add_modules(qwen3_embedding(tmp_path), "mean_tokens", dense=(64, 24))
    from safetensors.torch import load_file

    dense = load_file(path / "2_Dense/model.safetensors")
    ran = PoolingEngine(load_pooling(path)).run(prompts())
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        mean = hidden_states(path, prompt).mean(0)
        assert_close(vector, unit(torch.tanh(dense["linear.weight"] @ mean + dense["linear.bias"])))


@pytest.mark.parametrize("tasks", [("embed",), ("generate", "embed")])
def test_vectors_of_steps_that_are_read_late(tmp_path: Path, tasks: tuple[str, ...]) -> None:
    # An odd number of elements, and of vectors: the device copies words of two.
    path = add_modules(qwen3_embedding(tmp_path), "mean_tokens", dense=(64, 23))
    loaded = load_pooling(path, task=tasks, max_num_batched_tokens=32, max_num_seqs=8)
    at_once = PoolingEngine(loaded).run(prompts())
    runner = ModelRunner(loaded, 64)
    runner.warm_up()
    nothing = SamplingParams(temperature=0.0, max_tokens=0)
    pooled = [Sequence(prompt, 16, nothing, pooling=PoolingParams()) for prompt in prompts()]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    others = [Sequence([5, 9, 200, 17], 16, greedy)] if "generate" in tasks else []
    reported = {output.request_id: output for output in Ahead(runner).run([*others, *pooled]) if output.finished}
    for seq, vector in zip(pooled, at_once.vectors, strict=True):
        assert_close(np.frombuffer(reported[seq.id].vector or b"", dtype="<f4"), vector)
    assert [seq.leave_reason for seq in others] == ["max_tokens"] * len(others)


def test_vectors_are_cut_and_normalised_again(embedder: Path, expected: list[npt.NDArray[np.float32]]) -> None:
    ran = PoolingEngine(load_pooling(embedder)).run(prompts(), PoolingParams(dimensions=10))
    for vector, reference in zip(ran.vectors, expected, strict=True):
        assert_close(vector, unit(torch.tensor(reference[:10])))


def test_a_body_that_was_saved_by_itself_has_no_prefix_and_needs_no_head(tmp_path: Path, embedder: Path) -> None:
    # In the layout of the published Qwen3-Embedding: the names of its tensors begin with `layers`.
    AutoModel.from_pretrained(embedder).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["Qwen3ForCausalLM"], tie_word_embeddings=False)
    (tmp_path / "tokenizer.json").write_bytes((embedder / "tokenizer.json").read_bytes())
    add_modules(tmp_path, "lasttoken")
    ran = PoolingEngine(load_pooling(tmp_path)).run(prompts())
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        assert_close(vector, unit(hidden_states(embedder, prompt)[-1]))


@sweep(variant={each.architecture: each for each in OLDER}, is_alone={"whole": False, "alone": True})
def test_models_whose_tensors_and_fields_have_other_names_embed(
    variant: Variant, is_alone: bool, tmp_path: Path
) -> None:
    path = whole = make_checkpoint(tmp_path / "whole", variant.family, **variant.overrides)
    if is_alone:
        path = tmp_path / "alone"
        AutoModel.from_pretrained(whole).save_pretrained(path)
        (path / "tokenizer.json").write_bytes((whole / "tokenizer.json").read_bytes())
    ran = PoolingEngine(load_pooling(path, task=("embed",))).run(prompts())
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        assert_close(vector, unit(hidden_states(whole, prompt)[-1]))


@pytest.mark.parametrize("variant", OLDER, ids=lambda variant: variant.architecture)
def test_classifiers_whose_tensors_have_other_names(variant: Variant, tmp_path: Path) -> None:
    config_class = variant.family.config_class
    name = variant.architecture.replace("ForCausalLM", "ForSequenceClassification")
    family = Family(config_class, getattr(transformers, name), variant.family.defaults)
    path = make_checkpoint(tmp_path, family, num_labels=3, **variant.overrides)
    for vector, prompt in zip(PoolingEngine(load_pooling(path)).run(prompts(), RAW).vectors, prompts(), strict=True):
        assert_close(vector, logits(path, prompt))


@pytest.mark.parametrize("num_labels", [1, 3])
def test_a_classifier_over_a_language_model(tmp_path: Path, num_labels: int) -> None:
    path = qwen3_classifier(tmp_path, num_labels)
    engine = PoolingEngine(load_pooling(path))
    for vector, prompt in zip(engine.run(prompts(), RAW).vectors, prompts(), strict=True):
        assert_close(vector, logits(path, prompt))
    for vector, prompt in zip(engine.run(prompts()).vectors, prompts(), strict=True):
        raw = torch.tensor(logits(path, prompt))
        assert_close(vector, (raw.softmax(0) if num_labels > 1 else raw.sigmoid()).numpy())


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_compares_the_logits_of_two_answers(tmp_path: Path, tied: bool) -> None:
    path = qwen3_reranker(tmp_path, tie_word_embeddings=tied)
    no, yes = (Tokenizer.from_checkpoint(path).token_id(token) for token in "ny")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ran = PoolingEngine(load_pooling(path)).run(prompts())
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        with torch.inference_mode():
            last = model(torch.tensor([prompt])).logits[0, -1]
        assert_close(vector, last[[no, yes]].softmax(0)[1:].numpy())


@pytest.mark.parametrize("variant", OLDER, ids=lambda variant: variant.architecture)
def test_rerankers_whose_tensors_have_other_names(variant: Variant, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    edit_json(path / "config.json", classifier_from_token=["n", "y"])
    no, yes = (Tokenizer.from_checkpoint(path).token_id(token) for token in "ny")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for vector, prompt in zip(PoolingEngine(load_pooling(path)).run(prompts()).vectors, prompts(), strict=True):
        with torch.inference_mode():
            last = model(torch.tensor([prompt])).logits[0, -1]
        assert_close(vector, last[[no, yes]].softmax(0)[1:].numpy())


def test_sentence_transformers_module_of_scores_is_the_same(tmp_path: Path) -> None:
    path = qwen3_reranker(tmp_path)
    by_tokens = PoolingEngine(load_pooling(path)).run(prompts())
    edit_json(path / "config.json", classifier_from_token=None)
    tokenizer = Tokenizer.from_checkpoint(path)
    kinds = [{"path": "", "type": "x.Transformer"}, {"path": "1_LogitScore", "type": "x.LogitScore"}]
    (path / "modules.json").write_text(json.dumps(kinds))
    (path / "1_LogitScore").mkdir()
    ids = {"true_token_id": tokenizer.token_id("y"), "false_token_id": tokenizer.token_id("n")}
    (path / "1_LogitScore/config.json").write_text(json.dumps(ids))
    by_ids = PoolingEngine(load_pooling(path)).run(prompts())
    for vector, same in zip(by_ids.vectors, by_tokens.vectors, strict=True):
        assert_close(vector, same)


# -- encoders ---------------------------------------------------------------------------------------------------


@sweep(family=[*ENCODER_FAMILIES], mode=["cls_token", "mean_tokens"])
def test_an_encoder_embeds_as_transformers_does(tmp_path: Path, family: str, mode: str) -> None:
    path = add_modules(encoder(tmp_path, family), mode)
    # In steps of 64 tokens: prompts are never split, and several share a step.
    ran = PoolingEngine(load_pooling(path, max_num_batched_tokens=64)).run(prompts())
    assert sorted(count for step in ran.steps for count in step) == sorted(LENGTHS)
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        states = hidden_states(path, prompt)
        assert_close(vector, unit(states[0] if mode == "cls_token" else states.mean(0)))


@sweep(family=[*ENCODER_FAMILIES], num_labels=[1, 4])
def test_an_encoder_classifies_texts_and_pairs_as_transformers_does(
    tmp_path: Path, family: str, num_labels: int
) -> None:
    path = encoder(tmp_path, family, num_labels)
    tokenizer = Tokenizer.from_checkpoint(path)
    pairs = [("a dog", "The fox jumps"), ("The lazy dog sleeps", "x"), ("jumps", "friends and a fox. " * 3)]
    encoded = [tokenizer.encode_for_pooling(*pair) for pair in pairs]
    single = tokenizer.encode_for_pooling("The quick fox")
    given = [*encoded, single]
    if family == "bert":
        assert [first is not None for _, first in given] == [True, True, True, False]
    engine = PoolingEngine(load_pooling(path))
    ran = engine.run([ids for ids, _ in given], RAW, firsts=[first for _, first in given])
    for vector, (ids, first) in zip(ran.vectors, given, strict=True):
        types = None if first is None else [0] * first + [1] * (len(ids) - first)
        assert_close(vector, logits(path, ids, types))


def test_a_language_model_with_attention_in_both_directions(tmp_path: Path) -> None:
    path = embedding_gemma(tmp_path)
    from safetensors.torch import load_file

    dense = load_file(path / "2_Dense/model.safetensors")
    ran = PoolingEngine(load_pooling(path, max_num_batched_tokens=64)).run(prompts())
    assert sorted(count for step in ran.steps for count in step) == sorted(LENGTHS)
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        mean = hidden_states(path, prompt).mean(0)
        assert_close(vector, unit(dense["linear.weight"] @ mean + dense["linear.bias"]))


def test_a_language_model_that_is_not_causal_by_its_configuration(tmp_path: Path) -> None:
    path = add_modules(qwen3_embedding(tmp_path), "lasttoken")
    edit_json(path / "config.json", is_causal=False)
    ran = PoolingEngine(load_pooling(path)).run(prompts())
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for vector, prompt in zip(ran.vectors, prompts(), strict=True):
        everything = torch.zeros(1, 1, len(prompt), len(prompt))
        with torch.inference_mode():
            states = model(torch.tensor([prompt]), attention_mask=everything).last_hidden_state[0]
        assert_close(vector, unit(states[-1]))


def test_windows_of_a_long_prompt_are_computed_in_parts(tmp_path: Path) -> None:
    path = add_modules(encoder(tmp_path, "modernbert", max_position_embeddings=1024), "mean_tokens")
    prompt = [(7 * index) % 300 + 3 for index in range(777)]
    ran = PoolingEngine(load_pooling(path)).run([prompt])
    assert_close(ran.vectors[0], unit(hidden_states(path, prompt).mean(0)))


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_bfloat16_errs_no_more_than_transformers(tmp_path: Path, family: str) -> None:
    path = add_modules(encoder(tmp_path, family), "mean_tokens")
    assert _error_ratio(path, prompts()[2:]) <= 1.25


def test_bfloat16_of_a_language_model_errs_no_more_than_transformers(embedder: Path) -> None:
    assert _error_ratio(embedder, prompts()[2:]) <= 1.25


def _error_ratio(path: Path, given: list[list[int]]) -> float:
    """The root-mean-square error in bfloat16, as a multiple of transformers' own."""
    pooling = read_pooling(path)
    assert pooling is not None

    def reference(dtype: torch.dtype) -> npt.NDArray[np.float32]:
        states = [hidden_states(path, each, dtype) for each in given]
        return np.stack([unit(each[-1] if pooling.modes == ("last",) else each.mean(0)) for each in states])

    exact, theirs = reference(torch.float32), reference(torch.bfloat16)
    ours = np.stack(PoolingEngine(load_pooling(path, torch.bfloat16)).run(given).vectors)
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(theirs - exact))


@pytest.mark.parametrize("model", [GEMMA2, APERTUS], ids=lambda model: model.stem)
@pytest.mark.parametrize("mode", [None, "mean_tokens"])
def test_the_general_route_pools_what_transformers_computes(tmp_path: Path, model: Foreign, mode: str | None) -> None:
    path = model.checkpoint(tmp_path)
    if mode is not None:
        add_modules(path, mode)
    steps = {"max_num_batched_tokens": 16, "max_num_seqs": 8}
    engine = PoolingEngine(load_pooling(path, model_impl="transformers", task=("embed",), **steps))
    first, again = engine.run(prompts()), engine.run(prompts())
    for ran in (first, again):
        for vector, prompt in zip(ran.vectors, prompts(), strict=True):
            states = hidden_states(path, prompt)
            assert_close(vector, unit(states[-1] if mode is None else states.mean(0)))
    shares_prefixes = sum(map(sum, again.steps)) < sum(map(sum, first.steps))
    assert shares_prefixes == (mode is None)


def test_the_general_route_can_be_asked_for_and_generates_beside(
    embedder: Path, expected: list[npt.NDArray[np.float32]]
) -> None:
    loaded = load_pooling(embedder, model_impl="transformers", task=("generate", "embed"))
    ran = PoolingEngine(loaded).run(prompts(), generating=[[5, 9, 200, 17]])
    assert len(ran.texts[0]) == 12
    for vector, reference in zip(ran.vectors, expected, strict=True):
        assert_close(vector, reference)


def test_an_encoder_does_not_run_by_the_general_route(tmp_path: Path) -> None:
    path = encoder(tmp_path, "bert")
    with pytest.raises(CheckpointError, match="runs by Kaon's own code; set it to auto"):
        load_pooling(path, model_impl="transformers")


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["RobertaForCausalLM", "XLMRobertaForCausalLM"])
def test_a_language_model_over_an_encoder_is_not_pooled_unless_asked(tmp_path: Path, architecture: str) -> None:
    """So that the start says why it cannot generate."""
    path = encoder(tmp_path, "bert")
    edit_json(path / "config.json", architectures=[architecture])
    assert read_pooling(path) is None
    with pytest.raises(CheckpointError, match=f"is {architecture}, whose prompts this release cannot pool"):
        read_pooling(path, ("embed",))


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "pooling_mode_weightedmean_tokens"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "sets no mode of pooling"),
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        ("config.json", {"hidden_act": "silu"}, "hidden_act"),
        ("config.json", {"architectures": ["T5EncoderModel"]}, "whose prompts this release cannot pool"),
    ],
)
def test_what_cannot_be_pooled_is_refused_by_name(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    path = add_modules(encoder(tmp_path, "bert"), "mean_tokens")
    edit_json(path / file, **change)
    with pytest.raises(CheckpointError, match=message):
        load_pooling(path)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    path = encoder(tmp_path, "bert")
    edit_json(path / "config.json", architectures=["BertForSequenceClassification"])
    with pytest.raises(CheckpointError, match=r"lacks classifier\.weight"):
        load_pooling(path)
