"""What computes each operator: by what is asked for, what there is, and an `aiter` in every state it may be in."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models.kernels import aiter, backends
from models.layers.activation import swiglu
from models.layers.norm import OffsetRMSNorm, RMSNorm

SOUND = """
import torch
import torch.nn.functional as F

def rmsnorm2d_fwd(x, weight, eps):
    return F.rms_norm(x, (x.shape[1],), weight, eps)

def rmsnorm2d_fwd_with_add(out, x, residual, residual_out, weight, eps):
    residual_out.copy_(x + residual)
    out.copy_(F.rms_norm(residual_out, (x.shape[1],), weight, eps))

def silu_and_mul(out, x):
    gate, up = x.chunk(2, -1)
    out.copy_(F.silu(gate) * up)

def gelu_tanh_and_mul(out, x):
    gate, up = x.chunk(2, -1)
    out.copy_(F.gelu(gate, approximate="tanh") * up)
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for an `aiter` that this process and its children find first."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "aiter.py"
    aiter.stop()
    sys.modules.pop("aiter", None)


@pytest.mark.parametrize(
    ("source", "norm", "activation"),
    [
        (SOUND, None, None),
        (SOUND.replace("def silu_and_mul", "def other"), None, "it has no silu_and_mul"),
        (
            SOUND.replace("    residual_out.copy_(x + residual)\n", "    raise OSError('no code object')\n"),
            "OSError",
            None,
        ),
        (SOUND.replace("F.silu(gate)", "gate"), None, "its numbers are off"),
        ("raise RuntimeError('needs ROCm 9')", "could not be imported: RuntimeError: needs ROCm 9", "RuntimeError"),
        ("import module_that_there_is_not", "could not be imported", "module_that_there_is_not"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "ended by signal 11", "signal 11"),
        ("import sys\nsys.exit(3)", "exit code 3", "exit code 3"),
        ("import sys\nprint('not for you')\nsys.exit(0)", "exit code 0", "exit code 0"),
        (SOUND + "\nimport atexit\natexit.register(print, 'bye')\n", None, None),
        (
            "import subprocess, time\nsubprocess.Popen(['sleep', '20'])\ntime.sleep(60)",
            "took longer than 8 s",
            "took longer",
        ),
    ],
    ids=[
        "sound",
        "lacks one",
        "raises",
        "wrong",
        "broken",
        "half installed",
        "crashes",
        "exits",
        "exits as if all were well",
        "has last words",
        "hangs and its compiler too",
    ],
)
def test_the_probe_tells_what_is_wrong(library: Path, source: str, norm: str | None, activation: str | None) -> None:
    library.write_text(source)
    reasons = aiter.probe("cpu", 8.0 if "sleep" in source else 60.0)
    for operator, wanted in {"norm": norm, "activation": activation}.items():
        found = reasons[operator]
        assert (found is None) if wanted is None else (found is not None and wanted in found)


def test_a_missing_library_is_told_as_such_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise OSError('of another project')")
    monkeypatch.chdir(tmp_path)
    assert set(aiter.probe("cpu").values()) == {"aiter is not installed"}


def test_layers_call_the_library_once_it_is_started(library: Path) -> None:
    library.write_text(
        SOUND + "\ncalls = []\nplain = silu_and_mul\ndef silu_and_mul(*a):\n    calls.append(a)\n    plain(*a)\n"
    )
    aiter.start(frozenset({"norm", "activation"}))
    x, residual = torch.randn(3, 16).bfloat16(), torch.randn(3, 16).bfloat16()
    norm, offset = RMSNorm(16, 1e-6), OffsetRMSNorm(16, 1e-6)
    norm.weight.data = offset.weight.data = torch.randn(16).bfloat16()
    summed = x + residual
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-6))
    found = norm.add_norm(x, residual.clone())
    torch.testing.assert_close(found, (F.rms_norm(summed, (16,), norm.weight, 1e-6), summed))
    torch.testing.assert_close(swiglu(x), F.silu(x[:, :8]) * x[:, 8:])
    assert len(sys.modules["aiter"].calls) == 1
    # It has no norm whose weight is stored less one, and computes no float32.
    torch.testing.assert_close(offset(x), offset._compute(x))
    torch.testing.assert_close(swiglu(x.float()), F.silu(x[:, :8].float()) * x[:, 8:].float())
    assert len(sys.modules["aiter"].calls) == 1


def choices(*words: str, triton: str | None = None, **reasons: str | None) -> dict[str, str]:
    found = backends.choose(backends.parse(words), triton, reasons)
    return {choice.operator: str(choice) for choice in found}


def test_triton_computes_what_nothing_better_is_there_for() -> None:
    assert set(choices().values()) == {f"{operator} by triton" for operator in backends.OPERATORS}
    assert choices(norm=None)["norm"] == "norm by aiter"
    assert choices(norm=None)["moe"] == "moe by triton"
    assert choices(norm="it failed")["norm"] == "norm by triton"


def test_torch_computes_where_triton_does_not_work() -> None:
    found = choices(triton="no compiler", norm=None)
    assert found["attention"] == "attention by torch (no compiler)"
    assert found["norm"] == "norm by aiter"


def test_one_operator_or_all_are_left_to_what_is_asked_for() -> None:
    assert choices("torch", "norm=triton", norm=None)["norm"] == "norm by triton"
    assert choices("torch", "norm=triton")["moe"] == "moe by torch"
    assert choices("triton", norm=None)["norm"] == "norm by triton"


def test_a_library_that_is_asked_for_and_broken_prevents_nothing() -> None:
    found = choices("aiter", norm="it failed")
    assert found["norm"] == "norm by triton (not aiter: it failed)"
    assert found["moe"] == "moe by triton (not aiter: Kaon does not call it for this)"
    assert choices("aiter", triton="no compiler", norm="x")["norm"] == "norm by torch (not aiter: x; no compiler)"


@pytest.mark.parametrize("word", ["cuda", "norm=cuda", "nrm=torch", "="])
def test_a_name_that_there_is_not_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"kernel_backend is {word}; it must be one of auto, triton"):
        backends.parse([word])
