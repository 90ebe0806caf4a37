"""`kaon verify` passes for the CPU's operators, and reports its results."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.checkpoints import make_checkpoint
from tests.parity.test_cpu_models import _fields, needs_operators
from tests.parity.variants import all_variants

_FIRST = {variant.architecture: variant for variant in reversed(all_variants())}


@needs_operators
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[] if name == "Qwen3MoeForCausalLM" else [pytest.mark.slow]) for name in sorted(_FIRST)],
)
def test_answers_depend_on_nothing_else_that_is_computed(architecture: str, tmp_path: Path) -> None:
    variant = _FIRST[architecture]
    path = make_checkpoint(tmp_path, variant.family, **_fields(variant))
    command = [sys.executable, "-m", "server", "verify", str(path), "--device", "cpu", "--dtype", "bfloat16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = ["alone", "prefix hits", "in company", "restarted", "chunked", "preempted"]
    assert [line[:14].strip() for line in lines[:6]] == names
    assert lines[0].startswith(f"alone         8 answers equal ({architecture} in bfloat16 by cpu")
    assert lines[-1] == "Answers do not depend on company, chunks, caches, preemption or restarts"
