"""The GPU's benchmark: every part runs on small problems in the interpreter; a failing case becomes a row."""

import gc
import json
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import parts as page
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.launch import Launches
from benchmarks.gpu.part_process import BROKEN, MARK, findings_of, run_part
from benchmarks.gpu.parts import BY_NAME, PARTS, Finding, Part
from benchmarks.gpu.steps import Decodes, Interval, idle_between_passes, runner_of
from benchmarks.report import kept_section
from models.ops.triton.cases import elementwise as norm_reference
from models.ops.triton.elementwise import rms_norm
from tests.parity.triton_interpreter import DEVICE, requires_interpreter

PART = Part("dense", "Title", "What.", "none.", 60, 20)


@pytest.fixture
def bench() -> Bench:
    return Bench(torch.device("cpu"))


@requires_interpreter
@pytest.mark.parametrize(
    "name",
    # The gap between steps is that of a whole model.
    [pytest.param(name, marks=pytest.mark.slow if name == "gap" else ()) for name in BY_NAME if name != "engine"],
)
def test_the_first_case_of_each_part_runs(name: str, bench: Bench) -> None:
    values = next(iter(BY_NAME[name].cases(bench))).run()
    assert any(isinstance(value, float) and value > 0 for value in values.values())


@requires_interpreter
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_all_cases_of_each_part_run(part: Part, bench: Bench) -> None:
    found: list[Finding] = []
    assert run_part(part, bench, lambda case: None, found.append)
    assert found
    assert [finding for finding in found if finding.error is not None] == []


@requires_interpreter
def test_a_runner_reads_its_rows_blocks_and_leaves_nothing_to_the_next(bench: Bench) -> None:
    limits = {"max_num_seqs": 2, "max_model_len": 32, "num_blocks": 4}
    runner = runner_of(bench, "0.6B", **limits)
    decodes = Decodes(bench, runner, 2, 3, steps=2)
    decodes.step()
    decodes.finish()
    assert runner.tables is not None
    rows = torch.empty(2, 1, dtype=torch.int32)
    runner.tables.gather(torch.tensor([0, 1]), rows)
    assert sorted(rows.flatten().tolist()) == [0, 1], "the blocks of two rows"
    gone = weakref.ref(runner)
    gc.disable()
    try:
        del runner, decodes
        runner_of(bench, "0.6B", **limits)
        assert gone() is None
    finally:
        gc.enable()


@requires_interpreter
def test_a_kernel_that_is_wrong_is_not_timed(bench: Bench) -> None:
    x, weight = bench.random(3, 32), bench.random(32)
    by_kernel, by_torch = (lambda by=by: by(x, weight, 1e-6) for by in (rms_norm, norm_reference.reference_rms_norm))
    assert bench.kernel(by_kernel, by_torch)["error"]
    with pytest.raises(ValueError, match=r"it is off by 0\.33 of what is right, more than 0\.01"):
        bench.kernel(by_kernel, lambda: 1.5 * by_torch())
    with pytest.raises(ValueError, match="it is off by inf"):
        bench.kernel(lambda: by_kernel() * torch.nan, by_torch)


def _script(tmp_path: Path, *bodies: str) -> "Sequence[str]":
    """Commands of processes in place of a part's: the first runs `bodies[0]`, and so on."""
    names = []
    for place, body in enumerate(bodies):
        file = tmp_path / f"{place}.py"
        file.write_text(
            "import json, os, sys, time\n"
            f"def begin(name): print({MARK!r} + json.dumps(dict(begins=name)), flush=True)\n"
            "def tell(name):\n"
            "    found = dict(part='dense', case=name, values=dict(us=1.0))\n"
            f"    print({MARK!r} + json.dumps(found), flush=True)\n"
            "print('what libraries print')\n" + body
        )
        names.append(str(file))
    return names


def _findings(tmp_path: Path, *bodies: str, seconds: float = 60) -> list[tuple[str, str | None]]:
    scripts, skipped = iter(_script(tmp_path, *bodies)), []

    def command(done: int) -> list[str]:
        skipped.append(done)
        return [sys.executable, next(scripts)]

    found = [(finding.case, finding.error) for finding in findings_of(PART, command, seconds)]
    assert skipped[0] == 0
    return found


