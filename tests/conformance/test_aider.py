"""aider itself, without a terminal, against a model whose answers are scripted in aider/script.json."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("streams", [True, False])
def test_a_file_is_edited_and_committed(tmp_path: Path, model: str, streams: bool) -> None:
    for command in (("init", "--quiet"), ("config", "user.email", "a@b.c"), ("config", "user.name", "A")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "app.py").write_text('print("hello")\n')
    flags = ["--yes-always", "--no-check-update", "--analytics-disable", "--no-show-model-warnings", "--no-gitignore"]
    if not streams:
        flags.append("--no-stream")
    done = subprocess.run(
        [Path(sys.executable).with_name("aider"), "--model", f"openai/{model}", "--edit-format", "diff", *flags,
         "--message", "Greet the world.", "app.py"],
        cwd=tmp_path,
        env={**os.environ, "OPENAI_API_BASE": f"{os.environ['KAON_URL']}/v1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "app.py").read_text() == 'print("hello, world")\n'
    log = subprocess.run(["git", "log", "--format=%s"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert log.stdout.splitlines()[0] == "feat: greet the world"
