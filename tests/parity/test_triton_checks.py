"""The self-test of kernels at the start: correct ones pass, a wrong one is found, and torch then computes."""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from triton.runtime.interpreter import InterpretedFunction

from engine.commands import doctor
from engine.runner import kernel_checks, loaded_model
from engine.runner.kernel_checks import check_kernels, failure_of
from engine.runner.loaded_model import LoadedModel
from engine.runner.model_runner import ModelRunner
from engine.sequence import Sequence
from models.architectures.minimax import LightningAttention
from models.architectures.olmo_hybrid import OlmoHybridDeltaNet
from models.architectures.zamba2 import SharedMLP
from models.attention.triton import TritonAttentionBackend
from models.layers.mamba import MambaMixer, MambaShape
from models.ops import aiter, triton
from models.ops.self_test import Case, Finding, Problems, first_failure, relative_error
from models.ops.stored_weight import stored_of
from models.ops.triton import cases, configs
from models.ops.triton.cases import quantized_products as products
from models.ops.triton.cases import small_cases
from models.ops.triton.cases.elementwise import ActivationCase
from models.ops.triton.cases.experts import SortCase
from models.ops.triton.cases.latent_attention import IndexCase
from models.ops.triton.cases.state_space import GatedNormCase, ShortConvCase
from models.parallel.tensor_parallel import SINGLE_RANK, TensorParallel
from tests.parity import quantized_checkpoints as q
from tests.parity.checkpoints import make_checkpoint
from tests.parity.paged_model import PagedModel, prompt
from tests.parity.test_quantization import FORMATS
from tests.parity.test_worker_model_runner import runner_for, step_alone
from tests.parity.triton_interpreter import requires_interpreter, triton_kernels
from tests.parity.variants import (
    Variant,
    all_variants,
    block_sparse,
    compressed,
    deepseek,
    gemma3,
    glm5_next,
    gpt_oss,
    qwen3_next,
)

__all__ = ["triton_kernels"]

pytestmark = requires_interpreter

CPU = torch.device("cpu")
BF16 = torch.bfloat16
INDEXED = next(each for each in deepseek.VARIANTS if each.overrides.get("index_topk") == 64)


SOUND = small_cases(CPU)


def test_rows_of_drafts_are_a_case_of_their_own() -> None:
    assert SOUND["attention in bf16"].key != SOUND["attention that verifies drafts"].key


