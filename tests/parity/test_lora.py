"""Adapters in one batch compute the same as if each were merged into the base model's weights."""

import json
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Starcoder2Config, Starcoder2ForCausalLM, ZayaConfig, ZayaForCausalLM

from engine.core.scheduler import Scheduler
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.architectures.registry import ARCHITECTURES
from models.errors import CheckpointError
from models.lora.adapters import Adapter, attach, detach, load_adapters
from models.lora.config import LoRAConfig
from tests.parity.adapters import (
    PROJECTIONS,
    STACKS,
    make_adapter,
    make_expert_adapter,
    merge,
    read_weights,
    write_adapter,
)
from tests.parity.checkpoints import Family, make_checkpoint
from tests.parity.paged_model import CPU, PagedModel, Reference, Row, assert_computes, prompt
from tests.parity.runners import steps
from tests.parity.test_worker_model_runner import runner_for
from tests.parity.variants import KINDS, Variant, all_variants, short_form

GREEDY_TOKENS = 24
SHORT = {"LlamaForCausalLM", "DeepseekV3ForCausalLM", "Qwen3NextForCausalLM"}
"""With keys and values, with latents and experts, and with a state."""
BASE, WIDE, NARROW = 0, 1, 2


class Served(NamedTuple):
    """A checkpoint, two adapters of different ranks for it, and transformers' models: base, and each merged."""

    checkpoint: Path
    adapters: tuple[Path, Path]
    references: tuple[Reference, Reference, Reference]

    @property
    def flags(self) -> tuple[str, str]:
        return f"wide={self.adapters[0]}", f"narrow={self.adapters[1]}"


def first_variants() -> list[Variant]:
    """One of each architecture."""
    firsts = {variant.architecture: variant for variant in reversed(all_variants())}
    return [firsts[architecture] for architecture in ARCHITECTURES]


