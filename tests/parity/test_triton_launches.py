"""The launches of whole models are valid in Triton's front end with the types of their arguments, and were compared
with torch at the start in the same specialisations.

The interpreter is more permissive than the compiler, and ahead-of-time compilations have types that were written by
hand.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from tests.parity.checkpoints import make_checkpoint
from tests.parity.draft_heads import MTPPair, make_eagle
from tests.parity.launched_kernels import DRAFTING
from tests.parity.quantized_checkpoints import write_pair
from tests.parity.test_quantization import FORMATS
from tests.parity.test_triton_quantized_models import STAYING, family_of, write_experts
from tests.parity.triton_interpreter import requires_interpreter
from tests.parity.variants import Variant, deepseek, families, qwen3_next

pytestmark = requires_interpreter


@triton.jit
def exp_kernel(x, out):
    """One element."""
    tl.store(out, tl.exp(tl.load(x)))


TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SOME = (deepseek.VARIANTS[-1], qwen3_next.VARIANTS[0]._replace(overrides=TWO_LAYERS))
ALL = pytest.mark.slow
QUANTISED = {
    *("fp8_gemm_kernel", "four_bit_vector_kernel", "four_bit_gemm_kernel"),
    *("moe_fp8_gemm_kernel", "moe_int8_gemm_kernel"),
}
"""Kernels of quantised weights in linear layers and experts."""
OF_CACHES = {
    *("attention_prefill_kernel", "latent_prefill_kernel", "gated_delta_span_kernel", "state_space_span_kernel"),
    "selective_scan_kernel",
}
"""Kernels that read keys and values, latents or states of a prompt."""
DELIBERATELY_UNCHECKED = ("unchecked: store_kernel, by no check of",)
"""Block-sparse attention stores keys like any other layer, whose check launches the kernel. Only a variant without
another layer has none; no published checkpoint is like it."""
COMPUTED_BY_TORCH = "compressed"
"""The family whose attention torch computes on a GPU: DeepSeek-V4."""


def test_the_interpreter_refuses_types_of_which_the_compiler_has_no_exponential() -> None:
    x = torch.zeros(1, dtype=torch.float16)
    with pytest.raises(InterpreterError, match="but got fp16"):
        exp_kernel[(1,)](x, x)
    out = torch.zeros(1)
    exp_kernel[(1,)](torch.ones(1), out)
    assert out.item() == pytest.approx(2.71828, rel=1e-5)


def made(variants: Iterable[Variant], directory: Path) -> list[Path]:
    return [
        make_checkpoint(directory / str(number), each.family, **each.overrides) for number, each in enumerate(variants)
    ]


def launched(arch: str, dtype: str, paths: Iterable[Path]) -> set[str]:
    """Names of the kernels launched over a cache of more than 2 GiB, which each checkpoint's own start compared."""
    module = "tests.parity.launched_kernels"
    lines = uninterpreted("-m", module, "--large-pool", arch, dtype, *map(str, paths)).splitlines()
    unchecked = [line for line in lines if line.startswith("unchecked:")]
    assert not [line for line in unchecked if not line.startswith(DELIBERATELY_UNCHECKED)]
    return set(lines) - {"", *unchecked}


def uninterpreted(*arguments: str) -> str:
    """The output of a Python process in which kernels are compiled and not interpreted."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    found = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


_FORMS = """
import torch
from models.ops.triton.cache_store import vector_store
from models.ops.triton.configs import TARGETS
from models.ops.triton.elementwise import rms_norm
from models.ops.triton.specializations import CheckedKernels, UncheckedKernel
from tests.parity.front_end import on

def launch(x, width):
    rms_norm(x[..., :width], torch.ones(width, dtype=x.dtype), 1e-6)

small = torch.ones(4, 64, dtype=torch.bfloat16)
large = torch.empty(2**30 + 64, 2, dtype=torch.uint8).view(torch.bfloat16).view(-1, 64)[-4:]
checked = CheckedKernels()
checked.watch()
with on(TARGETS["gfx942"]):
    with checked.checking("norm"):
        launch(small, 64)
    launch(small[1:], 64)
    print(checked.unchecked_of("norm"))
    launch(large, 64)
    (form,) = checked.unchecked_of("norm")
    print(dict(form.arguments)["x"], checked.unchecked_of("attention"))
    checked.refuse_others()
    launch(large[1:], 64)  # It was launched before: the start has decided.
    try:
        launch(small.flatten()[1:65].view(1, 64), 64)
    except UncheckedKernel as refused:
        print(refused.refused_operator, dict(refused.specialization.arguments)["x"])
    with checked.checking("norm"):
        launch(small.float(), 64)
    launch(torch.ones(9, 64), 64)
    vector_store(small, small.view(1, 4, 64), torch.arange(4))  # Of no operator that was checked: it is only recorded.
    print({form.kernel for form, operator in checked.unchecked.items() if operator is None})
