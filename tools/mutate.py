"""`make mutate`: plant one bug at a time in a scratch copy of the tree, and see whether a test finds it.

Layout of this folder:

    mutations.txt           the bugs: a name, the tests that should fail, the exact old text, and the new text
    mutate.py               this runner
    cached_cc.sh            the C compiler, with a cache: a mutation of a C file compiles that file alone
    mutations-killed.json   a recorded result: which test killed each mutation, or null where it survived

A mutation names no product file, because modules move. The runner searches the product packages for the one file in
which the old text occurs exactly once. A test entry is a path below tests/, with an optional `::name`. A test that
has moved is found by its function's name, a file by its own name; entries that no longer exist are skipped.

A run copies the tree (tracked and untracked files, no ignored ones) once per job into a temporary folder, and builds
the compiled operators there. Each mutation is written into such a copy, its tests run with `-x`, and the file is
restored. With `--full` the rest of `make test` follows where these tests pass. A mutation is killed when a test fails
or hangs, or when the C code no longer compiles. At the end every test that killed a mutation runs once more without
any mutation: if it fails there too, it has proved nothing, and its mutations count as survivors.

Exit code 1: an old text is not found exactly once, or `--compare FILE` names killed mutations that survive now.
"""

import argparse
import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("server", "engine", "kvcache", "models", "kaon")
SUFFIXES = (".py", ".c", ".h")
TEST_SECONDS, FULL_SECONDS = 300.0, 3600.0
"""Limits for a mutation's own tests, and for all of `make test`; a run that takes longer counts as failed."""
NOT_SLOW = ("-m", "not slow")
IN_PARALLEL = ("-n", "2", "--dist", "worksteal")
NO_COMPILE = "does not compile"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py(?:::\w+)*)", re.MULTILINE)
PYTEST = """
import hypothesis, pytest, sys
# One failing example is enough: it need not be made small.
phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
hypothesis.settings.register_profile("ci", hypothesis.settings.get_profile("ci"), phases=phases)
sys.exit(pytest.main(sys.argv[1:]))
"""


class Mutation(NamedTuple):
    """A seeded bug. The fields are those of mutations.txt."""

    name: str
    old: str
    new: str
    tests: tuple[str, ...]


def read_mutations(text: str) -> list[Mutation]:
    """The bugs of mutations.txt. Raises `ValueError` where a line belongs to no bug."""
    named: dict[str, list[str]] = {}
    found: list[tuple[str, list[str], dict[str, list[str]]]] = []
    for number, line in enumerate(text.splitlines(), 1):
        name, _, rest = line.partition(" ")
        tests = [test for entry in rest.split() for test in named.get(entry, [entry])]
        if line.startswith("@"):
            named[name[1:]] = tests
        elif line.startswith(("-", "+")) and found:
            found[-1][2][line[0]].append(line[1:])
        elif name.endswith(":") and "/" in name:
            found.append((name[:-1], tests, {"-": [], "+": []}))
        elif line and not line.startswith("#"):
            raise ValueError(
                f"line {number} is {line!r}; it must be a bug's name and tests, or begin with #, @, - or +"
            )
    # The last line's end is part of the text only where whole lines are deleted.
    return [
        Mutation(name, "\n".join(lines["-"] if lines["+"] else [*lines["-"], ""]), "\n".join(lines["+"]), tuple(tests))
        for name, tests, lines in found
    ]


MUTATIONS = read_mutations(Path(__file__).with_name("mutations.txt").read_text(encoding="utf-8"))


