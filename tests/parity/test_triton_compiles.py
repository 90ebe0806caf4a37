"""Every kernel compiles ahead of time for every target, without spills, within LDS, with the required instructions.

The compiler's result for each is recorded in docs/kernels.json by a key of all its inputs: the kernel's source,
launch, target and Triton's release. Reading the record takes a second, compiling the kernels of the first-class
targets about 220 core-seconds, so only kernels whose key is not recorded are compiled, and one more for comparison.
"""

import linecache
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

from models.ops.triton.configs import TARGETS, Config
from tools import kernel_report
from tools.kernel_prediction import Prediction
from tools.kernel_report import Assembly, compilations, compile_apart, problems, read_record
from tools.kernels.compilation import Compilation, source_of
from tools.kernels.probe_kernel import COMPILATIONS as PROBE
from tools.kernels.quantized_products import ORDERED

FIRST_CLASS = [arch for arch, target in TARGETS.items() if target.first_class]


@pytest.mark.timeout(1800)
def test_kernels_on_the_first_class_targets(tmp_path: Path) -> None:
    assert_nothing_wrong(compilations(FIRST_CLASS), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_on_the_other_targets(tmp_path: Path) -> None:
    """NVIDIA's GPUs before Hopper are not recorded: they are compiled."""
    assert_nothing_wrong(compilations(TARGETS.keys() - FIRST_CLASS), tmp_path)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["one", "all"])
def test_the_record_is_what_the_compiler_makes(count: int | None, tmp_path: Path) -> None:
    """Keys are hashes, so the first of them is any kernel, and another once kernels change."""
    recorded = read_record()
    sample = sorted(one.key for one in compilations(FIRST_CLASS) if one.key in recorded)[:count]
    assert compile_apart(sample, tmp_path) == {key: recorded[key] for key in sample}


def test_a_compilation_has_a_key_of_all_that_its_output_depends_on() -> None:
    one = replace(PROBE[0], kernel=JITFunction(PROBE[0].kernel.fn))
    others = (
        one,
        replace(PROBE[0], kernel=JITFunction(PROBE[0].kernel.fn)),
        replace(one, variant="renamed", has_dot=False),
        replace(one, target=TARGETS["gfx1201"]),
        replace(one, config=Config(one.config.blocks, num_warps=8)),
        replace(one, constexprs={"SIZE": 128}),
        replace(one, signature={name: {"*fp16": "*bf16"}.get(kind, kind) for name, kind in one.signature.items()}),
    )
    assert [other.key == one.key for other in others] == [True, True, True, False, False, False, False]


def test_a_key_depends_on_code_and_not_on_its_lines_comments_or_docstrings(tmp_path: Path) -> None:
    def source(text: str) -> str:
        path = tmp_path / "kernels.py"
        path.write_text(text)
        linecache.clearcache()
        found: dict[str, Any] = {"__name__": "kernels"}
        exec(compile(text, str(path), "exec"), found)
        return source_of.__wrapped__(found["add"])

    text = "SIZE = 4\n\ndef add(x):\n    return x + SIZE\n"
    documented = '"""Kernels."""\n\n' + text.replace("return", '"""A sum."""\n    # Why.\n    return')
    assert source(documented) == source(text)
    assert source(text.replace("4", "5")) != source(text)
    assert source(text.replace("+", "-")) != source(text)


def test_a_key_depends_on_the_kernels_that_a_kernel_calls() -> None:
    from models.ops.triton.attention import attend_tile, attention_prefill_kernel

    assert source_of(attend_tile.fn) in source_of(attention_prefill_kernel.fn)


def test_a_record_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.json"
    assert read_record(path) == {}
    made = Assembly(8, 12, 3, 0, 8, {"v_mfma_f32": 1}, {16: 2})
    other = replace(PROBE[0], target=TARGETS["gfx1201"])
    kernel_report.write_record([(PROBE[0], made), (other, made)], path)
    assert read_record(path) == {PROBE[0].key: made, other.key: made}
    monkeypatch.setattr(kernel_report, "_reader", lambda: "another")
    assert read_record(path) == {}, "other code would read other numbers"


def test_no_prediction_is_more_than_a_tenth_worse_than_recorded() -> None:
    recorded = read_record()
    results = [(one, recorded[one.key]) for one in compilations() if one.key in recorded]
    made = kernel_report.predictions(results)
    assert made, "the record has no timings"
    worse = kernel_report.lowered(made, kernel_report.read_accepted())
    assert not worse, "\n".join(worse)


