"""Every mixture of experts, distributed over ranks or replicas, gives the tokens of transformers.

Ranks and replicas are threads, and real processes.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.client.llm_engine import LLMEngine
from engine.config.config import ParallelConfig
from engine.sampling_params import SamplingParams
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Reference
from tests.parity.test_tensor_parallel_architectures import CONTINUATIONS, NUM_TOKENS, PROMPTS, divides
from tests.parity.thread_ranks import at_once, thread_ranks
from tests.parity.variants import DERIVED, Variant, all_variants

SHORT = {("MixtralForCausalLM", 2, 1)}
"""For real processes. Replicas that are processes: tests/e2e/test_expert_parallel.py."""
_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def num_experts(variant: Variant) -> int:
    """0 for a dense model."""
    fields = {"num_hidden_layers": 2, **variant.family.defaults, **variant.overrides}
    if fields.get("first_k_dense_replace", 0) >= fields["num_hidden_layers"]:
        return 0
    return next((fields[name] for name in _EXPERT_FIELDS if name in fields), 0)


def cases(is_short: Callable[[Variant, int, int], bool]) -> list[object]:
    """Two ranks, two replicas, and both together, over all variants; those that are not `is_short` in the long
    form."""
    made: list[object] = []
    seen: set[tuple[object, ...]] = set()
    for variant in all_variants():
        for size, replicas in ((2, 1), (1, 2), (2, 2)):
            if not num_experts(variant) or num_experts(variant) % (size * replicas) or not divides(size, variant):
                continue
            key = (variant.architecture, size, replicas)
            marks = [pytest.mark.slow] if key in seen or not is_short(variant, size, replicas) else []
            seen.add(key)
            name = f"{size} ranks, {replicas} replicas, {variant.architecture}, {variant.name}"
            made.append(pytest.param(variant, size, replicas, marks=marks, id=name))
    return made


@pytest.mark.parametrize(
    ("variant", "size", "replicas"),
    cases(lambda variant, size, replicas: size == replicas == 2 and variant.architecture not in DERIVED),
)
def test_experts_spread_over_threads_give_the_tokens_of_transformers(
    variant: Variant, size: int, replicas: int, tmp_path: Path
) -> None:
    """Each replica computes other prompts, of other lengths. Others' layers, of `DERIVED`, are in the long form."""
    checkpoint = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    whole = Reference(checkpoint).argmax_tokens(PROMPTS, CONTINUATIONS)
    places = [place for ranks in thread_ranks(size, replicas, spread_experts=True) for place in ranks]
    models = at_once([partial(PagedModel, checkpoint, parallel=place) for place in places])
    calls = [
        partial(model.argmax_tokens, PROMPTS[number // size :], CONTINUATIONS[number // size :])
        for number, model in enumerate(models)
    ]
    assert at_once(calls)[::size] == [whole[replica:] for replica in range(replicas)]


@pytest.mark.parametrize(
    ("size", "replicas", "spread"),
    [
        pytest.param(2, 1, False, marks=pytest.mark.slow),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(1, 2, True, marks=pytest.mark.slow),
        (2, 2, True),
    ],
)
def test_several_experts_a_token_of_llama_4_are_added_once_over_ranks_and_replicas(
    size: int, replicas: int, spread: bool, tmp_path: Path
) -> None:
    """Each has an input of its own, so the layer of experts runs once for each."""
    variant = next(each for each in all_variants() if each.architecture == "Llama4ForCausalLM")
    checkpoint = make_checkpoint(tmp_path, variant.family, **{**variant.overrides, "num_experts_per_tok": 2})
    exact = Reference(checkpoint).logits(PROMPTS[0]).log_softmax(-1)
    places = [place for ranks in thread_ranks(size, replicas, spread_experts=spread) for place in ranks]
    models = at_once([partial(PagedModel, checkpoint, parallel=place) for place in places])
    for found in at_once([partial(model.logits, PROMPTS[0]) for model in models])[::size]:
        torch.testing.assert_close(found.log_softmax(-1), exact, atol=1e-4, rtol=0)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(
    ("variant", "size", "replicas"),
    cases(lambda variant, size, replicas: (variant.architecture, size, replicas) in SHORT),
)
def test_spread_experts_give_the_tokens_of_transformers(
    variant: Variant, size: int, replicas: int, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    with LLMEngine(
        str(checkpoint),
        parallel_config=ParallelConfig(
            tensor_parallel_size=size, data_parallel_size=replicas, enable_expert_parallel=True
        ),
        dtype="float32",
        device="cpu",
        cpu_threads=1,
        num_kvcache_blocks=64,
        max_num_seqs=8,
        scheduling_policy="mixed",
        max_num_batched_tokens=32,
        generation_config="none",
    ) as engine:
        found = engine.generate(
            PROMPTS, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False
        )
    tokens = [result["token_ids"] for result in found]
    assert [len(each) for each in tokens] == [NUM_TOKENS] * len(PROMPTS)
    assert tokens == Reference(checkpoint).argmax_tokens(PROMPTS, tokens)