class Scratch:
    """A copy of the tree, to which mutations are applied one after the other."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        run("git", "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(self.root))
        for name in run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0"):
            if (source := ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, self.root / name)
        run("git", "-C", str(self.root), "read-tree", "HEAD")
        self._environment = {
            **os.environ,
            # It precedes an editable installation of another tree, also in processes that tests start.
            "PYTHONPATH": str(self.root),
            "CC": f"sh {Path(__file__).with_name('cached_cc.sh')}",
            "CC_CACHE": str(folder.parent / "cc-cache"),
        }
        self._stamp = 10**9
        if not self._build():
            raise SystemExit("the compiled operators cannot be built without any mutation")

    @contextmanager
    def mutated(self, path: Path, mutation: Mutation) -> Iterator[bool]:
        """Apply a mutation while the block runs. Yields whether the tree builds with it."""
        file = self.root / path
        original = file.read_text(encoding="utf-8")
        libraries = {each: each.read_bytes() for each in self.root.glob("models/**/*.so")}
        self._write(file, original.replace(mutation.old, mutation.new))
        try:
            yield file.suffix == ".py" or self._build()
        finally:
            self._write(file, original)
            for library, content in libraries.items() if file.suffix != ".py" else ():
                library.write_bytes(content)

    def test(self, tests: Sequence[str], *options: str, limit: float = TEST_SECONDS) -> list[str]:
        """Run pytest. Returns the tests that failed, or the first of `tests` if the process hung or crashed."""
        process = subprocess.Popen(
            [sys.executable, "-c", PYTEST, "-q", "-rfE", "-p", "no:cacheprovider", *NOT_SLOW, *options, *tests],
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=limit)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return [tests[0]]
        # Exit codes: 0 passed, 5 no test collected, 3 and 4 pytest cannot run; negative: a signal, as wrong C code
        # causes.
        if process.returncode in (3, 4):
            raise SystemExit(f"pytest cannot run {' '.join(tests)}: {output[-2000:]}")
        return [] if process.returncode in (0, 5) else FAILED.findall(output) or [tests[0]]

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        # Python distinguishes versions of a compiled module by size and second: each version gets its own second.
        self._stamp += 2
        os.utime(file, (self._stamp, self._stamp))

    def _build(self) -> bool:
        for made in self.root.glob("models/**/*.so"):
            made.unlink()
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--force"]
        subprocess.run(command, cwd=self.root, env=self._environment, capture_output=True, check=False)
        return any(self.root.glob("models/**/*.so"))


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


@cache
def product_texts() -> dict[Path, str]:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*") if file.suffix in SUFFIXES]
    return {file.relative_to(ROOT): file.read_text(encoding="utf-8") for file in files}


def locate(mutation: Mutation) -> list[Path]:
    """The product files that contain the mutation's old text, each as often as the text occurs; there should be
    one."""
    return [path for path, text in product_texts().items() for _ in range(text.count(mutation.old))]


@cache
def test_index() -> dict[str, list[str]]:
    """Node ids, `tests/x.py::Class::name`, by the test function's name; paths by the file's name."""
    index: dict[str, list[str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        path = str(file.relative_to(ROOT))
        index.setdefault(file.name, []).append(path)
        module = ast.parse(file.read_text(encoding="utf-8"))
        scopes = [("", module.body)]
        scopes += [(f"{each.name}::", each.body) for each in module.body if isinstance(each, ast.ClassDef)]
        for prefix, body in scopes:
            for each in body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    index.setdefault(each.name, []).append(f"{path}::{prefix}{each.name}")
    return index


def resolve(entry: str) -> list[str]:
    """The current tests of an entry, as pytest's arguments; none if they no longer exist."""
    path, _, name = entry.partition("::")
    found = test_index().get(name or Path(path).name, [])
    # A name may be used twice: the file that the entry names takes precedence.
    return [node for node in found if node.partition("::")[0] == f"tests/{path}"] or found


def try_one(scratch: Scratch, mutation: Mutation, full: bool) -> str | None:
    """The test that killed a mutation, or `NO_COMPILE`; None if it survived."""
    with scratch.mutated(locate(mutation)[0], mutation) as is_built:
        if not is_built:
            return NO_COMPILE
        tests = list(dict.fromkeys(node for entry in mutation.tests for node in resolve(entry)))
        failed = scratch.test(tests, "-x", "--timeout", "120") if tests else []
        if not failed and full:
            failed = scratch.test(["tests"], "-x", *IN_PARALLEL, limit=FULL_SECONDS)
        return failed[0] if failed else None


def run_all(mutations: Sequence[Mutation], folder: Path, jobs: int, full: bool) -> dict[str, str | None]:
    """The test that killed each mutation, by name."""
    scratches: SimpleQueue[Scratch] = SimpleQueue()
    for number in range(jobs):
        scratches.put(Scratch(folder / str(number)))

    def work(mutation: Mutation) -> str | None:
        scratch, started = scratches.get(), time.monotonic()
        try:
            killed_by = try_one(scratch, mutation, full)
        finally:
            scratches.put(scratch)
        print(f"{mutation.name:56} {time.monotonic() - started:6.1f} s  {killed_by or 'SURVIVED'}", flush=True)
        return killed_by

    with ThreadPoolExecutor(jobs) as pool:
        outcomes = dict(zip([mutation.name for mutation in mutations], pool.map(work, mutations), strict=True))
    killers = sorted({killer for killer in outcomes.values() if killer} - {NO_COMPILE})
    broken = scratches.get().test(killers, *IN_PARALLEL, limit=FULL_SECONDS) if killers else []
    for test in sorted(set(broken)):
        print(f"{test} fails without any mutation too: what it killed counts as survived")
    return {name: None if killer in broken else killer for name, killer in outcomes.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutate", description="See which seeded bugs the tests find.")
    parser.add_argument("--only", metavar="REGEX", default="", help="mutations whose names match")
    parser.add_argument("--full", action="store_true", help="run all of make test where the listed tests pass")
    parser.add_argument("--jobs", type=int, default=2, help="mutations tried at a time (default: 2)")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="fail if one that was killed there survives")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the result as JSON")
    options = parser.parse_args()
    mutations = [mutation for mutation in MUTATIONS if re.search(options.only, mutation.name)]
    started = time.monotonic()
    wrong = {mutation.name: places for mutation in mutations if len(places := locate(mutation)) != 1}
    for name, places in wrong.items():
        where = ", ".join(map(str, places)) or "no product file"
        print(f"{name}: the old text must occur exactly once, and is in {where}")
    if wrong:
        return 1
    with tempfile.TemporaryDirectory(prefix="kaon-mutate-") as folder:
        outcomes = run_all(mutations, Path(folder), options.jobs, options.full)
    if options.out is not None:
        options.out.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    survived = [name for name, killer in outcomes.items() if killer is None]
    minutes = (time.monotonic() - started) / 60
    print(f"{len(outcomes) - len(survived)} of {len(outcomes)} killed in {minutes:.1f} minutes")
    before = json.loads(options.compare.read_text(encoding="utf-8")) if options.compare else {}
    lost = [name for name in survived if before.get(name)]
    for name in survived:
        print(f"{name} survived" + (", and was killed before" if name in lost else ""))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
