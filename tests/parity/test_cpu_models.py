"""Models over the compiled operators, in bfloat16: as exact as transformers, and independent of the batch."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config.config import PrecisionConfig
from engine.runner.model_runner import ModelRunner
from models.architectures.registry import ARCHITECTURES
from models.layers.linear import can_pack
from models.layers.parameter import onednn_of
from models.ops.cpu import runtime, structures
from models.ops.cpu import runtime as library
from models.ops.cpu.program import operators_of
from tests.parity.adapters import make_adapter, read_weights
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, Reference, prompt
from tests.parity.test_architectures import errors_by_token, generate, log_probabilities
from tests.parity.test_worker_model_runner import runner_for
from tests.parity.variants import DERIVED, KINDS, PARTLY_TORCH, Variant, all_variants, first_of_each
from tests.sweeps import some

needs_operators = pytest.mark.skipif(
    library.load_library() is None, reason="the operators were not built: install again where there is a C compiler"
)
# Sizes of heads that the operators support; other differences between architectures are those of their variants.
_SIZES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"head_dim": 32},
    "MistralForCausalLM": {"head_dim": 32},
    "Qwen2ForCausalLM": {"head_dim": 32},
    "Qwen3ForCausalLM": {"head_dim": 64},
    "Qwen3MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "MixtralForCausalLM": {"head_dim": 32, "intermediate_size": 64},
    "Glm4MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "GptOssForCausalLM": {"head_dim": 32, "intermediate_size": 64},
    "Gemma3ForCausalLM": {"head_dim": 32},
    "Gemma4ForCausalLM": {"head_dim": 32, "global_head_dim": 64, "moe_intermediate_size": 32},
    "Phi3ForCausalLM": {"head_dim": 32},
    "PhimoeForCausalLM": {"head_dim": 32, "intermediate_size": 64},
    "CohereForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2},
    "Cohere2ForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4},
    "GraniteForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4},
    "GraniteMoeForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 64},
    "GlmForCausalLM": {"head_dim": 32},
    "HyperCLOVAXForCausalLM": {"head_dim": 32},
    "Glm4ForCausalLM": {"head_dim": 32},
    "Exaone4ForCausalLM": {"head_dim": 32},
    "ArceeForCausalLM": {"head_dim": 32},
    "NemotronForCausalLM": {"head_dim": 32},
    "Starcoder2ForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4},
    "StableLmForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 32},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 32, "intermediate_size": 64},
    "Qwen2MoeForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "moe_intermediate_size": 32},
    "GemmaForCausalLM": {"head_dim": 32},
    "Gemma2ForCausalLM": {"head_dim": 32},
    "Dots1ForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "OlmoeForCausalLM": {"head_dim": 32, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 64},
    "Llama4ForCausalLM": {"head_dim": 32, "intermediate_size": 64},
    "DeepseekV2ForCausalLM": {"qk_rope_head_dim": 32, "head_dim": 32, "kv_lora_rank": 32},
    "DeepseekV3ForCausalLM": {"qk_rope_head_dim": 32, "head_dim": 32, "kv_lora_rank": 64},
    "DeepseekV32ForCausalLM": {"qk_rope_head_dim": 32, "head_dim": 32, "kv_lora_rank": 32, "index_head_dim": 64},
    "DeepseekV4ForCausalLM": {"head_dim": 32, "index_head_dim": 32, "intermediate_size": 32, "o_lora_rank": 32},
    "GlmMoeDsaForCausalLM": {"qk_rope_head_dim": 32, "head_dim": 32, "kv_lora_rank": 64, "index_head_dim": 32},
    "MiniMaxM3VLForCausalLM": {"head_dim": 32, "index_head_dim": 32, "index_block_size": 16},
    "Qwen3NextForCausalLM": {"head_dim": 32, "moe_intermediate_size": 48},
    "SeedOssForCausalLM": {"head_dim": 32},
    "Ministral3ForCausalLM": {"head_dim": 32},
    "SmolLM3ForCausalLM": {"head_dim": 32},
    "Olmo2ForCausalLM": {"head_dim": 32},
    "Olmo3ForCausalLM": {"head_dim": 32},
    "Ernie4_5ForCausalLM": {"head_dim": 32},
    "Ernie4_5_MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "MiniMaxM2ForCausalLM": {"head_dim": 32, "intermediate_size": 64},
    "Qwen3_5ForCausalLM": {"head_dim": 32},
    "BambaForCausalLM": {"head_dim": 32},
    "FalconH1ForCausalLM": {"head_dim": 32},
    "GraniteMoeHybridForCausalLM": {"head_dim": 32, "hidden_size": 96},
    "Lfm2ForCausalLM": {"head_dim": 32},
    "Lfm3ForCausalLM": {"head_dim": 32},
    "Mamba2ForCausalLM": {},
    "MambaForCausalLM": {},
    "FalconMambaForCausalLM": {},
    "JambaForCausalLM": {"head_dim": 32, "intermediate_size": 64, "hidden_size": 128, "num_attention_heads": 4},
    "KimiLinearForCausalLM": {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "linear_head_dim": 32},
    "OlmoHybridForCausalLM": {"head_dim": 32, "linear_value_head_dim": 32},
    "Mistral4ForCausalLM": {"qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "head_dim": 64, "kv_lora_rank": 64},
    "Glm4MoeLiteForCausalLM": {"qk_rope_head_dim": 32, "head_dim": 32, "kv_lora_rank": 64},
    "MiniMaxForCausalLM": {"head_dim": 32, "intermediate_size": 64},
    "Lfm2MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "NemotronHForCausalLM": {"head_dim": 32, "moe_intermediate_size": 64},
    "Qwen3_5MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 48},
    "MiMoV2FlashForCausalLM": {"head_dim": 96, "v_head_dim": 64, "moe_intermediate_size": 32},
    "MinistralForCausalLM": {"head_dim": 32},
    "CwmForCausalLM": {"head_dim": 32},
    "SolarOpenForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "ExaoneMoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "HYV3ForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "Gemma4UnifiedForCausalLM": {"head_dim": 32, "global_head_dim": 64},
    "Glm5NextForCausalLM": {"linear_head_dim": 32, "index_head_dim": 32, "moe_intermediate_size": 32},
    "BailingHybridForCausalLM": {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "head_dim": 32},
    "BloomForCausalLM": {"hidden_size": 128, "num_attention_heads": 4},
    "MptForCausalLM": {"hidden_size": 128, "num_attention_heads": 4},
    "FalconForCausalLM": {"hidden_size": 128, "num_attention_heads": 4},
    "GPTJForCausalLM": {"hidden_size": 128, "num_attention_heads": 4},
    "Zamba2ForCausalLM": {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "n_mamba_heads": 8},
}
SELECTING = {
    ("GlmMoeDsaForCausalLM", "every layer selects five, biases, keys all rotated"),
    ("DeepseekV4ForCausalLM", "a layer of each kind, five entries of four tokens"),
    ("Glm5NextForCausalLM", "four pools of four tokens, one layer shares the selection"),
    ("MiniMaxForCausalLM", "six heads of 12, layers by their order"),
    ("Qwen3MoeForCausalLM", "weights as the router gives them"),
}
"""Variants in which rounding selects other tokens or experts, nearly as good, as chance has it: with some weights Kaon
errs more than transformers and with others less, so that several draws of weights are compared."""
DRAWS = 3
SIZED = [each for each in all_variants() if each.architecture in _SIZES]
VARIANTS = [
    each
    for each in SIZED
    # Torch clamps MPT's queries, keys and values.
    if each.architecture not in PARTLY_TORCH and "clip_qkv" not in each.overrides.get("attn_config", {})
]


_SOME_KINDS = frozenset({"LlamaForCausalLM", "Qwen3MoeForCausalLM", "MambaForCausalLM"})
_COMPUTED = {each.architecture for each in VARIANTS}


def _fields(variant: Variant) -> dict[str, Any]:
    fields = {**variant.overrides, **_SIZES.get(variant.architecture, {})}
    if variant.architecture == "Phi3ForCausalLM":
        # Its heads divide the hidden size.
        fields["hidden_size"] = 32 * fields.get("num_attention_heads", 4)
    rope = fields.get("rope_parameters") or {}
    if "long_factor" in rope:
        # There is a factor for each pair.
        pairs = int(16 * rope.get("partial_rotary_factor", 1))
        factors = {name: (rope[name] * 2)[:pairs] for name in ("short_factor", "long_factor")}
        fields["rope_parameters"] = {**rope, **factors}
    return fields


@pytest.fixture(scope="module")
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def checkpoint(variant: Variant, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    return make_checkpoint(directory, variant.family, dtype=torch.bfloat16, **_fields(variant))


def runner(checkpoint: Path, **fields: object) -> ModelRunner:
    return runner_for(checkpoint, torch.bfloat16, num_kvcache_blocks=64, **fields)


@first_of_each(SIZED, without=DERIVED)
# By torch alone test_architectures compares them too.
@pytest.mark.parametrize(
    "by", [pytest.param("operators", marks=needs_operators), pytest.param("torch", marks=pytest.mark.slow)]
)
def test_errs_no_more_than_transformers_own(variant: Variant, checkpoint: Path, by: str, tmp_path: Path) -> None:
    checkpoints = [checkpoint]
    for seed in range(1, DRAWS if variant[:2] in SELECTING else 1):
        directory = tmp_path / str(seed)
        checkpoints.append(
            make_checkpoint(directory, variant.family, seed=seed, dtype=torch.bfloat16, **_fields(variant))
        )
    exact = [log_probabilities(Reference(each)) for each in checkpoints]
    theirs = [
        errors_by_token(one, Reference(each, torch.bfloat16)) for one, each in zip(exact, checkpoints, strict=True)
    ]
    if by == "operators":
        runtime.start(2)
    models = [PagedModel(each, dtype=torch.bfloat16) for each in checkpoints]
    ours = [errors_by_token(one, model) for one, model in zip(exact, models, strict=True)]
    for share, most in ((0.5, 1.25), (0.9, 1.5)):
        ratios = [one.quantile(share) / other.quantile(share) for one, other in zip(ours, theirs, strict=True)]
        assert torch.stack(ratios).mean() < most


# The others: test_architectures compares their tokens in company, in float32 too, with those of transformers.
@first_of_each(VARIANTS, without=frozenset(ARCHITECTURES) - _SOME_KINDS)
def test_without_operators_tokens_are_the_same_in_float32_in_any_company(variant: Variant, checkpoint: Path) -> None:
    shared = prompt(40, seed=5)
    prompts = [prompt(37), shared + prompt(21, seed=6), shared + prompt(3, seed=7)]
    fields = {"cpu_operators": False, "num_kvcache_blocks": 64}
    together = runner_for(checkpoint, torch.float32, scheduling_policy="mixed", max_num_batched_tokens=48, **fields)
    found = generate(together, prompts)
    single = runner_for(checkpoint, torch.float32, enable_prefix_caching=False, **fields)
    alone = [generate(single, [tokens], preempted_at=None)[0] for tokens in prompts]
    assert found == alone


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this torch packs no bfloat16 weights for this processor")
@first_of_each(VARIANTS, without=DERIVED)
def test_without_operators_each_products_weight_is_stored_once_as_onednn_reads_it(checkpoint: Path) -> None:
    made = runner(checkpoint, cpu_operators=False)
    assert made.program is None
    assert not runtime.active()
    packed = [each for each in made.model.parameters() if onednn_of(each) is not None]
    assert packed
    assert all(each.untyped_storage().nbytes() == each.dtype.itemsize for each in packed)


# The steps of others are made of the same operators.
@needs_operators
@first_of_each(VARIANTS, without=frozenset(ARCHITECTURES) - KINDS)
def test_tokens_are_the_same_alone_and_in_company(variant: Variant, checkpoint: Path) -> None:
    assert_independent(checkpoint, is_one_call=variant.architecture not in PARTLY_TORCH)


def assert_independent(checkpoint: Path, *, is_one_call: bool = True) -> None:
    """Tokens are the same alone and in batches: chunks of prompts next to decodes, prefixes found in the cache, one
    preemption of all."""
    shared = prompt(40, seed=5)
    prompts = [prompt(37), shared + prompt(21, seed=6), shared + prompt(3, seed=7), prompt(70, seed=8)]
    together = runner(checkpoint, scheduling_policy="mixed", max_num_batched_tokens=48)
    assert (together.program is not None) == together.loaded.is_invariant == is_one_call
    found = generate(together, prompts)
    single = runner(checkpoint, enable_prefix_caching=False)
    alone = [generate(single, [tokens], preempted_at=None)[0] for tokens in prompts]
    assert found == alone


@needs_operators
@pytest.mark.parametrize(
    ("architecture", "sizes"),
    [
        ("Qwen3ForCausalLM", {"head_dim": 20, "hidden_size": 100}),
        ("HunYuanDenseV1ForCausalLM", {"head_dim": 36, "hidden_size": 132}),
        ("GptOssForCausalLM", {"head_dim": 12, "hidden_size": 40, "intermediate_size": 20}),
        ("Qwen2MoeForCausalLM", {"head_dim": 32, "hidden_size": 128, "moe_intermediate_size": 44}),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 20, "moe_intermediate_size": 36}),
        ("FalconH1ForCausalLM", {"head_dim": 12, "num_attention_heads": 9, "num_key_value_heads": 3}),
        ("Glm5NextForCausalLM", {"kv_lora_rank": 20, "index_head_dim": 12}),
        ("Gemma4ForCausalLM", {"vocab_size": 515}),
        ("DeepseekV4ForCausalLM", {"o_lora_rank": 20, "q_lora_rank": 36, "index_head_dim": 20}),
    ],
)
def test_sizes_that_are_no_multiples_are_computed_by_operators(
    architecture: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Heads and index heads of any size, latents of any rank, experts of any size, tokens without layers' inputs."""
    first = next(each for each in all_variants() if each.architecture == architecture)
    checkpoint = make_checkpoint(tmp_path, first.family, dtype=torch.bfloat16, **(_fields(first) | sizes))
    assert_independent(checkpoint)
    exact, rounded = log_probabilities(Reference(checkpoint)), Reference(checkpoint, torch.bfloat16)
    if hasattr(rounded.model.config, "num_experts_per_tok"):
        rounded.model.set_experts_implementation("eager")  # torch's grouped products refuse such sizes.
    theirs = errors_by_token(exact, rounded)
    ours = errors_by_token(exact, PagedModel(checkpoint, dtype=torch.bfloat16))
    assert ours.median() < 1.25 * theirs.median()


