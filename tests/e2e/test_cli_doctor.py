"""`kaon doctor` as a process, on the machine that runs the tests."""

import json
import subprocess
import sys
from typing import Any

import pytest


def doctor(*flags: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "server", "doctor", *flags], capture_output=True, text=True, check=False, timeout=500
    )
    return done.returncode, done.stdout


def test_it_reports_what_is_here_and_what_computes() -> None:
    code, out = doctor()
    lines = out.splitlines()
    assert lines[0].startswith("torch ")
    operators = [line.split()[1] for line in lines if line.startswith("operator ")]
    named = {"attention", "norm", "activation", "moe", "linear", "recurrent", "sampling", "gemm", "all_reduce"}
    assert named == set(operators)
    assert any(line.startswith("memory ") for line in lines)
    assert code == (0 if lines[-1] in ("Nothing is wrong.", "Nothing else is wrong.") else 1)
    assert (code == 1) == any(line.startswith("wrong ") for line in lines)


@pytest.mark.slow  # The short form: tests/unit/models/test_doctor.py.
def test_programs_read_it_as_json() -> None:
    code, out = doctor("--json")
    report: dict[str, Any] = json.loads(out)
    assert report["facts"]["torch"]
    assert code == (1 if report["problems"] else 0)
