"""Every kernel compiles ahead of time for every target, without spills, within LDS, with the instructions it needs.

In a process of its own: in this one kernels may be interpreted.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from triton.runtime.jit import JITFunction

from models.ops.triton.configs import TARGETS, Config
from models.ops.triton.probe_kernel import COMPILATIONS as PROBE
from tools import kernel_report as record
from tools.kernel_report import Assembly, compilations, is_page_complete, problems

FIRST_CLASS = [arch for arch, target in TARGETS.items() if target.first_class]


@pytest.mark.timeout(1800)
def test_kernels_on_the_first_class_targets(tmp_path: Path) -> None:
    """What .kernels.jsonl has of the very source, options and compiler is not compiled again."""
    assert_nothing_wrong(report(tmp_path, "--targets", ",".join(FIRST_CLASS)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_on_the_other_targets(tmp_path: Path) -> None:
    assert_nothing_wrong(report(tmp_path, "--targets", ",".join(TARGETS.keys() - FIRST_CLASS)))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "files", [["moe_combine", "indexer_scores"], pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_what_is_on_record_is_what_the_compiler_makes(files: list[str], tmp_path: Path) -> None:
    chosen = ("--targets", ",".join(FIRST_CLASS), *files)
    assert report(tmp_path, "--fresh", *chosen) == report(tmp_path, *chosen)


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


def test_a_record_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RECORD", tmp_path / "kernels.jsonl")
    assert record.read_record() == {}
    one = replace(PROBE[0], kernel=JITFunction(PROBE[0].kernel.fn))
    made = Assembly(8, 12, 3, 0, 8, {"v_mfma_f32": 1}, {16: 2})
    record.add_to_record([(one, made)])
    other = replace(one, target=TARGETS["gfx1201"])
    record.add_to_record([(other, made)])
    assert record.read_record() == {one.key: made, other.key: made}
    monkeypatch.setattr(record, "_reader", lambda: {"read by": "another"})
    assert record.read_record() == {}


def test_the_page_of_kernels_has_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_page_complete(compilations()), capsys.readouterr().err


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


def assert_nothing_wrong(lines: Iterable[str]) -> None:
    compiled = [json.loads(line) for line in lines]
    wrong = [f"{one['name']} on {one['target']}: {', '.join(one['problems'])}" for one in compiled if one["problems"]]
    assert not wrong, "\n".join(wrong)


def report(cache: Path, *arguments: str) -> list[str]:
    """A line a compilation."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache / f"of {len(list(cache.iterdir()))}")
    command = [sys.executable, "-m", "tools.kernel_report", "--json", *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.stdout, result.stderr
    return result.stdout.splitlines()
