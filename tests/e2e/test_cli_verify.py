"""`kaon verify` passes for the CPU's operators, and reports its results."""

from pathlib import Path

import pytest

from server.cli import main
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
def test_answers_depend_on_nothing_else_that_is_computed(
    architecture: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    variant = _FIRST[architecture]
    path = make_checkpoint(tmp_path, variant.family, **_fields(variant))
    # In this process, so that its three engine cores start warm.
    code = main(["verify", str(path), "--device", "cpu", "--dtype", "bfloat16"])
    printed = capfd.readouterr()
    assert code == 0, printed.out + printed.err
    lines = printed.out.splitlines()
    names = ["alone", "prefix hits", "in company", "restarted", "chunked", "preempted"]
    assert [line[:14].strip() for line in lines[:6]] == names
    assert lines[0].startswith(f"alone         8 answers equal ({architecture} in bfloat16 by cpu")
    assert lines[-1] == "Answers do not depend on company, chunks, caches, preemption or restarts"
