"""Every architecture over several ranks gives the tokens of transformers: as threads, and as real processes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.client.llm_engine import LLMEngine
from engine.sampling_params import SamplingParams
from models.ops.torch_ops import torch_norm
from models.ops.types import NormWeight
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, Row, prompt
from tests.parity.thread_ranks import Meeting, ThreadCollectives, at_once, thread_ranks
from tests.parity.variants import DERIVED, KINDS, Variant, all_variants, gemma3n, lfm2, mamba2, recurrent, zamba2

VARIANTS = all_variants()
NUM_TOKENS = 5
PROMPTS = [prompt(37), prompt(3, seed=7), prompt(21, seed=6)]
CONTINUATIONS = [prompt(NUM_TOKENS, seed=20 + number) for number in range(len(PROMPTS))]
"""Of the prompts, whatever the model says: then the reference computes the argmax of all positions in one pass."""


SUMS_OF_A_LAYER = {
    # Norms of queries and keys are over the heads of all ranks.
    **dict.fromkeys(("MiniMaxM2ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoeForCausalLM"), 4),
    # Attention and feed-forward are added before they are summed over the ranks.
    **dict.fromkeys(("CohereForCausalLM", "Cohere2ForCausalLM", "FalconForCausalLM", "GPTJForCausalLM"), 1),
}
"""Sums per layer if they are not two: one of attention, and one of the feed-forward layer with shared experts."""


SUMS_OF_HYBRIDS = {
    "Lfm2MoeForCausalLM": (2, 0),
    "BailingHybridForCausalLM": (2, 0),
    "KimiLinearForCausalLM": (2, 0),
    "GraniteMoeHybridForCausalLM": (2, 0),
    # Recurrent layers normalise over the channels of all ranks, or make their steps and keys of them.
    "MiniMaxForCausalLM": (2, 1),
    "JambaForCausalLM": (2, 1),
    # A layer is a mixer or a feed-forward layer.
    "NemotronHForCausalLM": (1, 0),
}
"""Of hybrid mixtures: sums per layer, and those of a recurrent layer in addition, apart from its groups' norms."""


def num_sums(variant: Variant, num_layers: int, size: int) -> int:
    """Sums over `size` ranks of a step: the embedding's, and those of each layer."""
    fields = {**variant.family.defaults, **variant.overrides}
    if variant.architecture in SUMS_OF_HYBRIDS:
        a_layer, recurrent = SUMS_OF_HYBRIDS[variant.architecture]
        # The channels that are normalised together are those of a group, which several ranks may share.
        num_groups = 1 if variant.architecture.startswith("Granite") else size
        recurrent += fields.get("mamba_n_groups", fields.get("n_groups", num_groups)) % size > 0
        return 1 + a_layer * num_layers + recurrent * num_recurrent(fields, num_layers)
    a_layer = 1 if fields.get("use_parallel_residual") else SUMS_OF_A_LAYER.get(variant.architecture, 2)
    if fields.get("parallel_attn") is False:
        a_layer = 2
    # Gemma 4 has experts next to a dense network, and a second embedding.
    a_layer += bool(fields.get("enable_moe_block"))
    return 1 + bool(fields.get("hidden_size_per_layer_input")) + a_layer * num_layers


def num_recurrent(fields: dict[str, Any], num_layers: int) -> int:
    """Layers that keep a state instead of keys and values."""
    if "attn_layer_period" in fields:
        attends = range(fields["attn_layer_offset"], num_layers, fields["attn_layer_period"])
        return num_layers - len(attends)
    kinds: list[str] = fields.get("layer_types") or fields.get("layers_block_type") or []
    return kinds.count("linear_attention")


KIND = "DeepseekV3ForCausalLM"
"""For real processes in the short form: with latents, experts and dense layers."""


_MIXED = (*mamba2.VARIANTS, *lfm2.VARIANTS, *recurrent.VARIANTS, *zamba2.VARIANTS, *gemma3n.VARIANTS)
HYBRIDS = frozenset(each.architecture for each in _MIXED)
"""Architectures whose layers differ in their number of sums over the ranks."""


def divides(size: int, variant: Variant) -> bool:
    """Whether `size` ranks can divide the heads, including those of recurrent layers."""
    fields = {"num_attention_heads": 4, **variant.family.defaults, **variant.overrides}
    heads = ("num_attention_heads", "linear_num_key_heads", "mamba_n_heads", "mamba_num_heads", "num_heads")
    heads = (*heads, "linear_num_heads", "linear_num_value_heads", "n_mamba_heads", "o_groups")
    groups = [
        fields[name]
        for name in ("mamba_n_groups", "n_groups", "mamba_ngroups", "num_key_value_heads")
        if name in fields
    ]
    return all(fields.get(name, size) % size == 0 for name in heads) and all(
        number % size == 0 or size % number == 0 for number in groups
    )