SLOW = {
    "norm of 300, its weight less one, in fp16",
    "GeGLU in fp16",
    "clamped SwiGLU in bf16",
    "attention in bf16",
    "attention in fp16, its cache in FP8",
    "routes by softmax",
    "experts in bf16",
    "a weight in fp8",
    "attention with norms in bf16",
    "latents in bf16",
    "indexer in FP8",
    "experts in FP8",
    "experts in fp16 with an activation of its own",
    "a weight in fp8 in fp16",
    "a weight in mxfp4",
    "delta net in bf16",
    "Mamba-2 in bf16",
    "delta rule in fp16",
    "selective scan in bf16",
    "short convolution in bf16",
    "delta rule by key in bf16",
    "Mamba-2 in fp16",
    "a weight in int8",
    "a dense weight in torch.float32",
    "values larger than keys, FP8",
    "values with rows of their own, unaligned",
    "chunks of the last tokens, in another layer's cache",
}
"""The same sizes as others, in other dtypes, and those that take long, whose kernels have tests of their own."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in SOUND]
)
def test_sound_kernels_are_found_right(name: str) -> None:
    assert first_failure([SOUND[name]], CPU) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", SOUND)
def test_sound_kernels_are_found_right_whatever_the_numbers(name: str, seed: int) -> None:
    assert first_failure([SOUND[name]], CPU, seed) is None


BROKEN = {
    "rms_norm_kernel": "norm of 40 in bf16",
    "gated_kernel": "SwiGLU in bf16",
    "store_kernel": "attention in fp16, its cache in FP8",
    "attention_decode_kernel": "attention in bf16",
    "attention_merge_kernel": "attention in bf16",
    "attention_prefill_kernel": "attention in bf16",
    "latent_store_kernel": "latents in fp16, their cache in FP8",
    "latent_attention_kernel": "latents in fp16, their cache in FP8",
    "merge_latent_runs_kernel": "latents in fp16, their cache in FP8",
    "latent_prefill_kernel": "latents in fp16, their cache in FP8",
    "vector_store_kernel": "indexer in bf16",
    "indexer_scores_kernel": "indexer in bf16",
    "moe_route_kernel": "routes by groups",
    "moe_count_kernel": "experts in bf16",
    "moe_scan_kernel": "experts in bf16",
    "moe_place_kernel": "experts in bf16",
    "moe_gemm_kernel": "experts in bf16",
    "moe_combine_kernel": "experts in bf16",
    "moe_fp8_gemm_kernel": "experts in FP8",
    "moe_four_bit_gemm_kernel": "experts in MXFP4",
    "quantize_groups_kernel": "a weight in fp8",
    "fp8_gemm_kernel": "a weight in fp8",
    "add_splits_kernel": "a weight in fp8",
    "four_bit_gemm_kernel": "a weight in int4",
    "four_bit_vector_kernel": "a weight in mxfp4",
    "delta_conv_kernel": "delta net in fp16",
    "delta_conv_step_kernel": "delta net in fp16",
    "gated_delta_step_kernel": "delta net in fp16",
    "delta_inverse_kernel": "delta net in fp16",
    "gated_delta_span_kernel": "delta net in fp16",
    "gated_norm_kernel": "delta net in fp16",
    "short_conv_kernel": "short convolution in bf16",
    "short_conv_step_kernel": "short convolution in bf16",
    "keep_last_inputs_kernel": "short convolution in bf16",
    "state_space_step_kernel": "Mamba-2 in fp16",
    "state_space_span_kernel": "Mamba-2 in fp16",
    "group_norm_kernel": "Mamba-2 in fp16",
    "delta_rule_kernel": "delta rule in fp16",
    "selective_scan_kernel": "selective scan in fp16",
    "adjust_kernel": "sampling",
    "mask_kernel": "sampling",
    "argmax_tile_kernel": "sampling",
    "argmax_kernel": "sampling",
    "weigh_kernel": "sampling",
    "gather_kernel": "sampling",
    "draw_kernel": "sampling",
    "logprobs_tile_kernel": "sampling",
    "logprobs_row_kernel": "sampling",
}
"""Kernels, and the operators whose checks must find each of them."""
QUICK = {
    "rms_norm_kernel",
    "gated_kernel",
    "attention_decode_kernel",
    "moe_gemm_kernel",
    "four_bit_gemm_kernel",
    "draw_kernel",
}
"""Of operators whose cases take little time."""


def break_kernels(patch: pytest.MonkeyPatch, *names: str) -> set[str]:
    """Let kernels write wrong numbers; the set receives the names of those that were launched."""
    as_it_was, launched = InterpretedFunction.run, set()
    # Freed memory of an earlier run of the same case may contain the right numbers: nothing would seem to be written.
    patch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)
    patch.setattr(torch, "empty", torch.zeros)
    patch.setattr(torch, "empty_like", torch.zeros_like)

    def run(self: Any, *arguments: Any, **keywords: Any) -> None:
        if self.__name__ not in names:
            return as_it_was(self, *arguments, **keywords)
        launched.add(self.__name__)
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        before = [each.clone() for each in tensors]
        as_it_was(self, *arguments, **keywords)
        for now, then in zip(tensors, before, strict=True):
            is_new = now.view(torch.uint8) != then.view(torch.uint8)
            is_new = is_new.unflatten(-1, (-1, now.itemsize)).any(-1)
            if now.is_floating_point():
                spoiled = (now.float() * 1.3).masked_fill(now.float().isinf(), 1.3)
                now.copy_(torch.where(is_new, spoiled, now.float()).to(now.dtype))
            elif now.dtype is torch.int64:
                now.copy_(torch.where(is_new, now.flip(-1), now))
            elif self.__name__ != "weigh_kernel":  # Its counts are addresses, beyond which other kernels would write.
                now.masked_fill_(is_new, 0)
        return None

    patch.setattr(InterpretedFunction, "run", run)
    return launched


@pytest.mark.parametrize(
    "kernel", [pytest.param(kernel, marks=[] if kernel in QUICK else [pytest.mark.slow]) for kernel in BROKEN]
)
def test_a_broken_kernel_is_found(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = SOUND[BROKEN[kernel]]
    launched = break_kernels(monkeypatch, kernel)
    reason = failure_of([case], CPU, "it")
    assert launched == {kernel}
    assert reason is not None
    assert reason.startswith(("its numbers are", "they failed"))


@pytest.fixture
def triton_backend(triton_kernels: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models attend by kernels."""
    monkeypatch.setattr(loaded_model, "select_backend", TritonAttentionBackend)


