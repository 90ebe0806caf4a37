"""Every drafter with every kind of target, on two ranks whose core dies: answers are those of one without drafts.

docs/speculative.md has the table of these pairs. A recurrent layer stores a state for each position of a step that
verifies drafts, and every rank selects the one after the accepted drafts. In another core keys, values and states are
computed again from the prompt and the delivered tokens.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch

from engine.config.config import Config
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.attention import context as forward_context
from models.layers.base import DraftLM
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.checkpoints import make_checkpoint
from tests.parity.draft_heads import MTPPair, V4Pair, make_eagle
from tests.parity.rank_threads import RankThreads
from tests.parity.runners import load
from tests.parity.test_model_drafters import Forbidden, K, Outside, OverRanks, SometimesBroken, Steps, Toy, endless
from tests.parity.test_worker_model_runner import NUM_BLOCKS, runner_for
from tests.parity.thread_ranks import at_once, thread_ranks
from tests.parity.variants import (
    Variant,
    compressed,
    deepseek,
    gemma3,
    gpt_oss,
    lfm2,
    llama,
    mamba2,
    moe,
    qwen3_5,
    qwen3_next,
    recurrent,
)
from tests.sweeps import some

VOCAB_SIZE = 160
FIELDS: dict[str, Any] = {"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": 256, "max_num_seqs": 8}


class Pair(NamedTuple):
    """A target and its drafter."""

    target: Path
    speculative: dict[str, Any]
    drafter: Callable[[list[Sequence]], DraftLM] | None = None
    """Creates a drafter from sequences with their answers; None: `speculative` names one."""


class Knowing(Toy):
    """Drafts the known answers except for each fifth position: a step accepts some drafts, and rejects others."""

    def __init__(self, answered: list[Sequence], hidden_layers: tuple[int, ...] = ()) -> None:
        super().__init__(hidden_layers)
        # An entry that is made with a hidden state has the token after its position.
        first = len(hidden_layers)
        self._next = {
            (position, before): after
            for seq in answered
            for position, (before, after) in enumerate(
                zip(seq.token_ids[first:], seq.token_ids[first + 1 :], strict=False)
            )
        }

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        del hidden
        entries = zip(positions.tolist(), input_ids.tolist(), strict=True)
        known = [0 if entry[0] % 5 == 4 else self._next.get(entry, 0) for entry in entries]
        return torch.tensor(known, dtype=torch.float32)[:, None].expand(-1, self.hidden_size).contiguous()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), VOCAB_SIZE)
        return logits.scatter_(1, hidden[:, :1].long(), 100.0)


def target(directory: Path, variant: Variant) -> Path:
    return make_checkpoint(directory / "target", variant.family, **{**variant.overrides, "vocab_size": VOCAB_SIZE})


def with_mtp(variant: Variant, directory: Path) -> Pair:
    overrides = {**variant.overrides, "vocab_size": VOCAB_SIZE}
    make = V4Pair if variant.architecture == "DeepseekV4ForCausalLM" else MTPPair
    pair = make(directory, variant._replace(overrides=overrides))
    return Pair(pair.path, {"speculative_method": "mtp"})


def with_eagle(version: int, variant: Variant, directory: Path) -> Pair:
    path = target(directory, variant)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]} if version == 3 else {}
    head = make_eagle(directory / "head", path, version=version, **layers)
    return Pair(path, {"speculative_method": "eagle3" if version == 3 else "eagle", "speculative_model": str(head)})


def with_model(variant: Variant, directory: Path) -> Pair:
    smaller = make_checkpoint(directory / "smaller", "llama", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    return Pair(target(directory, variant), {"speculative_method": "draft", "speculative_model": str(smaller)})


def with_lookup(variant: Variant, directory: Path) -> Pair:
    return Pair(target(directory, variant), {"prompt_lookup_min": 1, "prompt_lookup_max": 2})


def with_drafter(drafter: Callable[[list[Sequence]], DraftLM], variant: Variant, directory: Path) -> Pair:
    """`drafter` in place of a checkpoint's."""
    named = {"speculative_method": "draft", "speculative_model": "-"}
    return Pair(target(directory, variant), named, drafter)


def broken(drafter: type[Toy], hidden_layers: tuple[int, ...], _: list[Sequence]) -> DraftLM:
    return drafter(hidden_layers)


def variant_of(variants: list[Variant], architecture: str) -> Variant:
    return next(each for each in variants if each.architecture == architecture)