def first_of_each() -> list[Variant]:
    """One variant of each architecture: the first."""
    firsts = {variant.architecture: variant for variant in reversed(VARIANTS)}
    return [variant for name, variant in list(firsts.items())[::-1] if name not in DERIVED]


def cases(short: list[Variant]) -> list[object]:
    """Two ranks over the `short` variants; in the long form, over all, and four."""
    made: list[object] = []
    for variant in VARIANTS:
        for size in (2, 4):
            if not divides(size, variant):
                continue
            marks = () if size == 2 and variant in short else (pytest.mark.slow,)
            name = f"{size} ranks, {variant.architecture}, {variant.name}"
            made.append(pytest.param(variant, size, marks=marks, id=name))
    return made


# Others: their layers are cut as those of `KINDS`, and test_model_sharding.py has each kind of cut.
@pytest.mark.parametrize(
    ("variant", "size"), cases([each for each in first_of_each() if each.architecture in {*KINDS, *SUMS_OF_A_LAYER}])
)
def test_ranks_in_one_process_give_the_tokens_of_transformers(variant: Variant, size: int, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    expected = Reference(checkpoint).argmax_tokens(PROMPTS, CONTINUATIONS)
    [ranks] = thread_ranks(size)
    models = at_once([partial(PagedModel, checkpoint, parallel=rank) for rank in ranks])
    found, *_ = at_once([partial(model.argmax_tokens, PROMPTS, CONTINUATIONS) for model in models])
    assert found == expected
    collectives = ranks[0].collectives
    assert isinstance(collectives, ThreadCollectives)
    collectives.num_sums = 0
    at_once([partial(model.step, [(Row(PROMPTS[0]), 7)]) for model in models])
    if variant.architecture not in HYBRIDS or variant.architecture in SUMS_OF_HYBRIDS:
        assert collectives.num_sums == num_sums(variant, models[0].config.num_hidden_layers, size)


def test_every_mixture_s_sums_are_counted() -> None:
    mixtures = {each.architecture for each in VARIANTS if each.architecture in HYBRIDS and _has_experts(each)}
    assert mixtures <= SUMS_OF_HYBRIDS.keys()


def _has_experts(variant: Variant) -> bool:
    fields = {**variant.family.defaults, **variant.overrides}
    return any(fields.get(name) for name in ("num_local_experts", "num_experts", "n_routed_experts"))


class Fusing(ThreadCollectives):
    """Collectives with a kernel for a sum, a residual sum and a norm."""

    num_norms = 0

    def add_norm(  # type: ignore[override]
        self, x: torch.Tensor, residual: torch.Tensor, norm: NormWeight
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_norms += 1
        residual = super().all_reduce(x) + residual
        return torch_norm(residual, norm), residual


def test_sums_before_norms_are_one_kernel_where_there_is_one(tmp_path: Path) -> None:
    variant = next(each for each in first_of_each() if each.architecture == KIND)
    checkpoint = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    expected = Reference(checkpoint).argmax_tokens(PROMPTS, CONTINUATIONS)
    meeting = Meeting(2)
    fusing = [Fusing(meeting, rank) for rank in range(2)]
    models = at_once(
        [partial(PagedModel, checkpoint, parallel=TensorParallel(rank, 2, each)) for rank, each in enumerate(fusing)]
    )
    found, *_ = at_once([partial(model.argmax_tokens, PROMPTS, CONTINUATIONS) for model in models])
    assert found == expected
    # Two per layer, and one more sum per pass, the embedding's.
    num_layers = models[0].config.num_hidden_layers
    assert fusing[0].num_norms == 2 * num_layers * (fusing[0].num_sums - fusing[0].num_norms)


@pytest.mark.usefixtures("warm_children")
@pytest.mark.parametrize(("variant", "size"), cases([each for each in first_of_each() if each.architecture == KIND]))
def test_ranks_give_the_tokens_of_transformers(variant: Variant, size: int, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, variant.family, **variant.overrides)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLMEngine(
        str(checkpoint),
        tensor_parallel_size=size,
        dtype="float32",
        device="cpu",
        cpu_threads=1,
        num_kvcache_blocks=64,
        max_num_seqs=8,
        scheduling_policy="mixed",
        max_num_batched_tokens=32,
        generation_config="none",
        async_scheduling="on",
    ) as engine:
        found = engine.generate(PROMPTS, params, use_tqdm=False)
    tokens = [result["token_ids"] for result in found]
    assert [len(each) for each in tokens] == [NUM_TOKENS] * len(PROMPTS)
    assert tokens == Reference(checkpoint).argmax_tokens(PROMPTS, tokens)
