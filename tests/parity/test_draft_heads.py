"""MTP layers and EAGLE heads compute the same as plain references of the papers, and load from published layouts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.sampling_params import SamplingParams
from engine.sequence import Sequence
from models.errors import CheckpointError
from models.layers.base import DraftLM
from models.ops.cpu import runtime
from models.ops.cpu.draft_chain import DraftChain, Verified, VerifyingRows
from models.ops.cpu.program import operators_of
from models.parallel.tensor_parallel import TensorParallel
from tests.parity.checkpoints import edit_json, make_checkpoint
from tests.parity.draft_heads import (
    CONFIG,
    WEIGHTS,
    EagleReference,
    MTPPair,
    MTPReference,
    PagedDraft,
    Reference,
    TargetStates,
    V4Pair,
    V4Reference,
    load_head,
    make_eagle,
)
from tests.parity.paged_model import prompt
from tests.parity.quantized_checkpoints import FP8_BLOCK_CONFIG, fp8_block
from tests.parity.test_model_drafters import Steps, endless
from tests.parity.test_worker_model_runner import runner_for
from tests.parity.thread_ranks import at_once, thread_ranks
from tests.parity.variants import Variant, compressed, deepseek, gpt_oss, moe, qwen3_5, qwen3_next
from tests.sweeps import some

LENGTH, CHUNK, DRAFTS = 37, 23, 3
SIZES: dict[str, dict[str, int]] = {
    "DeepseekV3ForCausalLM": {"qk_rope_head_dim": 32, "head_dim": 32, "kv_lora_rank": 64},
    "Glm4MoeLiteForCausalLM": {"qk_rope_head_dim": 32, "head_dim": 32, "kv_lora_rank": 64},
    "Glm4MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 32},
    "Qwen3NextForCausalLM": {"head_dim": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    "Qwen3_5ForCausalLM": {"head_dim": 32},
    "Qwen3_5MoeForCausalLM": {"head_dim": 32, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
"""Sizes that the compiled operators support, by architecture."""


class Case(NamedTuple):
    """A drafter, its target and its reference, and the inputs of a prompt."""

    method: str
    target: Path
    path: Path | None
    reference: Reference
    hidden: torch.Tensor  # [LENGTH, features]

    def load(self, **options: object) -> DraftLM:
        return load_head(self.method, self.target, self.path, **options)  # type: ignore[arg-type]


def mtp_case(directory: Path, variant: Variant, *, has_own: bool = False) -> Case:
    fields = {**variant.overrides, **SIZES.get(variant.architecture, {})}
    pair = MTPPair(directory, variant._replace(overrides=fields), has_own=has_own)
    states = TargetStates(pair.whole, pair.num_layers)
    return Case(
        "mtp", pair.path, None, MTPReference(pair, states.model.config.rms_norm_eps), states.final(prompt(LENGTH))
    )


def v4_case(directory: Path) -> Case:
    pair = V4Pair(directory, compressed.VARIANTS[0])
    reference = V4Reference(pair)
    return Case("mtp", pair.path, None, reference, reference.streams_of(prompt(LENGTH)))


def eagle_case(directory: Path, **options: bool | int) -> Case:
    target = make_checkpoint(directory / "target", "llama")
    path = make_eagle(directory / "head", target, version=1, **options)  # type: ignore[arg-type]
    return Case("eagle", target, path, EagleReference(path, target), TargetStates(target).final(prompt(LENGTH)))


def eagle3_case(directory: Path, family: str | Variant, layers: tuple[int, ...], **options: object) -> Case:
    if isinstance(family, str):
        target = make_checkpoint(directory / "target", family, num_hidden_layers=6)  # type: ignore[arg-type]
    else:
        target = make_checkpoint(directory / "target", family.family, **{**family.overrides, "num_hidden_layers": 6})
    path = make_eagle(directory / "head", target, version=3, **options)  # type: ignore[arg-type]
    hidden = TargetStates(target).inputs_of(layers, prompt(LENGTH))
    return Case("eagle3", target, path, EagleReference(path, target), hidden)


def variant_of(variants: list[Variant], architecture: str) -> Variant:
    return next(each for each in variants if each.architecture == architecture)


CASES: dict[str, Callable[[Path], Case]] = {
    "DeepSeek-V3": lambda path: mtp_case(path, variant_of(deepseek.VARIANTS, "DeepseekV3ForCausalLM")),
    "DeepSeek-V3.2": lambda path: mtp_case(path, variant_of(deepseek.VARIANTS, "DeepseekV32ForCausalLM")),
    "DeepSeek-V4": v4_case,
    "GLM-5": lambda path: mtp_case(path, variant_of(deepseek.VARIANTS, "GlmMoeDsaForCausalLM")),
    "GLM-4.7-Flash": lambda path: mtp_case(path, variant_of(deepseek.VARIANTS, "Glm4MoeLiteForCausalLM")),
    "GLM-4.5, own head": lambda path: mtp_case(path, variant_of(moe.VARIANTS, "Glm4MoeForCausalLM"), has_own=True),
    "Qwen3-Next": lambda path: mtp_case(path, qwen3_next.VARIANTS[0]),
    "Qwen3.5": lambda path: mtp_case(path, variant_of(qwen3_5.VARIANTS, "Qwen3_5ForCausalLM")),
    "Qwen3.5, experts": lambda path: mtp_case(path, variant_of(qwen3_5.VARIANTS, "Qwen3_5MoeForCausalLM")),
    "EAGLE": eagle_case,
    "EAGLE, two layers, all of its own": partial(
        eagle_case, num_layers=2, has_own_embedding=True, has_own_head=True, has_bias=True
    ),
    "EAGLE-3, Llama": lambda path: eagle3_case(path, "llama", (2, 3, 3), has_own_embedding=True),
    "EAGLE-3, Qwen3, part of the vocabulary": lambda path: eagle3_case(
        path, "qwen3", (1, 2, 5), draft_vocab_size=96, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}
    ),
    "EAGLE-3, gpt-oss, norm first": lambda path: eagle3_case(
        path, gpt_oss.VARIANTS[0], (1, 2, 4), norm_before_residual=True, eagle_aux_hidden_state_layer_ids=[1, 2, 4]
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return CASES[request.param](tmp_path_factory.mktemp("case"))


def drafted(drafter: DraftLM, case: Case, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, list[int]]:
    """Outputs at a prompt's positions, in two chunks, and at those of three drafts; and the drafts."""
    paged = PagedDraft(drafter, dtype)
    tokens = prompt(LENGTH + 1)[1:]
    fused = drafter.combine(case.hidden.to(dtype))
    found = [paged.run(tokens[:CHUNK], fused[:CHUNK]), paged.run(tokens[CHUNK:], fused[CHUNK:], CHUNK)]
    drafts = []
    for number in range(DRAFTS):
        drafts.append(int(paged.logits(found[-1][-1:]).argmax()))
        found.append(paged.run(drafts[-1:], found[-1][-1:], LENGTH + number))
    return torch.cat(found), drafts