def loaded(path: Path, dtype: torch.dtype = torch.float32, **fields: Any) -> LoadedModel:
    return runner_for(path, dtype, cpu_operators=False, max_num_batched_tokens=40, **fields).loaded


def only(patch: pytest.MonkeyPatch, *operators: str) -> None:
    """Have the start compare these operators, and no others."""
    ours_of = kernel_checks._ours_of

    def selected(every: dict[str, list[Case]]) -> dict[str, list[Case]]:
        return {name: found for name, found in ours_of(every).items() if name in operators}

    patch.setattr(kernel_checks, "_ours_of", selected)


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    ("family", "overrides", "used"),
    [
        ("qwen3", {}, {"attention": 1, "norm": 2, "activation": 1, "sampling": 1}),
        (gemma3.VARIANTS[0].family, gemma3.VARIANTS[0].overrides, {"attention": 2, "norm": 2, "activation": 1}),
        (gpt_oss.VARIANTS[0].family, gpt_oss.VARIANTS[0].overrides, {"attention": 2, "norm": 2, "moe": 3}),
        (INDEXED.family, INDEXED.overrides, {"latents": 2, "norm": 4, "activation": 2, "moe": 3}),
        (
            qwen3_next.VARIANTS[0].family,
            qwen3_next.VARIANTS[0].overrides,
            {"attention": 1, "norm": 2, "activation": 1, "moe": 3, "recurrent": 1},
        ),
    ],
    ids=["qwen3", "gemma3", "gpt_oss", "deepseek", "qwen3_next"],
)
def test_what_a_model_uses_is_looked_at_once_for_layers_that_are_alike(
    family: Any, overrides: dict[str, Any], used: dict[str, int], tmp_path: Path
) -> None:
    found = kernel_checks._cases_of(loaded(make_checkpoint(tmp_path, family, **overrides)))
    assert {operator: len(checks) for operator, checks in found.items()} == {**used, "sampling": 1}


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_convolution_is_looked_at_in_the_form_in_which_it_serves(activation: str) -> None:
    """With SiLU, which is a part of its kernel, and without it where another kernel computes the activation."""
    mixer = mamba_mixer(activation)
    (convolution,) = (case for case in mixer.kernel_cases(BF16, 8) if isinstance(case, ShortConvCase))
    assert convolution.has_silu == mixer.conv1d.has_silu == (activation == "silu")
    assert (len([*mixer.conv1d.kernel_cases(BF16, 8)]) == 1) == (activation == "gelu")


def mamba_mixer(activation: str) -> MambaMixer:
    shape = MambaShape(32, 64, 16, 4, 8, bias=False, conv_bias=True, norms="none", eps=1e-6, activation=activation)
    return MambaMixer("model.layers.0.mixer", shape, SINGLE_RANK)