@pytest.fixture(
    scope="module",
    params=short_form(first_variants(), without=frozenset(ARCHITECTURES) - KINDS),
    ids=lambda variant: variant.architecture,
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    directory = tmp_path_factory.mktemp("lora")
    variant: Variant = request.param
    checkpoint = make_checkpoint(directory / "base", variant.family, **variant.overrides)
    base = read_weights(checkpoint)
    leaves = {name.split(".")[-2] for name in base if name.endswith(".weight")} & PROJECTIONS
    wide = make_adapter(
        directory / "wide", base, rank=8, alpha=4, leaves=leaves, own={"0.self_attn.o_proj": (3, 1.5)}, seed=1
    )
    narrow = make_adapter(
        directory / "narrow",
        base,
        rank=2,
        alpha=1,
        leaves={"q_proj", "qkv_proj", "query_key_value", "o_proj", "q_b_proj", "wo_b"} & leaves or {"out_proj"},
        use_rslora=True,
        seed=2,
    )
    merged = [merge(directory / f"merged{i}", checkpoint, base, deltas) for i, deltas in enumerate((wide, narrow))]
    references = Reference(checkpoint), Reference(merged[0]), Reference(merged[1])
    return Served(checkpoint, (directory / "wide", directory / "narrow"), references)


def test_rows_of_one_step_get_their_own_adapters_log_probabilities(served: Served) -> None:
    """Rows of one adapter are adjacent in the first step, and apart in the second."""
    model = PagedModel(served.checkpoint)
    load_adapters(model.model, dict(zip("wn", served.adapters, strict=True)), dtype=torch.float32, device=CPU)
    adapters = [WIDE, WIDE, BASE, NARROW, NARROW]
    rows = [Row(prompt(30 + i, seed=i), slot=i, adapter=adapter) for i, adapter in enumerate(adapters)]
    found = [model.step([(row, 11) for row in rows])]
    order = [0, 2, 3, 1, 4]
    later = model.step([(rows[i], len(rows[i].tokens) - 11) for i in order])
    found.append([later[order.index(i)] for i in range(len(rows))])
    for i, row in enumerate(rows):
        assert_computes(served.references[row.adapter], row.tokens, torch.cat([found[0][i], found[1][i]]))


few = pytest.mark.parametrize(
    "served",
    [
        pytest.param(each, marks=() if each.architecture in SHORT else pytest.mark.slow, id=each.architecture)
        for each in first_variants()
    ],
    indirect=True,
)
"""The architectures of `SHORT`; in the long form, all."""


@few
def test_bfloat16_errs_about_as_much_as_products_beside_transformers_layers(served: Served) -> None:
    """Merged weights have smaller errors, since they are rounded once. If two experts are nearly equal, rounding
    decides: so the median and a quantile of many tokens are compared."""
    model = PagedModel(served.checkpoint, dtype=torch.bfloat16)
    load_adapters(model.model, dict(zip("wn", served.adapters, strict=True)), dtype=torch.bfloat16, device=CPU)
    theirs = Reference(served.checkpoint, dtype=torch.bfloat16)
    add_products(theirs.model, served.adapters[0])
    ours_by_token, theirs_by_token = [], []
    for seed in range(3, 7):
        row = Row(prompt(60, seed=seed), adapter=WIDE)
        (logits,) = model.step([(row, 60)])
        exact = served.references[WIDE].logits(row.tokens).log_softmax(-1)
        ours_by_token.append((logits.log_softmax(-1) - exact).abs().mean(-1))
        theirs_by_token.append((theirs.logits(row.tokens).float().log_softmax(-1) - exact).abs().mean(-1))
    our_errors, their_errors = torch.cat(ours_by_token), torch.cat(theirs_by_token)
    assert our_errors.median() < 1.25 * their_errors.median()
    assert our_errors.quantile(0.75) < 1.5 * their_errors.quantile(0.75)


def add_products(model: nn.Module, adapter: Path) -> None:
    """As PEFT does: each layer of transformers' adds its product of this adapter to its result."""
    config, tensors = LoRAConfig.from_adapter(adapter), load_file(adapter / "adapter_model.safetensors")
    for name, module in model.named_modules():
        if (a := tensors.get(f"base_model.model.{name}.lora_A.weight")) is not None:
            b = tensors[f"base_model.model.{name}.lora_B.weight"]
            module.register_forward_hook(partial(_add_product, a.bfloat16(), b.bfloat16(), config.scale_of(name)))


def _add_product(
    a: torch.Tensor, b: torch.Tensor, scale: float, _: nn.Module, args: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    return output + args[0] @ a.T @ b.T * scale


@few
def test_greedy_tokens_are_those_of_merged_weights_in_chunks_with_prefix_hits(served: Served) -> None:
    shared = prompt(40, seed=5)
    prompts = [shared + prompt(9, seed=6), shared + prompt(21, seed=7)]
    jobs = [(tokens, adapter) for tokens in prompts for adapter in (BASE, WIDE, NARROW)]
    runner = runner_for(served.checkpoint, scheduling_policy="mixed", max_num_batched_tokens=48, lora=served.flags)
    found, hits = generate(runner, jobs)
    for (tokens, adapter), answer in zip(jobs, found, strict=True):
        assert len(answer) == GREEDY_TOKENS
        assert [answer] == served.references[adapter].argmax_tokens([tokens], [answer])
    assert len({tuple(tokens) for tokens in found}) > 1, "the adapters change nothing here"
    if runner.config.enable_prefix_caching:
        # The first prompt of each adapter has no prefix hit, the second finds the first's beginning.
        assert hits == [0, 0, 0, 32, 32, 32]


EXPERTS = ("GptOssForCausalLM", "Qwen3MoeForCausalLM")
MORE_EXPERTS = ("DeepseekV3ForCausalLM", "MixtralForCausalLM", "NemotronHForCausalLM", "PhimoeForCausalLM")


def variant_of(architecture: str) -> Variant:
    return next(each for each in first_variants() if each.architecture == architecture)


@pytest.mark.parametrize(
    ("architecture", "is_exchanged"),
    [
        *((each, False) for each in EXPERTS),
        pytest.param(EXPERTS[1], True, marks=pytest.mark.slow),
        *(pytest.param(each, False, marks=pytest.mark.slow) for each in MORE_EXPERTS),
    ],
)
def test_adapters_of_stacked_experts_compute_what_merged_stacks_do(
    architecture: str, is_exchanged: bool, tmp_path: Path
) -> None:
    variant = variant_of(architecture)
    checkpoint = make_checkpoint(tmp_path / "base", variant.family, **variant.overrides)
    base, merged = Reference(checkpoint), Reference(checkpoint)
    make_expert_adapter(
        tmp_path / "wide",
        merged.model,
        rank=3,
        alpha=4,
        is_transposed=architecture == "GptOssForCausalLM",
        is_exchanged=is_exchanged,
    )
    model = PagedModel(checkpoint)
    load_adapters(model.model, {"wide": tmp_path / "wide"}, dtype=torch.float32, device=CPU)
    rows = [Row(prompt(30 + i, seed=i), slot=i, adapter=adapter) for i, adapter in enumerate((WIDE, BASE, WIDE))]
    found = model.step([(row, len(row.tokens)) for row in rows])
    for row, logits in zip(rows, found, strict=True):
        assert_computes(merged if row.adapter else base, row.tokens, logits)
    detach(model.model, WIDE)
    assert_computes(base, rows[0].tokens, model.logits(rows[0].tokens))


def test_patterns_are_matched_with_the_names_of_experts_before_the_adapter_is_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is attached between two steps, which would wait for them."""
    model = PagedModel(
        make_checkpoint(tmp_path / "base", variant_of("Qwen3MoeForCausalLM").family, num_hidden_layers=1)
    )
    path = tmp_path / "wide"
    make_expert_adapter(path, Reference(tmp_path / "base").model, rank=3, alpha=4, is_transposed=False)
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "alpha_pattern": {"no|module": 2.0}}))
    adapter = Adapter.read(model.model, path)
    matches = Mock(return_value=False)
    monkeypatch.setattr("models.lora.config._matches", matches)
    attach(model.model, WIDE, adapter, dtype=torch.float32, device=CPU)
    matches.assert_not_called()
    assert adapter.config.scale_of("another") == pytest.approx(4 / 3)
    matches.assert_called_once()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lora_A": None}, r"lacks model.layers.0.mlp.experts.base_layer.lora_A"),
        ({"": None}, r"lacks model.layers.0.mlp.experts.gate_up_proj; save"),
        ({"lora_A": (24, 8)}, r"experts.base_layer in .* has a product of 8 inputs and 80 outputs, which no stack"),
        ({"lora_A": (16, 64)}, r"has a LoRA product of shape \[16, 64\], where the model needs \[24, 64\]"),
    ],
)
def test_adapters_of_experts_that_do_not_fit_are_refused_in_a_sentence(
    changes: dict[str, tuple[int, int] | None], sentence: str, tmp_path: Path
) -> None:
    variant = variant_of("Qwen3MoeForCausalLM")
    model = PagedModel(make_checkpoint(tmp_path / "base", variant.family, num_hidden_layers=1))
    path = tmp_path / "wide"
    make_expert_adapter(path, Reference(tmp_path / "base").model, rank=3, alpha=4, is_transposed=False)
    tensors = load_file(path / "adapter_model.safetensors")
    for end, shape in changes.items():
        for name in [each for each in tensors if f".base_layer.{end}" in each]:
            if shape is None:
                del tensors[name]
            else:
                tensors[name] = torch.ones(shape)
    targets = [f"mlp.experts.{leaf}" for leaf in STACKS]
    write_adapter(path, tensors, r=3, target_parameters=targets)
    with pytest.raises(CheckpointError, match=sentence):
        load_adapters(model.model, {"wide": path}, dtype=torch.float32, device=CPU)


_GENERAL: dict[str, tuple[Family | Literal["llama"], set[str]]] = {
    "llama": ("llama", {"q_proj", "down_proj"}),
    # It has biases, and projections with names of its own.
    "starcoder2": (
        Family(Starcoder2Config, Starcoder2ForCausalLM, {"use_bias": True}),
        {"q_proj", "o_proj", "c_fc", "c_proj"},
    ),
    # It has recurrent states, so that a step is computed in parts.
    "zaya": (
        Family(ZayaConfig, ZayaForCausalLM, {"num_experts": 4, "moe_intermediate_size": 48, "router_hidden_size": 24}),
        {"q_proj", "o_proj"},
    ),
}


@pytest.mark.parametrize("family", _GENERAL)
def test_models_of_the_general_route_take_adapters(tmp_path: Path, family: str) -> None:
    made, leaves = _GENERAL[family]
    checkpoint = make_checkpoint(tmp_path / "base", made)
    base = read_weights(checkpoint)
    deltas = make_adapter(tmp_path / "wide", base, rank=8, alpha=4, leaves=leaves)
    references = {BASE: Reference(checkpoint), WIDE: Reference(merge(tmp_path / "merged", checkpoint, base, deltas))}
    runner = runner_for(checkpoint, model_impl="transformers", lora=[f"wide={tmp_path / 'wide'}"])
    jobs = [(prompt(37 + i, seed=i), adapter) for i, adapter in enumerate((BASE, WIDE, BASE, WIDE))]
    found, _ = generate(runner, jobs)
    for (tokens, adapter), answer in zip(jobs, found, strict=True):
        assert len(answer) == GREEDY_TOKENS
        assert [answer] == references[adapter].argmax_tokens([tokens], [answer])
    assert [found[1]] != references[BASE].argmax_tokens([jobs[1][0]], [found[1]])


def generate(runner: ModelRunner, jobs: list[tuple[list[int], int]]) -> tuple[list[list[int]], list[int]]:
    """Greedy completions of prompts by their adapters, the second half of which arrive later; their prefix hits."""
    scheduler = Scheduler(runner.config)
    params = SamplingParams(temperature=0.0, max_tokens=GREEDY_TOKENS, ignore_eos=True)
    size = runner.config.kv_cache_block_size
    seqs = [Sequence(list(tokens), size, params, id=i, adapter=adapter) for i, (tokens, adapter) in enumerate(jobs)]
    hits = [0] * len(seqs)
    arrivals = {0: seqs[: len(seqs) // 2], 6: seqs[len(seqs) // 2 :]}
    for batch in steps(scheduler, runner, arrivals):
        for id, cached in zip(batch.req_ids, batch.num_cached_tokens, strict=True):
            hits[id] = cached
        scheduler.check_integrity()
    return [seq.completion_token_ids for seq in seqs], hits


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    return PagedModel(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=1))


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
WRONG = {
    "lacks model.layers.0.self_attn.q_proj.lora_B": {f"{Q_PROJ}.lora_A.weight": (4, 64)},
    "q_proj in .* has a LoRA product of shape \\[5, 64\\], where the model needs \\[4, 64\\]": {
        f"{Q_PROJ}.lora_A.weight": (5, 64),
        f"{Q_PROJ}.lora_B.weight": (64, 5),
    },
    "has a LoRA product of shape \\[32, 4\\], where the model needs \\[64, 4\\]": {
        f"{Q_PROJ}.lora_A.weight": (4, 64),
        f"{Q_PROJ}.lora_B.weight": (32, 4),
    },
    "holds model.layers.7.self_attn.q_proj, but the model has no such linear layer": {
        f"{Q_PROJ.replace('0', '7')}.lora_A.weight": (4, 64),
        f"{Q_PROJ.replace('0', '7')}.lora_B.weight": (64, 4),
    },
    "holds lm_head, but the model has no such linear layer": {
        "base_model.model.lm_head.lora_A.weight": (4, 64),
        "base_model.model.lm_head.lora_B.weight": (307, 4),
    },
    "embed_tokens.lora_embedding_A, which is not part of a LoRA adapter": {
        "base_model.model.model.embed_tokens.lora_embedding_A": (4, 307)
    },
    "lacks every product": {},
}


@pytest.mark.parametrize("sentence", WRONG)
def test_adapters_that_do_not_fit_are_refused_in_a_sentence(llama: PagedModel, tmp_path: Path, sentence: str) -> None:
    tensors = {name: torch.ones(shape) for name, shape in WRONG[sentence].items()}
    path = write_adapter(tmp_path, tensors, target_modules=["q_proj"] if "model.layers.0" in str(tensors) else [])
    with pytest.raises(CheckpointError, match=f"LoRA adapter mine cannot be served: .*{sentence}"):
        load_adapters(llama.model, {"mine": path}, dtype=torch.float32, device=CPU)


def test_an_adapter_that_lacks_a_target_of_its_own_is_refused(llama: PagedModel, tmp_path: Path) -> None:
    tensors = {f"{Q_PROJ}.lora_A.weight": torch.ones(4, 64), f"{Q_PROJ}.lora_B.weight": torch.ones(64, 4)}
    path = write_adapter(tmp_path, tensors, target_modules=["q_proj", "down_proj"])
    with pytest.raises(CheckpointError, match=r"lacks model.layers.0.mlp.down_proj; save"):
        load_adapters(llama.model, {"mine": path}, dtype=torch.float32, device=CPU)


def test_a_damaged_file_is_refused(llama: PagedModel, tmp_path: Path) -> None:
    path = write_adapter(tmp_path, {})
    (path / "adapter_model.safetensors").write_bytes(b"\x10")
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is truncated or is not a safetensors file"):
        load_adapters(llama.model, {"mine": path}, dtype=torch.float32, device=CPU)
    (path / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors; save the adapter as safetensors"):
        load_adapters(llama.model, {"mine": path}, dtype=torch.float32, device=CPU)
