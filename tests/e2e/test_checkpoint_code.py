"""Code in a checkpoint (`auto_map`) is never run, with any standard input."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.demo import CHECKPOINT_DIR

ROOT = Path(__file__).parents[2]
AUTO_CLASSES = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")

TRY_EACH = """
import sys
from pathlib import Path
path = Path(sys.argv[1])

def tokenizer():
    from engine.text.tokenizer import Tokenizer
    Tokenizer.from_checkpoint(path)

def config():
    from models.loading.checkpoint import read_checkpoint_config
    read_checkpoint_config(path, "transformers")

def offline():
    from kaon import LLM
    LLM(str(path)).close()

for attempt in (tokenizer, config, offline):
    try:
        attempt()
        print(attempt.__name__, "loaded it")
    except ValueError as error:
        print(attempt.__name__, "refused:", error)
    except Exception as error:
        print(attempt.__name__, "refused:", type(error).__name__, error)
"""
"""Every way in which a checkpoint is opened: its tokenizer, its configuration, and both by the offline API."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint whose configuration, model and tokenizer are code of its own, which writes the file `ran`."""
    path = tmp_path / "checkpoint"
    path.mkdir()
    auto_map = {name: f"custom.{name}" for name in AUTO_CLASSES} | {"AutoTokenizer": ["custom.AutoTokenizer", None]}
    own = {"model_type": "of_its_own", "architectures": ["OfItsOwn"], "auto_map": auto_map}
    (path / "config.json").write_text(json.dumps({**json.loads((CHECKPOINT_DIR / "config.json").read_text()), **own}))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "OfItsOwn", "auto_map": auto_map}))
    shutil.copy(CHECKPOINT_DIR / "model.safetensors", path)
    classes = "".join(f"\nclass {name}: pass" for name in AUTO_CLASSES)
    (path / "custom.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close(){classes}\n")
    return path


def test_a_checkpoint_s_own_code_is_refused_in_words_even_where_stdin_says_yes(
    checkpoint: Path, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", TRY_EACH, str(checkpoint)],
        input="y\n" * 100,
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)},
    )
    assert not (tmp_path / "ran").exists(), done.stdout
    assert "[y/N]" not in done.stdout + done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert said.keys() == {"tokenizer", "config", "offline"}
    for name in said:
        assert said[name].startswith("refused: "), said
        assert "asks for code from the checkpoint, which is never run" in said[name], said


def calls_of(text: str) -> list[ast.Call]:
    """Calls of `from_pretrained` on transformers' Auto classes: those that could run a checkpoint's code."""
    return [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value).rpartition(".")[2].startswith("Auto")
    ]


def test_every_call_of_transformers_that_could_run_such_code_says_no() -> None:
    packages = ("kaon", "server", "engine", "kvcache", "models", "benchmarks", "tools")
    found = {
        f"{path.relative_to(ROOT)}:{call.lineno}": {named.arg: ast.unparse(named.value) for named in call.keywords}
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        for call in calls_of(path.read_text(encoding="utf-8"))
    }
    assert len(found) >= 4
    assert [where for where, named in found.items() if named.get("trust_remote_code") != "False"] == []
