"""The probe's result for ROCm's library `aiter` in every state of its installation."""

import json
import time
from pathlib import Path

import pytest
import torch

from engine.runner.build import sizes_of
from models.loading.checkpoint import read_checkpoint_config
from models.ops.aiter.cases import Sizes
from models.ops.aiter.library import OPERATORS
from models.ops.aiter.probe import probe, report, wrong
from tests.aiter_library import Library, forget, library
from tests.parity.checkpoints import make_checkpoint

__all__ = ["library"]

CPU = torch.device("cpu")
SMALL = Sizes(hidden=128, inner=256, heads=4, kv_heads=2, head_dim=32, experts=4, expert_inner=64)
ATTENTION = "ops/triton/attention/unified_attention.py"
OFF = "its numbers are "


class Clock:
    """Ten minutes pass at every poll of a process that hangs, which is named in a file; otherwise no time passes."""

    sleep = staticmethod(time.sleep)

    def __init__(self, hanging: Path) -> None:
        self._hanging = hanging
        self._now = 0.0

    def monotonic(self) -> float:
        if self._hanging.exists() and Path("/proc", self._hanging.read_text()).exists():
            self._now += 600.0
        return self._now


def test_an_error_of_one_operator_is_reported_for_it_alone(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "hanging"
    hangs = f"import os, pathlib, time; pathlib.Path({str(hanging)!r}).write_text(str(os.getpid())); time.sleep(600)"
    monkeypatch.setattr("models.ops.aiter.probe.time", Clock(hanging))
    library.replace(
        ATTENTION, ("    assert causal\n", "    import os, signal\n    os.kill(os.getpid(), signal.SIGSEGV)\n")
    )
    library.replace("tuned_gemm.py", ("        return F", f"        {hangs}\n        return F"))
    library.remove("fused_moe.py")
    assert probe("cpu", ["norm", "attention", "moe", "gemm"], SMALL) == {
        "norm": None,
        "attention": "its probe was ended by signal 11",
        "moe": "this aiter has no aiter.fused_moe",
        "gemm": "its probe took longer than 300 s",
    }


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys\nprint('not for you')\nsys.exit(0)", "exit code 0: it wrote nothing to stderr"),
        ("import subprocess, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)", "took longer than 2 s"),
    ],
    ids=["exits as if all were well", "hangs and its compiler too"],
)
def test_a_library_that_ends_its_process_computes_nothing(library: Library, source: str, words: str) -> None:
    library.write("__init__.py", source)
    reasons = probe("cpu", ["norm", "moe"], seconds=2.0 if "sleep" in source else 300.0)
    assert list(reasons) == ["norm", "moe"]
    assert all(reason is not None and words in reason for reason in reasons.values())