def test_a_gate_without_a_norm_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Mamba's layers; the gates of Mamba-2's are a part of their own case."""
    (gate,) = (case for case in mamba_mixer("silu").kernel_cases(BF16, 8) if isinstance(case, GatedNormCase))
    assert failure_of([gate], CPU, "it") is None
    break_kernels(monkeypatch, "group_norm_kernel")
    assert failure_of([gate], CPU, "it") is not None


@pytest.mark.parametrize(
    ("architecture", "layer", "case"),
    [
        ("MiniMaxForCausalLM", LightningAttention, ActivationCase),
        ("OlmoHybridForCausalLM", OlmoHybridDeltaNet, GatedNormCase),
        ("Zamba2ForCausalLM", SharedMLP, ActivationCase),
    ],
)
def test_what_follows_a_product_is_looked_at(
    architecture: str, layer: type[Any], case: type[Case], tmp_path: Path
) -> None:
    variant = next(each for each in all_variants() if each.architecture == architecture)
    model = PagedModel(make_checkpoint(tmp_path, variant.family, **variant.overrides)).model
    assert isinstance(model, nn.Module)
    found = next(module for module in model.modules() if isinstance(module, layer))
    (one,) = (each for each in found.kernel_cases(BF16, 8) if isinstance(each, case))
    assert first_failure([one], CPU) is None


@pytest.mark.usefixtures("triton_backend")
def test_the_order_of_experts_pairs_is_looked_at_before_all_else(tmp_path: Path) -> None:
    """Other kernels take addresses from it, and a wrong address ends the process."""
    variant = gpt_oss.VARIANTS[0]
    found = kernel_checks._cases_of(loaded(make_checkpoint(tmp_path, variant.family, **variant.overrides)))
    first = found[kernel_checks._OPERATORS[0]][0]
    assert isinstance(first, SortCase)
    assert not [case for cases in found.values() for case in cases if case.gives_addresses and case != first]


@pytest.mark.parametrize("kernel", ["moe_count_kernel", "moe_scan_kernel", "moe_place_kernel"])
def test_a_wrong_order_of_pairs_is_found_by_its_own_case(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = break_kernels(monkeypatch, kernel)
    assert failure_of([SOUND["the order of pairs"]], CPU, "moe") is not None
    assert launched == {kernel}


@pytest.mark.usefixtures("triton_backend")
def test_a_sound_model_runs_as_it_was_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3"), BF16)
    with caplog.at_level("INFO"):
        model = check_kernels(model)
    assert model.backend.name == "triton"
    assert not triton.left()
    assert "Triton's kernels were compared with torch in" in caplog.text
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.usefixtures("triton_backend")
def test_what_is_wrong_is_left_to_torch_and_answers_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3"))
    break_kernels(monkeypatch, "rms_norm_kernel", "gated_kernel", "attention_prefill_kernel")
    only(monkeypatch, "norm", "activation", "attention")
    model = check_kernels(model)
    assert model.backend.name == "torch"
    assert triton.left() == {"norm", "activation", "attention"}
    for operator in ("norm", "activation", "attention"):
        assert f"Triton's kernels for {operator} are wrong on cpu by Triton" in caplog.text
    assert "what rounding explains: a norm of 64. Plain torch computes them, slowly; another release" in caplog.text
    monkeypatch.undo()
    found = logits_of(model)
    triton.stop()
    torch.testing.assert_close(found, logits_of(loaded(tmp_path)), atol=1e-4, rtol=1e-4)


def logits_of(model: LoadedModel) -> torch.Tensor:
    """Index of a prompt's last token."""
    runner = ModelRunner(model, 20)
    found: list[torch.Tensor] = []
    compute = runner.model.compute_logits
    runner.model.compute_logits = lambda hidden: found.append(compute(hidden)) or found[-1].clone()  # type: ignore
    seq = Sequence(prompt(11), 16, id=0)
    seq.slot, seq.block_table = 0, [1]
    step_alone(runner, seq, 0, 11, new=True)
    return found[0]