@needs_operators
@pytest.mark.parametrize(
    ("sizes", "fields", "why"),
    [
        ({"head_dim": 520}, {}, "the model's code calls"),
        ({}, {"kv_cache_block_size": 1}, "the model's code calls"),
        ({}, {"model_impl": "transformers"}, "the model's code calls"),
        ({}, {"quantization_config": PrecisionConfig(kv_cache_dtype="fp8")}, "the model's code calls"),
        ({}, {"lora": ("a=adapter",)}, "lora is set"),
        ({}, {"server_config": {"lora_directories": (".",)}}, "lora_directories is set"),
        (
            {},
            {"speculative_config": {"speculative_model": "model", "speculative_acceptance": "rejection"}},
            "speculative_acceptance is rejection",
        ),
    ],
)
def test_no_invariance_is_claimed_where_answers_may_depend_on_others(
    sizes: dict[str, Any],
    fields: dict[str, Any],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16, **sizes)
    make_adapter(tmp_path / "adapter", read_weights(checkpoint), rank=2, alpha=2, leaves={"q_proj"}, seed=1)
    with caplog.at_level("INFO"):
        made = runner(checkpoint, batch_invariant=True, **fields)
    assert not made.loaded.is_invariant
    assert ("answers may depend on other requests" in caplog.text) == (made.program is None)
    with pytest.raises(ValueError, match=f"batch_invariant is set, but .*{why}"):
        made.loaded.require_invariance()


