"""Each architecture computes the same as transformers, alone and in batches with other work."""

from pathlib import Path

import pytest
import torch

from engine.core.scheduler import Scheduler
from engine.runner.model_runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.architectures.registry import ARCHITECTURES
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, distribution, prompt
from tests.parity.runners import steps
from tests.parity.test_worker_model_runner import runner_for
from tests.parity.tolerance import assert_within
from tests.parity.variants import KINDS, Variant, all_variants, first_of_each, short_form

VARIANTS = all_variants()
OTHERS = frozenset(ARCHITECTURES) - KINDS
GREEDY_TOKENS = 13
"""A prompt of 37 tokens, and each other one here, goes on in a new block of 16."""
LONG_TOKENS = 64
"""In the long form."""


@pytest.fixture(
    scope="module", params=short_form(VARIANTS), ids=lambda variant: f"{variant.architecture}, {variant.name}"
)
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def checkpoint(variant: Variant, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # More than one file, as in large checkpoints.
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint"), variant.family, max_shard_size="80KB", **variant.overrides
    )


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)


def test_every_architecture_has_three_variants() -> None:
    counts = {name: sum(variant.architecture == name for variant in VARIANTS) for name in ARCHITECTURES}
    assert {name: count for name, count in counts.items() if count < 3} == {}


def test_prompt_log_probabilities_are_those_of_transformers(checkpoint: Path, reference: Reference) -> None:
    """Of three prompts in one step, one of them of a single token."""
    model, tokens, lengths = PagedModel(checkpoint), prompt(90, seed=90), (90, 1, 37)
    expected, bound = distribution(reference, tokens)
    found = model.logits_together([tokens[:length] for length in lengths]).log_softmax(-1).split(lengths)
    assert_within(found[0], expected, bound)
    for length, own in zip(lengths[1:], found[1:], strict=True):
        assert_within(own, reference.logits(tokens[:length]).log_softmax(-1), bound[:length])


# The others: by the operators, test_cpu_models compares their tokens in company with those alone.
@first_of_each(VARIANTS, without=OTHERS)
@pytest.mark.parametrize("count", [GREEDY_TOKENS, pytest.param(LONG_TOKENS, marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_transformers_alone_and_in_company(
    checkpoint: Path, reference: Reference, count: int
) -> None:
    """In batches: chunks of prompts next to decodes, prefixes found in the cache, one preemption of all."""
    shared = prompt(40, seed=5)
    prompts = [prompt(37), shared + prompt(21, seed=6), shared + prompt(3, seed=7), prompt(70, seed=8)]
    runner = runner_for(checkpoint, scheduling_policy="mixed", max_num_batched_tokens=48)
    found = generate(runner, prompts, count=count)
    assert {len(tokens) for tokens in found} == {count}
    assert found == reference.argmax_tokens(prompts, found)
    assert PagedModel(checkpoint).greedy(prompts[0], count) == found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [
        *("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM", "MiniMaxM3VLForCausalLM"),
        *("Glm5NextForCausalLM", "Gemma4ForCausalLM", "NemotronHForCausalLM"),
    ],
)
def test_tokens_do_not_depend_on_the_size_of_blocks(architecture: str, tmp_path: Path) -> None:
    """Of architectures with caches of their own, with blocks of one token, and of more than a window has."""
    first = next(each for each in VARIANTS if each.architecture == architecture)
    path = make_checkpoint(tmp_path, first.family, **first.overrides)
    shared = prompt(100, seed=5)
    prompts = [prompt(37), shared + prompt(21, seed=6), shared + prompt(3, seed=7)]
    fields = {"scheduling_policy": "mixed", "max_num_batched_tokens": 48}
    found = {
        size: generate(
            runner_for(path, kv_cache_block_size=size, num_kvcache_blocks=1024 // size, **fields), prompts, count=8
        )
        for size in (16, 1, 48)
    }
    assert found[1] == found[48] == found[16] == Reference(path).argmax_tokens(prompts, found[16])


# The others: test_cpu_models, by the operators.
@first_of_each(VARIANTS, without=OTHERS)
def test_bfloat16_errs_no_more_than_transformers_own(checkpoint: Path, reference: Reference) -> None:
    exact = log_probabilities(reference)
    theirs = errors_by_token(exact, Reference(checkpoint, dtype=torch.bfloat16))
    ours = errors_by_token(exact, PagedModel(checkpoint, dtype=torch.bfloat16))
    assert ours.median() < 1.25 * theirs.median()
    assert ours.quantile(0.9) < 1.5 * theirs.quantile(0.9)


def log_probabilities(model: PagedModel | Reference) -> torch.Tensor:
    """Of eight prompts of 60 tokens in one pass. # [480, V]"""
    return model.logits_together([prompt(60, seed=seed) for seed in range(3, 11)]).float().log_softmax(-1)


def errors_by_token(exact: torch.Tensor, model: PagedModel | Reference) -> torch.Tensor:
    """Errors of a model's log probabilities. If two experts are nearly equal, rounding decides: so over many tokens,
    without a mean. # exact: [480, V] -> [480]"""
    return (exact - log_probabilities(model)).abs().mean(-1)


def generate(
    runner: ModelRunner, prompts: list[list[int]], *, preempted_at: int | None = 10, count: int = GREEDY_TOKENS
) -> list[list[int]]:
    """Greedy completions of the prompts, of `count` tokens. They arrive in pairs; at one step, all running ones are
    preempted."""
    scheduler = Scheduler(runner.config, window=runner.window, rope=runner.rope)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    size = runner.config.kv_cache_block_size
    seqs = [Sequence(list(tokens), size, params, id=number) for number, tokens in enumerate(prompts)]
    arrivals = {0: seqs[:2], 6: seqs[2:]}
    hits = 0
    for number, batch in enumerate(steps(scheduler, runner, arrivals), 1):
        hits += sum(batch.num_cached_tokens)
        if number == preempted_at:
            for seq in list(scheduler.running):
                scheduler.preempt(seq)
    assert hits > 0 or not runner.config.enable_prefix_caching
    return [seq.token_ids[seq.num_prompt_tokens :] for seq in seqs]