def test_neither_last_words_nor_the_directory_change_what_is_found(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.replace("__init__.py", ("import torch\n", "import atexit, torch\natexit.register(print, 'bye')\n"))
    (tmp_path / "elsewhere/models").mkdir(parents=True)
    (tmp_path / "elsewhere/models/__init__.py").write_text("raise OSError('of another project')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert probe("cpu", ["activation"], SMALL) == {"activation": None}


def test_a_missing_library_is_reported_as_such() -> None:
    assert set(probe("cpu").values()) == {"aiter is not installed"}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("raise RuntimeError('needs ROCm 9')", "it could not be imported: RuntimeError: needs ROCm 9"),
        ("import no_such_module", "it could not be imported: No module named 'no_such_module'"),
    ],
)
def test_a_library_that_cannot_be_imported_says_why(
    library: Library, source: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    library.write("__init__.py", source)
    report("cpu", ["norm", "moe"], SMALL)
    assert json.dumps(["moe", words]) in capsys.readouterr().out


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_sound_library_computes_everything(operator: str) -> None:
    assert wrong(operator, SMALL, CPU) is None


@pytest.mark.parametrize(
    ("operator", "file", "before", "after", "words"),
    [
        ("norm", "__init__.py", "residual_out.copy_(input +", "residual_out.copy_(input -", ": a norm with a sum"),
        ("norm", "__init__.py", "    return F.rms_norm(input,", "    return 2 * F.rms_norm(input,", ": a norm"),
        ("activation", "__init__.py", "F.silu(gate)", "gate", "SwiGLU"),
        ("activation", "__init__.py", 'gate, approximate="tanh"', "-gate", "GeGLU"),
        ("linear", "__init__.py", "* scales).to(dtype)", ").to(dtype)", "of 1 tokens"),
        ("gemm", "tuned_gemm.py", "weights, bias)", "weights)", "of 1 tokens with a bias"),
        ("moe", "fused_moe.py", "plain(w1).float()", "w1.float()", "of 1 tokens"),
        ("moe", "fused_moe.py", "F.silu(gate) * up", "F.silu(up) * gate", "of 1 tokens"),
        # Blocks must be adjacent, as those of a single layer would be.
        (
            "attention",
            ATTENTION,
            "assert causal",
            "k = k.as_strided(k.shape, k.contiguous().stride())",
            "not the right ones: attention without options",
        ),
        ("attention", ATTENTION, "1 + window_size[0]", "(1 + window_size[0]) // 2", "with a window"),
        ("attention", ATTENTION, "softcap, k_descale", "0.0, k_descale", "with a soft cap"),
        ("attention", ATTENTION, "v_descale, sinks", "v_descale, None", "with sinks"),
        ("attention", ATTENTION, "softcap, k_descale", "softcap, None", "over a cache in FP8"),
        (
            "prefill",
            "__init__.py",
            "softmax_scale, 1 + window_size[0],",
            "softmax_scale, 0,",
            "torch.bfloat16 with a window",
        ),
        ("prefill", "__init__.py", "lengths, tables, softmax", "lengths, tables * 0, softmax", "in torch.bfloat16"),
        ("decode", "__init__.py", 'layout == "HND"', 'layout == "NHD"', ""),
        ("decode", "__init__.py", "scale, sliding_window,", "scale, 0,", "with a window"),
        (
            "decode",
            "__init__.py",
            "logits_soft_cap,\n        k_scale",
            "logits_soft_cap,\n        None",
            "over a cache in FP8",
        ),
    ],
)
def test_wrong_numbers_are_found(
    library: Library, operator: str, file: str, before: str, after: str, words: str
) -> None:
    library.replace(file, (before, after))
    found = wrong(operator, SMALL, CPU)
    assert found is not None
    assert found.startswith(OFF if words else "it failed: ")
    assert found.endswith(words)


def test_experts_in_fp8_are_probed_where_the_model_has_them(library: Library) -> None:
    sizes = SMALL._replace(expert_inner=128, has_fp8_experts=True)
    assert wrong("moe", sizes, CPU) is None
    library.replace("fused_moe.py", ("if quant_type is QuantType.per_128x128", "if False"))
    forget()
    assert wrong("moe", SMALL, CPU) is None
    assert str(wrong("moe", sizes, CPU)).endswith("of 1 tokens in FP8")


def test_what_a_library_raises_is_reported_in_a_line(library: Library) -> None:
    library.replace(
        "__init__.py", ("    gate, up = input.chunk", "    raise OSError('no code\\nobject')\n    gate, up = input")
    )
    assert wrong("activation", SMALL, CPU) == "it failed: OSError: no code"


def test_releases_that_have_other_arguments_or_modules_are_reported_or_used(library: Library) -> None:
    # A release of 2025: another module, and without sinks, which other kernels then compute.
    old = "ops/triton/unified_attention.py"
    (library.root / ATTENTION).rename(library.root / old)
    library.replace(old, ("    sinks: torch.Tensor | None = None,\n", ""), (", sinks", ""))
    assert wrong("attention", SMALL, CPU) is None
    library.replace("fused_moe.py", ("quant_type", "quantization"))
    library.replace("__init__.py", ("    kv_cache_layout: str,\n", ""), ("def silu_and_mul", "def other"))
    forget()
    way = "of this aiter has another signature: got an unexpected keyword argument"
    assert wrong("moe", SMALL, CPU) == f"fused_moe {way} 'quant_type'"
    assert wrong("decode", SMALL, CPU) == f"paged_attention_v1 {way} 'kv_cache_layout'"
    assert wrong("activation", SMALL, CPU) == "this aiter has no silu_and_mul"
    library.replace(
        "dist/device_communicators/custom_all_reduce.py",
        ("        device: ", "        on: torch.device,\n        device: "),
    )
    assert "missing a required argument" in str(wrong("all_reduce", SMALL, CPU))


def test_problems_are_of_the_models_own_sizes(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "qwen3", hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    config = read_checkpoint_config(path)
    sizes = sizes_of(config, 32, 4)
    assert sizes == Sizes()._replace(
        hidden=64, inner=sizes.inner, heads=2, kv_heads=1, head_dim=sizes.head_dim, block=32
    )