@pytest.mark.usefixtures("triton_backend")
def test_an_operator_that_is_named_as_tritons_stays_and_a_warning_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3"), kernel_backend=("triton", "norm=triton"))
    break_kernels(monkeypatch, "rms_norm_kernel", "gated_kernel")
    only(monkeypatch, "norm", "activation")
    model = check_kernels(model)
    assert triton.left() == {"activation"}
    assert "They are used nevertheless, because kernel_backend has norm=triton; another release" in caplog.text


@pytest.mark.usefixtures("triton_backend")
def test_what_aiter_computes_is_left_to_its_own_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3"))
    assert set(kernel_checks._cases_of(model)) == {"attention", "norm", "activation", "sampling"}
    monkeypatch.setattr(aiter, "takes", lambda operator: operator in ("attention", "norm"))
    assert set(kernel_checks._cases_of(model)) == {"activation", "sampling"}
    latent = loaded(make_checkpoint(tmp_path / "latent", INDEXED.family, **INDEXED.overrides))
    assert "latents" in kernel_checks._cases_of(latent), "which aiter never has"


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(
    ("variant", "stored", "scored"),
    [
        (
            compressed.VARIANTS[0],
            # Keys; tokens' series and entries of four tokens, of 32, and of the indexer, over blocks of 16 tokens.
            {(32, 16), (128, 16), (32, 4), (64, 16), (32, 1), (96, 16)},
            {("attention", 16, 24, 4)},
        ),
        (block_sparse.VARIANTS[0], set(), {("attention", 2, 24, 16)}),
        (glm5_next.VARIANTS[0], {(48, 16)}, {("latents", 16, 24, 4)}),
    ],
    ids=["compressed", "block_sparse", "pools"],
)
def test_selections_are_looked_at_in_the_sizes_of_their_caches(
    variant: Variant,
    stored: set[tuple[int, int]],
    scored: set[tuple[str, int, int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where aiter computes attention: these layers launch Triton's kernels."""
    monkeypatch.setattr(aiter, "takes", lambda operator: operator == "attention")
    found = kernel_checks._cases_of(loaded(make_checkpoint(tmp_path, variant.family, **variant.overrides)))
    cases = [case for of in found.values() for case in of if isinstance(case, IndexCase)]
    assert {(each.dim, each.block_size) for each in cases if not each.heads} == stored
    assert {(each.operator, each.heads, each.dim, each.block_size) for each in cases if each.heads} == scored


@pytest.mark.usefixtures("triton_backend")
def test_an_operator_of_torch_s_is_not_looked_at(tmp_path: Path) -> None:
    """An FP8 cache that the hardware's kernels could not read does not end the start then."""
    model = loaded(make_checkpoint(tmp_path, "qwen3"))
    triton.leave_to_torch(frozenset({"attention"}))
    assert "attention" not in kernel_checks._cases_of(model)


@pytest.mark.usefixtures("triton_backend")
def test_latents_that_are_wrong_end_the_start_since_nothing_else_computes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_checkpoint(tmp_path, INDEXED.family, **INDEXED.overrides)
    model = loaded(path)
    break_kernels(monkeypatch, "latent_store_kernel")
    only(monkeypatch, "latents")
    with pytest.raises(
        ValueError, match=r"^Triton's kernels for latents are wrong on cpu .* set kernel_backend to att"
    ):
        model = check_kernels(model)
    check_kernels(loaded(path, kernel_backend=("attention=triton",)))
    assert not triton.left()


@pytest.mark.usefixtures("triton_backend")
def test_weights_that_stay_quantised_become_dense_where_their_kernels_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize, config = FORMATS["awq"]
    pair = q.write_pair(tmp_path, quantize, config, hidden_size=192, intermediate_size=320)
    model = loaded(pair.quantised)
    assert any(stored_of(parameter) is not None for parameter in model.model.parameters())
    break_kernels(monkeypatch, "four_bit_gemm_kernel")
    monkeypatch.setattr(products, "_ROWS", (3,))
    only(monkeypatch, "linear")
    model = check_kernels(model)
    assert all(stored_of(parameter) is None for parameter in model.model.parameters())
    found, expected = logits_of(model), logits_of(loaded(pair.dense))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("triton_backend")
def test_what_is_wrong_on_another_rank_is_left_to_torch_here_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3"))
    asked: list[bool] = []

    def all_agree(self: TensorParallel, is_so: bool, device: torch.device) -> bool:
        asked.append(is_so)
        return is_so and len(asked) != 4

    monkeypatch.setattr(TensorParallel, "all_agree", all_agree)
    only(monkeypatch, "norm")
    model = check_kernels(model)
    assert asked == [True] * 8  # Each operator once, whichever the model uses.
    assert triton.left() == {"norm"}
    assert "another rank's kernels are wrong" in caplog.text


@pytest.mark.usefixtures("triton_backend")
def test_a_cache_in_fp8_that_the_hardware_has_not_ends_the_start_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(make_checkpoint(tmp_path, "qwen3"), quantization_config={"kv_cache_dtype": "fp8"})
    monkeypatch.setattr(configs, "INTERPRETER", configs.TARGETS["gfx90a"])
    with pytest.raises(ValueError, match=r"^kv_cache_dtype is fp8, which gfx90a does not compute; set it to auto$"):
        model = check_kernels(model)


@dataclass(frozen=True)
class FailingCase:
    """A kernel that raises."""

    operator: ClassVar[str] = "norm"
    error: Exception

    @property
    def key(self) -> Hashable:
        return self

    def compare(self, problems: Problems) -> Iterator[Finding]:
        raise self.error
        yield problems


def test_kernels_that_raise_are_wrong_and_their_words_are_kept() -> None:
    reason = failure_of([FailingCase(RuntimeError("out of resource: shared memory\nand more"))], CPU, "norm")
    assert reason == "they failed: RuntimeError: out of resource: shared memory"


def test_a_lack_of_memory_is_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert failure_of([FailingCase(torch.OutOfMemoryError("none"))], CPU, "moe") is None
    assert "There is no memory to compare the kernels for moe with torch" in caplog.text


def test_a_gpu_that_computes_nothing_any_more_ends_the_start_and_the_flag_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost(*arguments: Any, **fields: Any) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch, "zeros", lost)
    with pytest.raises(ValueError, match=r"took the GPU from this process \(they failed: .* to norm=torch; another"):
        failure_of([FailingCase(RuntimeError("an illegal memory access"))], CPU, "norm")


def test_no_number_at_all_is_wrong() -> None:
    exact = torch.ones(3)
    assert relative_error(torch.tensor([1.0, torch.nan, 1.0]), exact, exact) == float("inf")
    assert relative_error(exact, torch.tensor([1.0, torch.nan, 1.0]), exact) == 0.0


def test_the_doctor_reports_each_operator_that_fails_at_common_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"norm": [SOUND["norm of 40 in bf16"]], "moe": [FailingCase(RuntimeError("no such instruction"))]}
    monkeypatch.setattr(cases, "common_cases", lambda device: dict(broken))
    assert doctor._checked_kernels(CPU) == (tuple(broken), {"moe": "they failed: RuntimeError: no such instruction"})


def test_every_operator_of_triton_but_latents_has_cases_of_common_sizes() -> None:
    found = cases.common_cases(CPU)
    assert set(found) == {"attention", "norm", "activation", "moe", "linear", "recurrent", "sampling"}