TARGETS = {
    "Llama": variant_of(llama.VARIANTS, "LlamaForCausalLM"),
    "Qwen3": variant_of(llama.VARIANTS, "Qwen3ForCausalLM"),
    "Gemma 3": gemma3.VARIANTS[0],
    "gpt-oss": gpt_oss.VARIANTS[0],
    "Qwen3-MoE": moe.VARIANTS[0],
    "GLM-4.5": variant_of(moe.VARIANTS, "Glm4MoeForCausalLM"),
    "DeepSeek-V3": variant_of(deepseek.VARIANTS, "DeepseekV3ForCausalLM"),
    "DeepSeek-V3.2": variant_of(deepseek.VARIANTS, "DeepseekV32ForCausalLM"),
    "DeepSeek-V4": compressed.VARIANTS[0],
    "GLM-4.7-Flash": variant_of(deepseek.VARIANTS, "Glm4MoeLiteForCausalLM"),
    "GLM-5": variant_of(deepseek.VARIANTS, "GlmMoeDsaForCausalLM"),
    "Qwen3-Next": qwen3_next.VARIANTS[0],
    "Qwen3.5": qwen3_5.VARIANTS[0],
    "Qwen3.5-MoE": variant_of(qwen3_5.VARIANTS, "Qwen3_5MoeForCausalLM"),
    "Bamba": mamba2.VARIANTS[1],
    "Falcon-H1": variant_of(mamba2.VARIANTS, "FalconH1ForCausalLM"),
    "Granite 4": variant_of(mamba2.VARIANTS, "GraniteMoeHybridForCausalLM"),
    "Nemotron-H": variant_of(mamba2.VARIANTS, "NemotronHForCausalLM"),
    "Mamba-2": recurrent.VARIANTS[0],
    "Jamba": variant_of(recurrent.VARIANTS, "JambaForCausalLM"),
    "Kimi Linear": variant_of(recurrent.VARIANTS, "KimiLinearForCausalLM"),
    "LFM2": lfm2.VARIANTS[0],
}
_LATENTS = ("DeepSeek-V3", "DeepSeek-V3.2", "GLM-4.7-Flash", "GLM-5")
MTP = ("GLM-4.5", *_LATENTS, "DeepSeek-V4", "Qwen3-Next", "Qwen3.5", "Qwen3.5-MoE")
STREAMS = ("Llama", "Qwen3", "gpt-oss", "Qwen3-MoE", "GLM-4.5", *_LATENTS)
"""Targets that return the residual streams of their layers, which EAGLE-3 reads."""
FAULTS: dict[str, tuple[type[Toy], tuple[int, ...]]] = {
    "NaN": (Toy, (-1,)),
    "outside of the vocabulary": (Outside, ()),
    "no token": (Forbidden, (-1,)),
    "sometimes NaN": (SometimesBroken, (-1,)),
}
Make: TypeAlias = Callable[[Variant, Path], Pair]
DRAFTERS: dict[str, Make] = {
    "ngram": with_lookup,
    "draft": with_model,
    "mtp": with_mtp,
    "eagle": partial(with_eagle, 1),
    "eagle3": partial(with_eagle, 3),
}
OTHERS: dict[str, Make] = {
    "known": partial(with_drafter, Knowing),
    **{fault: partial(with_drafter, partial(broken, *FAULTS[fault])) for fault in FAULTS},
}
PAIRS = [
    *(
        (name, method)
        for method in DRAFTERS
        for name in TARGETS
        if name in {"mtp": MTP, "eagle3": STREAMS}.get(method, TARGETS)
    ),
    *((name, other) for other in OTHERS for name in TARGETS),
]
SHORT = {
    ("Qwen3-Next", "mtp"),
    ("Granite 4", "draft"),
    ("Qwen3.5", "ngram"),
    ("Nemotron-H", "eagle"),
    ("gpt-oss", "eagle3"),
    ("DeepSeek-V3", "known"),
    ("Bamba", "known"),
    ("LFM2", "outside of the vocabulary"),
    ("Qwen3.5", "sometimes NaN"),
}
"""The pairs of `make test`."""


def made(pair: Pair, answered: list[Sequence], parallel: TensorParallel) -> tuple[ModelRunner, dict[str, Any]]:
    """A rank's runner and its caches, which are a global of the process."""
    speculative = {"speculative_config": {"num_speculative_tokens": K, **pair.speculative}}
    if pair.drafter is None:
        loaded = load(pair.target, Config(**FIELDS, **speculative), parallel=parallel)
    else:
        loaded = load(pair.target, Config(**FIELDS), parallel=parallel)
        config = Config.model_validate({**loaded.config.model_dump(), **speculative})
        loaded = dataclasses.replace(loaded, config=config, drafter=pair.drafter(answered))
    return ModelRunner(loaded, NUM_BLOCKS), forward_context._kv_cache_data


def over_two_ranks(pair: Pair, answered: list[Sequence], seqs: list[Sequence], most: int = 1000) -> Steps:
    """Two ranks that have computed the sequences, in at most `most` steps."""
    if "speculative_method" in pair.speculative:
        [ranks] = thread_ranks(2)
        steps: Steps = OverRanks(at_once([partial(made, pair, answered, rank) for rank in ranks]))
        steps.run(seqs, most)
        return steps

    def lead(runner: ModelRunner) -> Steps:
        steps = Steps(runner)
        steps.run(seqs, most)
        return steps

    # The other rank gets the tokens of a step with a later one.
    speculative = {"num_speculative_tokens": K, **pair.speculative}
    return RankThreads(pair.target, **FIELDS, speculative_config=speculative).run(lead)