def expected(case: Case, drafts: list[int]) -> torch.Tensor:
    """The reference's results for the same tokens."""
    tokens, hidden = prompt(LENGTH + 1)[1:], case.reference.combine(case.hidden)
    for draft in drafts:
        own = case.reference.forward(tokens, hidden)[-1:]
        tokens, hidden = [*tokens, draft], torch.cat([hidden, own])
    return case.reference.forward(tokens, hidden)


def error_of(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    found, wanted = (torch.where(each.isinf(), torch.zeros(()), each.float()) for each in (found, wanted))
    return float((found - wanted).abs().max() / wanted.abs().max())


def test_a_drafter_computes_what_its_reference_does_and_goes_on_from_its_own_states(case: Case) -> None:
    drafter = case.load()
    found, drafts = drafted(drafter, case)
    wanted = expected(case, drafts)
    # DeepSeek-V4's outputs also have what the head reads.
    assert error_of(found[:, -wanted.shape[1] :], wanted) <= 1e-5
    logits, wanted_logits = drafter.compute_logits(found), case.reference.logits(wanted)
    assert error_of(logits, wanted_logits) <= 1e-5
    assert torch.equal(logits.isinf(), wanted_logits.isinf())
    assert drafter.hidden_size == found.shape[1]


def test_by_the_operators_in_bfloat16_it_differs_by_rounding_only(case: Case) -> None:
    if runtime.start(2) is None:
        pytest.skip("the compiled operators are not there")
    drafter = case.load(dtype=torch.bfloat16)
    found, drafts = drafted(drafter, case, torch.bfloat16)
    logits, wanted = drafter.compute_logits(found), case.reference.logits(expected(case, drafts))
    rows = [error_of(*pair) for pair in zip(logits, wanted, strict=True)]
    # In a few rows rounding selects other experts, or other tokens to attend to.
    assert sorted(rows)[len(rows) // 2] <= 0.03
    assert sum(row > 0.1 for row in rows) <= 4


def test_its_pass_is_recordable(case: Case) -> None:
    """With this the pass of a head is one call of the operators."""
    native = runtime.start(2)
    if native is None:
        pytest.skip("the compiled operators are not there")
    drafter = case.load(dtype=torch.bfloat16)
    paged, features = PagedDraft(drafter, torch.bfloat16), case.hidden.shape[1]

    def record(positions: torch.Tensor) -> torch.Tensor:
        def compute(hidden: torch.Tensor) -> torch.Tensor:
            return drafter(positions, positions, drafter.combine(hidden))

        operators, _, output = operators_of(compute, len(positions), features)
        assert len(operators) > 10
        assert output.shape == (len(positions), drafter.hidden_size)
        return output

    paged.step(0, record, 4)


def test_two_ranks_compute_what_one_does(case: Case) -> None:
    single = case.load()
    found, drafts = drafted(single, case)

    def compute(parallel: TensorParallel) -> tuple[torch.Tensor, torch.Tensor]:
        drafter = case.load(parallel=parallel)
        paged, fused = PagedDraft(drafter), drafter.combine(case.hidden)
        tokens = prompt(LENGTH + 1)[1:]
        hidden = paged.run(tokens, fused)
        further = paged.run(drafts[:1], hidden[-1:], LENGTH)
        hidden = torch.cat([hidden, further])
        return hidden, paged.logits(hidden)

    (first, logits), (second, _) = at_once([partial(compute, each) for each in thread_ranks(2)[0]])
    wanted = found[: LENGTH + 1]
    assert error_of(first, wanted) <= 1e-5
    assert torch.equal(first, second)
    assert error_of(logits, single.compute_logits(wanted)) <= 1e-5


def names_of(drafter: DraftLM) -> set[str]:
    return {name for name, _ in drafter.named_parameters()}


def test_an_embedding_and_a_head_that_are_copies_of_the_target_take_no_memory(tmp_path: Path) -> None:
    variant = variant_of(moe.VARIANTS, "Glm4MoeForCausalLM")
    copied = mtp_case(tmp_path / "copied", variant).load()
    assert not any("embed_tokens" in name or "head.head" in name for name in names_of(copied))
    own = mtp_case(tmp_path / "own", variant, has_own=True).load()
    assert names_of(own) - names_of(copied) == {
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
    }


def test_an_mtp_layer_may_be_quantised_as_the_model_is(tmp_path: Path) -> None:
    case = mtp_case(tmp_path, variant_of(deepseek.VARIANTS, "DeepseekV3ForCausalLM"))
    tensors = load_file(case.target / WEIGHTS)
    layer = [name for name in tensors if name.startswith("model.layers.2.") and name.endswith("_proj.weight")]
    meant = {}
    for name in layer:
        # Published checkpoints have this product in bfloat16.
        if not name.endswith("eh_proj.weight"):
            parts, meant[name] = fp8_block(tensors.pop(name))
            tensors |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    assert len(meant) > 20
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    (quantised / CONFIG).write_bytes((case.target / CONFIG).read_bytes())
    edit_json(quantised / CONFIG, quantization_config=FP8_BLOCK_CONFIG)
    save_file(tensors, quantised / WEIGHTS)
    save_file(load_file(case.target / WEIGHTS) | meant, case.target / WEIGHTS)
    dense, found = case.load(), case._replace(target=quantised).load()
    for (name, first), (_, second) in zip(dense.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(first, second), name


def test_a_head_may_be_stored_as_the_body_of_a_model_with_a_numbered_layer(tmp_path: Path) -> None:
    case = eagle3_case(tmp_path, "llama", (2, 3, 3), draft_vocab_size=64)
    wanted = case.load()
    tensors = load_file(case.path / WEIGHTS)  # type: ignore[operator]
    renamed = {
        name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name.replace('midlayer.', 'layers.0.')}": tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, case.path / WEIGHTS)  # type: ignore[operator]
    for first, second in zip(wanted.parameters(), case.load().parameters(), strict=True):
        assert torch.equal(first, second)


def config(**fields: object) -> Callable[[Case], None]:
    return lambda case: edit_json(case.path / CONFIG, **fields)  # type: ignore[operator]


def weights(**changes: torch.Tensor | None) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        assert case.path is not None
        tensors = {**load_file(case.path / WEIGHTS), **{n.replace("__", "."): t for n, t in changes.items()}}
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, case.path / WEIGHTS)

    return change


@pytest.mark.parametrize(
    ("version", "injure", "sentence"),
    [
        (1, config(vocab_size=300), r"vocab_size of .* is 300, but the model's is 307"),
        (1, config(hidden_size=32), r"hidden_size of .* is 32, but the model's is 64"),
        (1, weights(fc__weight=None), r"has no tensor fc\.weight; name the directory of an EAGLE head"),
        (1, weights(layers__0__mlp__up_proj__weight=None), r"lacks 1 tensor \(layers\.0\.mlp\.up_proj\.weight\)"),
        (1, weights(surplus=torch.zeros(3)), r"holds 1 tensor \(surplus\)"),
        (3, config(num_hidden_layers=2), r"num_hidden_layers of .* is 2; it must be 1"),
        (3, config(target_hidden_size=48), r"target_hidden_size of .* is 48, but the model's hidden_size is 64"),
        (3, weights(lm_head__weight=None), r"has no tensor lm_head\.weight, which draft_vocab_size 96 needs"),
        (3, weights(d2t=None), r"has no tensor d2t, which draft_vocab_size 96 of a vocabulary of 307"),
        (3, weights(d2t=torch.zeros(95, dtype=torch.int64)), r"d2t .* of shape \[95\]; it must be .* \[96\]"),
        (3, weights(d2t=torch.zeros(96, dtype=torch.bool)), r"d2t .* is torch\.bool of .*; it must be integers of"),
        (3, weights(d2t=torch.full((96,), 300)), "outside the vocabulary of 307, or two to one"),
        (3, weights(d2t=-torch.arange(96)), "outside the vocabulary of 307, or two to one"),
        (3, weights(fc__weight=torch.zeros(64, 64)), r"fc\.weight .* has shape \[64, 64\], where the model needs"),
        (3, config(eagle_aux_hidden_state_layer_ids=[1, 2]), "must be three layers of the model, which has 6"),
        (3, config(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}), "must be three layers of the model"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_words(
    version: int, injure: Callable[[Case], None], sentence: str, tmp_path: Path
) -> None:
    case = eagle_case(tmp_path) if version == 1 else eagle3_case(tmp_path, "llama", (2, 3, 3), draft_vocab_size=96)
    injure(case)
    with pytest.raises(CheckpointError, match=sentence):
        case.load()


def test_a_method_says_what_it_needs(tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "llama", "llama")
    with pytest.raises(CheckpointError, match=r"is mtp, but LlamaForCausalLM has no layers of multi-token prediction"):
        load_head("mtp", target)
    with pytest.raises(CheckpointError, match=r"speculative_model is .*, but speculative_method is mtp"):
        load_head("mtp", target, target)
    for method in ("eagle", "eagle3"):
        with pytest.raises(CheckpointError, match=f"is {method}, which needs a head; set speculative_model"):
            load_head(method, target)
    variant = variant_of(deepseek.VARIANTS, "DeepseekV3ForCausalLM")
    bare = make_checkpoint(tmp_path / "bare", variant.family, **variant.overrides)
    with pytest.raises(CheckpointError, match=r"holds no tensors model\.layers\.3\.\*, which predict further tokens"):
        load_head("mtp", bare)


def test_by_the_operators_all_drafts_of_deepseek_v4_are_one_call_and_change_no_answer(tmp_path: Path) -> None:
    """Of the last sequence one token is allowed, so that all of its drafts are accepted."""
    if runtime.start(2) is None:
        pytest.skip("the compiled operators are not there")
    target = V4Pair(tmp_path, compressed.VARIANTS[0]).path

    def sequences() -> list[Sequence]:
        seqs = endless(3, 9)
        params = SamplingParams(temperature=0.0, max_tokens=11, ignore_eos=True, allowed_token_ids=[7])
        seqs[2] = Sequence(seqs[2].prompt_token_ids, 16, params, id=2)
        return seqs

    fields: dict[str, Any] = {"max_model_len": 128, "num_kvcache_blocks": 64, "max_num_seqs": 8}
    expected = Steps(runner_for(target, torch.bfloat16, **fields)).run(sequences())
    drafting = {"num_speculative_tokens": DRAFTS, "speculative_method": "mtp"}
    steps = Steps(runner_for(target, torch.bfloat16, **fields, speculative_config=drafting))
    assert steps.runner.drafts.drafter._passes.chain is not None
    assert steps.run(sequences()) == expected
    assert steps.scheduler.total_accepted_tokens >= 6


@pytest.mark.parametrize("architecture", ["Qwen3NextForCausalLM", "Glm4MoeForCausalLM"])
def test_the_operators_prepare_steps_that_change_no_answer(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With recurrent states and without. Much noise makes random models agree on some drafts."""
    if runtime.start(2) is None:
        pytest.skip("the compiled operators are not there")
    target = mtp_case(tmp_path, variant_of([*qwen3_next.VARIANTS, *moe.VARIANTS], architecture)).target

    def sequences() -> list[Sequence]:
        params = [SamplingParams(temperature=2.0, seed=row, max_tokens=20 + row, ignore_eos=True) for row in range(3)]
        return [Sequence(prompt(3 + 11 * row, seed=row), 16, each, id=row) for row, each in enumerate(params)]

    fields: dict[str, Any] = {"max_model_len": 128, "num_kvcache_blocks": 64, "max_num_seqs": 8}
    expected = Steps(runner_for(target, torch.bfloat16, **fields)).run(sequences())
    drafting = {"num_speculative_tokens": DRAFTS, "speculative_method": "mtp"}
    steps = Steps(runner_for(target, torch.bfloat16, **fields, speculative_config=drafting))
    verify, verified = DraftChain.verify, list[int]()

    def counted(chain: DraftChain, rows: VerifyingRows, *arguments: Any, **named: Any) -> Verified:
        verified.append(len(rows.drafts))
        return verify(chain, rows, *arguments, **named)

    monkeypatch.setattr(DraftChain, "verify", counted)
    assert steps.run(sequences()) == expected
    assert sum(verified) >= 20
    assert 5 <= steps.scheduler.total_accepted_tokens < steps.scheduler.total_draft_tokens


@pytest.mark.parametrize(
    "case",
    some(CASES, "DeepSeek-V3", "DeepSeek-V4", "Qwen3-Next", "EAGLE", "EAGLE-3, Qwen3, part of the vocabulary"),
    indirect=True,
)
@pytest.mark.parametrize("num_drafts", [DRAFTS, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2, 5, 8))])
def test_drafts_of_a_head_change_no_answer(case: Case, num_drafts: int) -> None:
    """With greedy and seeded sequences in one batch. Random heads are mostly wrong."""
    drafting: dict[str, object] = {"num_speculative_tokens": num_drafts, "speculative_method": case.method}
    if case.path is not None:
        drafting["speculative_model"] = str(case.path)
    fields: dict[str, Any] = {"max_model_len": 128, "num_kvcache_blocks": 64, "max_num_seqs": 8}
    expected = Steps(runner_for(case.target, **fields)).run(endless(3, 9))
    steps = Steps(runner_for(case.target, **fields, speculative_config=drafting))
    assert steps.run(endless(3, 9)) == expected
    assert max(steps.drafted) == num_drafts
