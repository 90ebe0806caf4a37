"""What whole models launch is what Triton's front end takes, with the types that their arguments have there.

The interpreter is laxer than the compiler, and what is compiled ahead of time has types that somebody wrote down.
"""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.parity.checkpoints import make_checkpoint
from tests.parity.quantized_checkpoints import write_pair
from tests.parity.test_quantization import FORMATS
from tests.parity.test_triton_quantized_models import STAYING, write_experts
from tests.parity.triton_interpreter import requires_interpreter
from tests.parity.variants import Variant, all_variants, deepseek, gpt_oss, qwen3_next

pytestmark = requires_interpreter

SOME = (deepseek.VARIANTS[-1], gpt_oss.VARIANTS[0], qwen3_next.VARIANTS[0])
ALL = pytest.mark.slow


def made(variants: Iterable[Variant], directory: Path) -> list[Path]:
    return [
        make_checkpoint(directory / str(number), each.family, **each.overrides) for number, each in enumerate(variants)
    ]


def launched(arch: str, dtype: str, paths: Iterable[Path]) -> set[str]:
    """Names of the kernels, of which none was refused."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.parity.launched_kernels", arch, dtype, *map(str, paths)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return set(found.stdout.split())


def quantised(names: Iterable[str], directory: Path) -> list[Path]:
    """A dense model of each format, and one whose experts are in FP8."""
    dense = [write_pair(directory / name, *FORMATS[name]).quantised for name in names]
    experts = write_experts(directory / "experts", "Qwen3MoeForCausalLM", "fp8 blocks", moe_intermediate_size=64)
    return [*dense, experts.quantised]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("arch", "dtype", "variants", "formats"),
    [
        ("gfx942", "bfloat16", SOME, ("fp8 blocks", "awq")),
        pytest.param("sm_90", "float16", all_variants(), STAYING, marks=ALL),
        pytest.param("gfx1201", "bfloat16", all_variants(), STAYING, marks=ALL),
    ],
    ids=["some", "all on sm_90", "all on gfx1201"],
)
def test_launches_of_whole_models(
    arch: str, dtype: str, variants: tuple[Variant, ...], formats: tuple[str, ...], tmp_path: Path
) -> None:
    found = launched(arch, dtype, [*made(variants, tmp_path), *quantised(formats, tmp_path)])
    assert {"attention_prefill_kernel", "latent_prefill_kernel", "gated_delta_span_kernel", "draw_kernel"} <= found
    assert {"fp8_gemm_kernel", "four_bit_gemm_kernel", "moe_fp8_gemm_kernel"} <= found