def test_a_process_that_dies_within_a_case_is_that_cases_row_and_another_goes_on(tmp_path: Path) -> None:
    first = "begin('a'); tell('a'); begin('b'); os.kill(os.getpid(), 11)"
    assert _findings(tmp_path, first, "begin('c'); tell('c')") == [
        ("a", None),
        ("b", "its process ended with SIGSEGV"),
        ("c", None),
    ]


def test_behind_a_case_that_broke_the_device_another_process_goes_on(tmp_path: Path) -> None:
    first = f"begin('a'); tell('a'); sys.exit({BROKEN})"
    assert _findings(tmp_path, first, "begin('b'); tell('b')") == [("a", None), ("b", None)]


def test_a_process_that_does_not_start_is_one_row(tmp_path: Path) -> None:
    assert _findings(tmp_path, "sys.exit(1)") == [("start", "its process ended with code 1")]


def test_a_case_that_hangs_is_ended_with_its_part(tmp_path: Path) -> None:
    # With interpreters that start slowly on a busy machine, the time ends before the case begins.
    ((case, error),) = _findings(tmp_path, "begin('a'); time.sleep(600)", seconds=2)
    assert case in ("a", "start")
    assert error == "not done within the part's 2 s"


def test_findings_are_a_table_with_what_failed_in_the_last_column(tmp_path: Path) -> None:
    found = [
        Finding("dense", "norm", {"us": 12.345, "of the bound": 0.876, "error": "1.0e-03"}),
        Finding("dense", "other", error="RuntimeError: no"),
    ]
    text = page.section({"device": "X", "driver": "1.2"}, found)
    assert "device X, driver 1.2." in text
    assert "| norm | 12.3 | 88% | 1.0e-03 |  |" in text
    assert "| other |  |  |  | RuntimeError: no |" in text
    assert "norm   12.3           88%" in page.as_text(PART, found)
    benchmarks = tmp_path / "page.md"
    benchmarks.write_text("# Benchmarks\n\n## Ours\n")
    page.put(benchmarks, {"device": "Y"}, found)
    page.put(benchmarks, {"device": "X"}, found)
    assert benchmarks.read_text().startswith("# Benchmarks\n\n## Ours\n\n<!-- gpu -->\n## On a GPU\n")
    assert "device Y" not in benchmarks.read_text()
    assert kept_section(benchmarks.read_text(), page.SECTION).endswith("<!-- end of gpu -->\n")
    page.write_json(tmp_path / "found.json", {"device": "X"}, found)
    assert json.loads((tmp_path / "found.json").read_text())["findings"][1] == {
        "part": "dense",
        "case": "other",
        "error": "RuntimeError: no",
    }


def test_idle_time_between_passes_is_what_no_activity_covers() -> None:
    passes = [Interval(at + n, at + n + 1, launch) for launch, at in ((1, 0), (2, 100)) for n in range(3)]
    between = [Interval(10, 20, 3), Interval(15, 30, 4), Interval(90, 95, 5)]
    assert idle_between_passes([*between, *passes], fewest=3) == [7 + 60 + 5]
    assert idle_between_passes(passes, fewest=4) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "torch finds no GPU" in capsys.readouterr().out


def test_launches_are_distinguished_by_what_triton_compiles_anew_for() -> None:
    x, weight = torch.randn(6, 40, device=DEVICE), torch.randn(40, device=DEVICE)
    with Launches() as launches:
        rms_norm(x, weight, 1e-6)
        rms_norm(x[:5], weight, 1e-6)  # Rows are not specialised on.
        assert len(launches.signatures) == 1
        rms_norm(x[:, 1:33], weight[:32], 1e-6)  # Another size, and not aligned.
        assert len(launches.signatures) == 2
        rms_norm(x[:, 4:36], weight[:32], 1e-6)  # The same, aligned.
        assert len(launches.signatures) == 3
    rms_norm(x.double().float()[:, 1:], weight[1:], 1e-6)
    assert sum(launches.signatures.values()) == len(launches.made) == 4
