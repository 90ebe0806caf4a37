"""Every mixture of experts, spread over ranks or replicas as real processes, gives the tokens of transformers."""

from pathlib import Path

import pytest

from engine.config import ParallelConfig
from engine.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import Reference, prompt
from tests.parity.test_tensor_parallel_architectures import divides
from tests.parity.variants import Variant, all_variants

NUM_TOKENS = 12
PROMPTS = [prompt(37), prompt(3, seed=7), prompt(21, seed=6)]
_EXPERT_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


def num_experts(variant: Variant) -> int:
    """0 for a dense model."""
    fields = {**variant.family.defaults, **variant.overrides}
    return next((fields[name] for name in _EXPERT_FIELDS if name in fields), 0)


def cases() -> list[object]:
    """Two ranks, and two replicas, over each architecture; in the long form, over all variants, and both at once."""
    made: list[object] = []
    seen: set[tuple[object, ...]] = set()
    for variant in all_variants():
        for size, replicas in ((2, 1), (1, 2), (2, 2)):
            if not num_experts(variant) or num_experts(variant) % (size * replicas) or not divides(size, variant):
                continue
            key = (variant.architecture, size, replicas)
            marks = [pytest.mark.slow] if key in seen or size * replicas > 2 else []
            seen.add(key)
            name = f"{size} ranks, {replicas} replicas, {variant.architecture}, {variant.name}"
            made.append(pytest.param(variant, size, replicas, marks=marks, id=name))
    return made


@pytest.mark.parametrize(("variant", "size", "replicas"), cases())
def test_spread_experts_give_the_tokens_of_transformers(
    variant: Variant, size: int, replicas: int, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    reference = Reference(checkpoint)
    expected = [reference.greedy(tokens, NUM_TOKENS) for tokens in PROMPTS]
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
    assert [result["token_ids"] for result in found] == expected
