"""Rules that hold for the repository as a whole, beyond what linters and import contracts check."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.mutate import MUTATIONS, NO_COMPILE, locate, resolve, test_index

ROOT = Path(__file__).parents[3]
PACKAGES = ("kaon", "server", "engine", "kvcache", "models")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEXTS = {path: path.read_text(encoding="utf-8") for path in SOURCES}

LARGEST_DATA = 12 * 10**6
"""Bytes of all committed weights and fixtures together; the embedded model's are most of them."""

WRITTEN_BY_HAND = {".py", ".c", ".h", ".md", ".toml", ".yaml", ".yml", ".sh", ".txt", ".html", ".css", ".js", ""}
"""Kinds of files that are code or pages."""


def committed_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_api_process_and_the_offline_client_import_no_torch() -> None:
    server = [path for path in SOURCES if path.parts[len(ROOT.parts)] == "server" and path.name != "__main__.py"]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in server]
    modules = [module.removesuffix(".__init__") for module in modules]
    code = f"import sys, {', '.join(modules)}, engine.client.llm_engine, engine.core.scheduler\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers"} & set(done.stdout.split())


def test_every_file_opens_with_what_it_is_for() -> None:
    assert [name_of(path) for path, text in TEXTS.items() if text and not ast.get_docstring(ast.parse(text))] == []


def test_nothing_is_pickled() -> None:
    pickling = re.compile(r"^\s*(?:import|from) (?:pickle|cloudpickle|dill|marshal|shelve)\b", re.MULTILINE)
    assert [name_of(path) for path, text in TEXTS.items() if pickling.search(text)] == []


def test_the_committed_files_stay_small_together() -> None:
    data = [path for path in committed_files() if path.suffix not in WRITTEN_BY_HAND]
    assert sum(path.stat().st_size for path in data) <= LARGEST_DATA


def test_no_committed_file_names_a_path_of_one_machine() -> None:
    of_one_machine = re.compile(rb"(?<![\w.])/(?:root|work|home/\w+|Users/\w+)/[\w.]")
    guilty = [
        name_of(path)
        for path in committed_files()
        if path.suffix not in {".safetensors"} and of_one_machine.search(path.read_bytes())
    ]
    assert guilty == []


def test_each_seeded_bug_is_found_once_in_the_product_and_names_tests_that_exist() -> None:
    """So that `make mutate` runs also after the code that it changes has moved."""
    stale = [each.name for each in MUTATIONS if len(locate(each)) != 1 or not all(map(resolve, each.tests))]
    assert not stale


def test_each_recorded_killer_of_a_seeded_bug_is_a_test_that_exists() -> None:
    record: dict[str, str | None] = json.loads((ROOT / "tools" / "mutations-killed.json").read_text())
    names = {killer.rpartition("::")[2] for killer in record.values() if killer is not None and killer != NO_COMPILE}
    assert names <= test_index().keys()