"""


def test_a_form_that_was_not_compared_is_found_and_refused_once_requests_are_served() -> None:
    """Small memory and aligned addresses at first; then more than 2 GiB, and an unaligned address."""
    small, large, refused, of_no_check = uninterpreted("-c", _FORMS).splitlines()
    assert small == "[]"
    assert large == "*bf16 divisibility=16 []"
    assert refused == "norm *bf16 pointer_range=32"
    assert of_no_check == "{'vector_store_kernel'}"


def quantised(names: Iterable[str], directory: Path) -> list[Path]:
    """A dense model of each format, one whose experts are in FP8, and one whose experts are integers except for a
    dense one."""
    dense = [write_pair(directory / name, *FORMATS[name]).quantised for name in names]
    experts = write_experts(directory / "experts", "Qwen3MoeForCausalLM", "fp8 blocks", moe_intermediate_size=64)
    integers, config = FORMATS["compressed-tensors int8 and rounded inputs"]
    partly = write_pair(
        directory / "partly",
        integers,
        config,
        module=lambda name: ".experts." in name and ".experts.2." not in name,
        family=family_of("Qwen3MoeForCausalLM"),
        moe_intermediate_size=64,
        num_hidden_layers=1,
    )
    return [*dense, experts.quantised, partly.quantised]


def drafting(directory: Path) -> dict[str, Path]:
    """Targets with a drafter, whose heads differ in number and size from the target's, by drafting method."""
    pairs: dict[str, Path] = {}
    target = make_checkpoint(directory / "llama", num_hidden_layers=6)
    for version, method in ((1, "eagle"), (3, "eagle3")):
        path = shutil.copytree(target, directory / method)
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 80}
        part = {"draft_vocab_size": 96} if version == 3 else {}
        head = make_eagle(directory / f"{method}-head", path, version=version, **part, **sizes)
        pairs[method] = draft_by(path, speculative_method=method, speculative_model=str(head))
    pairs["mtp"] = draft_by(MTPPair(directory / "mtp", qwen3_next.VARIANTS[0]).path, speculative_method="mtp")
    smaller = make_checkpoint(directory / "smaller", "qwen3", num_hidden_layers=1, head_dim=32, hidden_size=32)
    path = shutil.copytree(target, directory / "model")
    pairs["model"] = draft_by(path, speculative_method="draft", speculative_model=str(smaller))
    return pairs


def draft_by(path: Path, **fields: str) -> Path:
    (path / DRAFTING).write_text(json.dumps({"speculative_config": {"num_speculative_tokens": 2, **fields}}))
    return path


@ALL  # Of models that do not draft: the next test.
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arch", "dtype", "methods"),
    [
        ("gfx942", "bfloat16", ("eagle", "eagle3", "mtp", "model")),
        ("sm_90", "float16", ("eagle", "eagle3", "mtp", "model")),
    ],
)
def test_launches_of_models_that_draft(arch: str, dtype: str, methods: tuple[str, ...], tmp_path: Path) -> None:
    """No launch has a form that the start did not compare: once requests are served, such a launch is refused."""
    pairs = drafting(tmp_path)
    found = launched(arch, dtype, [pairs[method] for method in methods])
    assert {"attention_prefill_kernel", "attention_decode_kernel", "store_kernel", "draw_kernel"} <= found


def test_launches_of_whole_models(tmp_path: Path) -> None:
    found = launched("gfx942", "bfloat16", [*made(SOME, tmp_path), *quantised(("fp8 blocks", "awq"), tmp_path)])
    assert {"attention_prefill_kernel", "latent_prefill_kernel", "gated_delta_span_kernel", "draw_kernel"} <= found
    assert found >= QUANTISED


each_target = pytest.mark.parametrize(("arch", "dtype"), [("sm_90", "float16"), ("gfx1201", "bfloat16")])


@ALL
@pytest.mark.timeout(900)
@each_target
@pytest.mark.parametrize("family", families())
def test_no_variant_launches_what_its_start_did_not_compare(
    family: str, arch: str, dtype: str, tmp_path: Path
) -> None:
    """All variants on an AMD GPU, whose forms are the finest; on another, the first of each architecture."""
    variants = families()[family]
    if arch == "sm_90":
        variants = list({each.architecture: each for each in reversed(variants)}.values())
    found = launched(arch, dtype, made(variants, tmp_path))
    assert "draw_kernel" in found
    assert found & OF_CACHES or family == COMPUTED_BY_TORCH


@ALL
@pytest.mark.timeout(900)
@each_target
def test_launches_of_models_in_every_format(arch: str, dtype: str, tmp_path: Path) -> None:
    assert launched(arch, dtype, quantised(STAYING, tmp_path)) >= QUANTISED