def requests(method: str) -> list[Sequence]:
    """A checkpoint's drafter, whose weights are random, has accepted drafts only where few tokens are allowed.

    Every draft of a request with one allowed token is accepted. Of one with three, drafts are accepted or rejected as
    the weights have it, so that a wrong state after accepted drafts changes its answer.
    """
    seqs = endless(3, 19)
    if method in DRAFTERS:
        for number, allowed in ((0, [7, 19, 64]), (2, [7])):
            params = SamplingParams(
                temperature=0.0, max_tokens=19 + number, ignore_eos=True, allowed_token_ids=allowed
            )
            seqs[number] = Sequence(seqs[number].prompt_token_ids, 16, params, id=number)
    return seqs


@pytest.mark.parametrize(
    ("name", "method"),
    [pytest.param(*pair, marks=() if pair in SHORT else pytest.mark.slow, id=", ".join(pair)) for pair in PAIRS],
)
def test_two_ranks_whose_core_dies_answer_as_one_without_drafts(name: str, method: str, tmp_path: Path) -> None:
    pair = {**DRAFTERS, **OTHERS}[method](TARGETS[name], tmp_path)
    answered = requests(method)
    expected = Steps(runner_for(pair.target)).run(answered)
    begun = requests(method)
    over_two_ranks(pair, answered, begun, most=4)
    assert not any(len(seq.completion_token_ids) == len(tokens) for seq, tokens in zip(begun, expected, strict=True))
    resumed = [
        Sequence(seq.prompt_token_ids, 16, seq.sampling_params, id=seq.id, resumed_token_ids=seq.completion_token_ids)
        for seq in begun
    ]
    after = over_two_ranks(pair, answered, resumed)
    assert [seq.completion_token_ids for seq in resumed] == expected
    drafted = after.scheduler.total_draft_tokens
    if method == "known":
        # Each fifth draft is wrong, and ends its step's acceptance.
        assert after.scheduler.total_accepted_tokens >= 15
        assert after.acceptance < 1.0
        assert max(after.drafted) == K
    elif method in DRAFTERS:
        assert drafted > (0 if method == "ngram" else 10)
        assert after.scheduler.total_accepted_tokens > 3
    elif method != "sometimes NaN":
        assert not drafted


def test_the_table_of_pairs_has_what_is_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "speculative.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    columns = next(line for line in lines if line[0] == "Target")[1:]
    assert columns == [f"`{method}`" for method in DRAFTERS]
    rows = {line[0]: line[1:] for line in lines if line[0] in TARGETS}
    lacking = {"mtp": "-", "eagle3": "refused"}
    assert rows == {
        name: ["yes" if (name, method) in PAIRS else lacking[method] for method in DRAFTERS] for name in TARGETS
    }


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("Gemma 3", "DeepSeek-V4") else pytest.mark.slow)
        for name in TARGETS
        if name not in STREAMS
    ],
)
def test_an_eagle3_head_is_refused_where_the_target_keeps_no_streams(name: str, tmp_path: Path) -> None:
    pair = with_eagle(3, TARGETS[name], tmp_path)
    with pytest.raises(ValueError, match="does not keep the states of its layers"):
        load(pair.target, Config(**FIELDS, speculative_config={"num_speculative_tokens": K, **pair.speculative}))


def test_an_eagle3_head_is_refused_that_reads_the_output_of_the_last_layer(tmp_path: Path) -> None:
    """It has the number after the last layer, whose input is kept for no layer."""
    path = target(tmp_path, TARGETS["Llama"])
    head = make_eagle(tmp_path / "head", path, version=3, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    speculative = {"speculative_method": "eagle3", "speculative_model": str(head), "num_speculative_tokens": K}
    with pytest.raises(ValueError, match="does not keep the states of its layers"):
        load(path, Config(**FIELDS, speculative_config=speculative))


@pytest.mark.parametrize("name", some(["Qwen3-Next", "Bamba"], "Bamba"))
def test_known_drafts_are_accepted_among_chunks_and_preemption(name: str, tmp_path: Path) -> None:
    """On one rank, with blocks for a part of the sequences: preempted ones compute their states again."""
    pair = with_drafter(Knowing, TARGETS[name], tmp_path)
    answered = endless(4, 40)
    fields: dict[str, Any] = {"scheduling_policy": "mixed", "max_num_batched_tokens": 20}
    expected = Steps(runner_for(pair.target, **fields)).run(answered)
    [rank], config = thread_ranks(1)[0], {**FIELDS, **fields}
    loaded = load(pair.target, Config(**config), parallel=rank)
    speculative = {"num_speculative_tokens": K, **pair.speculative}
    changed = Config.model_validate({**loaded.config.model_dump(), "speculative_config": speculative})
    runner = ModelRunner(dataclasses.replace(loaded, config=changed, drafter=Knowing(answered)), NUM_BLOCKS)
    runner.config = runner.config.model_copy(update={"num_kvcache_blocks": 11})
    steps = Steps(runner)
    assert steps.run(endless(4, 40)) == expected
    assert steps.scheduler.stats("decode", 0.0).preemptions > 0
    assert steps.acceptance > 0.3