def test_a_worse_prediction_is_found_and_recorded_only_where_it_is_accepted() -> None:
    def predicted(share: float, seconds: float) -> dict[str, dict[str, Prediction]]:
        return {"norm: 1 row": {"gfx942": Prediction(share, seconds, 0.0, "latency")}}

    before = kernel_report.accepted(predicted(0.5, 1e-5), {})
    assert before == {"norm: 1 row": {"gfx942": [0.5, 10.0]}}
    assert not kernel_report.lowered(predicted(0.46, 1.09e-5), before)
    assert kernel_report.accepted(predicted(0.46, 0.9e-5), before) == {"norm: 1 row": {"gfx942": [0.5, 9.0]}}
    for worse in (predicted(0.44, 1e-5), predicted(0.5, 1.2e-5)):
        (sentence,) = kernel_report.lowered(worse, before)
        assert sentence.startswith("norm: 1 row on gfx942: ")
    now = kernel_report.accepted(predicted(0.3, 2e-5), before, all_of=True)
    assert now == {"norm: 1 row": {"gfx942": [0.3, 20.0]}}
    assert not kernel_report.lowered(predicted(0.1, 1.0), {}), "a new kernel is worse than nothing"


def test_the_page_and_the_record_have_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert kernel_report.is_complete(compilations(), read_record()), capsys.readouterr().err


def test_products_of_any_number_of_rows_add_by_one_matrix_instruction() -> None:
    """Kernels of `--batch-invariant`: a row's sums have one order only if all products use instructions of one
    depth."""
    recorded = read_record()
    by_weight: dict[tuple[str, str], set[str]] = {}
    for one in compilations():
        weight, _, form = one.name.rpartition(" ")
        is_ordered = weight.endswith(ORDERED.rstrip()) or one.name.startswith("dense_gemm bf16")
        # On NVIDIA, up to 64 rows use the tile of 16 too.
        is_few = form == "m16" or (form == "m64" and one.target.backend == "hip")
        if one.name.startswith(("dense_gemm bf16", "fp8_gemm", "four_bit_gemm")) and (is_ordered or is_few):
            kind = weight.removesuffix(ORDERED.rstrip()).rstrip()
            by_weight.setdefault((kind, one.target.arch), set()).update(recorded[one.key].matrix)
    assert {kind for kind, _ in by_weight} == {
        "dense_gemm bf16", "fp8_gemm blocks", "fp8_gemm channels", "four_bit_gemm mxfp4", "four_bit_gemm int4 g128",
    }  # fmt: skip
    assert not {key: found for key, found in by_weight.items() if len(found) != 1}


@pytest.mark.parametrize(
    ("assembly", "wrong"),
    [
        (Assembly(8, 0, 0, 0, 8, {"v_mfma_f32": 1}, {16: 2}), []),
        (Assembly(8, 12, 3, 0, 8, {"v_mfma_f32": 1}, {16: 2}), ["12 bytes of registers are spilled"]),
        (Assembly(8, 0, 0, 65537, 8, {"v_mfma_f32": 1}, {16: 2}), ["65537 bytes of LDS of 65536"]),
        (Assembly(8, 0, 0, 0, 8, {}, {16: 2}), ["has a dot and no matrix instruction"]),
        (Assembly(8, 0, 0, 0, 8, {"v_mfma_f32": 1}, {2: 2}), ["2 loads of less than 4 bytes, 0 expected"]),
    ],
)
def test_what_is_wrong_is_said(assembly: Assembly, wrong: list[str]) -> None:
    (on_gfx942,) = (compilation for compilation in PROBE if compilation.target.arch == "gfx942")
    assert problems(on_gfx942, assembly) == wrong


def test_narrow_loads_are_wrong_on_first_class_targets_alone() -> None:
    (on_gfx1201,) = (compilation for compilation in PROBE if compilation.target.arch == "gfx1201")
    wrong = ["12 bytes of registers are spilled", "has a dot and no matrix instruction"]
    assert problems(on_gfx1201, Assembly(8, 12, 3, 0, 8, {}, {2: 2})) == wrong


def assert_nothing_wrong(wanted: Iterable[Compilation], cache: Path) -> None:
    by_key = {one.key: one for one in wanted}
    made = read_record()
    if missing := by_key.keys() - made.keys():
        made |= compile_apart(sorted(missing), cache)
    wrong = [
        f"{one.name} on {one.target.arch}: {', '.join(found)}"
        for key, one in by_key.items()
        if (found := problems(one, made[key]))
    ]
    assert not wrong, "\n".join(wrong)