@needs_operators
# The other architectures' variants assert this while they compute tokens, in the test above.
@pytest.mark.parametrize(
    "name",
    some(
        [name for name in ARCHITECTURES if name in DERIVED or name not in _COMPUTED],
        *(name for name in ARCHITECTURES if name not in _COMPUTED),
    ),
)
def test_a_step_is_one_call_where_docs_say_so(name: str, tmp_path: Path) -> None:
    first = next(each for each in all_variants() if each.architecture == name)
    path = make_checkpoint(tmp_path, first.family, dtype=torch.bfloat16, **_fields(first))
    made = runner(path)
    assert (made.program is None) == (not made.loaded.is_invariant) == (name in PARTLY_TORCH)


@needs_operators
@pytest.mark.parametrize(
    ("architecture", "candidates"),
    [
        ("DeepseekV32ForCausalLM", 192),
        ("DeepseekV4ForCausalLM", 192 // 4),
        ("Glm5NextForCausalLM", 192 // 4),
        ("MiniMaxM3VLForCausalLM", 2 * 192 // 16),
    ],
)
def test_a_limit_of_keys_is_one_of_a_sequence_and_not_of_the_cache(
    architecture: str, candidates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has 1024 tokens, a sequence 192."""
    first = next(each for each in all_variants() if each.architecture == architecture)
    path = make_checkpoint(tmp_path, first.family, dtype=torch.bfloat16, **_fields(first))
    monkeypatch.setattr(structures, "MAX_INDEXED", candidates)
    assert runner(path, max_model_len=192).program is not None
    monkeypatch.setattr(structures, "MAX_INDEXED", candidates - 1)
    assert runner(path, max_model_len=192).program is None


@needs_operators
def test_a_gated_feed_forward_layer_is_two_operators(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, intermediate_size=96)
    model = runner(path).model
    arguments, *_ = operators_of(model.model.layers[0].mlp, 5, model.model.norm.weight.numel())
    assert [type(each) for each in arguments] == [structures.GatedLinear, structures.Linear]


@needs_operators
def test_recording_imports_none_of_torchs_compiler() -> None:
    """This takes a second, as long as the rest of a small model's start."""
    script = """
import sys
import torch
from models.demo import CHECKPOINT_DIR
from engine.config.config import Config
from engine.runner.loaded_model import load_model, start_operators
from engine.runner.model_runner import ModelRunner
from models.loading.checkpoint import read_checkpoint_config
path, config, cpu = CHECKPOINT_DIR, Config(num_kvcache_blocks=64), torch.device("cpu")
operators = start_operators(config, cpu, torch.bfloat16)
model_config = read_checkpoint_config(path, "auto")
runner = ModelRunner(load_model(config, path, model_config, cpu, torch.bfloat16, operators=operators), 64)
assert runner.program is not None
print({"sympy", "torch._dynamo", "transformers"} & set(sys.modules))
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "set()"
